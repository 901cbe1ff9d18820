import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from titan_moe.plan import schedule
from titan_moe.plan.schedule import Op


def test_lanes_run_beside_each_other_and_wait_for_what_they_need():
    placed = schedule.run(
        [
            Op("a", "compute", 2.0),
            Op("send a", "network", 3.0, ("a",)),
            Op("b", "compute", 2.0),
            Op("uses a", "compute", 1.0, ("send a",)),
        ]
    )
    ends = {p.name: p.end for p in placed}
    assert ends == {"a": 2.0, "send a": 5.0, "b": 4.0, "uses a": 6.0}
    assert schedule.makespan(placed) == 6.0
    assert schedule.makespan(placed) - schedule.busy(placed, "compute") == 1.0  # exposed


def test_busy_counts_lanes_together_once():
    placed = schedule.run([Op("a", "compute", 2.0), Op("b", "nvlink", 3.0), Op("c", "copy", 1.0)])
    assert schedule.busy(placed, "compute", "nvlink", "copy") == 3.0


def test_a_lane_keeps_its_order():
    placed = schedule.run([Op("x", "compute", 5.0), Op("first", "nvlink", 1.0, ("x",)), Op("second", "nvlink", 1.0)])
    assert {p.name: p.start for p in placed}["second"] == 6.0


def test_circular_needs_are_our_bug():
    with pytest.raises(AssertionError, match="wait for each other"):
        schedule.run([Op("a", "compute", 1.0, ("b",)), Op("b", "nvlink", 1.0, ("a",))])


@pytest.mark.parametrize("microbatches", [8, 64, 200])
def test_1f1b_has_the_known_bubble(microbatches):
    """(pp - 1)(F + B) beside microbatches (F + B)."""
    total, work = schedule.pipeline_seconds([1.0] * 8, [2.0] * 8, 8, microbatches, 0.0)
    assert work == 3.0 * microbatches
    assert total - work == pytest.approx(7 * 3.0)


@pytest.mark.parametrize(("pp", "vp"), [(4, 2), (8, 3), (2, 8)])
def test_interleaving_divides_the_bubble(pp, vp):
    """(pp - 1)(F + B) / vp, with F and B those of a rank."""
    total, work = schedule.pipeline_seconds([1.0] * (pp * vp), [2.0] * (pp * vp), pp, 8 * pp, 0.0)
    assert total - work == pytest.approx((pp - 1) * 3.0, rel=1e-9)


def test_the_slowest_stage_sets_the_period():
    even, _ = schedule.pipeline_seconds([1.0] * 4, [2.0] * 4, 4, 64, 0.0)
    slow, work = schedule.pipeline_seconds([1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0], 4, 64, 0.0)
    assert work == 64 * 4.5
    assert slow > 64 * 4.5 > even


@pytest.mark.parametrize(("pp", "vp", "slow"), [(4, 1, 0), (4, 1, 3), (4, 4, 9), (8, 2, 15)])
def test_the_steady_state_is_extrapolated_exactly(pp, vp, slow, monkeypatch):
    forward = [1.0 + 0.3 * (i == slow) for i in range(pp * vp)]
    backward = [2 * f for f in forward]
    short = schedule.pipeline_seconds(forward, backward, pp, 12 * pp, 0.05)
    monkeypatch.setattr(schedule, "SIMULATED_ROUNDS", 12)
    assert schedule.pipeline_seconds(forward, backward, pp, 12 * pp, 0.05) == pytest.approx(short)


def test_sends_are_hidden_but_while_the_pipeline_fills():
    without, _ = schedule.pipeline_seconds([1.0] * 8, [2.0] * 8, 4, 64, 0.0)
    with_sends, _ = schedule.pipeline_seconds([1.0] * 8, [2.0] * 8, 4, 64, 0.1)
    assert 0 < with_sends - without < 0.1 * 64


def test_one_stage_has_no_bubble():
    assert schedule.pipeline_seconds([1.0], [2.0], 1, 10, 0.0) == (30.0, 30.0)


