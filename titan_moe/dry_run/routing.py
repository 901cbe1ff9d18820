"""Dispatch plans of an even load.

Fake tensors have no values, so nobody knows where a router sends a token, and the dispatchers that exchange exact sizes
need to know. Here every expert gets the mean: a rank sends T K / EP copies of its T tokens to each rank, as T U / EP
rows where a token with several experts on one rank travels once (U ranks in the mean, as the planner counts). The plan
itself runs as written, on fake tensors; only the sizes that its host would read are given. Fixed receive buffers
(moe.recv_buffer) have their sizes anyway, and at an even load they do not overflow.

Shape letters: T tokens of this rank, K top-k, E experts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from titan_moe.flavors import Flavor
from titan_moe.moe import alltoall, dedup, exchange, layout, plan_tensors, static
from titan_moe.moe.contract import Dispatcher
from titan_moe.moe.plan_tensors import Sizes
from titan_moe.plan import traffic

OPS = (
    *(alltoall._plan_alltoall, dedup._plan_dedup, static.plan_alltoall_fixed, static.plan_dedup_fixed),
    *(exchange._start_dispatch, exchange._wait_dispatch, exchange._start_combine, exchange._wait_combine),
)
"""Everything that dispatch sends is sent inside one of them"""


def even_sizes(flavor: Flavor, tokens: int, dispatcher: Dispatcher, routing: str) -> tuple[list[Sizes], int]:
    """(what each hop of `dispatcher` moves, chunk by chunk, rows of the padded slabs) when every rank has `tokens`
    tokens and all experts get as many. `routing` is the planner's name for how tokens choose: it decides how many ranks
    they go to."""
    ranks, experts = dispatcher.ranks, flavor.num_experts
    capacity = dispatcher.capacity(tokens)
    mean = tokens * flavor.top_k / experts  # copies of one (source rank, expert)
    kept = mean if capacity is None else min(mean, capacity)
    to_rank = round(kept * dispatcher.local_experts)
    slab = layout.round_up(round(kept * ranks), dispatcher.alignment)
    rows = dispatcher.local_experts * slab
    if dispatcher.name == "alltoall":
        return [_hop(ranks, range(ranks), to_rank, to_rank)], rows
    assert isinstance(dispatcher, dedup.DedupDispatcher)
    unique = tokens * traffic.unique_places(flavor, routing, ranks) / ranks
    per_node, chunks = dispatcher.ranks_per_node, dispatcher.chunks
    if per_node is None:
        return [_hop(ranks, range(ranks), round(unique), to_rank)], rows
    # To the rank in each node with this rank's place in its node, which passes on what it got to its own node.
    nodes, me = ranks // per_node, dispatcher.group.rank()
    to_node = tokens * traffic.unique_places(flavor, routing, nodes) / nodes
    mates, start = range(me % per_node, ranks, per_node), me // per_node * per_node
    hops = []
    for part in layout.chunk_tokens(tokens, chunks):
        # Rounded down, so that no chunk sends more copies than it has.
        to_node_c, unique_c, copies = (round(each) * part // tokens for each in (to_node, unique, to_rank))
        hops.append(_hop(ranks, mates, to_node_c, per_node * copies))
        hops.append(_hop(ranks, range(start, start + per_node), nodes * unique_c, nodes * copies))
    return hops, rows


def _hop(ranks: int, peers: range, rows: int, copies: int) -> Sizes:
    def splits(each: int) -> tuple[list[int], list[int]]:
        sizes = [each if rank in peers else 0 for rank in range(ranks)]
        return sizes, sizes

    return Sizes(splits(rows), splits(copies))


def plan_evenly(sizes: tuple[list[Sizes], int], watching: Callable[[], AbstractContextManager]) -> None:
    """From now on the ops of dispatch run as written on fake tensors, with `sizes`. What they do inside is done in the
    context `watching`: modes do not look into ops by themselves."""
    for module in (alltoall, dedup, plan_tensors):
        module.read_sizes = lambda host, ranks, hops: sizes
    for op in OPS:
        op.register_fake(partial(_run, watching, op._init_fn))


def _run(watching: Callable[[], AbstractContextManager], op: Callable[..., Any], *arguments: Any) -> Any:
    with watching():
        return op(*arguments)
