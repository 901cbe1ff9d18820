"""Ends a run that hangs, and says which rank it is that the others wait for.

A rank that hangs makes all others wait, each in a collective; what they then say, after the collective's time limit, is
that they waited. So a thread in every rank reports to torchrun's key-value store, every few seconds: how many
collectives its main thread has issued in each process group, where that thread is, and that the process lives. Rank 0's
thread reads all reports (1,024 of some 300 bytes take it milliseconds) and ends the run when

- a rank has not reported for SILENT seconds: its node is gone, or something holds its interpreter;
- no rank has issued a collective for most of a collective's time limit, and some have issued fewer than others of their
  group, or do something else while others wait: these have not arrived;
- no rank has issued one for comm.hang_seconds, for whatever reason.

It names the ranks on the console and raises an alarm in the store. Every rank that sees it writes its Python stacks to
<run folder>/stacks/rank-N.txt, and NCCL's flight recorder where there is one, and exits with status 1, a failure for
torchrun (MAX_RESTARTS). Where something holds the interpreter from the thread itself, a thread of faulthandler, which
needs none, writes the stacks and exits. Nothing here is on the path of a step.

Ranks may wait for long while a checkpoint is saved, for the one with the slowest disk or the most to write: that takes
comm.hang_seconds to be called a hang.

What it cannot see: on GPUs a collective counts as issued when the host has queued it. A device that hangs in one makes
no rank be behind; then NCCL's own watchdog and the flight recorder tell. Sends and receives of a pipeline are not
counted, as each stage has its own number; who waits in one is seen by where it is.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any, cast

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world
from torchtitan.tools.logging import logger

from titan_moe.mistakes import OURS, tell_torchrun

SILENT = 40.0
"""Seconds without a report after which a rank counts as gone; with the way to the exit, under a minute"""
STARVED = 50.0
"""Seconds that something may hold the interpreter before faulthandler's thread ends the process"""
INTERVAL = 5.0
"""Seconds between reports, at most"""
SHARE = 0.8
"""Of a collective's time limit, after which the others may not be kept waiting: it would end them without a name"""
TORCH_DISTRIBUTED = str(Path(dist.__file__).parent)
NO_COLLECTIVES = tuple(str(Path(TORCH_DISTRIBUTED, part)) for part in ("checkpoint", "elastic"))
SAVES = str(Path(TORCH_DISTRIBUTED, "checkpoint", "state_dict_saver.py"))


@dataclass(frozen=True)
class Report:
    """What a rank says about itself."""

    count: int
    """Reports so far"""
    groups: dict[str, int]
    """Collectives that its main thread has issued, by process group"""
    waits: bool
    """Whether that thread is inside a collective"""
    at: str
    """Where it is"""
    host: str


class Judge:
    """Rank 0's view of all ranks. `limit`: seconds that a collective may take; `hang_seconds`: see the top."""

    def __init__(self, now: float, world_size: int, limit: float, hang_seconds: float) -> None:
        self.limit, self.hang_seconds = limit, hang_seconds
        self.asked, self.heard, self.counts = now, [now] * world_size, [-1] * world_size
        self.moved, self.groups = now, [{}] * world_size

    def verdict(self, now: float, reports: Sequence[Report | None]) -> str | None:
        """Why the run has to end, if it has to; from the newest report of each rank, None before its first."""
        if (away := now - self.asked) > SILENT / 2:  # rank 0 was frozen, and others perhaps with it: that time is none
            self.moved, self.heard = self.moved + away, [heard + away for heard in self.heard]
        self.asked = now
        for rank, report in enumerate(reports):
            if report is not None and report.count != self.counts[rank]:
                self.counts[rank], self.heard[rank] = report.count, now
        if silent := [rank for rank, heard in enumerate(self.heard) if now - heard > SILENT]:
            what = _named(silent, reports)
            return f"No sign of life for {SILENT:.0f} s from {what}: the process or its node is gone, or frozen"
        groups = [{} if report is None else report.groups for report in reports]
        if groups != self.groups:
            self.moved, self.groups = now, groups
        still = now - self.moved
        if still > SHARE * self.limit and (late := missing(reports)):
            return f"The other ranks have waited {still:.0f} s for {_named(late, reports)}, which did not arrive"
        if still > self.hang_seconds:
            everyone = _named(missing(reports) or range(len(reports)), reports)
            return f"No progress for {still:.0f} s (comm.hang_seconds): {everyone}"
        return None


def missing(reports: Sequence[Report | None]) -> list[int]:
    """Ranks that have not arrived where others are: they have issued fewer collectives than others of a group; or,
    where all have issued the same, they do something else while others are inside one."""
    there = {rank: report for rank, report in enumerate(reports) if report is not None}
    most: dict[str, int] = {}
    for report in there.values():
        for group, issued in report.groups.items():
            most[group] = max(issued, most.get(group, 0))
    late = [rank for rank, r in there.items() if any(issued < most[group] for group, issued in r.groups.items())]
    if not late and any(report.waits for report in there.values()):
        late = [rank for rank, report in there.items() if not report.waits]
    return late


def _named(ranks: Sequence[int], reports: Sequence[Report | None], most: int = 8) -> str:
    def one(rank: int) -> str:
        report = reports[rank]
        return f"rank {rank}" if report is None else f"rank {rank} on {report.host}, at {report.at}"

    more = f", and {len(ranks) - most:,} more" if len(ranks) > most else ""
    return "; ".join(one(rank) for rank in ranks[:most]) + more