@pytest.mark.parametrize(("rank", "pp", "vp", "microbatches"), [*itertools.product([0, 3], [4], [1, 3], [4, 6])])
def test_an_order_runs_everything_once(rank, pp, vp, microbatches):
    order = schedule.order(rank, pp, vp, microbatches)
    expected = set(itertools.product("FB", range(rank, pp * vp, pp), range(microbatches)))
    assert len(order) == len(expected) and set(order) == expected


def test_zero_bubble_schedules_have_smaller_bubbles():
    """Of one rank's F 1, dgrad 1, wgrad 1 in 4 ranks."""
    one_each = [[r] for r in range(4)]
    two_each = [[r, 7 - r] for r in range(4)]
    times, half = [1.0] * 4, [0.5] * 8
    plain, work = schedule.pipeline_seconds(times, [2.0] * 4, 4, 32, 0.0)
    zb, _ = schedule.zero_bubble_seconds("InterleavedZeroBubble", times, times, times, one_each, 32)
    zbv, _ = schedule.zero_bubble_seconds("ZBVZeroBubble", half, half, half, two_each, 32)
    dual, _ = schedule.zero_bubble_seconds("DualPipeV", half, half, half, two_each, 32)
    assert plain - work == pytest.approx(9)
    assert (zb - work, zbv - work, dual - work) == (pytest.approx(3), pytest.approx(0), pytest.approx(2))


# ---------------------------------------------------------------------------------------------------------------------
# Against torch's order of actions

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
PIPELINES = [
    *itertools.product(("Interleaved1F1B", "InterleavedZeroBubble"), (2, 4, 8), (2, 3), (8, 10, 16, 24, 36)),
    *itertools.product(V_SHAPED, (2, 4, 8), (2,), (4, 16, 36)),
]


def torchs_orders(name: str, pp: int, vp: int, microbatches: int) -> dict[int, list[schedules._Action]]:
    """Rank -> actions, sub-actions one by one. Skips what torch refuses."""
    last = pp * vp - 1
    places = [0, last] if name in V_SHAPED else range(0, last + 1, pp)
    shared: dict[str, Any] = {"num_stages": last + 1, "group_size": pp, "group_rank": 0, "is_first": True}
    shared |= {"stage_index_to_group_rank": {}, "is_last": True, "group": None, "submod": torch.nn.Identity()}
    stages: Any = [SimpleNamespace(stage_index=place, **shared) for place in places]
    try:
        made: Any = schedules.get_schedule_class(name)(stages, microbatches, loss_fn=lambda output, goal: output)
    except ValueError as refused:
        pytest.skip(str(refused))
    orders = made.pipeline_order_with_comms.items()
    return {rank: [part for each in actions for part in each.sub_actions or (each,)] for rank, actions in orders}


@pytest.mark.parametrize(("name", "pp", "vp", "microbatches"), PIPELINES)
def test_ranks_hold_what_torchs_schedules_make_them_hold(name: str, pp: int, vp: int, microbatches: int) -> None:
    """Of each stage at its fullest moments, exactly; received ahead, never more, and less by three at most."""
    for rank, actions in torchs_orders(name, pp, vp, microbatches).items():
        held = dict.fromkeys([rank, 2 * pp - 1 - rank] if name in V_SHAPED else range(rank, pp * vp, pp), 0)
        moments, posted, ahead = set(), set(), 0
        for action in actions:
            kind, stage, microbatch = action.computation_type, action.stage_index, action.microbatch_index
            if kind in (schedules.RECV_F, schedules.RECV_B):
                posted.add((kind == schedules.RECV_F, stage, microbatch))
            ahead = max(ahead, len(posted))
            if kind in (schedules.FORWARD, schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT):
                posted.discard((kind == schedules.FORWARD, stage, microbatch))
            if kind == schedules.FORWARD:
                held[stage] += 1
            if kind in (schedules.FULL_BACKWARD, schedules.BACKWARD_WEIGHT):
                held[stage] -= 1
            moments.add(tuple(held.values()))
        fullest = {
            moment
            for moment in moments
            if not any(other != moment and all(a >= b for a, b in zip(other, moment)) for other in moments)
        }
        assert schedule.held(name, rank, pp, vp, microbatches) == fullest
        assert ahead <= schedule.received_ahead(name, rank, pp, microbatches) <= ahead + 3
