"""Dispatch with one row on the wire for every (token, destination rank), whatever number of its experts live there.

With K = 8 of 256 experts on 8 ranks a token goes to 5.3 different ranks, with group-limited routing to 4.0: half the
bytes of one row per copy. The row is copied into slabs only where it arrives. Combine is the mirror: the expert's rank
adds up a token's copies in fp32, rounds once to the dtype of the rows and sends one row back; the source adds those up
in fp32. In bf16 that is one rounding more than `alltoall`, in fp32 only another order of the same sum.

**Metadata.** Sender and receiver both know the order of the copies: by (source, expert, token), as in alltoall. So one
number per copy, which of the source's rows it is, says the rest; with the routing weight that is 8 bytes for each copy.

**Two hops.** Between nodes the network is slower than inside one. With `ranks_per_node` (rank r is in node
r // ranks_per_node) a row crosses to a node once, to the rank there that has the same place in its node as the source
(so all links between two nodes are used), and that rank fans it out to those of its node that want it. Combine goes the
same way back, adding up in both places. All ranks learn all counts in one all-gather, so that this too needs only one
host sync.

**Chunks.** The two hops use different links, and one after the other each link is idle half of the time. With
`hop_chunks` = C the tokens are cut into C parts, and while one part fans out inside the node the next one crosses to
it: with hops of the times a and b, max(a, b) + min(a, b) / C instead of a + b. A token's copies stay together, so sums
are the same; only the order of the rows inside a slab changes. The last hops have a process group of their own: NCCL
would let the transfers of one communicator wait for each other.

Shape letters: T tokens of this rank, K top-k, N = T*K copies, I rows held before a hop, U rows sent, V rows received,
M copies received, E experts, e experts of one rank, S ranks, R rows of the padded slabs.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.moe import layout, static
from titan_moe.moe.alltoall import send_copies
from titan_moe.moe.contract import Plan
from titan_moe.moe.exchange import exchange, group_named
from titan_moe.moe.plan_tensors import Sizes, pack, read_sizes, refuse_fake, unpack_exact
from titan_moe.moe.row_dispatcher import RowDispatcher
from titan_moe.moe.rows import CopyMap, RowMap


class DedupDispatcher(RowDispatcher):
    """One row per (token, destination rank) on the wire, or per (token, node) and then fanned out inside it.

    Arguments are those of `Dispatcher`, and
        hop_chunks: parts of the tokens that take the two hops one behind the other; only with `ranks_per_node`.
    """

    name = "dedup"

    def __init__(self, *, hop_chunks: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        if hop_chunks < 1 or (hop_chunks > 1 and self.ranks_per_node is None):
            raise ValueError(
                f"hop_chunks = {hop_chunks}: tokens take two hops, in at least 1 chunk, only with ranks_per_node: set "
                "that, or leave hop_chunks at 1"
            )
        self.chunks = hop_chunks
        if hop_chunks > 1:
            self.hop_groups = (self.group, last_hop_group(self.group))

    def _plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None) -> Plan:
        T = topk_ids_TK.shape[0]
        arguments = (topk_ids_TK, topk_weights_TK, self.num_experts, self.alignment, self.capacity(T))
        if self.recv_buffer == "exact":
            by_node = (self.ranks_per_node, self.chunks)
            tensors = torch.ops.titan_moe.plan_dedup(*arguments, self.group.group_name, *by_node)
            hops = 1 if self.ranks_per_node is None else 2
            return unpack_exact(tensors, T, self.ranks, hops, self.chunks)
        sizes = static.fixed_sizes(self)
        tensors = static.plan_dedup_fixed(*arguments, self.group.group_name, *sizes)
        return static.unpack_fixed(tensors, T, self, sizes.copies, sizes.rows)


_last_hop_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def last_hop_group(group: ProcessGroup) -> ProcessGroup:
    """Another process group of the same ranks, one for all layers. All of the ranks must call it."""
    if group not in _last_hop_groups:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(ranks, use_local_synchronization=True, group_desc="last_hop", sort_ranks=False)
        assert isinstance(own, ProcessGroup)  # this process belongs to it
        _last_hop_groups[group] = own
    return _last_hop_groups[group]


def last_hop_groups() -> list[ProcessGroup]:
    """Those that this process has made."""
    return list(_last_hop_groups.values())


@torch.library.custom_op("titan_moe::plan_dedup", mutates_args=())
def _plan_dedup(
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    alignment: int,
    capacity: int | None,
    group_name: str,
    ranks_per_node: int | None,
    chunks: int,
) -> list[Tensor]:
    group = group_named(group_name)
    own = layout.sort_copies(ids_TK, num_experts, capacity, weights_TK)
    if ranks_per_node is None:
        padded_e, host, maps = plan_one_hop(ids_TK, own, alignment, group)
    else:
        padded_e, host, maps = plan_two_hops(ids_TK, own, alignment, group, ranks_per_node, chunks)
    return pack(own, ids_TK, padded_e, host, maps)


@_plan_dedup.register_fake
def _(ids_TK, weights_TK, num_experts, alignment, capacity, group_name, ranks_per_node, chunks):
    refuse_fake(torch.ops.titan_moe.plan_dedup.default)


def plan_one_hop(ids_TK: Tensor, own: layout.Copies, alignment: int, group: ProcessGroup):
    """Padded slab sizes, host sizes and maps of rows sent straight to their ranks."""
    K, ranks = ids_TK.shape[1], group.size()
    experts = own.kept_E.shape[0] // ranks
    goes_ST = layout.destinations(ids_TK // experts, ranks, own.kept_N).T
    sent = torch.cat([own.kept_E.view(ranks, experts), goes_ST.sum(1, keepdim=True)], dim=1)  # [S, e + 1]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    received_Se, rows_S = received[:, :-1], received[:, -1]
    padded_e = layout.round_up(received_Se.sum(0), alignment)
    splits = torch.stack([rows_S, sent[:, -1], received_Se.sum(1), sent[:, :-1].sum(1)])
    host = torch.cat([splits.reshape(-1), padded_e.sum().view(1)]).cpu()
    (hop,), R = read_sizes(host, ranks, hops=1)

    copies = send_copies(own, sum(hop.copies[1]))
    expert_N = ids_TK.reshape(-1)[copies.index]
    rows, block_row_N = send_once(goes_ST, copies.index // K, expert_N // experts, sum(hop.rows[1]))
    block_row_M = exchange(block_row_N, *hop.copies, group)
    row_in_M = received_rows(block_row_M, rows_S, received_Se.sum(1))
    row_out_M = layout.slab_rows(received_Se, layout.exclusive_cumsum(padded_e), row_in_M.shape[0])
    return padded_e, host, [rows, copies, *slab_maps(row_in_M, row_out_M, sum(hop.rows[0]), R)]


class Place(NamedTuple):
    """Where this rank is among the ranks, and the nodes."""

    ranks: int
    per_node: int
    nodes: int
    mates: Tensor  # the ranks, one in each node, with my place in it
    node: Tensor  # the ranks of my node
    my_node: int
    me: int

    @classmethod
    def of(cls, group: ProcessGroup, per_node: int, device: torch.device) -> "Place":
        ranks, me = group.size(), group.rank()
        rank_S, my_node = torch.arange(ranks, device=device), me // per_node
        mates, node = rank_S[me % per_node :: per_node], rank_S[my_node * per_node :][:per_node]
        return cls(ranks, per_node, ranks // per_node, mates, node, my_node, me)

    def by_node(self, goes_TS: Tensor) -> Tensor:
        return goes_TS.view(-1, self.nodes, self.per_node).any(2)  # [T, X], X nodes


class Counts(NamedTuple):
    """How much of one chunk moves. splits: int64 [S] each, as `read_sizes` wants them, of both hops."""

    splits: list[Tensor]
    first_Se: Tensor  # copies that I get by the first hop, of each expert of my node
    last_Se: Tensor  # copies that I get by the last hop, of each of my experts


def plan_two_hops(ids_TK: Tensor, own: layout.Copies, alignment: int, group: ProcessGroup, per_node: int, chunks: int):
    """The same for rows that cross to a node once and are fanned out there. Each chunk has two hops of its own; all
    chunks have one exchange of counts, one host sync and the slabs in common."""
    place, experts = Place.of(group, per_node, ids_TK.device), own.kept_E.shape[0] // group.size()
    ids = ids_TK.tensor_split(chunks)
    parts = [own] if chunks == 1 else layout.split_copies(own, ids)
    goes = [layout.destinations(part_TK // experts, place.ranks, part.kept_N) for part_TK, part in zip(ids, parts)]
    mine = torch.cat(
        [n for part, goes_TS in zip(parts, goes) for n in (part.kept_E, goes_TS.sum(0), place.by_node(goes_TS).sum(0))]
    )
    table = mine.new_empty((place.ranks, mine.shape[0]))
    dist.all_gather_single(table.view(-1), mine, group=group)
    counts = [count_two_hops(part, experts, place) for part in table.tensor_split(chunks, dim=1)]

    last_CSe = torch.cat([each.last_Se for each in counts])
    padded_e = layout.round_up(last_CSe.sum(0), alignment)
    host = torch.cat([*(n for each in counts for n in each.splits), padded_e.sum().view(1)]).cpu()
    sizes, R = read_sizes(host, place.ranks, hops=2 * chunks)

    maps: list[RowMap | CopyMap] = []
    rows_in, held = [], 0  # what the chunks bring lies one behind the other, each with its zero row
    for i in range(chunks):
        first, last = sizes[2 * i : 2 * i + 2]
        hops, row_in_M = map_two_hops(ids[i], parts[i], goes[i], counts[i], first, last, place, group)
        maps += hops
        rows_in.append(row_in_M + held)
        held += sum(last.rows[0]) + 1
    row_in_M = torch.cat(rows_in)
    row_out_M = layout.slab_rows(last_CSe, layout.exclusive_cumsum(padded_e), row_in_M.shape[0])
    return padded_e, host, [*maps, *slab_maps(row_in_M, row_out_M, held - 1, R)]


def count_two_hops(table: Tensor, experts: int, place: Place) -> Counts:
    """From what all ranks send in one chunk, [S, S e + S + X]: copies to each expert, rows to each rank and node."""
    ranks, per_node, nodes, mates, node, my_node, me = place
    copies_SSe, rows_SS, rows_SX = table.split([ranks * experts, ranks, nodes], dim=1)
    copies_SSe = copies_SSe.reshape(ranks, ranks, experts)  # [from, to, expert]

    def spread(values: Tensor, places: Tensor) -> Tensor:  # [S], zero elsewhere
        return values.new_zeros(ranks).index_copy_(0, places, values)

    first_Se = torch.zeros_like(copies_SSe[:, node].flatten(1))
    first_Se[mates] = copies_SSe[mates][:, node].flatten(1)
    last_Se = torch.zeros_like(copies_SSe[:, me])
    last_Se[node] = copies_SSe.view(nodes, per_node, ranks, experts)[:, :, me].sum(0)
    splits = [
        *(spread(rows_SX[mates, my_node], mates), spread(rows_SX[me], mates)),
        *(first_Se.sum(1), spread(copies_SSe[me].view(nodes, -1).sum(1), mates)),
        spread(rows_SS[:, me].unflatten(0, (nodes, per_node)).sum(0), node),
        spread(rows_SS[mates][:, node].sum(0), node),
        *(last_Se.sum(1), spread(first_Se.sum(0).view(per_node, experts).sum(1), node)),
    ]
    return Counts(splits, first_Se, last_Se)


def map_two_hops(
    ids_TK: Tensor,
    own: layout.Copies,
    goes_TS: Tensor,
    counts: Counts,
    first: Sizes,
    last: Sizes,
    place: Place,
    group: ProcessGroup,
) -> tuple[list[RowMap | CopyMap], Tensor]:
    """The maps of one chunk's two hops, and which of the rows received by the last each received copy goes with."""
    K, ranks, device = ids_TK.shape[1], place.ranks, ids_TK.device
    splits, first_Se = counts.splits, counts.first_Se
    copies = send_copies(own, sum(first.copies[1]))
    goes_ST = torch.zeros_like(goes_TS.T)
    goes_ST[place.mates] = place.by_node(goes_TS).T
    node_N = ids_TK.reshape(-1)[copies.index] // first_Se.shape[1]
    rows, block_row_N = send_once(goes_ST, copies.index // K, place.mates[node_N], sum(first.rows[1]))
    block_row_M = exchange(block_row_N, *first.copies, group)
    row_M = received_rows(block_row_M, splits[0], splits[2])

    # What arrived is by (source, expert of the node): to be sent on it must be by expert, which is what slabs are.
    M, held = row_M.shape[0], sum(first.rows[0]) + 1  # with the zero row
    place_M = layout.slab_rows(first_Se, layout.exclusive_cumsum(first_Se.sum(0)), M)
    passed = CopyMap(torch.empty_like(place_M).scatter_(0, place_M, torch.arange(M, device=device)), place_M)
    rank_M = torch.repeat_interleave(torch.arange(ranks, device=device), splits[7], output_size=M)
    row_M = row_M[passed.index]
    goes_SI = goes_ST.new_zeros(ranks * held).index_fill_(0, rank_M * held + row_M, True).view(ranks, held)
    passed_rows, block_row_M = send_once(goes_SI, row_M, rank_M, sum(last.rows[1]))
    block_row_M = exchange(block_row_M, *last.copies, group)
    return [rows, copies, passed_rows, passed], received_rows(block_row_M, splits[4], splits[6])


def send_once(goes_SI: Tensor, row_N: Tensor, rank_N: Tensor, sent: int) -> tuple[RowMap, Tensor]:
    """From the rows held to those on the wire, one for each (rank, row) set in the bool `goes_SI`, of which there are
    `sent`; and for each copy, which row of the block for its rank it goes with: int32 [N]."""
    held = goes_SI.shape[1]
    position_B = torch.cumsum(goes_SI.reshape(-1), dim=0) - 1  # B = S*I pairs; where a pair is on the wire
    start_S = layout.exclusive_cumsum(goes_SI.sum(1))
    block_row_N = position_B[rank_N * held + row_N] - start_S[rank_N]
    source_U = torch.nonzero_static(goes_SI, size=sent)[:, 1]
    row, rank = torch.nonzero_static(goes_SI.T, size=sent).unbind(1)  # the same pairs, row by row
    offsets = layout.exclusive_cumsum(goes_SI.sum(0))
    return RowMap(source_U, position_B[rank * held + row], offsets), block_row_N.int()


def received_rows(block_row_M: Tensor, rows_S: Tensor, copies_S: Tensor) -> Tensor:
    """Which of all received rows each received copy goes with: int64 [M]."""
    start_S = layout.exclusive_cumsum(rows_S)
    return block_row_M + torch.repeat_interleave(start_S, copies_S, output_size=block_row_M.shape[0])


def slab_maps(row_in_M: Tensor, row_out_M: Tensor, received: int, slab_rows: int) -> tuple[RowMap, CopyMap]:
    """From V = `received` rows, and the zero row after them, to the slabs, where copy m goes from row `row_in_M[m]` to
    row `row_out_M[m]`; and the same for routing weights."""
    M = row_in_M.shape[0]
    source_R = row_in_M.new_full((slab_rows,), received).scatter_(0, row_out_M, row_in_M)
    by_row = torch.argsort(row_in_M, stable=True)
    row_V = torch.arange(received + 1, device=row_in_M.device)
    offsets = torch.searchsorted(row_in_M[by_row], row_V)
    arrival_M = torch.arange(M, device=row_in_M.device)
    index_R = row_in_M.new_full((slab_rows,), M).scatter_(0, row_out_M, arrival_M)
    return RowMap(source_R, row_out_M[by_row], offsets), CopyMap(index_R, row_out_M)
