"""The functions of TE's extension behind its ep.py: NCCL EP's contract, kept by gathering everything everywhere.

What the library demands is asserted, and what it leaves undefined is NaN. Calls are collective, so each first tells the
other ranks which call it is, of which handle and what sizes: a rank that calls in another order, or with another
capacity, is found out and not waited for.

Shape letters: T tokens of this rank, D model width, K top-k, E experts, e experts of this rank, R rows received.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

NAN = float("nan")
MAX_TOKENS, MAX_TOP_K = 8192, 32


@dataclass
class Handle:
    """A routing, as `ep_prepare` has left it."""

    number: int  # in the order of creation
    memory: Tensor  # held, so that no other handle gets its address
    tokens: list[int] = field(default_factory=list)  # T of each rank
    ids: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, K] of this rank
    rows: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # [ranks, T, K]: (owner, row) of each copy as one number
    filled: int = 0  # rows of this rank's slabs, padding included
    total: int = 0  # the same before anything was dropped


@dataclass
class Group:
    """What NCCL EP is set up for."""

    group: dist.ProcessGroup
    experts: int
    max_tokens: int
    capacity: int  # 0: eager
    dim: int
    top_k: int
    drops: bool
    alignment: int | None = None  # of the first prepare, and of the process from then on
    handles: dict[int, Handle] = field(default_factory=dict)  # by the address of their memory


_group: Group | None = None
calls: list[str] = []  # what was called, for tests to read
sent: list[tuple[str, int]] = []  # bytes of rows that went to other ranks, by call
_destroy_process_group = dist.destroy_process_group


def destroy_process_group(*args, **kwargs) -> None:
    assert _group is None, "the process group goes before ep_finalize has given its communicator back"
    _destroy_process_group(*args, **kwargs)


dist.destroy_process_group = destroy_process_group


def ep_initialize(
    comm_ptr: int,
    group_name: str,
    num_experts: int,
    max_tokens_per_rank: int,
    max_recv_tokens_per_rank: int,
    hidden_dim: int,
    max_num_sms: int = 0,
    max_token_dtype: torch.dtype = torch.bfloat16,
    zero_copy: bool = False,
    num_topk: int = 0,
    drop_on_overflow: bool = False,
) -> None:
    global _group
    assert _group is None, "ep_initialize called twice without ep_finalize"
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    assert num_experts % group.size() == 0, "num_experts must be divisible by ep_size"
    assert num_experts % 4 == 0, "experts of an LSA team must be a multiple of 4 (here the team is the group)"
    assert hidden_dim * max_token_dtype.itemsize % 16 == 0, "token rows must be a multiple of 16 bytes"
    assert 0 < max_tokens_per_rank <= MAX_TOKENS and max_tokens_per_rank % 128 == 0, "ncclInvalidUsage: tokens per rank"
    assert not max_recv_tokens_per_rank or max_recv_tokens_per_rank >= max_tokens_per_rank, "ncclInvalidUsage: capacity"
    assert 1 <= num_topk <= MAX_TOP_K and not zero_copy and max_token_dtype == torch.bfloat16
    _group = Group(
        group, num_experts, max_tokens_per_rank, max_recv_tokens_per_rank, hidden_dim, num_topk, drop_on_overflow
    )
    sizes = [num_experts, max_tokens_per_rank, max_recv_tokens_per_rank, hidden_dim, num_topk, int(drop_on_overflow)]
    _same_everywhere("initialize", *sizes)


def ep_finalize() -> None:
    global _group
    if _group is not None:
        calls.append("finalize")
        dist.barrier(group=_group.group)  # the group is still there
    _group = None


def ep_handle_mem_size(top_k: int, dispatch_output_per_expert_alignment: int = 0) -> int:
    return 1024


def ep_prepare(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    dispatch_output_per_expert_alignment: int,
    total_recv_tokens: Tensor,
) -> None:
    ep, alignment = _ep(), dispatch_output_per_expert_alignment
    assert ep.alignment in (None, alignment), "EP prepare alignment disagrees with process-wide cached alignment"
    assert top_k == ep.top_k, "EP prepare top_k disagrees with process-wide cached top_k"
    ep.alignment = alignment
    _check_ids(topk_idx)
    assert tokens_per_expert.dtype == total_recv_tokens.dtype == torch.int64
    handle = ep.handles.setdefault(handle_mem.data_ptr(), Handle(len(ep.handles), handle_mem))
    assert handle.memory is handle_mem, "another buffer has this handle's memory"
    _same_everywhere("prepare", handle.number, len(ep.handles), alignment)

    tokens = [torch.zeros(1, dtype=torch.int64) for _ in range(ep.group.size())]
    dist.all_gather(tokens, torch.tensor([topk_idx.shape[0]]), group=ep.group)
    handle.tokens, handle.ids = [int(n) for n in tokens], topk_idx.clone()
    ids = _gather(topk_idx.long(), handle.tokens, -1)  # [ranks, T, K], -1 where a rank has fewer tokens

    e, me, most = ep.experts // ep.group.size(), ep.group.rank(), ep.capacity or 2**31
    handle.rows = torch.full_like(ids, -1)
    for owner in range(ep.group.size()):
        start, placed = 0, []
        for expert in range(owner * e, (owner + 1) * e):
            copies = (ids == expert).nonzero()  # by (source rank, token)
            rows = start + torch.arange(len(copies))
            rows[rows >= most] = -1  # dropped
            handle.rows[tuple(copies.T)] = torch.where(rows >= 0, owner * 2**32 + rows, -1)
            padded = -(-len(copies) // max(alignment, 1)) * max(alignment, 1)
            placed.append(max(min(start + padded, most) - start, 0))
            start += padded
        assert start <= most or ep.drops, f"device trap: {start} rows for rank {owner}, capacity {most}"
        if owner == me:
            tokens_per_expert.copy_(torch.tensor(placed))
            handle.filled, handle.total = sum(placed), start
            total_recv_tokens.fill_(start)


def ep_dispatch(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    recv_tokens: Tensor,
    recv_topk_weights: Tensor,
    tokens_scale_inv: Tensor | None = None,
    recv_scale_inv: Tensor | None = None,
) -> None:
    handle = _call("dispatch", handle_mem)
    _check_ids(topk_idx)
    assert torch.equal(topk_idx, handle.ids), "dispatch of another routing than the handle was prepared for"
    _check(topk_weights, torch.float32, topk_idx.shape)
    _check(recv_topk_weights, torch.float32, recv_tokens.shape[:1])
    _send("dispatch", handle, tokens, recv_tokens, tokens_scale_inv, recv_scale_inv)
    weights = _gather(topk_weights, handle.tokens, NAN)
    recv_topk_weights.fill_(NAN)[: handle.filled] = 0
    rows, mine = _mine(handle)
    recv_topk_weights[rows] = weights[mine]


def ep_combine(handle_mem: Tensor, expert_out: Tensor, result: Tensor) -> None:
    handle = _call("combine", handle_mem)
    _check_received(handle, expert_out)
    _check(result, torch.bfloat16, (handle.ids.shape[0], _ep().dim))
    _sum(handle, expert_out, result)


def ep_dispatch_bwd(
    handle_mem: Tensor, grad: Tensor, g_recv_topk_weights: Tensor, grad_tokens: Tensor, grad_topk_weights: Tensor
) -> None:
    handle = _call("dispatch_bwd", handle_mem)
    _check_received(handle, grad)
    _check(g_recv_topk_weights, torch.float32, grad.shape[:1])
    _check(grad_tokens, torch.bfloat16, (handle.ids.shape[0], _ep().dim))
    _check(grad_topk_weights, torch.float32, handle.ids.shape)
    _sum(handle, grad, grad_tokens)
    everyones, rows = _everyones(handle, g_recv_topk_weights)
    grad_topk_weights.copy_(torch.where(rows >= 0, everyones[rows.clamp(min=0)], 0))


def ep_combine_bwd(
    handle_mem: Tensor,
    grad: Tensor,
    grad_expert_out: Tensor,
    grad_scale_inv: Tensor | None = None,
    grad_expert_out_scale_inv: Tensor | None = None,
) -> None:
    handle = _call("combine_bwd", handle_mem)
    _send("combine_bwd", handle, grad, grad_expert_out, grad_scale_inv, grad_expert_out_scale_inv)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _ep() -> Group:
    assert _group is not None, "NCCL EP is not initialized"
    return _group


def _call(name: str, handle_mem: Tensor) -> Handle:
    handle = _ep().handles.get(handle_mem.data_ptr())
    assert handle is not None and handle.memory is handle_mem, f"{name} before prepare"
    _same_everywhere(name, handle.number)
    return handle


def _check(tensor: Tensor, dtype: torch.dtype, shape: Any) -> None:
    assert tensor.is_contiguous(), "must be contiguous"
    assert tensor.dtype == dtype, f"{tensor.dtype} where {dtype} is expected"
    assert tensor.shape == tuple(shape), f"{tuple(tensor.shape)} where {tuple(shape)} is expected"


def _check_ids(ids_TK: Tensor) -> None:
    ep = _ep()
    assert ids_TK.is_contiguous() and ids_TK.dtype in (torch.int64, torch.int32)
    assert ids_TK.dim() == 2 and ids_TK.shape[1] == ep.top_k and ids_TK.shape[0] <= ep.max_tokens
    assert ((ids_TK >= 0) & (ids_TK < ep.experts)).all(), "an id that is no expert's: what happens is not documented"
    assert (ids_TK.sort(1).values.diff(dim=1) != 0).all(), "a token goes to an expert twice"


def _check_received(handle: Handle, rows_RD: Tensor) -> None:
    _check(rows_RD, torch.bfloat16, (_ep().capacity or handle.total, _ep().dim))


def _send(
    name: str, handle: Handle, rows_TD: Tensor, out_RD: Tensor, scales_TS: Tensor | None, out_RS: Tensor | None
) -> None:
    """Rows in bf16, or in MXFP8 with their scales."""
    T, D, R = handle.ids.shape[0], _ep().dim, _ep().capacity or handle.total
    dtype = torch.bfloat16 if scales_TS is None else torch.float8_e4m3fn
    _check(rows_TD, dtype, (T, D))
    _check(out_RD, dtype, (R, D))
    pairs = [(rows_TD, out_RD)]
    if scales_TS is not None:
        assert out_RS is not None, "recv_scale_inv must be provided together with tokens_scale_inv"
        assert D % 512 == 0 and _ep().alignment == 128, "rows of scales of 16 bytes, slabs of 128 rows"
        _check(scales_TS, torch.uint8, (T, D // 32))
        _check(out_RS, torch.uint8, (R, D // 32))
        pairs.append((scales_TS, out_RS))
    owners = handle.rows[_ep().group.rank(), :T] >> 32  # -1 of a dropped copy
    ranks = [torch.any(owners == rank, dim=1).sum() for rank in range(_ep().group.size()) if rank != _ep().group.rank()]
    sent.append((name, int(sum(ranks)) * sum(rows.element_size() * rows.shape[1] for rows, _ in pairs)))
    for rows, out in pairs:
        as_bytes = rows.element_size() == 1
        _scatter(handle, rows.view(torch.uint8) if as_bytes else rows, out.view(torch.uint8) if as_bytes else out)


def _same_everywhere(name: str, *numbers: int) -> None:
    calls.append(name)
    everyones: list[Any] = [None] * _ep().group.size()
    dist.all_gather_object(everyones, (name, *numbers), group=_ep().group)
    assert all(one == everyones[0] for one in everyones), f"ranks call different things: {everyones}"


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def _gather(tensor: Tensor, sizes: list[int], fill: float) -> Tensor:
    """[ranks, most, ...]: every rank's tensor, whose first dimensions are `sizes`, filled up."""
    padded = tensor.new_full((max(sizes), *tensor.shape[1:]), fill)
    padded[: tensor.shape[0]] = tensor
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded, group=_ep().group)
    return torch.stack(everyones)


