"""The sizes of an even load: nothing gets lost, and a token travels as often as it has places to go."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_moe.dry_run.routing import even_sizes
from titan_moe.flavors import FLAVORS
from titan_moe.moe import dedup
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.plan.traffic import unique_places

DEEPSEEK = FLAVORS["671B"]
TOKENS, RANKS, NODES = 4096, 64, 8
COPIES = TOKENS * DEEPSEEK.top_k


def sizes(name: str, **arguments: Any):
    group = SimpleNamespace(size=lambda: RANKS, rank=lambda: 11)
    made = make_dispatcher(name, num_experts=256, top_k=8, alignment=128, ep_group=cast(Any, group), **arguments)
    return even_sizes(DEEPSEEK, TOKENS, made, "natural")


def test_alltoall_sends_every_copy() -> None:
    (hop,), slab_rows = sizes("alltoall")
    assert hop.rows == hop.copies and sum(hop.rows[0]) == sum(hop.rows[1]) == slab_rows == COPIES


def test_dedup_sends_a_token_once_to_a_rank() -> None:
    (hop,), slab_rows = sizes("dedup")
    assert sum(hop.copies[0]) == slab_rows == COPIES
    assert sum(hop.rows[0]) == pytest.approx(TOKENS * unique_places(DEEPSEEK, "natural", RANKS), abs=RANKS)


def test_by_node_a_token_crosses_once_and_is_handed_on_to_its_ranks() -> None:
    (first, last), slab_rows = sizes("dedup", ranks_per_node=RANKS // NODES)
    assert sum(first.copies[0]) == sum(last.copies[0]) == slab_rows == COPIES
    assert [rank for rank, rows in enumerate(first.rows[0]) if rows] == [3, 11, 19, 27, 35, 43, 51, 59]
    assert [rank for rank, rows in enumerate(last.rows[0]) if rows] == list(range(8, 16))
    assert sum(first.rows[0]) == pytest.approx(TOKENS * unique_places(DEEPSEEK, "natural", NODES), abs=NODES)
    assert sum(last.rows[0]) == pytest.approx(TOKENS * unique_places(DEEPSEEK, "natural", RANKS), abs=RANKS)


def test_chunks_share_the_two_hops(monkeypatch) -> None:
    monkeypatch.setattr(dedup, "last_hop_group", lambda group: group)
    whole, slab_rows = sizes("dedup", ranks_per_node=RANKS // NODES)
    hops, chunked_rows = sizes("dedup", ranks_per_node=RANKS // NODES, hop_chunks=3)
    assert len(hops) == 6 and chunked_rows == slab_rows
    for hop, chunks in zip(whole, (hops[::2], hops[1::2])):
        for what in ("rows", "copies"):
            received = [getattr(chunk, what)[0] for chunk in chunks]
            missing = [of_all - sum(each) for each, of_all in zip(zip(*received), getattr(hop, what)[0])]
            assert min(missing) >= 0 and max(missing) <= 3 * NODES  # each part was rounded down
            assert all(min(filter(None, each)) > 0.9 * max(each) for each in zip(*received) if any(each))


def test_a_capacity_below_the_mean_drops_the_rest() -> None:
    (hop,), slab_rows = sizes("alltoall", capacity_factor=0.5)
    assert sum(hop.copies[0]) == slab_rows == COPIES // 2


def test_slabs_are_padded() -> None:
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    made = make_dispatcher("alltoall", num_experts=256, top_k=8, alignment=128, ep_group=cast(Any, group))
    (hop,), slab_rows = even_sizes(DEEPSEEK, 16, made, "natural")
    assert sum(hop.copies[0]) == 16 * 8 and slab_rows == 128 * 128  # one row for each of 128 experts, and 127 of zeros
