"""Rows between ranks, as ops that activation checkpointing can recognise.

Two ops do all the moving: `titan_moe::dispatch_rows` takes rows and their routing weights to other ranks,
`titan_moe::combine_rows` takes rows back. Backward of each is the same op with the splits swapped. They are
`torch.library` ops, not bare collectives inside an autograd Function, because selective checkpointing saves by op: with
`PAYLOAD_OPS` of dispatch.py in its save set recompute finds the received rows and sends nothing; with only `PLAN_OPS`
it sends the rows again but does not plan again.

The zero row. A receiver's slabs have padding rows, which must be zero. So an exchange may leave room for one row more
than it receives, the last, and zero it: then the slabs are filled by one gather in which padding copies the last row.
On the way back that row is never sent, and its gradient is zero. Without it, either every received row would be
copied once more or the slabs be written twice.

gloo and NCCL both do `all_to_all_single` with split sizes, which is all that is used here.

Shape letters: U rows sent, V rows received, N and M the same for routing weights, D model width.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

Splits = tuple[list[int], list[int]]  # received from each rank, sent to each rank


def dispatch_rows(x_UD: Tensor, w_N: Tensor, rows: Splits, copies: Splits, group: ProcessGroup):
    """Rows and weights to other ranks: x [V + 1, D], the last row zero, and w [M]. Differentiable in both."""
    return torch.ops.titan_moe.dispatch_rows(x_UD, w_N, *rows, *copies, group.group_name, True)


def combine_rows(y_VD: Tensor, rows: Splits, group: ProcessGroup, zero_row: bool = False) -> Tensor:
    """Rows back to where `dispatch_rows` with the same splits got them from: [U, D], with a zero row after them if
    asked for. The last of the V + 1 rows of y stays. Differentiable."""
    received, sent = rows
    return torch.ops.titan_moe.combine_rows(y_VD, sent, received, group.group_name, zero_row)


def exchange(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup, zero_row: bool = False) -> Tensor:
    """Send the first sum(sent) rows of x, receive sum(received), with a zero row after them if asked for. Not
    differentiable."""
    out, work = start_exchange(x, received, sent, group, zero_row)
    work.wait()
    return out


def start_exchange(
    x: Tensor, received: list[int], sent: list[int], group: ProcessGroup, zero_row: bool = False
) -> tuple[Tensor, dist.Work]:
    """The same without waiting: nothing may touch the result before `.wait()` of the work."""
    total = sum(received)
    out = x.new_empty((total + zero_row, *x.shape[1:]))
    out[total:].zero_()
    work = dist.all_to_all_single(out[:total], x.contiguous()[: sum(sent)], received, sent, group=group, async_op=True)
    assert work is not None  # this process belongs to the group
    return out, work


def group_named(name: str) -> ProcessGroup:
    """Ops take a process group by its name."""
    return _resolve_process_group(GroupName(name))


@torch.library.custom_op("titan_moe::dispatch_rows", mutates_args=())
def _dispatch_rows(
    x: Tensor,
    w: Tensor,
    rows_in: list[int],
    rows_out: list[int],
    copies_in: list[int],
    copies_out: list[int],
    group_name: str,
    zero_row: bool,
) -> tuple[Tensor, Tensor]:
    group = group_named(group_name)
    w, pending = start_exchange(w, copies_in, copies_out, group)
    x = exchange(x, rows_in, rows_out, group, zero_row)
    pending.wait()
    return x, w


@_dispatch_rows.register_fake
def _(x, w, rows_in, rows_out, copies_in, copies_out, group_name, zero_row):
    return x.new_empty((sum(rows_in) + zero_row, *x.shape[1:])), w.new_empty(sum(copies_in))


def _dispatch_setup(ctx, inputs, output):
    x, _, rows_in, rows_out, copies_in, copies_out, group_name, _ = inputs
    ctx.swapped = (rows_out, rows_in, copies_out, copies_in, group_name, x.shape[0] > sum(rows_out))


def _dispatch_backward(ctx, grad_x, grad_w):
    return (*torch.ops.titan_moe.dispatch_rows(grad_x, grad_w, *ctx.swapped), *(None,) * 6)


_dispatch_rows.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


@torch.library.custom_op("titan_moe::combine_rows", mutates_args=())
def _combine_rows(x: Tensor, rows_in: list[int], rows_out: list[int], group_name: str, zero_row: bool) -> Tensor:
    return exchange(x, rows_in, rows_out, group_named(group_name), zero_row)


@_combine_rows.register_fake
def _(x, rows_in, rows_out, group_name, zero_row):
    return x.new_empty((sum(rows_in) + zero_row, *x.shape[1:]))


def _combine_setup(ctx, inputs, output):
    x, rows_in, rows_out, group_name, _ = inputs
    ctx.swapped = (rows_out, rows_in, group_name, x.shape[0] > sum(rows_out))


def _combine_backward(ctx, grad):
    return torch.ops.titan_moe.combine_rows(grad, *ctx.swapped), None, None, None, None


_combine_rows.register_autograd(_combine_backward, setup_context=_combine_setup)
