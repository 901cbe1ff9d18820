"""What the phase timers cost, how they agree with torch's profiler, and how much of a step they explain.

Cost: two runs in one process, one with timers and one without, take turns in random order, each step on the same data.
Told is the median over the pairs of what the timers add to the CPU time of the process, which other programs on the
machine disturb less than the time on the wall, and to the latter.

Agreement: a third run of a few steps, each recorded by torch's profiler. Of each phase the seconds that metrics.jsonl
tells are set against the total of the ranges of its name in the traces: the median over the steps of the ratio. The two
have the same boundaries but nothing else in common: other clock, other bookkeeping. That the boundaries are where they
should be is another question: each node of backward, which says by its name whose it is, has to lie in its phase
(tests/test_profiling.py).

Explained: 1 - "other" over the step, of the run with timers.
"""

import gzip
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group  # isort: skip - before torchtitan

import train
from benchmarks.harness import Options, Record, interleaved, spread
from titan_moe import telemetry
from titan_moe.metrics import read_metrics
from titan_moe.phase_names import NAMES
from titan_moe.phases import Phases
from titan_moe.profiling import ROW

SUITE = "phases"
WARM_UP = 3  # steps that set things up
OTHERS_TURN = "profile"  # a phase that these runs do not have
LARGE = 0.01  # share of the step from which on a phase's agreement is judged: below, one interruption is all of it


class Off(Phases):
    """Timers that are not there."""

    def around(self, call: Any, *_: Any) -> Any:
        return call

    inside = around

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        yield


def build(argv: list[str], folder: Path, phases: type[Phases]) -> SteppedRun:
    with mock.patch.object(train, "Phases", phases):
        if phases is not Off:
            return SteppedRun(load(argv, folder))
        with mock.patch.object(telemetry, "watch"):
            return SteppedRun(load(argv, folder))


def cost(argv: list[str], folder: Path, steps: int) -> Iterator[Record]:
    runs = {"with timers": build(argv, folder / "with", Phases), "without": build(argv, folder / "without", Off)}
    phases = runs["with timers"].run.telemetry.phases

    def step(name: str) -> Callable[[], None]:
        def take() -> None:
            if name == "with timers":
                return runs[name].step()
            with phases.whole(OTHERS_TURN):  # is no part of a step of the run with timers
                return runs[name].step()

        return take

    for name in list(runs) * WARM_UP:
        step(name)()
    phases.take()  # what the warm-up took
    cpu: dict[str, list[float]] = {name: [] for name in runs}

    def timed(name: str) -> Callable[[], None]:
        take = step(name)

        def on_cpu() -> None:
            start = time.process_time()
            take()
            cpu[name].append(time.process_time() - start)

        return on_cpu

    wall = interleaved({name: (lambda name=name: timed(name)) for name in runs}, steps, warm_up=0)
    taken, _ = phases.take()
    for run in runs.values():
        run.close()
    for metric, found in (("CPU time", cpu), ("time on the wall", wall.seconds)):
        added = [100 * (a / b - 1) for a, b in zip(found["with timers"], found["without"])]
        low, high = spread(added)
        yield record(f"timers add to {metric}", value=statistics.median(added), unit="%", low=low, high=high)
    total = sum(seconds for name, seconds in taken.items() if name != OTHERS_TURN)
    yield record("explained", value=100 * (1 - taken["other"] / total), unit="% of the step")


def record(metric: str, case: str = "debug model", **fields: Any) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def agreement(argv: list[str], folder: Path, traces: int) -> dict[str, dict[str, float]]:
    """Of each phase: seconds told, the profiler's, and the median of their ratio."""
    steps = WARM_UP + traces
    profiled = ["--profiling.enable_profiling", "--profiling.profile_freq=1", "--profiling.profiler_warmup=0"]
    output = folder / "traced"
    run = build([*argv, *profiled, f"--training.steps={steps}"], output, Phases)
    for _ in range(steps):
        run.step(logs=True)
    run.close()
    told = read_metrics(output)
    found: dict[str, dict[str, float]] = {}
    for name in NAMES:
        pairs = []
        for step in range(WARM_UP + 1, steps + 1):
            seconds = told[step].get(f"phase/{name}", 0.0)
            traced = phases_of_trace(output / f"profile_traces/iteration_{step}/rank0_trace.json.gz")[name]
            if seconds and traced:
                pairs.append((seconds, traced, told[step]["phase/step"]))
        if pairs:
            found[name] = {
                "told": statistics.median(pair[0] for pair in pairs),
                "profiler": statistics.median(pair[1] for pair in pairs),
                "ratio": statistics.median(pair[0] / pair[1] for pair in pairs),
                "share": statistics.median(pair[0] / pair[2] for pair in pairs),
            }
    return found


def phases_of_trace(path: Path) -> Counter[str]:
    """Seconds of each phase's ranges."""
    totals: Counter[str] = Counter()
    with gzip.open(path, "rt") as file:
        for event in json.load(file)["traceEvents"]:
            if event.get("tid") == ROW and event["ph"] == "X":
                totals[event["name"]] += event["dur"] / 1e6  # type: ignore[assignment]
    return totals


def measure(options: Options) -> Iterator[Record]:
    steps, traces = options.pick((2, 1), (12, 3), (40, 6))
    argv = ["train_configs/debug_model.toml", *QUIET, "--metrics.log_freq=1000", *options.more]
    with one_process_group() as folder:
        found = agreement(argv, folder, traces)
        for name, row in found.items():
            case = f"{name}, {row['share']:.1%} of the step"
            yield record("told", case, value=1e3 * row["told"], unit="ms")
            yield record("told / profiler", case, value=row["ratio"])
        yield record("largest disagreement", f"phases from {LARGE:.0%} of the step", value=100 * worst(found), unit="%")
        yield from cost(argv, folder, steps)


def worst(agreed: dict[str, dict[str, float]]) -> float:
    return max(abs(row["ratio"] - 1) for row in agreed.values() if row["share"] >= LARGE)
