"""Plans whose shapes do not follow the routing: nobody waits for the device to learn a size.

With exact sizes the host must read how many rows come and go before it can make room for them: one wait per layer, and
other shapes in each step, so no CUDA graph and a recompile for whatever is compiled. Here every rank sends the same
number of slots to every rank, all-to-alls of equal splits, and a slot may be empty. The sizes are made of `max_tokens`
alone, the same on all ranks and in all steps:

    on the wire   C slots per destination                  for copies: weights, and rows too with alltoall
                  C_rows slots per destination             for rows with dedup
    received      R rows, all slabs together               `Dispatcher.fixed_rows`

"worst_case" holds any routing: C = T min(K, e), since a token has at most so many copies on a rank, and C_rows = T. A
factor f holds f times what balanced routing brings: C = f T K / S of a token's K copies over S ranks, and C_rows =
f T p, where p is the chance that any of K experts, drawn from all without groups, is one of a rank's e:
1 - C(E - e, K) / C(E, K). Group-limited routing needs less of C_rows, never more of the others in the mean.

What does not fit goes nowhere and sets `overflow`: a copy beyond its destination's C, a row beyond C_rows (its copies
arrive as rows of zeros), a slab row beyond R. The numbers of such a step are finite, and to be thrown away.

How an empty slot is said: by an index one past the end. A gather there reads a row of zeros, which the ops of dispatch
and combine keep behind what they receive (exchange.py); a scatter there writes to a place that is cut off.

Shape letters: T tokens of this rank, K top-k, N = T*K copies, E experts, e experts of one rank, S ranks, P = min(K, S),
U row slots sent, V row slots received, M copy slots received, R rows of the padded slabs.
"""

from fractions import Fraction
from math import comb
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.moe import layout
from titan_moe.moe.contract import Dispatcher, Plan
from titan_moe.moe.exchange import exchange, group_named
from titan_moe.moe.plan_tensors import TOLD, Sizes, pack, unpack
from titan_moe.moe.rows import CopyMap, RowMap


class FixedSizes(NamedTuple):
    """Slots per destination, for copies and for rows of their own (dedup), and rows of the slabs."""

    copies: int
    rows: int
    slab_rows: int


def fixed_sizes(d: Dispatcher) -> FixedSizes:
    """The sizes of a dispatcher's plans with its present factor."""
    assert d.max_tokens is not None
    T, E, K, e = d.max_tokens, d.num_experts, d.top_k, d.local_experts
    capacity = d.capacity(T)
    copies = T * min(K, e) if capacity is None else min(T * min(K, e), e * capacity)
    rows = min(T, copies)
    if d.can_overflow and d.factor is not None:
        copies = min(copies, layout.times(d.factor, Fraction(T * K, d.ranks)))
        rows = min(rows, layout.times(d.factor, T * (1 - Fraction(comb(E - e, K), comb(E, K)))))
    return FixedSizes(copies, rows, d.fixed_rows())


def unpack_fixed(tensors: list[Tensor], tokens: int, d: Dispatcher, slots: int, row_slots: int) -> Plan:
    """The plan of one of the ops below, with so many slots for copies and for rows to each rank."""
    rows, copies = [row_slots] * d.ranks, [slots] * d.ranks
    plan = unpack(tensors, tokens, [Sizes((rows, rows), (copies, copies))], empty_slots=True)
    plan.overflow = tensors[TOLD] if d.can_overflow else None
    return plan


@torch.library.custom_op("titan_moe::plan_alltoall_fixed", mutates_args=())
def plan_alltoall_fixed(
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    alignment: int,
    capacity: int | None,
    group_name: str,
    slots: int,
    slab_rows: int,
) -> list[Tensor]:
    return _plan_alltoall_fixed(ids_TK, weights_TK, num_experts, alignment, capacity, group_name, slots, slab_rows)


