"""A run folder as data: all that is there, and a sentence about whatever is not, or is broken.

Somebody opens a report because something went wrong, so nothing in a run folder has to be there, or whole: a line of
metrics.jsonl may be cut off by a kill, a disk may have filled up, half of the folder may have been copied. What can be
read is shown; the rest is told of in `Run.problems`. Only a folder that does not exist is an error.

A run that was started again goes on from a checkpoint, so its later attempt does some steps for a second time. What the
earlier attempt wrote of those, and of all later steps, never became part of the weights: it is dropped.

Columns are arrays of numbers, with NaN for a number that was not finite, and each has steps of its own: validation,
expert loads and the like are not in every line.
"""

import json
import math
import sys
import tomllib
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_moe import checkpoint_folder, run_folder

LONGEST = 64 * 2**20
"""Bytes of a line: a thousand layers of a thousand experts have room in it, and no memory runs out over a file that
is something else"""
DEEPEST = 8
"""Tables inside each other that are looked into"""
LOAD = "moe_load."


@dataclass
class Series:
    """A quantity over the steps at which it was logged, which ascend."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def last(self) -> float | None:
        """The newest finite value."""
        return next((value for value in reversed(self.values) if math.isfinite(value)), None)


@dataclass
class Loads:
    """Copies routed to each expert of one MoE layer, in the steps at which that was logged."""

    steps: array = field(default_factory=lambda: array("q"))
    counts: list[array] = field(default_factory=list)


@dataclass
class Run:
    folder: Path
    name: str
    series: dict[str, Series] = field(default_factory=dict)
    loads: dict[str, Loads] = field(default_factory=dict)
    """By layer, as "layers.3" """
    steps: array = field(default_factory=lambda: array("q"))
    """That have a line in metrics.jsonl"""
    restarts: list[tuple[int, int]] = field(default_factory=list)
    """(first step logged, number of the attempt, from 2)"""
    checkpoints: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """run.json"""
    config: dict[str, Any] = field(default_factory=dict)
    """config.toml by dotted keys"""
    alive: bool = False
    """Whether a process trains in the folder"""
    problems: list[str] = field(default_factory=list)
    """What is missing or broken"""

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("training.steps")
        return steps if isinstance(steps, int) else None

    @property
    def finished(self) -> bool:
        return not self.alive and self.planned_steps is not None and self.last_step >= max(self.planned_steps, 1)

    def last(self, key: str) -> float | None:
        return self.series[key].last() if key in self.series else None

    def state(self) -> str:
        """One word or two, as a person would say it."""
        if self.alive:
            return "running" if self.steps else "starting"
        if not self.steps:
            return "no steps"
        return "finished" if self.finished else "stopped"

    def skips(self) -> list[tuple[int, int]]:
        """(step logged, steps that the guard has skipped since the one logged before)."""
        found, before = [], 0.0
        series = self.series.get("skipped_steps", Series())
        for step, value in zip(series.steps, series.values):
            if value > before:
                found.append((step, int(value - before)))
            before = value if math.isfinite(value) else before
        return found


def read(folder: Path | str) -> Run:
    """Everything there is about the run in `folder`. Raises ValueError if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: {_no_folder(folder)}")
    run = Run(folder, folder.resolve().name or str(folder))
    try:
        run.alive = run_folder.is_held(folder)
    except OSError as error:
        run.problems.append(f".lock cannot be read ({error.strerror}): whether the run is alive is not known")
    _read_facts(run)
    _read_config(run)
    _read_metrics(run)
    _read_checkpoints(run)
    _read_stacks(run)
    return run


def _no_folder(folder: Path) -> str:
    if folder.exists():
        return "is no folder; give the folder that a run writes to, which holds metrics.jsonl"
    there = [path for path in sorted(Path("outputs").glob("*/")) if path.is_dir()]
    newest = f"; the newest there is {there[-1]}" if there else ""
    return f"there is no such folder; give one that a run writes to, as under outputs/{newest}"


def _open_problem(name: str, error: OSError) -> str:
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read: {error.strerror}"


def _read_facts(run: Run) -> None:
    try:
        facts = json.loads((run.folder / "run.json").read_bytes())
    except OSError as error:
        run.problems.append(_open_problem("run.json", error) + ": no environment, no count of attempts")
        return
    except (ValueError, RecursionError):
        run.problems.append("run.json is broken: no environment, no count of attempts")
        return
    if isinstance(facts, dict):
        run.facts = facts
    else:
        run.problems.append("run.json holds no table: no environment, no count of attempts")


def _read_config(run: Run) -> None:
    try:
        table = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    except OSError as error:
        run.problems.append(_open_problem("config.toml", error) + ": no configuration, no number of steps to go")
        return
    except (ValueError, RecursionError) as error:
        run.problems.append(f"config.toml is broken, so there is no configuration: {str(error)[:200]}")
        return
    run.config = flat(table)


