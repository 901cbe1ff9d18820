import itertools

import pytest

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
