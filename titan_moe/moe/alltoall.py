"""Dispatch with one row on the wire for every copy: the plain one, and the yardstick for `dedup`.

Each rank sorts its copies by expert, so by destination rank too, and tells every rank how many it will get for each of
its experts (one exchange of [EP, e] counts). The host then learns all sizes in one go: that is the layer's only host
sync. The rows arrive by (source rank, expert, token) and are gathered into slabs by (expert, source rank, token).

A token with four of its K experts on one rank is sent there four times. See dedup.py for what to do about it.

Shape letters: T tokens of this rank, K top-k, N = T*K copies, U copies sent (N less the dropped ones), M copies
received, E experts, e experts of one rank, S source ranks, R rows of the padded slabs.
"""

from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from titan_moe.moe import layout
from titan_moe.moe.contract import Dispatcher, Hop, Plan
from titan_moe.moe.exchange import group_named
from titan_moe.moe.rows import CopyMap, RowMap


class AllToAllDispatcher(Dispatcher):
    """k copies per token on the wire; one host sync per layer, in the plan."""

    name = "alltoall"

    def _plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None) -> Plan:
        tensors = torch.ops.titan_moe.plan_alltoall(
            topk_ids_TK,
            topk_weights_TK,
            self.num_experts,
            self.alignment,
            self.capacity(topk_ids_TK.shape[0]),
            self.group.group_name,
        )
        return unpack(tensors, topk_ids_TK.shape[0], self.ranks, hops=1)


@torch.library.custom_op("titan_moe::plan_alltoall", mutates_args=())
def _plan_alltoall(
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    alignment: int,
    capacity: int | None,
    group_name: str,
) -> list[Tensor]:
    group = group_named(group_name)
    own = layout.sort_copies(ids_TK, num_experts, capacity, weights_TK)
    sent_Se = own.kept_E.view(group.size(), -1)
    received_Se = torch.empty_like(sent_Se)
    dist.all_to_all_single(received_Se, sent_Se, group=group)
    padded_e = layout.round_up(received_Se.sum(0), alignment)
    splits = torch.stack([received_Se.sum(1), sent_Se.sum(1)])
    host = torch.cat([splits.repeat(2, 1).reshape(-1), padded_e.sum().view(1)]).cpu()
    (hop,), R = read_sizes(host, group.size(), hops=1)
    M, U = (sum(splits) for splits in hop.rows)

    copies = send_copies(own, U)
    rows = RowMap(copies.index // ids_TK.shape[1], *copies_by_token(ids_TK, own, copies.inverse, U))
    arrival_M = torch.arange(M + 1, device=ids_TK.device)  # M: the zero row
    row_M = layout.slab_rows(received_Se, layout.exclusive_cumsum(padded_e), M)
    source_R = arrival_M.new_full((R,), M).scatter_(0, row_M, arrival_M[:M])
    slabs = RowMap(source_R, row_M, arrival_M)
    return pack(own, ids_TK, padded_e, host, [rows, copies, slabs, CopyMap(source_R, row_M)])


@_plan_alltoall.register_fake
def _(ids_TK, weights_TK, num_experts, alignment, capacity, group_name):
    refuse_fake(torch.ops.titan_moe.plan_alltoall.default)


class Sizes(NamedTuple):
    """What the host has to know about one hop: how many rows, and how many routing weights, come from and go to each
    rank."""

    rows: tuple[list[int], list[int]]
    copies: tuple[list[int], list[int]]


def read_sizes(host: Tensor, ranks: int, hops: int) -> tuple[list[Sizes], int]:
    """The sizes of each hop and R, from the int64 tensor [4 ranks hops + 1] on the CPU that they travel in."""
    *numbers, R = host.tolist()
    splits = [numbers[i : i + ranks] for i in range(0, len(numbers), ranks)]
    return [Sizes((splits[i], splits[i + 1]), (splits[i + 2], splits[i + 3])) for i in range(0, 4 * hops, 4)], R


def send_copies(own: layout.Copies, sent: int) -> CopyMap:
    """From this rank's N copies to the `sent` ones on the wire, sorted by expert."""
    index_U = own.order_N[:sent]
    inverse_N = torch.full_like(own.order_N, sent)
    return CopyMap(index_U, inverse_N.scatter_(0, index_U, torch.arange(sent, device=index_U.device)))


def copies_by_token(ids_TK: Tensor, own: layout.Copies, position_N: Tensor, sent: int) -> tuple[Tensor, Tensor]:
    """`copies` and `offsets` of a RowMap from tokens, where copy n went to `position_N[n]` unless it was dropped."""
    T, K = ids_TK.shape
    if own.kept_N is None:
        return position_N, torch.arange(0, T * K, K, device=ids_TK.device)
    kept = torch.nonzero_static(own.kept_N, size=sent)[:, 0]
    return position_N[kept], layout.exclusive_cumsum(own.kept_N.view(T, K).sum(1))


def pack(own: layout.Copies, ids_TK: Tensor, padded_e: Tensor, host: Tensor, maps: list[RowMap | CopyMap]):
    """A plan as the list of tensors that an op may return: no two may share memory."""
    kept_TK = ids_TK.new_empty(0, dtype=torch.bool) if own.kept_N is None else own.kept_N.view_as(ids_TK)
    dropped = (own.load_E - own.kept_E).sum()
    tensors = [own.load_E, padded_e, dropped, kept_TK, host, *(tensor for each in maps for tensor in each)]
    seen: set[int] = set()
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()._cdata
        tensors[i] = tensor.clone() if storage in seen else tensor.contiguous()
        seen.add(storage)
    return tensors


def unpack(tensors: list[Tensor], tokens: int, ranks: int, hops: int) -> Plan:
    """The plan that `pack` took apart. Its host tensor is on the CPU already: reading it is not another sync."""
    load_E, padded_e, dropped, kept_TK, host, *rest = tensors
    maps = [(RowMap(*rest[i : i + 3]), CopyMap(*rest[i + 3 : i + 5])) for i in range(0, len(rest), 5)]
    sizes, _ = read_sizes(host, ranks, hops)
    return Plan(
        load_E,
        padded_e,
        dropped,
        kept_TK if kept_TK.dim() == 2 else None,
        tokens,
        *maps[-1],
        [Hop(*each, *size) for each, size in zip(maps, sizes)],
    )


def refuse_fake(op: torch._ops.OpOverload) -> NoReturn:
    """The sizes of these plans depend on the routing, so there is nothing a fake kernel could return."""
    raise DynamicOutputShapeException(op)