def flat(table: dict[str, Any]) -> dict[str, Any]:
    """A table of tables by dotted keys, in its order; what is nested deeper than anything of ours is left out."""
    found: dict[str, Any] = {}
    left = [((key,), value) for key, value in reversed(table.items())]
    while left:
        path, value = left.pop()
        if not isinstance(value, dict):
            found[".".join(path)] = value
        elif len(path) < DEEPEST:
            left += [((*path, key), inner) for key, inner in reversed(value.items())]
    return found


def _read_checkpoints(run: Run) -> None:
    name = run.config.get("checkpoint.folder", "checkpoint")
    folder = run.folder / (name if isinstance(name, str) else "checkpoint")
    try:
        run.checkpoints = sorted(checkpoint_folder.steps(folder))
        damaged = [path.name for path in folder.glob("damaged-step-*")]
    except (OSError, ValueError) as error:
        run.problems.append(f"checkpoints cannot be listed: {error}")
        return
    if damaged:
        run.problems.append(f"damaged checkpoints were set aside: {', '.join(sorted(damaged)[:5])}")


def _read_stacks(run: Run) -> None:
    try:
        written = sorted(path.name for path in (run.folder / "stacks").glob("rank-*.txt") if path.stat().st_size)
    except OSError as error:
        run.problems.append(f"stacks/ cannot be read: {error.strerror}")
        return
    if written:
        more = f" and {len(written) - 4} more" if len(written) > 4 else ""
        run.problems.append(f"the watchdog ended an attempt that hung; see stacks/{', '.join(written[:4])}{more}")


# ---------------------------------------------------------------------------------------------------------------------
# metrics.jsonl


def _read_metrics(run: Run) -> None:
    broken, cut, attempt = 0, False, 1
    try:
        with (run.folder / "metrics.jsonl").open("rb") as file:
            while line := file.readline(LONGEST):
                cut = not line.endswith(b"\n")
                while cut and len(line) == LONGEST and (line := file.readline(LONGEST)):  # passed over to its end
                    cut = not line.endswith(b"\n")
                if (record := _record(line)) is None:
                    broken += bool(line.strip())
                    continue
                step, now = record["step"], record.get("attempt", attempt)
                if type(now) is not int or now < attempt or (now == attempt and step < run.last_step):
                    broken += 1
                    continue
                _drop_from(run, step)
                if now > attempt:
                    run.restarts.append((step, now))
                attempt, cut = now, False
                _take(run, step, record)
    except OSError as error:
        run.problems.append(_open_problem("metrics.jsonl", error) + (": no curves" if not run.steps else ""))
        return
    if cut and broken and run.alive:  # the line that is being written at this very moment is nothing to tell of
        broken, cut = broken - 1, False
    if broken:
        last = (", the last of them cut off" if broken > 1 else ": it is cut off") if cut else ""
        run.problems.append(f"metrics.jsonl: {broken:,} line{'s' * (broken != 1)} could not be read{last}")
    if not run.steps:
        run.problems.append("metrics.jsonl has no step: no curves")
    elif not run.loads and not any(key.startswith("moe_max/mean.") for key in run.series):
        run.problems.append("no expert loads in metrics.jsonl: no heat map")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        return record if type(record["step"]) is int and 0 <= record["step"] < 2**53 else None
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _drop_from(run: Run, step: int) -> None:
    """Forget what was written of this step and later ones."""
    if not run.steps or run.last_step < step:
        return
    for series in run.series.values():
        at = bisect_left(series.steps, step)
        del series.steps[at:], series.values[at:]
    for loads in run.loads.values():
        at = bisect_left(loads.steps, step)
        del loads.steps[at:], loads.counts[at:]
    del run.steps[bisect_left(run.steps, step) :]
    run.restarts = [restart for restart in run.restarts if restart[0] < step]


def _take(run: Run, step: int, record: dict[str, Any]) -> None:
    run.steps.append(step)
    for key, value in record.items():  # millions of times for a long run, so ordinary numbers come first
        if type(value) is float or type(value) is int or value is None:
            if key == "step" or key == "attempt":
                continue
            if (series := run.series.get(key)) is None:
                series = run.series[key] = Series()
            series.steps.append(step)
            series.values.append(_finite(value))
        elif key.startswith(LOAD) and (counts := _counts(value)) is not None:
            loads = run.loads.setdefault(key.removeprefix(LOAD), Loads())
            if not loads.counts or len(loads.counts[0]) == len(counts):
                loads.steps.append(step)
                loads.counts.append(counts)


def _finite(value: float | None) -> float:
    """The number, or NaN for anything that is not a finite float64."""
    if value is None or not -sys.float_info.max <= value <= sys.float_info.max:
        return math.nan
    return value


def _counts(value: Any) -> array | None:
    if not isinstance(value, list) or not value:
        return None
    try:
        counts = array("q", value)
    except (TypeError, OverflowError):
        return None
    return counts if min(counts) >= 0 else None
