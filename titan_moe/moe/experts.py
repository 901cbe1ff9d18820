"""Routed experts: one SwiGLU feed-forward per expert over its slab of rows.

    gate, up = x W1, x W3        h = silu(gate) * up        y = (weight * h) W2

Gate and up are one parameter, `w13_EF2D` ([:, :, 0] is torchtitan's w1, [:, :, 1] its w3): one all-gather and one GEMM,
and F can be sharded, which [E, 2F, D] would silently break. So the GEMM returns gate and up as neighbours, F pairs.

Backends, by name in `EXPERTS`, where te_experts.py adds another:

- `loop`: a Python loop over experts in plain autograd, for any dtype. The oracle, and what fp32 on a GPU runs on.
- `grouped_mm`: grouped GEMMs in autograd Functions of our own. They keep x, the routing weights and gate_up, nothing
  else: SwiGLU is computed again in backward, the wgrad of all experts is one packed tensor, and where rows can be
  gathered again (one rank) not even x is kept, only the tokens that it was copied from.

The gradient of the input (dgrad) and of the weight (wgrad) are separate nodes of the graph, because schedules that
split the backward pass (zero bubble) first ask for the one, later for the other, and a node that does both would do
both twice. `linear` shows how: what the two share is an identity.

"Early" weighting multiplies h, F numbers per row, "late" the result y, D numbers, after it was rounded. Backward is the
same for both: with t = dy W2^T the gradient of the weight is t . h = dy . y, and y need not be kept.

Rows beyond the last slab (`counts_e.sum()`) are undefined: what is computed for them reaches no other row.

Shape letters: R rows of the padded slabs, sorted by expert, E experts (of this rank), D model width, F expert hidden
width, I and O input and output width of one GEMM.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.offload import offloaded

# SwiGLU on a CPU goes over the rows in blocks of so many numbers, so that its dozen passes find them in the L2 cache.
CPU_BLOCK_ELEMENTS = 2**16

# On a CPU a kernel is compiled for each number of rows it meets, which takes up to ten times as long as running it, and
# the counts of tokens almost never repeat. Slabs cut into pieces of these sizes and one rest, of which alignment leaves
# few kinds, meet the same kernels again and again.
CPU_PIECES = (1024, 512, 256)


class Source(NamedTuple):
    """How the rows can be had again in backward: `gather(x_TD)` is x_RD. Not differentiable."""

    x_TD: Tensor
    gather: Callable[[Tensor], Tensor]


def loop(
    x_RD: Tensor,
    counts_E: Tensor,
    weight_R: Tensor,
    w13_EF2D: Tensor,
    w2_EDF: Tensor,
    *,
    late: bool = False,
    source: Source | None = None,
) -> Tensor:
    """y_RD, one expert after the other. `source` is not used: autograd keeps what it needs."""
    counts = counts_E.tolist()  # a host sync
    tail = x_RD.shape[0] - sum(counts)
    y_RD = []
    for x, weight, w13, w2 in zip(x_RD.split([*counts, tail]), weight_R.split([*counts, tail]), w13_EF2D, w2_EDF):
        h = F.silu(x @ w13[:, 0].T) * (x @ w13[:, 1].T)
        y_RD.append(((h @ w2.T) * weight[:, None]).to(x.dtype) if late else (h * weight[:, None]).to(x.dtype) @ w2.T)
    return torch.cat([*y_RD, x_RD.new_zeros(tail, x_RD.shape[1])])


def grouped_mm(
    x_RD: Tensor,
    counts_E: Tensor,
    weight_R: Tensor,
    w13_EF2D: Tensor,
    w2_EDF: Tensor,
    *,
    late: bool = False,
    source: Source | None = None,
) -> Tensor:
    """y_RD by torch._grouped_mm; the rows beyond the last slab are undefined."""
    return by_gemm(grouped_gemm(counts_E), x_RD, weight_R, w13_EF2D, w2_EDF, late=late, source=source)


def by_gemm(
    gemm: "GroupedGemm",
    x_RD: Tensor,
    weight_R: Tensor,
    w13_EF2D: Tensor,
    w2_EDF: Tensor,
    *,
    late: bool = False,
    source: Source | None = None,
) -> Tensor:
    """y_RD by any grouped GEMM; the rows beyond the last slab are undefined."""
    experts, hidden, _, width = w13_EF2D.shape
    gate_up_R2F = linear(gemm, x_RD, w13_EF2D.view(experts, 2 * hidden, width), source, keeps="moe_expert_input")

    # The wgrad of w2 needs h again. Its node is made before SwiGLU's, so backward comes to it later and finds the h
    # that SwiGLU's backward left for it in passing. If none was left, it computes h itself.
    left: list[Tensor] = []

    def weighted_h(gate_up_R2F: Tensor, weight_R: Tensor) -> Tensor:
        return left.pop() if left else swiglu(gate_up_R2F, weight_R, gemm)

    wgrad = wgrad_node(gemm, w2_EDF, x_RD.shape, weighted_h, gate_up_R2F, weight_R)
    h_RF = _SwiGLU.apply(gate_up_R2F, weight_R, gemm, late, left if w2_EDF.requires_grad else None)
    y_RD = _Dgrad.apply(h_RF, w2_EDF.detach(), gemm)
    # Late: y is scaled in forward alone. SwiGLU's backward, which scales either way, would do it twice.
    return Join.apply(y_RD, wgrad, weight_R if late else None)


EXPERTS: dict[str, Callable[..., Tensor]] = {"loop": loop, "grouped_mm": grouped_mm}


def grouped_mm_problem(device: str, dtype: torch.dtype, width: int, hidden: int) -> str | None:
    """Why `grouped_mm` cannot compute this, or None."""
    if device == "cpu":
        return None
    if dtype.itemsize > 2:
        return f"torch._grouped_mm has no {dtype} kernel on {device}"
    multiple = 16 // dtype.itemsize
    if width % multiple or hidden % multiple:
        return f"torch._grouped_mm wants rows of 16-byte multiples, but D = {width} or F = {hidden} % {multiple} != 0"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Grouped GEMM: for each expert y = x w^T (forward), y = x w (dgrad), y^T x (wgrad)


class GroupedGemm(Protocol):
    """What the autograd Functions below need. One per forward: it knows the slabs."""

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor: ...

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor: ...

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor) -> Tensor: ...

    def blocks(self, width: int) -> list[slice]: ...

    # One that quantizes may have `swiglu(gate_up_R2F, weight_R)` of its own, whose h only its `forward` gets to see.


def grouped_gemm(counts_E: Tensor) -> GroupedGemm:
    """Of torch, for slabs of these sizes."""
    return (_PiecewiseGemm if counts_E.device.type == "cpu" else _GroupedGemm)(counts_E)


class _GroupedGemm:
    """By torch._grouped_mm, without a host sync."""

    def __init__(self, counts_E: Tensor) -> None:
        self.offsets_E = torch.cumsum(counts_E, dim=0, dtype=torch.int32)

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        return torch._grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=self.offsets_E)

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        return torch._grouped_mm(grad_RO, w_EOI, offs=self.offsets_E)

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
        return torch._grouped_mm(grad_RO.t(), x_RI, offs=self.offsets_E)

    def blocks(self, width: int) -> list[slice]:
        """Rows for SwiGLU: all of them, because the host does not know where the last slab ends."""
        return [slice(None)]


class _PiecewiseGemm:
    """On a CPU, where torch._grouped_mm is a loop over slabs too, but one that meets new numbers of rows for ever."""

    def __init__(self, counts_E: Tensor) -> None:
        self.counts = counts_E.tolist()
        self.rows = sum(self.counts)
        self.pieces: list[tuple[int, slice]] = []
        start = 0
        for expert, count in enumerate(self.counts):
            end = start + count
            while start < end:
                size = next((size for size in CPU_PIECES if size <= end - start), end - start)
                self.pieces.append((expert, slice(start, start + size)))
                start += size

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        return self.dgrad(x_RI, w_EOI.transpose(1, 2))

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        out_RI = grad_RO.new_empty(grad_RO.shape[0], w_EOI.shape[2])
        for expert, rows in self.pieces:
            torch.mm(grad_RO[rows], w_EOI[expert], out=out_RI[rows])
        return out_RI

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
        grad_EOI = grad_RO.new_empty(len(self.counts), grad_RO.shape[1], x_RI.shape[1])
        begun = -1
        for expert, rows in self.pieces:
            if expert == begun:
                grad_EOI[expert].addmm_(grad_RO[rows].t(), x_RI[rows])
            else:
                torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_EOI[expert])
            begun = expert
        for expert, count in enumerate(self.counts):
            if count == 0:
                grad_EOI[expert].zero_()
        return grad_EOI

    def blocks(self, width: int) -> list[slice]:
        """Rows for SwiGLU: cache-sized blocks up to the last slab's end."""
        step = max(1, CPU_BLOCK_ELEMENTS // width)
        return [slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]


# ---------------------------------------------------------------------------------------------------------------------
# A grouped linear map with dgrad and wgrad apart


def linear(gemm: GroupedGemm, x_RI: Tensor, w_EOI: Tensor, source: Source | None = None, *, keeps: str = "") -> Tensor:
    """y = x w^T for each slab, as three nodes:

                    y         backward of Join hands dy to both
                  /   \\
          _Dgrad(x)   _Wgrad(w)       neither knows the other's input

    The wgrad keeps what `source` makes x of; without one x, or what a GEMM that quantizes keeps in its place (`keep`
    of precision/gemm.py); `keeps` is what activation_offload.tensors calls these.
    """
    y_RO = _Dgrad.apply(x_RI, w_EOI.detach(), gemm)
    again, kept = (None, (x_RI,)) if source is None else (source.gather, (source.x_TD,))
    if source is None and w_EOI.requires_grad and hasattr(gemm, "keep"):
        again, kept = gemm.keep(x_RI.detach())
    if source is None:
        kept = [offloaded(keeps, tensor) for tensor in kept]
    return Join.apply(y_RO, wgrad_node(gemm, w_EOI, y_RO.shape, again, *kept), None)


def wgrad_node(gemm, w_EOI: Tensor, shape: torch.Size, again: Callable[..., Tensor] | None, *kept: Tensor) -> Tensor:
    """The weight's part of y: a stand-in of its shape without memory. `again` makes the GEMM's input of `kept`."""
    return _Wgrad.apply(w_EOI, gemm, shape, again, *(tensor.detach() for tensor in kept))


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RI, w_EOI, gemm):
        ctx.gemm = gemm
        ctx.save_for_backward(w_EOI)
        return gemm.forward(x_RI, w_EOI)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):  # type: ignore[override]
        return ctx.gemm.dgrad(grad_RO, *ctx.saved_tensors), None, None


