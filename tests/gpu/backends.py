"""Every way to compute the routed experts on this machine, by a name for tests and tables."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titan_moe.moe import te, te_experts
from titan_moe.moe.experts import EXPERTS, by_gemm
from titan_moe.moe.te_quantize import te_quantized
from titan_moe.precision.recipes import RECIPES

NAMES = ("loop", "grouped_mm", "TE, host splits", "TE, device splits")
LOW_PRECISION = [f"TE, {recipe}" for recipe in RECIPES]
"""By the path that `te_quantized` chooses on this machine"""
SYNC_FREE = ("grouped_mm", "TE, device splits")


def experts_backend(
    name: str, dtype: torch.dtype, D: int, F: int, local_experts: int = 1
) -> Callable[..., Tensor] | str:
    """The function with the signature of those in `EXPERTS`, or why this machine does not have it."""
    if name in EXPERTS:
        return EXPERTS[name]
    found = te.facts()
    if name in LOW_PRECISION:
        recipe = RECIPES[name.removeprefix("TE, ")]
        why = te_experts.recipe_problem(found, recipe, dtype, D, F, local_experts)
        return why or partial(te_quantized, recipe=recipe)
    if problem := te_experts.problem(found, dtype):
        return problem
    if name == "TE, host splits":
        return partial(_by_te, te_experts.HostSplits)
    if problem := te_experts.device_splits_problem(found, dtype, D, F):
        return problem
    return partial(_by_te, partial(te_experts.DeviceSplits, widths=(D, 2 * F, F)))


def _by_te(splits, x_RD: Tensor, counts_E: Tensor, weight_R: Tensor, w13_EF2D: Tensor, w2_EDF: Tensor, **options):
    return by_gemm(splits(counts_E), x_RD, weight_R, w13_EF2D, w2_EDF, **options)