# ---------------------------------------------------------------------------------------------------------------------
# In each rank


class Watchdog:
    """One per process. All ranks start it, with a process group.

    Arguments:
        limits: seconds that a collective may take, at first and when `training` was called.
        hang_seconds: seconds without a collective of any rank, after which the run ends.
    """

    def __init__(self, folder: Path, limits: tuple[float, float], hang_seconds: float) -> None:
        self.rank, self.world_size, self.limits = dist.get_rank(), dist.get_world_size(), limits
        self.interval = min(INTERVAL, *(limit / 20 for limit in limits))
        self.main_thread = threading.get_ident()
        store = _get_default_store().clone()  # a connection of its own: the other may be waiting for something
        store.set_timeout(timedelta(seconds=SILENT))
        # The store may be the launcher's, and hold the alarm of the attempt before.
        self.store = dist.PrefixStore(f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self.file: IO[str] = _stacks_file(folder, self.rank)
        self.judge = Judge(time.monotonic(), self.world_size, limits[0], hang_seconds)
        self.count, self.answered = 0, time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def training(self) -> None:
        """The first step is over."""
        self.judge.limit = self.limits[1]

    def stop(self) -> None:
        """The run ends by itself."""
        self.ended.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        path = Path(self.file.name)
        if path.exists() and path.stat().st_size == 0:
            path.unlink()

    def _watch(self) -> None:
        wait = 0.0  # at first not at all: rank 0 is to know the host of a rank that is lost soon
        while not self.ended.wait(wait):
            wait = self.interval
            faulthandler.dump_traceback_later(STARVED, exit=True, file=self.file)
            report = self._report()
            try:
                alarm = self._look(report)
                self.answered = time.monotonic()
            except RuntimeError as error:  # the store: rank 0's node, or its torchrun, may be gone
                if time.monotonic() - self.answered < SILENT:
                    continue
                alarm = f"No answer for {SILENT:.0f} s from torchrun's store, on the node of rank 0: {error}"
            if alarm:
                self._end(alarm)

    def _look(self, report: Report) -> str | None:
        """Tell the store, and learn from it whether the run has to end."""
        self.store.set(str(self.rank), json.dumps(asdict(report)))
        if self.rank == 0:
            if verdict := self.judge.verdict(time.monotonic(), self._reports()):
                self.store.set("alarm", verdict)
        return self.store.get("alarm").decode() if self.store.check(["alarm"]) else None

    def _reports(self) -> list[Report | None]:
        keys = [str(rank) for rank in range(self.world_size)]
        if self.store.check(keys):
            return [Report(**json.loads(report)) for report in self.store.multi_get(keys)]
        return [Report(**json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]

    def _report(self) -> Report:
        self.count += 1
        groups = {
            f"{name}/{dist.get_process_group_ranks(group)[0]}": cast(Any, group)._get_sequence_number_for_group()
            for group, name in list(_world.pg_names.items())
            if group.group_desc not in ("mesh_pp", runtime.SAVING)  # the first has sends and receives
            and dist.get_backend(group) != "fake"  # torchtitan's, for groups of one rank
        }
        frame = sys._current_frames().get(self.main_thread)
        return Report(self.count, groups, inside_collective(frame), place(frame), socket.gethostname())

    def _end(self, alarm: str) -> None:
        """Leave all that helps to find the reason, and end this process."""
        print(
            f"{time.strftime('%F %T')}, rank {self.rank} on {socket.gethostname()}: {alarm}\n",
            file=self.file,
            flush=True,
        )
        faulthandler.dump_traceback(self.file, all_threads=True)
        dump_flight_recorder(self.rank)
        if self.rank == 0:
            text = f"{alarm}. The stacks of all ranks are in {Path(self.file.name).parent}"
            logger.error(text)
            tell_torchrun(text)
        time.sleep(2 * self.interval)  # until the others have seen it too: torchrun ends them when one has ended
        os._exit(1)


def inside_collective(frame: FrameType | None) -> bool:
    """Whether a thread at `frame` is inside one of torch's collectives, or waits for one, but for those of a save."""
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    nearest = files[:4]  # operators and decorators lie between
    inside = any(file.startswith(TORCH_DISTRIBUTED) and not file.startswith(NO_COLLECTIVES) for file in nearest)
    return inside and SAVES not in files


def place(frame: FrameType | None) -> str:
    """The innermost line of this code at `frame`, or else of any."""
    inner = frame
    while frame is not None:
        if any(Path(frame.f_code.co_filename).is_relative_to(ours) for ours in OURS):
            inner = frame
            break
        frame = frame.f_back
    if inner is None:
        return "its end"
    return f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno} in {inner.f_code.co_name}"


def dump_flight_recorder(rank: int) -> None:
    """Write what NCCL's flight recorder has of the last collectives to where NCCL would have it (comm_traces)."""
    path = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    if path is None or runtime.DEVICE_TYPE != "cuda":
        return
    Path(f"{path}{rank}").write_bytes(cast(Any, torch._C._distributed_c10d)._dump_nccl_trace())


def _stacks_file(folder: Path, rank: int) -> IO[str]:
    (folder / "stacks").mkdir(parents=True, exist_ok=True)
    return (folder / "stacks" / f"rank-{rank}.txt").open("a")
