"""Routed experts in emulated low precision: the backends of experts.py on quantized operands.

Each expert's slab of rows is a tensor of its own to the recipe: no block of numbers that share a scale reaches into
another slab, and what a recipe has one of per tensor, an expert has one of. So a grouped GEMM gives, bit for bit, what
E single ones give, which is what `loop` does. SwiGLU and the routing weight stay in high precision between the two
GEMMs. Gate and up are one matrix of 2F rows, in which they alternate, so blocks along these hold both.

Shape letters: as in experts.py.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.moe.experts import Source, by_gemm, grouped_gemm, linear
from titan_moe.precision.gemm import DenseGemm, QuantizedGemm
from titan_moe.precision.quantize import Groups
from titan_moe.precision.recipes import Recipe


def loop(
    x_RD: Tensor,
    counts_E: Tensor,
    weight_R: Tensor,
    w13_EF2D: Tensor,
    w2_EDF: Tensor,
    *,
    recipe: Recipe,
    late: bool = False,
    source: Source | None = None,
) -> Tensor:
    """y_RD, one expert after the other, each a dense feed-forward. `source` is not used."""
    counts = counts_E.tolist()  # a host sync
    tail = x_RD.shape[0] - sum(counts)
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    gemm = QuantizedGemm(DenseGemm(), recipe)
    y_RD = []
    for x, weight, w13, w2 in zip(x_RD.split([*counts, tail]), weight_R.split([*counts, tail]), w13_EF2D, w2_EDF):
        gate_up = linear(gemm, x, w13.flatten(0, 1), keeps="moe_expert_input")
        gate_R, up_R = gate_up.unflatten(1, (-1, 2)).to(wide).unbind(-1)
        h = F.silu(gate_R) * up_R
        h = (h if late else h * weight[:, None]).to(x.dtype)
        y = linear(gemm, h, w2)
        y_RD.append((y * weight[:, None]).to(x.dtype) if late else y)
    return torch.cat([*y_RD, x_RD.new_zeros(tail, x_RD.shape[1])])


def grouped_mm(
    x_RD: Tensor,
    counts_E: Tensor,
    weight_R: Tensor,
    w13_EF2D: Tensor,
    w2_EDF: Tensor,
    *,
    recipe: Recipe,
    late: bool = False,
    source: Source | None = None,
) -> Tensor:
    """y_RD by grouped GEMMs; the rows beyond the last slab are undefined."""
    gemm = QuantizedGemm(grouped_gemm(counts_E), recipe, Groups.of_slabs(counts_E, len(x_RD)))
    return by_gemm(gemm, x_RD, weight_R, w13_EF2D, w2_EDF, late=late, source=source)


EXPERTS: dict[str, Callable[..., Tensor]] = {"loop": loop, "grouped_mm": grouped_mm}
