"""Transformer Engine's (TE's) fused grouped MLP: what it asks for, and how it orders w13's rows. Not to be chosen yet.

On Blackwell TE computes both projections and the SwiGLU between them in kernels that never write gate and up in full.
They exist for MXFP8 alone, so `problems` refuses the backend until a recipe for MXFP8 is built in. Beside the recipe,
two things are in the way: TE offers the kernels only to its own modules, which collect their parameters once, when they
are put together; and for backward they keep the quantized weights, which outlive what FSDP frees after forward.

The kernels want gate and up interleaved in blocks of 32 rows, as gate[0:32], up[0:32], gate[32:64], ...; `w13_EF2D` has
them interleaved one by one. Both are permutations, so a gradient goes back the way its weight came.

Shape letters: E experts, D model width, F expert hidden width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_moe.moe import te

BLOCK = 32


def interleave(w13_EF2D: Tensor) -> Tensor:
    """The weight of TE's first projection, [E, 2F, D]. Differentiable."""
    return w13_EF2D.unflatten(1, (-1, BLOCK)).transpose(2, 3).flatten(1, 3)


def deinterleave(w_E2FD: Tensor) -> Tensor:
    """`interleave` undone: [E, F, 2, D]. Differentiable."""
    return w_E2FD.unflatten(1, (-1, 2, BLOCK)).transpose(2, 3).flatten(1, 2)


def problems(
    found: te.Facts,
    env: Mapping[str, str],
    dtype: torch.dtype,
    width: int,
    hidden: int,
    recipe: str | None,
) -> list[str]:
    """Everything that keeps the fused kernels from being used; empty if nothing does.

    env: the environment as it was when TE was imported.
    recipe: how the GEMMs quantize; None: not at all.
    """
    said = []
    if problem := te.problem(found):
        said.append(problem)
    elif found.capability is not None and found.capability[0] != 10:
        has = "{}.{}".format(*found.capability)
        said.append(f"they are compiled for compute capability 10.x, and this device has {has}")
    if env.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0") in ("", "0"):
        said.append("set NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 in the environment before the start; TE reads it on import")
    if recipe != "mxfp8":
        said.append("they compute in MXFP8, and there is no recipe for it here yet")
    if dtype != torch.bfloat16:
        said.append(f"their input is bfloat16, not {dtype}")
    if width % 64 or hidden % 64:
        said.append(f"they want widths that are multiples of 64, but D = {width} or F = {hidden} % 64 != 0")
    return said
