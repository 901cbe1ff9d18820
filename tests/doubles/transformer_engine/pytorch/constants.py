"""Types that TE's quantizers know."""

import enum


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10
