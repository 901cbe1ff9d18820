"""What the phase timers cost, how they agree with torch's profiler, and how much of a step they explain.

    python benchmarks/phases.py [--config FILE] [--steps 40] [--traces 6] [--json FILE] [--KEY=VALUE ...]

Cost: two runs in one process, one with timers and one without, take turns in random order, each step on the same data.
Told is the median over the pairs of what the timers add, of the CPU time of the process, which other programs on the
machine disturb less than the time on the wall, and of the latter.

Agreement: a third run of a few steps, each recorded by torch's profiler. Of each phase the seconds that metrics.jsonl
tells are set against the total of the ranges of its name in the traces: the median over the steps of the ratio. The two
have the same boundaries but nothing else in common: other clock, other bookkeeping. That the boundaries are where they
should be is another question: each node of backward, which says by its name whose it is, has to lie in its phase
(tests/test_profiling.py).

Explained: 1 - "other" over the step, of the run with timers.
"""

import argparse
import gc
import gzip
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # isort: skip - first: it tells torchtitan about CPUs

from titan_moe import config_file, runtime
from titan_moe import telemetry as telemetry_module
from titan_moe.metrics import read_metrics
from titan_moe.phase_names import NAMES
from titan_moe.phases import Phases
from titan_moe.profiling import ROW

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


class Run:
    """A training that is taken step by step."""

    def __init__(self, argv: list[str], folder: Path, phases: type[Phases]) -> None:
        argv = [*argv, f"--job.dump_folder={folder}"]
        runtime.default_environment(argv)
        config = config_file.load(argv)
        config_file.raise_on_problems(config, 1)
        train.Phases = phases  # type: ignore[misc]
        watch, telemetry_module.watch = telemetry_module.watch, _nothing if phases is Off else telemetry_module.watch
        try:
            self.run, self.folder = train.build(config), folder
        finally:
            telemetry_module.watch = watch
        self.batches = iter(self.run.dataloader)

    def step(self, *, logs: bool = False) -> tuple[float, float]:
        """Seconds of (the CPU, the wall)."""
        self.run.progress.step += 1
        cpu, wall = time.process_time(), time.perf_counter()
        with self.run.telemetry.step(self.run.progress.step, logs=logs):
            train.train_step(self.run, self.batches, validates=False, logs=logs)
        return time.process_time() - cpu, time.perf_counter() - wall

    def close(self) -> None:
        self.run.checkpointer.close()
        self.run.metrics.close()


def _nothing(*_: Any) -> None:
    pass


def cost(argv: list[str], folder: Path, steps: int) -> dict[str, float]:
    """Medians over pairs of steps: CPU seconds of one without timers; the share that timers add, on the CPU and on the
    wall. And the share of the step that phases explain."""
    runs = {"with": Run(argv, folder / "with", Phases), "without": Run(argv, folder / "without", Off)}
    order, pairs = random.Random(0), []
    phases = runs["with"].run.telemetry.phases

    def step(name: str) -> tuple[float, float]:
        if name == "with":
            return runs[name].step()
        with phases.whole(OTHERS_TURN):  # is no part of a step of the run with timers
            return runs[name].step()

    for _ in range(WARM_UP):
        for name in runs:
            step(name)
    gc.collect()
    gc.disable()
    phases.take()  # what the warm-up took
    for _ in range(steps):
        pairs.append({name: step(name) for name in order.sample(list(runs), 2)})
    gc.enable()
    taken, timed_steps = phases.take()
    total = sum(seconds for name, seconds in taken.items() if name != OTHERS_TURN)
    for run in runs.values():
        run.close()
    added = [[pair["with"][i] / pair["without"][i] - 1 for pair in pairs] for i in (0, 1)]
    return {
        "step_cpu_s": statistics.median(pair["without"][0] for pair in pairs),
        "added_cpu": statistics.median(added[0]),
        "added_wall": statistics.median(added[1]),
        "explained": 1 - taken["other"] / total,
        "steps": timed_steps,
    }


def agreement(argv: list[str], folder: Path, traces: int) -> dict[str, dict[str, float]]:
    """Of each phase: seconds told, the profiler's, and the median of their ratio."""
    steps = WARM_UP + traces
    profiled = ["--profiling.enable_profiling", "--profiling.profile_freq=1", "--profiling.profiler_warmup=0"]
    run = Run([*argv, *profiled, f"--training.steps={steps}"], folder / "traced", Phases)
    for _ in range(steps):
        run.step(logs=True)
    run.close()
    told = read_metrics(run.folder)
    found: dict[str, dict[str, float]] = {}
    for name in NAMES:
        pairs = []
        for step in range(WARM_UP + 1, steps + 1):
            seconds = told[step].get(f"phase/{name}", 0.0)
            traced = phases_of_trace(run.folder / f"profile_traces/iteration_{step}/rank0_trace.json.gz")[name]
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


def report(found: dict[str, Any], out: Callable[[str], None] = print) -> None:
    spent = found["cost"]
    out(f"{'phase':24}{'told ms':>10}{'profiler ms':>13}{'ratio':>8}{'of step':>9}")
    for name, row in found["agreement"].items():
        numbers = f"{1e3 * row['told']:10.2f}{1e3 * row['profiler']:13.2f}{row['ratio']:8.3f}{row['share']:9.1%}"
        out(f"{name:24}{numbers}")
    out(f"largest disagreement of phases above {LARGE:.0%} of the step: {worst(found['agreement']):.2%}")
    out(f"explained: {spent['explained']:.2%} of the step")
    out(
        f"timers add {spent['added_cpu']:+.2%} of {1e3 * spent['step_cpu_s']:.1f} ms of CPU time per step, "
        f"{spent['added_wall']:+.2%} of the time on the wall ({spent['steps']} steps)"
    )


def worst(agreed: dict[str, dict[str, float]]) -> float:
    return max(abs(row["ratio"] - 1) for row in agreed.values() if row["share"] >= LARGE)


def share_process_group() -> None:
    """All runs of this process have the same one."""
    os.environ["RUN_ID"] = "phases"
    join, devices = runtime.init_process_group, []

    def join_once(config: Any, folder: Path) -> Any:
        devices[:] = devices or [join(config, folder)]
        return devices[0]

    runtime.init_process_group = join_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="train_configs/debug_model.toml")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--traces", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args, more = parser.parse_known_args()
    off = ["--metrics.enable_tensorboard=false", "--checkpoint.enable=false", "--validation.enable=false"]
    argv = [args.config, *off, f"--training.steps={args.steps + WARM_UP}", "--metrics.log_freq=1000", *more]
    share_process_group()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {"agreement": agreement(argv, folder, args.traces), "cost": cost(argv, folder, args.steps)}
    report(found)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
    runtime.leave_process_group()
