"""Rows between ranks, as ops that activation checkpointing can recognise, in two halves: start, and wait.

`titan_moe::start_dispatch` sends rows and their routing weights to other ranks and returns at once;
`titan_moe::wait_dispatch` returns what arrived. `start_combine` and `wait_combine` take rows back. What stands between
the two halves runs while the rows travel; with nothing in between, waiting begins at once.

**Tickets.** What `start` returns is a ticket, a tensor without elements, for `wait` to take. It is there for autograd:
the handle of the collective is in a table, under the identity of the ticket's storage, and goes from there with the
ticket: nobody waits any more for what an exception has ended. Backward of `wait` starts the
transposed exchange, and the ticket of that is the gradient of the ticket; backward of `start` waits for it. Autograd
takes the nodes that are ready in the reverse order of their making, so what stood between start and wait in forward
stands between the transposed start and wait in backward: overlap in one direction is overlap in both.

They are `torch.library` ops, not bare collectives inside an autograd Function, because selective checkpointing saves by
op. A start that recompute repeats without its wait would send rows for nothing, so the two are saved together; see
`kept_ops` of recompute.py.

**The zero row.** A receiver's slabs have padding rows, which must be zero. So an exchange may leave room for one row
more than it receives, the last, and zero it: then the slabs are filled by one gather in which padding copies the last
row. On the way back that row is never sent, and its gradient is zero. Without it, either every received row would be
copied once more or the slabs be written twice.

gloo and NCCL both do `all_to_all_single` with split sizes, which is all that is used here. Ranks must issue what
belongs to one group in the same order: the code decides that order, never the data.

Shape letters: U rows sent, V rows received, N and M the same for routing weights, D model width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.multiprocessing.reductions import StorageWeakRef

from titan_moe.in_flight import InFlight

Splits = tuple[list[int], list[int]]  # received from each rank, sent to each rank


def start_dispatch(
    x_UD: Tensor, w_N: Tensor, rows: Splits, copies: Splits, group: ProcessGroup
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Begin to send rows and weights to other ranks. The function that it returns waits, and gives x [V + 1, D], the
    last row zero, and w [M]. Differentiable in both."""
    how = (*rows, *copies, group.group_name, x_UD.shape[0] > sum(rows[1]), True)
    tickets = torch.ops.titan_moe.start_dispatch(x_UD, w_N, *how, False)
    return partial(torch.ops.titan_moe.wait_dispatch, *tickets, *how)


def start_combine(y_VD: Tensor, rows: Splits, group: ProcessGroup, zero_row: bool = False) -> Callable[[], Tensor]:
    """Begin to send rows back to where `start_dispatch` with the same splits got them from. The function that it
    returns waits, and gives [U, D], with a zero row after them if asked for. The last of the V + 1 rows of y stays.
    Differentiable."""
    received, sent = rows
    how = (sent, received, group.group_name, y_VD.shape[0] > sum(received), zero_row)
    ticket = torch.ops.titan_moe.start_combine(y_VD, *how, False)
    return partial(torch.ops.titan_moe.wait_combine, ticket, *how)


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


# ---------------------------------------------------------------------------------------------------------------------
# Tickets

_under_way: dict[StorageWeakRef, InFlight] = {}


def _key(ticket: Tensor) -> StorageWeakRef:
    """The identity of the memory that a ticket does not have: the same for whatever autograd, or a checkpoint that
    keeps it, wraps around it. (rebuild.py tells why weak references make good keys.)"""
    return StorageWeakRef(ticket.untyped_storage())


def _issue(
    name: str, group_name: str, backward: bool, *parts: tuple[Tensor, list[int], list[int], bool]
) -> tuple[Tensor, ...]:
    """Start the exchange of each (x, received, sent, zero_row), together one transfer. Returns a ticket for each; the
    first stands for all."""
    group = group_named(group_name)
    for abandoned in [key for key in _under_way if key.expired()]:  # by an exception between start and wait
        _under_way.pop(abandoned).wait()
    results, works = zip(*(start_exchange(x, received, sent, group, zero) for x, received, sent, zero in parts))
    me, bytes_in, bytes_out = group.rank(), 0, 0
    for x, received, sent, _ in parts:
        width = math.prod(x.shape[1:]) * x.element_size()
        bytes_in += (sum(received) - received[me]) * width
        bytes_out += (sum(sent) - sent[me]) * width
    tickets = tuple(x.new_empty((0, *x.shape[1:])) for x, *_ in parts)
    _under_way[_key(tickets[0])] = InFlight(
        works, results, name, backward=backward, sent=bytes_out, received=bytes_in, link=group_name
    )
    return tickets


