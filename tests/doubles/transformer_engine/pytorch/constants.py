"""Types that TE's quantizers know."""

import enum


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