class _Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w_EOI, gemm, shape, again, *kept):
        ctx.gemm, ctx.again = gemm, again
        ctx.save_for_backward(*kept)
        return w_EOI.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):  # type: ignore[override]
        kept = ctx.saved_tensors
        x_RI = kept[0] if ctx.again is None else ctx.again(*kept)
        return ctx.gemm.wgrad(grad_RO, x_RI), *(None,) * (3 + len(kept))


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RO, wgrad, scale_R):
        return y_RO.view_as(y_RO) if scale_R is None else (y_RO * scale_R[:, None]).to(y_RO.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):  # type: ignore[override]
        grad_RO = grad_RO.contiguous()  # grouped_mm refuses the stride 0 that y.sum() would give
        return grad_RO, grad_RO if ctx.needs_input_grad[1] else None, None


# ---------------------------------------------------------------------------------------------------------------------
# SwiGLU on interleaved gate and up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_R2F, weight_R, gemm, late, left):
        ctx.gemm, ctx.left = gemm, left
        ctx.save_for_backward(gate_up_R2F, weight_R)
        make = gemm.swiglu if hasattr(gemm, "swiglu") else partial(swiglu, gemm=gemm)  # quantized as it is made
        return make(gate_up_R2F, None if late else weight_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF):  # type: ignore[override]
        gate_up_R2F, weight_R = ctx.saved_tensors
        h_RF = None if ctx.left is None else torch.empty_like(grad_RF)
        grads = swiglu_backward(grad_RF, gate_up_R2F, weight_R, ctx.gemm, h_RF)
        if ctx.left is not None:
            ctx.left[:] = [h_RF]
        return *grads, None, None, None


def swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None, gemm) -> Tensor:
    """silu(gate) * up (* weight), computed in fp32 and rounded once."""
    h_RF = gate_up_R2F.new_empty(gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2)
    for rows in gemm.blocks(gate_up_R2F.shape[1] // 2):
        gate, up = _split(gate_up_R2F[rows])
        h = F.silu(gate).mul_(up)
        h_RF[rows] = h if weight_R is None else h.mul_(weight_R[rows, None])
    return h_RF


def swiglu_backward(grad_RF: Tensor, gate_up_R2F: Tensor, weight_R: Tensor, gemm, h_RF: Tensor | None = None):
    """Gradients of gate_up_R2F and weight_R, given that of h = weight * silu(gate) * up; h itself goes to `h_RF`."""
    grad_gate_up_R2F, grad_weight_R = torch.empty_like(gate_up_R2F), torch.empty_like(weight_R)
    dtype = gate_up_R2F.dtype
    for rows in gemm.blocks(gate_up_R2F.shape[1] // 2):
        gate, up = _split(gate_up_R2F[rows])
        grad = grad_RF[rows].to(gate.dtype)
        silu = F.silu(gate)
        h, weight = silu * up, weight_R[rows, None]
        grad_weight_R[rows] = (h * grad).sum(-1)
        if h_RF is not None:
            h_RF[rows] = h.mul_(weight)
        grad = grad * weight
        pair = grad_gate_up_R2F[rows].unflatten(1, (-1, 2))
        pair[..., 1] = silu.mul_(grad).to(dtype)  # rounding first makes the strided copy twice as fast
        pair[..., 0] = torch.ops.aten.silu_backward(grad.mul_(up), gate).to(dtype)
    return grad_gate_up_R2F, grad_weight_R


def _split(gate_up_R2F: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up as contiguous fp32 tensors (float64 of float64)."""
    if gate_up_R2F.dtype == torch.bfloat16:
        # bf16 is the upper half of fp32: seen as an int32, a pair holds the gate in its lower and up in its upper half
        # (little-endian). This vectorizes; a strided copy does not.
        pair_RF = gate_up_R2F.view(torch.int32)
        return (pair_RF << 16).view(torch.float32), (pair_RF & -65536).view(torch.float32)
    wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
    gate, up = gate_up_R2F.unflatten(1, (-1, 2)).permute(2, 0, 1).to(wide).contiguous()
    return gate, up