def _arrived(ticket: Tensor) -> tuple[Tensor, ...]:
    """Wait for what was started with this ticket."""
    return _under_way.pop(_key(ticket)).wait()


# ---------------------------------------------------------------------------------------------------------------------
# The ops. `zero_out` says that the rows sent end with a zero row, which stays, `zero_in` that those received shall.


@torch.library.custom_op("titan_moe::start_dispatch", mutates_args=())
def _start_dispatch(
    x: Tensor,
    w: Tensor,
    rows_in: list[int],
    rows_out: list[int],
    copies_in: list[int],
    copies_out: list[int],
    group_name: str,
    zero_out: bool,
    zero_in: bool,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    weights, rows = (w, copies_in, copies_out, False), (x, rows_in, rows_out, zero_in)
    w, x = _issue("dispatch", group_name, backward, weights, rows)
    return x, w


@torch.library.custom_op("titan_moe::wait_dispatch", mutates_args=())
def _wait_dispatch(
    x: Tensor,
    w: Tensor,
    rows_in: list[int],
    rows_out: list[int],
    copies_in: list[int],
    copies_out: list[int],
    group_name: str,
    zero_out: bool,
    zero_in: bool,
) -> tuple[Tensor, Tensor]:
    w, x = _arrived(w)
    return x, w


@_start_dispatch.register_fake
def _(x, w, rows_in, rows_out, copies_in, copies_out, group_name, zero_out, zero_in, backward):
    return x.new_empty((0, *x.shape[1:])), w.new_empty(0)


@_wait_dispatch.register_fake
def _(x, w, rows_in, rows_out, copies_in, copies_out, group_name, zero_out, zero_in):
    return x.new_empty((sum(rows_in) + zero_in, *x.shape[1:])), w.new_empty(sum(copies_in))


def _dispatch_setup(ctx, inputs, output):
    _, _, rows_in, rows_out, copies_in, copies_out, group_name, zero_out, zero_in, *_ = inputs
    ctx.transposed = (rows_out, rows_in, copies_out, copies_in, group_name, zero_in, zero_out)


def _wait_dispatch_backward(ctx, grad_x, grad_w):
    return (*torch.ops.titan_moe.start_dispatch(grad_x, grad_w, *ctx.transposed, True), *(None,) * 7)


def _start_dispatch_backward(ctx, ticket_x, ticket_w):
    return (*torch.ops.titan_moe.wait_dispatch(ticket_x, ticket_w, *ctx.transposed), *(None,) * 8)


_wait_dispatch.register_autograd(_wait_dispatch_backward, setup_context=_dispatch_setup)
_start_dispatch.register_autograd(_start_dispatch_backward, setup_context=_dispatch_setup)


@torch.library.custom_op("titan_moe::start_combine", mutates_args=())
def _start_combine(
    x: Tensor, rows_in: list[int], rows_out: list[int], group_name: str, zero_out: bool, zero_in: bool, backward: bool
) -> Tensor:
    return _issue("combine", group_name, backward, (x, rows_in, rows_out, zero_in))[0]


@torch.library.custom_op("titan_moe::wait_combine", mutates_args=())
def _wait_combine(
    x: Tensor, rows_in: list[int], rows_out: list[int], group_name: str, zero_out: bool, zero_in: bool
) -> Tensor:
    return _arrived(x)[0]


@_start_combine.register_fake
def _(x, rows_in, rows_out, group_name, zero_out, zero_in, backward):
    return x.new_empty((0, *x.shape[1:]))


@_wait_combine.register_fake
def _(x, rows_in, rows_out, group_name, zero_out, zero_in):
    return x.new_empty((sum(rows_in) + zero_in, *x.shape[1:]))


def _combine_setup(ctx, inputs, output):
    _, rows_in, rows_out, group_name, zero_out, zero_in, *_ = inputs
    ctx.transposed = (rows_out, rows_in, group_name, zero_in, zero_out)


def _wait_combine_backward(ctx, grad):
    return torch.ops.titan_moe.start_combine(grad, *ctx.transposed, True), *(None,) * 5


def _start_combine_backward(ctx, ticket):
    return torch.ops.titan_moe.wait_combine(ticket, *ctx.transposed), *(None,) * 6


_wait_combine.register_autograd(_wait_combine_backward, setup_context=_combine_setup)
_start_combine.register_autograd(_start_combine_backward, setup_context=_combine_setup)
