"""Interval arithmetic equals counting moments on a grid; transfers become spans; Perfetto can read the trace file."""

import json
import random

import pytest

from titan_moe.clock import Mark
from titan_moe.in_flight import Transfer
from titan_moe.timeline import Span, common, length, share_beside, spans, union, write_chrome_trace


def moments(intervals) -> set[int]:
    """The unit steps of a grid that lie in at least one of some intervals with whole ends: the oracle."""
    return {moment for start, end in intervals for moment in range(start, end)}


@pytest.mark.parametrize("seed", range(20))
def test_arithmetic_equals_counting_moments(seed):
    draw = random.Random(seed)

    def some() -> list[tuple[int, int]]:
        starts = [draw.randrange(40) for _ in range(draw.randrange(8))]
        return [(start, start + draw.randrange(9)) for start in starts]

    a, b = some(), some()
    both = moments(a) & moments(b)
    assert moments(union(a)) == moments(a)
    assert all(first[1] < second[0] for first, second in zip(union(a), union(a)[1:])), "disjoint and in order"
    assert moments(common(a, b)) == both == moments(common(b, a))
    assert length(a) == len(moments(a))
    assert share_beside(a, b) == pytest.approx(len(both) / len(moments(a)) if moments(a) else 0.0)


def test_intervals_that_touch_share_no_moment_and_make_one():
    assert union([(0.0, 1.0), (1.0, 2.0)]) == [(0.0, 2.0)]
    assert common([(0.0, 1.0)], [(1.0, 2.0)]) == []
    assert union([(1.0, 1.0), (3.0, 2.0)]) == [], "an empty one, a reversed one"


def test_transfers_become_spans():
    """From issue to the last byte where that was noted, else to the end of the wait; one under way is left out."""

    def at(moment: float) -> Mark:
        return Mark(100.0 + moment)

    there = Transfer("gather", False, 30, 90, at(1), ended=at(3), waited=at(4), done=at(4.5))
    unseen = Transfer("reduce", True, 8, 8, at(2), waited=at(4), done=at(6))
    on_a_stream = Transfer("gather", True, 8, 8, at(5), ended=at(7))  # FSDP's on a GPU: nobody knows who waited
    under_way = Transfer("dispatch", False, 8, 8, at(6))
    gather, reduce, streamed = spans([there, unseen, on_a_stream, under_way], Mark(100.0))
    assert gather.interval == (1, 3) and gather.lane == "FSDP" and not gather.backward
    assert gather.details == {"bytes sent": 30, "bytes received": 90, "waited for, ms": 500}
    assert reduce.interval == (2, 6) and reduce.backward
    assert streamed.interval == (5, 7) and "waited for, ms" not in streamed.details


def test_the_trace_file_has_a_row_for_each_lane_and_more_for_what_lies_beside(tmp_path):
    one = [Span("gather", "FSDP", 0.0, 2.0), Span("gather", "FSDP", 1.0, 3.0, True), Span("gather", "FSDP", 2.0, 4.0)]
    two = [Span("dispatch", "expert parallel", 0.5, 1.0, details={"bytes sent": 7})]
    path = tmp_path / "trace.json"
    write_chrome_trace(path, {0: [*one, *two], 1: two})
    events = json.loads(path.read_text())["traceEvents"]
    shown = [e for e in events if e["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["FSDP", "FSDP", "expert parallel", "expert parallel"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert len(shown) == 5 and {e["name"] for e in shown} == {"gather", "gather backward", "dispatch"}
    first, beside, after = (next(e for e in shown if e["pid"] == 0 and e["ts"] == 1e6 * s.start) for s in one)
    assert first["tid"] == after["tid"] != beside["tid"] and first["dur"] == 2e6
    assert next(e for e in shown if e["pid"] == 1)["args"] == {"bytes sent": 7}
