"""Every way to compute the routed experts on this machine, by a name for tests and tables."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titan_moe.moe import te, te_experts
from titan_moe.moe.experts import EXPERTS, by_gemm

NAMES = ("loop", "grouped_mm", "TE, host splits", "TE, device splits")
SYNC_FREE = ("grouped_mm", "TE, device splits")


def experts_backend(name: str, dtype: torch.dtype, D: int, F: int) -> Callable[..., Tensor] | str:
    """The function with the signature of those in `EXPERTS`, or why this machine does not have it."""
    if name in EXPERTS:
        return EXPERTS[name]
    found = te.facts()
    if problem := te_experts.problem(found, dtype):
        return problem
    if name == "TE, host splits":
        return partial(_by_te, te_experts.HostSplits)
    if problem := te_experts.device_splits_problem(found, dtype, D, F):
        return problem
    return partial(_by_te, partial(te_experts.DeviceSplits, widths=(D, 2 * F, F)))


def _by_te(splits, x_RD: Tensor, counts_E: Tensor, weight_R: Tensor, w13_EF2D: Tensor, w2_EDF: Tensor, **options):
    return by_gemm(splits(counts_E), x_RD, weight_R, w13_EF2D, w2_EDF, **options)
