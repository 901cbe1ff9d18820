"""Dispatch with one row on the wire for every copy: the plain one, and the yardstick for `dedup`.

Each rank sorts its copies by expert, so by destination rank too, and tells every rank how many it will get for each of
its experts (one exchange of [EP, e] counts). The host then learns all sizes in one go: that is the layer's only host
sync. The rows arrive by (source rank, expert, token) and are gathered into slabs by (expert, source rank, token).

A token with four of its K experts on one rank is sent there four times. See dedup.py for what to do about it.

Shape letters: T tokens of this rank, K top-k, N = T*K copies, U copies sent (N less the dropped ones), M copies
received, E experts, e experts of one rank, S source ranks, R rows of the padded slabs.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.moe import layout, static
from titan_moe.moe.contract import Plan
from titan_moe.moe.exchange import group_named
from titan_moe.moe.plan_tensors import pack, read_sizes, refuse_fake, unpack_exact
from titan_moe.moe.row_dispatcher import RowDispatcher
from titan_moe.moe.rows import CopyMap, RowMap


class AllToAllDispatcher(RowDispatcher):
    """k copies per token on the wire; one host sync per layer, in the plan, or none with a fixed `recv_buffer`."""

    name = "alltoall"

    def _plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None) -> Plan:
        T = topk_ids_TK.shape[0]
        arguments = (topk_ids_TK, topk_weights_TK, self.num_experts, self.alignment, self.capacity(T))
        if self.recv_buffer == "exact":
            tensors = torch.ops.titan_moe.plan_alltoall(*arguments, self.group.group_name)
            return unpack_exact(tensors, T, self.ranks, hops=1)
        sizes = static.fixed_sizes(self)
        tensors = static.plan_alltoall_fixed(*arguments, self.group.group_name, sizes.copies, sizes.slab_rows)
        return static.unpack_fixed(tensors, T, self, sizes.copies, sizes.copies)


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