def _mine(handle: Handle) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The rows of this rank that hold copies, and whose they are: (source rank, token, k)."""
    mine = ((handle.rows >= 0) & (handle.rows >> 32 == _ep().group.rank())).nonzero(as_tuple=True)
    return handle.rows[mine] & (2**32 - 1), mine


def _scatter(handle: Handle, x_TD: Tensor, out_RD: Tensor) -> None:
    """Every copy of a row to its place; zeros in padding, nothing defined behind it."""
    undefined = NAN if x_TD.is_floating_point() else 0xFF
    everyones = _gather(x_TD, handle.tokens, undefined)
    out_RD.fill_(undefined)[: handle.filled] = 0
    rows, (rank, token, _) = _mine(handle)
    out_RD[rows] = everyones[rank, token]


def _everyones(handle: Handle, y_R: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of all ranks behind each other, and where in them the copies of this rank's tokens are, [T, K]."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in handle.tokens]
    dist.all_gather(sizes, torch.tensor([y_R.shape[0]]), group=_ep().group)
    gathered = _gather(y_R, [int(n) for n in sizes], NAN)
    rows = handle.rows[_ep().group.rank(), : handle.ids.shape[0]]
    return gathered.flatten(0, 1), torch.where(rows >= 0, (rows >> 32) * gathered.shape[1] + (rows & (2**32 - 1)), -1)


def _sum(handle: Handle, y_RD: Tensor, out_TD: Tensor) -> None:
    """The sum of a token's copies, unweighted, in fp32; a dropped copy adds nothing."""
    everyones, rows = _everyones(handle, y_RD)
    if everyones.shape[0] == 0:
        out_TD.zero_()
        return
    copies = torch.where(rows[..., None] >= 0, everyones[rows.clamp(min=0)].float(), 0)
    out_TD.copy_(copies.sum(1))
