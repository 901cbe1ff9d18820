"""Routed experts: one SwiGLU feed-forward per expert over its slab of rows.

    gate, up = x W1, x W3        h = silu(gate) * up        y = (weight * h) W2

Gate and up are one parameter, `w13_EF2D` ([:, :, 0] is torchtitan's w1, [:, :, 1] its w3): one all-gather and one GEMM,
and F can be sharded, which [E, 2F, D] would silently break. So the GEMM returns gate and up as neighbours, F pairs.

Two backends, by name in `EXPERTS`:

- `loop`: a Python loop over experts in plain autograd, for any dtype. The oracle, and what fp32 on a GPU runs on.
- `grouped_mm`: `torch._grouped_mm` in autograd Functions of our own. They keep x, the routing weights and gate_up,
  nothing else: SwiGLU is computed again in backward, the wgrad of all experts is one packed tensor, and where rows can
  be gathered again (one rank) not even x is kept, only the tokens that it was copied from.

The gradient of the input (dgrad) and of the weight (wgrad) are separate nodes of the graph, because schedules that
split the backward pass (zero bubble) first ask for the one, later for the other, and a node that does both would do
both twice. `_linear` shows how: what the two share is an identity.

"Early" weighting multiplies h, F numbers per row, "late" the result y, D numbers, after it was rounded. Backward is the
same for both: with t = dy W2^T the gradient of the weight is t . h = dy . y, and y need not be kept.

Rows beyond the last slab (`counts_e.sum()`) are undefined: what is computed for them reaches no other row.

Shape letters: R rows of the padded slabs, sorted by expert, E experts (of this rank), D model width, F expert hidden
width, I and O input and output width of one GEMM.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# SwiGLU on a CPU goes over the rows in blocks of so many numbers, so that its dozen passes find them in the L2 cache.
CPU_BLOCK_ELEMENTS = 2**17


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
    """y_RD by grouped GEMMs; the rows beyond the last slab are undefined."""
    experts, hidden, _, width = w13_EF2D.shape
    offsets_E = torch.cumsum(counts_E, dim=0, dtype=torch.int32)
    kept, again = (x_RD, None) if source is None else source
    gate_up_R2F = _linear(x_RD, w13_EF2D.view(experts, 2 * hidden, width), offsets_E, again, kept)
    h_RF = _SwiGLU.apply(gate_up_R2F, weight_R, offsets_E, late)

    def weighted_h(gate_up_R2F: Tensor, weight_R: Tensor) -> Tensor:
        return swiglu(gate_up_R2F, weight_R, offsets_E)

    return _linear(h_RF, w2_EDF, offsets_E, weighted_h, gate_up_R2F, weight_R, scale_R=weight_R if late else None)


EXPERTS: dict[str, Callable[..., Tensor]] = {"loop": loop, "grouped_mm": grouped_mm}


def grouped_mm_problem(device: str, dtype: torch.dtype, width: int, hidden: int) -> str | None:
    """Why `grouped_mm` cannot compute this, or None."""
    if dtype == torch.float64 or (dtype == torch.float32 and device != "cpu"):
        return f"torch._grouped_mm has no {dtype} kernel on {device}"
    multiple = 16 // dtype.itemsize
    if width % multiple or hidden % multiple:
        return f"torch._grouped_mm wants rows of 16-byte multiples, but D = {width} or F = {hidden} % {multiple} != 0"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# A grouped linear map with dgrad and wgrad apart


def _linear(
    x_RI: Tensor,
    w_EOI: Tensor,
    offsets_E: Tensor,
    again: Callable[..., Tensor] | None,
    *kept: Tensor,
    scale_R: Tensor | None = None,
) -> Tensor:
    """y = x w^T for each slab. What backward keeps for the wgrad is `kept`, from which `again` makes its x.

                    y         backward of _Join hands dy to both
                  /   \\
          _Dgrad(x)   _Wgrad(w)       neither knows the other's input

    With `scale_R` the rows of y are scaled, forward only: the caller's gradients already hold the scale.
    """
    y_RO = _Dgrad.apply(x_RI, w_EOI.detach(), offsets_E)
    if not w_EOI.requires_grad:
        return _Join.apply(y_RO, y_RO.new_zeros(()), scale_R)
    wgrad = _Wgrad.apply(w_EOI, offsets_E, y_RO.shape, again, *(tensor.detach() for tensor in kept))
    return _Join.apply(y_RO, wgrad, scale_R)


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RI, w_EOI, offsets_E):
        ctx.save_for_backward(w_EOI, offsets_E)
        return torch._grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):  # type: ignore[override]
        w_EOI, offsets_E = ctx.saved_tensors
        return torch._grouped_mm(grad_RO, w_EOI, offs=offsets_E), None, None


class _Wgrad(torch.autograd.Function):
    """A stand-in for y without memory, whose gradient makes the weight's."""

    @staticmethod
    def forward(ctx, w_EOI, offsets_E, shape, again, *kept):
        ctx.again = again
        ctx.save_for_backward(offsets_E, *kept)
        return w_EOI.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):  # type: ignore[override]
        offsets_E, *kept = ctx.saved_tensors
        x_RI = kept[0] if ctx.again is None else ctx.again(*kept)
        return torch._grouped_mm(grad_RO.t(), x_RI, offs=offsets_E), *(None,) * (3 + len(kept))