@plan_alltoall_fixed.register_fake
def _plan_alltoall_fixed(ids_TK, weights_TK, num_experts, alignment, capacity, group_name, slots, slab_rows):
    """Its own fake kernel: nothing in it needs a value on the host."""
    (T, K), group = ids_TK.shape, group_named(group_name)
    own = layout.sort_copies(ids_TK, num_experts, capacity, weights_TK)
    copies, sent_Se, copies_over = copy_slots(own, ids_TK, slots, group.size())
    padded_e, row_out_M, slabs_over = slab_slots(sent_Se, alignment, slots, slab_rows, group)

    source_U = torch.cat([copies.index, copies.index.new_full((1,), T * K)]) // K
    rows = RowMap(source_U, copies.inverse, torch.arange(0, T * K, K, device=ids_TK.device))
    row_in_M = torch.arange(row_out_M.shape[0], device=ids_TK.device)
    slabs = fixed_slab_maps(row_in_M, row_out_M, row_out_M.shape[0], slab_rows)
    return pack(own, ids_TK, padded_e, copies_over | slabs_over, [rows, copies, *slabs])


@torch.library.custom_op("titan_moe::plan_dedup_fixed", mutates_args=())
def plan_dedup_fixed(
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    alignment: int,
    capacity: int | None,
    group_name: str,
    slots: int,
    row_slots: int,
    slab_rows: int,
) -> list[Tensor]:
    return _plan_dedup_fixed(
        ids_TK, weights_TK, num_experts, alignment, capacity, group_name, slots, row_slots, slab_rows
    )


@plan_dedup_fixed.register_fake
def _plan_dedup_fixed(ids_TK, weights_TK, num_experts, alignment, capacity, group_name, slots, row_slots, slab_rows):
    """Its own fake kernel, as above."""
    group = group_named(group_name)
    ranks, device = group.size(), ids_TK.device
    own = layout.sort_copies(ids_TK, num_experts, capacity, weights_TK)
    copies, sent_Se, copies_over = copy_slots(own, ids_TK, slots, ranks)
    padded_e, row_out_M, slabs_over = slab_slots(sent_Se, alignment, slots, slab_rows, group)

    rank_TK = ids_TK // (num_experts // ranks)
    goes_TS = layout.destinations(rank_TK, ranks, own.kept_N)
    rows, block_row_TS = row_slots_of(goes_TS, row_slots, min(ids_TK.shape[1], ranks))
    rows_over = (goes_TS.sum(0) > row_slots).any()

    # Which row of its source's block each copy slot goes with; `row_slots` for none.
    block_row_N = block_row_TS.gather(1, rank_TK).reshape(-1)
    block_row_U = torch.cat([block_row_N, block_row_N.new_full((1,), row_slots)])[copies.index].int()
    block_row_M = exchange(block_row_U, [slots] * ranks, [slots] * ranks, group)
    received = ranks * row_slots
    start_M = torch.arange(0, received, row_slots, device=device)[:, None].expand(ranks, slots).reshape(-1)
    row_in_M = torch.where(block_row_M < row_slots, start_M + block_row_M, received)
    slabs = fixed_slab_maps(row_in_M, row_out_M, received, slab_rows)
    return pack(own, ids_TK, padded_e, copies_over | rows_over | slabs_over, [rows, copies, *slabs])


def copy_slots(own: layout.Copies, ids_TK: Tensor, slots: int, ranks: int) -> tuple[CopyMap, Tensor, Tensor]:
    """From this rank's copies, sorted by expert, to `slots` for each destination; how many are sent to each expert,
    int64 [S, e]; and whether any is not, bool."""
    kept_Se = own.kept_E.view(ranks, -1)
    copies_S = kept_Se.sum(1)
    sent_Se = differences(kept_Se.cumsum(1).clamp(max=slots))
    order_N = own.order_N
    rank_N = ids_TK.reshape(-1)[order_N] // kept_Se.shape[1]
    place_N = torch.arange(order_N.shape[0], device=order_N.device) - layout.exclusive_cumsum(copies_S)[rank_N]
    fits_N = place_N < slots if own.kept_N is None else (place_N < slots) & own.kept_N[order_N]
    slot_N = torch.where(fits_N, rank_N * slots + place_N, ranks * slots)
    index = order_N.new_full((ranks * slots + 1,), order_N.shape[0]).scatter_(0, slot_N, order_N)[:-1]
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, slot_N)
    return CopyMap(index, inverse_N), sent_Se, (copies_S > slots).any()


