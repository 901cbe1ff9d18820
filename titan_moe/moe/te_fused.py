"""Routed experts in MXFP8 by fused kernels: SwiGLU and the quantization of its result happen inside the GEMMs.

These are the kernels of Transformer Engine's (TE's) fused grouped MLP, for Blackwell, which TE itself offers only to
modules of its own: those collect their parameters when they are put together, and keep quantized weights for backward,
which outlive what FSDP frees after forward. Here functions drive them (te_mxfp8.py), under the contract of experts.py:
from forward to backward there are x, gate_up, the routing weights and the weights as they came, all unquantized. What
backward needs in FP8 is quantized again, h is computed again, and w13 is put in the kernels' order again.

That order has gate and up interleaved in blocks of 32 rows, as gate[0:32], up[0:32], gate[32:64], ...; `w13_EF2D` has
them interleaved one by one. Both are permutations, so a gradient goes back the way its weight came, and gate_up keeps
the kernels' order from the one to the other.

dgrad and wgrad are nodes of their own, as in experts.py. Between nodes autograd hands on tensors of the shape and type
of the forward's, and FP8 with scales is none. So the kernels leave it in `passed`, and autograd gets a stand-in:

    x -> _Up -> gate_up --+-> _Share -> _Down -> y --+-> Join -> y
           w13 -> wgrad --+               w2 -> wgrad --+

_Down's backward is the dSwiGLU kernel: it leaves the gradient of gate_up for _Up's dgrad (quantized along its rows) and
for the wgrad of w13 (along its columns).

Shape letters: as in experts.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.moe import quantized_experts, te
from titan_moe.moe.experts import Join, Source, by_gemm, wgrad_node
from titan_moe.moe.te_experts import HostSplits
from titan_moe.moe.te_mxfp8 import ALIGNMENT, BLOCK, Gemms, Quantized
from titan_moe.precision import support
from titan_moe.precision.recipes import Recipe

RECIPE = "mxfp8"
OLDEST_FRONTEND = "1.32.0"  # of cuDNN: its kernels are called here as this version declares them
MAX_ELEMENTS = 2**31 - 1  # of one matrix: nothing says that the kernels count in more than 32 bits


def fused(
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
    """y_RD; the rows beyond the last slab are undefined. Slabs and R are multiples of ALIGNMENT, all else is bf16.
    `recipe` is mxfp8.

    Raises ValueError when the rows are more than the kernels can count.
    """
    rows, (_, hidden, _, width) = x_RD.shape[0], w13_EF2D.shape
    assert recipe.name == RECIPE
    assert rows % ALIGNMENT == 0, f"{rows} rows: slabs are not multiples of {ALIGNMENT}"
    if rows == 0:  # only exact sizes are 0, which the host knows anyway
        return by_gemm(HostSplits(counts_E), x_RD, weight_R, w13_EF2D, w2_EDF, late=late, source=source)
    if rows * max(width, 2 * hidden) > MAX_ELEMENTS:
        raise ValueError(
            f'moe.experts = "te_fused": {rows:,} rows x max(D, 2 F) = {max(width, 2 * hidden):,} are more than the '
            f"{MAX_ELEMENTS:,} numbers that the kernels can count; fewer tokens in a microbatch, a smaller "
            'moe.recv_buffer, or moe.experts = "te"'
        )
    gemms = Gemms(counts_E, width, hidden)
    passed: dict[str, Quantized] = {}
    gate_up_R2F = _Up.apply(x_RD, None if late else weight_R.detach(), w13_EF2D.detach(), gemms, passed)
    again, kept = (None, x_RD) if source is None else (source.gather, source.x_TD)
    wgrad = wgrad_node(_W13(gemms, passed), w13_EF2D, gate_up_R2F.shape, again, kept)
    gate_up_R2F = _Share.apply(gate_up_R2F, wgrad)
    wgrad = wgrad_node(gemms, w2_EDF, x_RD.shape, weighted_h, gate_up_R2F, weight_R)
    y_RD = _Down.apply(gate_up_R2F, weight_R, w2_EDF.detach(), gemms, passed)
    return Join.apply(y_RD, wgrad, weight_R if late else None)


quantized_experts.EXPERTS["te_fused"] = fused


def problems(found: te.Facts, dtype: torch.dtype, width: int, hidden: int, local_experts: int) -> list[str]:
    """Everything that keeps `fused` from computing this; empty if nothing does."""
    said = []
    if problem := te.problem(found):
        said.append(problem)
    elif found.capability is not None and not support.find(RECIPE, "te_fused", found.capability):
        spans, has = support.spans(RECIPE, "te_fused"), support.dotted(found.capability)
        said.append(f"its kernels are of Blackwell, compute capability {spans}, and this device has {has}")
    if found.cudnn_frontend is None or te.release(found.cudnn_frontend) < te.release(OLDEST_FRONTEND):
        has = f"is {found.cudnn_frontend}" if found.cudnn_frontend else "is not installed"
        said.append(f"nvidia-cudnn-frontend {has}: pip install 'nvidia-cudnn-frontend>={OLDEST_FRONTEND}'")
    if dtype != torch.bfloat16:
        said.append(f"it quantizes from bfloat16, not {dtype}")
    if width % 128 or hidden % 128:
        said.append(f"tiles of scales are 128 wide, but D = {width} or F = {hidden} % 128 != 0")
    if why := support.experts_problem(local_experts):
        said.append(why)
    return said


# ---------------------------------------------------------------------------------------------------------------------
# Order of rows


def interleave(w13_EF2D: Tensor) -> Tensor:
    """w13 in the kernels' order, [E, 2F, D]."""
    return w13_EF2D.unflatten(1, (-1, BLOCK)).transpose(2, 3).flatten(1, 3)


