"""Moving rows on one device: gather copies of rows, and sum the copies again.

Dispatch copies a row to several places, combine adds what came back; each is the transpose of the other, so that one's
backward is the other's forward. Both are written as a gather or as a sum over a list of rows, never as scatter-adds:
nothing is written twice, so results do not depend on the order of threads, on a GPU either, and each output row is
written once. Sums are fp32 (float64 for float64 rows) inside and rounded once, at the end: `embedding_bag` does that
for 16-bit rows without an fp32 copy of them (on a CPU it rounds a tie away from zero, not to even).

Shape letters: I input rows (tokens, or rows received), R output rows (copies), D model width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class RowMap(NamedTuple):
    """Which input row every output row copies, and the same read backwards.

    source_R: int64 [R], the input row of each output row. I, one past the last, stands for a row of zeros.
    copies: int64, output rows in the order of their input rows.
    offsets: int64 [>= I], where in `copies` each input row's part starts. Parts beyond the first I belong to no input
        row and are thrown away: without a host sync `copies` cannot be made shorter by what was dropped.
    """

    source_R: Tensor
    copies: Tensor
    offsets: Tensor


class CopyMap(NamedTuple):
    """A one-to-one map: output i takes input `index[i]`, input j went to output `inverse[j]`; one past the end means
    zero, or nowhere. Both int64."""

    index: Tensor
    inverse: Tensor


def gather_rows(x_ID: Tensor, rows: RowMap, zero_fill: bool) -> Tensor:
    """Copies of rows, [R, D]; backward sums the gradients of a row's copies. `zero_fill` says that `rows` may ask for
    rows of zeros."""
    return _GatherRows.apply(x_ID, *rows, zero_fill)


def sum_rows(y_RD: Tensor, rows: RowMap, inputs: int, zero_fill: bool) -> Tensor:
    """The sum of each input row's copies, [I, D]: the transpose of `gather_rows`. `inputs` is I. Rows of y that copy
    nothing are never read; their gradient is zero."""
    return _SumRows.apply(y_RD, *rows, inputs, zero_fill)


def select_copies(w_I: Tensor, copies: CopyMap) -> Tensor:
    """Values of one number each, rearranged; differentiable."""
    return _SelectCopies.apply(w_I, *copies)


def gather(x_ID: Tensor, source_R: Tensor, zero_fill: bool) -> Tensor:
    """The forward of `gather_rows`, for those who write their own backward."""
    if zero_fill:  # One more row to copy costs less than a pass over the result, which has K times as many.
        x_ID = torch.cat([x_ID, x_ID.new_zeros((1, *x_ID.shape[1:]))])
    return x_ID.index_select(0, source_R)


def _sum(y_RD: Tensor, copies: Tensor, offsets: Tensor, inputs: int) -> Tensor:
    if copies.shape[0] == 0 or y_RD.shape[1] == 0:
        return y_RD.new_zeros((inputs, y_RD.shape[1]))
    # detach: inside a Function inputs still say requires_grad, and would take the slower kernel that saves for backward
    return F.embedding_bag(copies, y_RD.detach().contiguous(), offsets, mode="sum")[:inputs]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ID, source_R, copies, offsets, zero_fill):
        ctx.save_for_backward(copies, offsets)
        ctx.inputs = x_ID.shape[0]
        return gather(x_ID, source_R, zero_fill)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):  # type: ignore[override]
        copies, offsets = ctx.saved_tensors
        return _sum(grad_RD, copies, offsets, ctx.inputs), None, None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, source_R, copies, offsets, inputs, zero_fill):
        ctx.save_for_backward(source_R)
        ctx.zero_fill = zero_fill
        return _sum(y_RD, copies, offsets, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ID):  # type: ignore[override]
        (source_R,) = ctx.saved_tensors
        return gather(grad_ID, source_R, ctx.zero_fill), None, None, None, None, None


class _SelectCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w_I, index, inverse):
        ctx.save_for_backward(inverse)
        return gather(w_I, index, zero_fill=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return gather(grad, inverse, zero_fill=True), None, None
