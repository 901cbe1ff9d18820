"""Where the seconds of a step go: the phase timers of metrics.jsonl, over the steps and on average.

"phase/NAME.forward" and "phase/NAME.backward", or "phase/NAME" for what has no such halves, are seconds per optimizer
step, the mean over the ranks; "phase_max/..." the slowest rank's, and "phase_rank/..." which rank that was.
"""

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

from titan_moe.phase_names import OUTSIDE
from titan_moe.report.read import Run, Series
from titan_moe.report.summary import typical

BARS = 72
"""At most, beside each other on the page"""
MOST = 40
"""Phases that are shown"""
RECENT = 1000
"""Lines that tell which rank is slow"""
NOTHING = 1e-3
"""Share of a step below which such a phase only asked whether it is due"""
WHOLE = "step"
"""The step as a whole, which the others are parts of"""
ORDER = ("attention", "router", "dispatch", "experts", "combine", "shared_expert", "dense", "norms", "embedding")
ORDER += ("loss", "fsdp", "clip", "optimizer", "data", "logging", "other")
"""From the bottom of a bar upwards; phases that are not listed come before "other" """


@dataclass(frozen=True)
class Phase:
    """Seconds per step, medians over the last quarter of the lines, or of a phase once in a while means over all steps;
    None where nothing was logged."""

    name: str
    forward: float | None
    backward: float | None
    seconds: float
    """Both together, or of a phase without halves"""
    slowest: float | None
    """The same of the slowest rank"""
    rank: int | None
    """The rank that was the slowest most often of late"""


def names(run: Run) -> list[str]:
    """The phases of a run, without the step as a whole."""
    found = {_phase(key) for key in run.series if key.startswith("phase/")} - {WHOLE}
    last = len(ORDER) - 1
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else last - 0.5, name))[:MOST]


def _phase(key: str) -> str:
    return key.partition("/")[2].removesuffix(".forward").removesuffix(".backward")


def _parts(run: Run, kind: str, name: str) -> list[Series]:
    keys = (f"{kind}/{name}.forward", f"{kind}/{name}.backward")
    halves = [run.series[key] for key in keys if key in run.series]
    whole = run.series.get(f"{kind}/{name}")
    return halves or ([] if whole is None else [whole])


def table(run: Run) -> list[Phase]:
    """All phases, the longest first, those outside of a step last, if there is anything to tell of them."""
    found = []
    for name in names(run):
        usual = partial(over_all_steps, run) if name in OUTSIDE else typical
        slowest = [value for part in _parts(run, "phase_max", name) if (value := usual(part)) is not None]
        seconds = [value for part in _parts(run, "phase", name) if (value := usual(part)) is not None]
        ranks = Counter(v for part in _parts(run, "phase_rank", name) for v in part.values[-RECENT:] if v == v)
        found.append(
            Phase(
                name,
                typical(run.series.get(f"phase/{name}.forward")),
                typical(run.series.get(f"phase/{name}.backward")),
                math.fsum(seconds),
                math.fsum(slowest) if slowest else None,
                int(ranks.most_common(1)[0][0]) if ranks else None,
            )
        )
    least = NOTHING * math.fsum(phase.seconds for phase in found if phase.name not in OUTSIDE)
    found = [phase for phase in found if phase.name not in OUTSIDE or phase.seconds > least]
    return sorted(found, key=lambda phase: (phase.name in OUTSIDE, -phase.seconds))


def over_all_steps(run: Run, series: Series) -> float:
    """The mean, where most lines have next to nothing, or no such key: their median would be that."""
    of_line = {step: step - before for before, step in pairwise(run.steps)}
    if run.steps:
        of_line[run.steps[0]] = 1  # how many steps the first line tells of, it does not say
    finite = (value * of_line[step] for step, value in zip(series.steps, series.values) if math.isfinite(value))
    return math.fsum(finite) / max(sum(of_line.values()), 1)


def inside(run: Run) -> list[Phase]:
    """Those that make up a step."""
    return [phase for phase in table(run) if phase.name not in OUTSIDE]


@dataclass(frozen=True)
class Bars:
    """Means over neighbouring steps."""

    ends: list[int]
    """Last step of each bar; the first one begins at the first step"""
    seconds: dict[str, list[float]]
    """By phase, in the order that they are stacked; as many as bars"""


def bars(run: Run, most: int = BARS) -> Bars:
    """The phases over the steps, as at most so many bars."""
    stacked = [name for name in names(run) if name not in OUTSIDE]
    parts = [part for name in stacked for part in _parts(run, "phase", name)]
    if not parts:
        return Bars([], {})
    logged = max(parts, key=len).steps
    each = -(-len(logged) // most)  # lines of a bar: as many of all, so that bars stand at equal distances
    ends = [logged[min(start + each, len(logged)) - 1] for start in range(0, len(logged), each)]
    seconds = {}
    for name in stacked:
        totals = [0.0] * len(ends)
        for part in _parts(run, "phase", name):
            cuts = [bisect_left(part.steps, end + 1) for end in ends]
            for i, (start, end) in enumerate(zip([0, *cuts], cuts)):
                finite = [value for value in part.values[start:end] if math.isfinite(value)]
                totals[i] += fmean(finite) if finite else 0.0
        seconds[name] = totals
    return Bars(ends, seconds)