def deinterleave(w_E2FD: Tensor) -> Tensor:
    """`interleave` undone: [E, F, 2, D]."""
    return w_E2FD.unflatten(1, (-1, 2, BLOCK)).transpose(2, 3).flatten(1, 2)


def weighted_h(gate_up_R2F: Tensor, weight_R: Tensor) -> Tensor:
    """weight * silu(gate) * up of the kernels' gate_up, in fp32 and rounded once."""
    gate, up = gate_up_R2F.unflatten(1, (-1, 2, BLOCK)).unbind(2)
    h = F.silu(gate.float()).mul_(up).mul_(weight_R[:, None, None])
    return h.flatten(1).to(gate_up_R2F.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Nodes


class _Up(torch.autograd.Function):
    """Leaves h, quantized, for _Down."""

    @staticmethod
    def forward(ctx, x_RD, weight_R, w13_EF2D, gemms, passed):
        ctx.gemms, ctx.passed = gemms, passed
        ctx.save_for_backward(w13_EF2D)
        gate_up_R2F, passed["h"] = gemms.up(x_RD, interleave(w13_EF2D), weight_R)
        return gate_up_R2F

    @staticmethod
    @once_differentiable
    def backward(ctx, stand_in):  # type: ignore[override]
        (w13_EF2D,) = ctx.saved_tensors
        return ctx.gemms.dgrad(ctx.passed.pop("grad_rows"), interleave(w13_EF2D)), None, None, None, None


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_R2F, weight_R, w2_EDF, gemms, passed):
        ctx.gemms, ctx.passed = gemms, passed
        ctx.save_for_backward(gate_up_R2F, weight_R, w2_EDF)
        return gemms.down(passed.pop("h"), w2_EDF)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):  # type: ignore[override]
        gate_up_R2F, weight_R, w2_EDF = ctx.saved_tensors
        rows, columns, grad_weight_R = ctx.gemms.dswiglu(grad_RD, w2_EDF, gate_up_R2F, weight_R)
        ctx.passed.update(grad_rows=rows, grad_columns=columns)
        return gate_up_R2F.new_zeros(()).expand_as(gate_up_R2F), grad_weight_R, None, None, None


class _Share(torch.autograd.Function):
    """gate_up, of which dgrad and wgrad both get the gradient."""

    @staticmethod
    def forward(ctx, gate_up_R2F, wgrad):
        return gate_up_R2F.view_as(gate_up_R2F)

    @staticmethod
    @once_differentiable
    def backward(ctx, stand_in):  # type: ignore[override]
        return stand_in, stand_in


class _W13:
    """The wgrad of w13, for `wgrad_node`."""

    def __init__(self, gemms: Gemms, passed: dict[str, Quantized]) -> None:
        self.gemms, self.passed = gemms, passed

    def wgrad(self, stand_in: Tensor, x_RD: Tensor) -> Tensor:
        """grad_EF2D."""
        return deinterleave(self.gemms.wgrad_of(self.passed.pop("grad_columns"), x_RD))