def row_slots_of(goes_TS: Tensor, slots: int, most: int) -> tuple[RowMap, Tensor]:
    """From tokens to `slots` row slots for each rank that they go to, at most `most`; and each token's row in the block
    for each rank, int64 [T, S], `slots` where it has none."""
    (T, ranks), device = goes_TS.shape, goes_TS.device
    place_TS = goes_TS.cumsum(0) - 1
    block_row_TS = torch.where(goes_TS & (place_TS < slots), place_TS, slots)
    start_S = torch.arange(0, ranks * slots, slots, device=device)
    slot_TS = torch.where(block_row_TS < slots, start_S + block_row_TS, ranks * slots)
    token_TS = torch.arange(T, device=device)[:, None].expand(T, ranks)
    source_U = slot_TS.new_full((ranks * slots + 1,), T).scatter_(0, slot_TS.reshape(-1), token_TS.reshape(-1))
    source_U[-1:] = T
    copies = slot_TS.sort(dim=1).values[:, :most].reshape(-1)  # by rank; what goes nowhere comes last
    return RowMap(source_U, copies, torch.arange(0, T * most, most, device=device)), block_row_TS


def slab_slots(
    sent_Se: Tensor, alignment: int, slots: int, slab_rows: int, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Padded slab sizes, int64 [e]; the slab row of each copy slot received, int64 [M], R where it is empty or does not
    fit; and whether any does not, bool."""
    received_Se = torch.empty_like(sent_Se)
    dist.all_to_all_single(received_Se, sent_Se, group=group)
    padded_e = layout.round_up(received_Se.sum(0), alignment)
    # Empty slots are the slab of one expert more, which begins where the buffer ends.
    empty_S = slots - received_Se.sum(1, keepdim=True)
    start_e = torch.cat([layout.exclusive_cumsum(padded_e), padded_e.new_full((1,), slab_rows)])
    row_M = layout.slab_rows(torch.cat([received_Se, empty_S], dim=1), start_e, sent_Se.shape[0] * slots)
    kept_e = differences(padded_e.cumsum(0).clamp(max=slab_rows))
    return kept_e, row_M.clamp(max=slab_rows), padded_e.sum() > slab_rows


def differences(ends: Tensor) -> Tensor:
    """The sizes of parts that end there, along the last dimension."""
    return torch.diff(ends, prepend=torch.zeros_like(ends[..., :1]))


LEFT_OVER = 64  # indices of one part that is thrown away: long parts would be summed one index after the other


def fixed_slab_maps(row_in_M: Tensor, row_out_M: Tensor, received: int, slab_rows: int) -> tuple[RowMap, CopyMap]:
    """`dedup.slab_maps` for slots that may be empty: V in `row_in_M`, R in `row_out_M`."""
    M, device = row_in_M.shape[0], row_in_M.device
    source_R = row_in_M.new_full((slab_rows + 1,), received).scatter_(0, row_out_M, row_in_M)[:-1]
    arrival_M = torch.arange(M, device=device)
    index_R = row_in_M.new_full((slab_rows + 1,), M).scatter_(0, row_out_M, arrival_M)[:-1]
    # Slots that lead to no slab row sort behind all rows, into parts that belong to no row. See RowMap.
    from_M, by_row = torch.where(row_out_M < slab_rows, row_in_M, received).sort(stable=True)
    offsets = torch.searchsorted(from_M, torch.arange(received + 1, device=device))
    left_over = (offsets[-1:] + torch.arange(0, M, LEFT_OVER, device=device)).clamp(max=M)
    copies = row_out_M[by_row].clamp(max=slab_rows - 1)
    return RowMap(source_R, copies, torch.cat([offsets, left_over])), CopyMap(index_R, row_out_M)
