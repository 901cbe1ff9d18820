"""Traces of chosen steps by torch's profiler, with the phases' names in them, and snapshots of a GPU's memory.

The folders and file names are torchtitan's, so that what reads its traces reads these:

    RUN/profile_traces/iteration_20/rank0_trace.json.gz            for https://ui.perfetto.dev or chrome://tracing
    RUN/memory_snapshot/iteration_20/rank0_memory_snapshot.pickle  for https://pytorch.org/memory_viz

A file appears under its name when it is whole. A phase of backward begins inside one node of the graph and ends inside
another, and viewers drop what overlaps without lying inside; so phases get a row of their own, "phases".

docs/profiling.md is about how to read them.
"""

import gzip
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_moe.runtime import DEVICE_TYPE

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from torchtitan.tools.logging import logger

from titan_moe.config import Config
from titan_moe.phase_names import NAMES, OTHER
from titan_moe.phases import Phases
from titan_moe.whole_file import replacing

STEP_FOLDER = "iteration_{step}"
ROW = 999_999_999
"""Thread id of the phases' row: no thread of Linux has one so high (at most 2^22)"""
FIELD = re.compile(r'\s*"(cat|name|tid)": "?([^",\n]*)')
"""One of these fields of an event, as torch writes them: a line each, in this order"""
HISTORY = 1_000_000
"""Allocations and frees that a memory snapshot goes back"""


class TraceRanges:
    """Phases as ranges of torch's profiler.

    Not by its `record_function`, which calls two ops: selective checkpointing counts ops, and would look in backward
    for those of the ranges of forward; and with thousands of short ranges their cost would show.
    """

    def __init__(self) -> None:
        self.open: Any = None

    def begin(self, name: str) -> None:
        if name != OTHER:
            self.open = torch.autograd._record_function_with_args_enter(name)

    def end(self) -> None:
        if self.open is not None:
            torch.autograd._record_function_with_args_exit(self.open)
            self.open = None


class NvtxRanges:
    """Phases as NVTX ranges, for Nsight Systems."""

    def __init__(self) -> None:
        self.open = False

    def begin(self, name: str) -> None:
        if name != OTHER:
            torch.cuda.nvtx.range_push(name)
            self.open = True

    def end(self) -> None:
        if self.open:
            torch.cuda.nvtx.range_pop()
            self.open = False


class Profiling:
    """One per run; `step` goes around every step of every rank.

    What needs a GPU is left out on a CPU, with a warning.
    """

    def __init__(self, config: Config, folder: Path, phases: Phases) -> None:
        self.chosen, self.steps, self.phases = config.profiling, config.training.steps, phases
        self.rank = dist.get_rank()
        self.traces = folder / self.chosen.save_traces_folder
        self.snapshots = folder / self.chosen.save_memory_snapshot_folder
        self.profiler: profile | None = None
        self.ranges = TraceRanges()
        self.takes_part = not self.chosen.ranks or self.rank in self.chosen.ranks
        gpu = DEVICE_TYPE == "cuda"
        for key in ("enable_memory_snapshot", "nvtx"):
            if getattr(self.chosen, key) and not gpu and self.rank == 0:
                logger.warning(f"profiling.{key} = true is left out: it needs a CUDA device, and this is {DEVICE_TYPE}")
        if gpu and self.takes_part and self.chosen.nvtx:
            phases.ranges.append(NvtxRanges())
        self.keeps_history = gpu and self.takes_part and self.chosen.enable_memory_snapshot
        if self.keeps_history:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step of training."""
        if self.takes_part and self.profiler is None and (window := self._window(step)) is not None:
            self._start(*window)
        try:
            yield
        except BaseException as error:
            self._abandon()
            if self.keeps_history and isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(step)
            raise
        if self.profiler is not None:
            self._end_of_step(self.profiler, step)
        if self.keeps_history and (step == self.chosen.step or step % self.chosen.profile_freq == 0):
            with self.phases.whole("profile"):
                self._write_snapshot(step)

    def _window(self, step: int) -> tuple[int, int] | None:
        """(steps of warm-up, steps to record) of a profile that would begin with this step."""
        chosen, lasts = self.chosen, []
        if chosen.step is not None:
            lasts.append((chosen.step, 1))
        if chosen.enable_profiling:
            lasts.append((-(-step // chosen.profile_freq) * chosen.profile_freq, chosen.profiler_active))
        for last, active in sorted(lasts):
            first = last - active + 1
            if first - chosen.profiler_warmup <= step <= last <= self.steps:
                return max(first - step, 0), last - max(first, step) + 1
        return None

    def _start(self, warmup: int, active: int) -> None:
        activities = [ProfilerActivity.CPU]
        if DEVICE_TYPE == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no warm-up, if the first step is to be profiled
            when = schedule(wait=0, warmup=warmup, active=active, repeat=1)
            self.profiler = profile(activities=activities, schedule=when, record_shapes=True)
            self.profiler.start()
        self.left = warmup + active
        self.phases.ranges.append(self.ranges)

    def _end_of_step(self, profiler: profile, step: int) -> None:
        self.left -= 1
        if self.left:
            profiler.step()
            return
        self.ranges.end()
        self.phases.ranges.remove(self.ranges)
        self.profiler = None
        with self.phases.whole("profile"):
            profiler.stop()
            self._write(self.traces, step, "trace.json.gz", lambda path: write_trace(profiler, path))

    def _abandon(self) -> None:
        """The step has failed: what was recorded of it is not written."""
        if self.profiler is not None:
            self.ranges.end()
            self.phases.ranges.remove(self.ranges)
            self.profiler.stop()
            self.profiler = None

    def _write_snapshot(self, step: int) -> None:
        def write(path: Path) -> None:
            with path.open("wb") as file:
                pickle.dump(torch.cuda.memory._snapshot(), file, protocol=4)  # as the viewer wants it

        self._write(self.snapshots, step, "memory_snapshot.pickle", write)

    def _write(self, folder: Path, step: int, name: str, write: Callable[[Path], None]) -> None:
        """A file that exists when it is whole. If it cannot be written, training goes on without it."""
        path = folder / STEP_FOLDER.format(step=step) / f"rank{self.rank}_{name}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                write(file)
            logger.info(f"Wrote {path}")
        except OSError as error:
            logger.warning(f"{path} was not written: {error}")


def write_trace(profiler: profile, path: Path) -> None:
    """What was recorded, as a gzipped Chrome trace whose phases are in a row of their own."""
    raw = path.with_name(f"{path.name}.raw")
    try:
        profiler.export_chrome_trace(str(raw))
        with raw.open() as lines, gzip.open(path, "wt", compresslevel=3) as out:
            out.writelines(with_row(lines))
    finally:
        raw.unlink(missing_ok=True)


def with_row(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a trace, which may be too large to be read as a whole."""
    event: dict[str, str] = {}
    for line in lines:
        if found := FIELD.match(line):
            event[found[1]] = found[2]
            if found[1] == "cat":
                event = {"cat": found[2]}
            elif found[1] == "tid" and event.get("cat") == "user_annotation" and event.get("name") in NAMES:
                line = line.replace(found[2], str(ROW))
        yield line
        if line.rstrip().endswith('"traceEvents": ['):
            yield from (f"{json.dumps(row)},\n" for row in row_names())


def row_names() -> list[dict[str, Any]]:
    """Trace events that name the phases' row, and put it above the threads."""
    row = {"ph": "M", "ts": 0, "pid": os.getpid(), "tid": ROW}
    return [
        {**row, "name": "thread_name", "args": {"name": "phases"}},
        {**row, "name": "thread_sort_index", "args": {"sort_index": -1}},
    ]
