"""When what ran: spans of time, what of them lies beside others, and a file to look at them.

The arithmetic is on plain intervals (start, end) in seconds. Times are the host's on a CPU. On a GPU they are those of
events on the device (clock.py), a transfer's of events on the stream that it ran on: its span is when the device was
busy with it, not when the host asked for it.

`write_chrome_trace` writes the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing open: one process per
rank, one row per lane, more where spans of a lane lie beside each other.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_moe.clock import Mark, seconds
from titan_moe.in_flight import Transfer

Interval = tuple[float, float]

LANES = {"dispatch": "expert parallel", "combine": "expert parallel", "gather": "FSDP", "reduce": "FSDP"}


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds after some origin."""

    name: str
    lane: str
    """What it occupies: a network, or compute"""
    start: float
    end: float
    backward: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    """For whoever looks at the file"""

    @property
    def interval(self) -> Interval:
        return self.start, self.end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order; empty and reversed ones hold none."""
    found: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in some interval of `a` and in some of `b`."""
    first, second = union(a), union(b)
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one of them is."""
    return sum(end - start for start, end in union(intervals))


def share_beside(these: Iterable[Interval], others: Iterable[Interval]) -> float:
    """The share of `these` that lies beside `others`: 0 without any."""
    these = list(these)
    total = length(these)
    return length(common(these, others)) / total if total else 0.0


def spans(transfers: Iterable[Transfer], origin: Mark) -> list[Span]:
    """The transfers that are over, in seconds after `origin`, each from its issue to its last byte."""
    found = []
    for transfer in transfers:
        end = transfer.ended if transfer.ended is not None else transfer.done
        if end is None:
            continue
        details: dict[str, Any] = {"bytes sent": transfer.sent, "bytes received": transfer.received}
        if transfer.waited is not None and transfer.done is not None:
            details["waited for, ms"] = round(1e3 * transfer.exposed, 3)
        start, end = seconds(origin, transfer.issued), seconds(origin, end)
        found.append(Span(transfer.name, LANES[transfer.name], start, end, transfer.backward, details))
    return found


def write_chrome_trace(path: Path, ranks: Mapping[int, Sequence[Span]]) -> None:
    """The spans of each rank, whose origins should be the same moment."""
    events: list[dict[str, Any]] = []
    for rank, found in ranks.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        thread = 0
        for lane in sorted({span.lane for span in found}):
            for row in _rows(sorted((s for s in found if s.lane == lane), key=lambda span: span.start)):
                name = {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}}
                events += [name, *(_event(span, rank, thread) for span in row)]
                thread += 1
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _rows(found: Sequence[Span]) -> list[list[Span]]:
    """Spans in order of their start, in rows in which none begins before the one in front has ended."""
    rows: list[list[Span]] = []
    for span in found:
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows


def _event(span: Span, rank: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name + " backward" * span.backward,
        "pid": rank,
        "tid": thread,
        "ts": 1e6 * span.start,
        "dur": 1e6 * (span.end - span.start),
        "args": dict(span.details),
    }