class _Join(torch.autograd.Function):
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
    def forward(ctx, gate_up_R2F, weight_R, offsets_E, late):
        ctx.save_for_backward(gate_up_R2F, weight_R, offsets_E)
        return swiglu(gate_up_R2F, None if late else weight_R, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF):  # type: ignore[override]
        return *swiglu_backward(grad_RF, *ctx.saved_tensors), None, None


def swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None, offsets_E: Tensor) -> Tensor:
    """silu(gate) * up (* weight), computed in fp32 and rounded once."""
    h_RF = gate_up_R2F.new_empty(gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2)
    for rows in _blocks(gate_up_R2F, offsets_E):
        gate, up = _split(gate_up_R2F[rows])
        h = F.silu(gate).mul_(up)
        h_RF[rows] = h if weight_R is None else h.mul_(weight_R[rows, None])
    return h_RF


def swiglu_backward(grad_RF: Tensor, gate_up_R2F: Tensor, weight_R: Tensor, offsets_E: Tensor):
    """Gradients of gate_up_R2F and weight_R, given that of weight * silu(gate) * up."""
    grad_gate_up_R2F, grad_weight_R = torch.empty_like(gate_up_R2F), torch.empty_like(weight_R)
    dtype = gate_up_R2F.dtype
    for rows in _blocks(gate_up_R2F, offsets_E):
        gate, up = _split(gate_up_R2F[rows])
        grad = grad_RF[rows].to(gate.dtype)
        silu = F.silu(gate)
        grad_weight_R[rows] = (silu * up).mul_(grad).sum(-1)
        grad = grad * weight_R[rows, None]
        pair = grad_gate_up_R2F[rows].unflatten(1, (-1, 2))
        pair[..., 1] = silu.mul_(grad).to(dtype)  # rounding first makes the strided copy twice as fast
        pair[..., 0] = torch.ops.aten.silu_backward(grad.mul_(up), gate).to(dtype)
    return grad_gate_up_R2F, grad_weight_R


def _blocks(gate_up_R2F: Tensor, offsets_E: Tensor) -> list[slice]:
    """The rows in pieces: on a CPU cache-sized ones up to the last slab's end, elsewhere all of them at once, because
    the host does not know where the last slab ends."""
    if gate_up_R2F.device.type != "cpu":
        return [slice(None)]
    step = max(1, CPU_BLOCK_ELEMENTS * 2 // gate_up_R2F.shape[1])
    total = int(offsets_E[-1])
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


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
