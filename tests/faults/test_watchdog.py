"""Ranks that hang, freeze or die: they are named, the run ends with a failure in time, and goes on from its newest
checkpoint."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import titan_moe.runtime

import pytest

from tests.distributed.harness import REPO
from tests.faults.started import STEPS, Started, uninterrupted
from titan_moe import watchdog
from titan_moe.config import Config
from titan_moe.watchdog import SHARE, SILENT, Judge, Report, inside_collective, missing, place

LIMIT, HANG = 100.0, 1000.0


def report(count: int, issued: int, *, waits: bool = False, more: dict[str, int] | None = None) -> Report:
    return Report(count, {"0/0": issued, **(more or {})}, waits, "train.py:7 in train_step", "node-1")


def verdict(seconds: float, *reports: Report | None, judge: Judge | None = None) -> str | None:
    """What is said about reports of ranks that live, after so many seconds without a collective."""
    judge = judge or Judge(0.0, len(reports), LIMIT, HANG)
    assert judge.verdict(1.0, reports) is None
    judge.heard, judge.asked = [1.0 + seconds] * len(reports), 1.0 + seconds
    return judge.verdict(1.0 + seconds, reports)


def test_who_has_issued_fewer_collectives_is_named_before_the_collectives_limit():
    reports = [report(1, 9), report(1, 8), report(1, 9)]
    assert verdict(SHARE * LIMIT - 1, *reports) is None
    text = verdict(SHARE * LIMIT + 1, *reports)
    assert text is not None and SHARE * LIMIT + 1 < LIMIT
    assert (
        text
        == "The other ranks have waited 81 s for rank 1 on node-1, at train.py:7 in train_step, which did not arrive"
    )


def test_who_does_something_else_is_named_where_all_have_issued_the_same():
    """As the stages of a pipeline that wait for one of them."""
    assert "for rank 2 on" in str(verdict(81, report(1, 9, waits=True), report(1, 9, waits=True), report(1, 9)))
    assert verdict(81, report(1, 9, waits=True), report(1, 9, waits=True)) is None  # on a device, or a slow network
    assert verdict(81, report(1, 9), report(1, 9)) is None  # both save, or compile


def test_ranks_are_compared_with_their_own_groups():
    """A group of four and two of two ranks, which have the same names, as those of a mesh do."""
    reports = [report(1, 4, more={"1/0": 7}), report(1, 4, more={"1/0": 7})]
    reports += [report(1, 4, more={"1/2": 9}), report(1, 4, more={"1/2": 8})]
    assert missing(reports) == [3]
    assert missing([report(1, 4), report(1, 4)]) == []


def test_any_progress_of_any_rank_starts_the_time_anew():
    judge = Judge(0.0, 2, LIMIT, HANG)
    for now in range(0, 2000, 5):
        assert judge.verdict(float(now), [report(now, now // 50), report(now, 3)]) is None
    judge.asked = 2080.0
    assert "rank 1" in str(judge.verdict(2080.0, [report(-2, 39), report(-2, 3)]))


def test_no_progress_at_all_ends_the_run_at_last():
    reports = [report(1, 9), report(1, 9)]
    assert verdict(HANG - 1, *reports) is None
    assert str(verdict(HANG + 1, *reports)).startswith(
        "No progress for 1001 s (comm.hang_seconds): rank 0 on node-1, at"
    )


def test_a_rank_that_does_not_report_is_gone_even_if_it_never_did():
    """In time: with the way to the exit, the run ends within a minute."""
    judge = Judge(0.0, 3, LIMIT, HANG)
    for now in range(0, int(SILENT) + 1, 5):
        assert judge.verdict(float(now), [report(now, now), report(min(now, 10), now), None]) is None
    text = judge.verdict(SILENT + 5, [report(45, 45), report(10, 45), None])
    assert text == "No sign of life for 40 s from rank 2: the process or its node is gone, or frozen"
    text = judge.verdict(SILENT + 15, [report(55, 45), report(10, 45), report(1, 1)])
    assert "rank 1 on node-1" in str(text) and "rank 2" not in str(text)
    assert SILENT + 2 * watchdog.INTERVAL + 2 * watchdog.INTERVAL <= 60


def test_a_job_that_was_frozen_as_a_whole_goes_on():
    """Suspended by the scheduler, or with its machine: rank 0 sees old reports only, and has not been there itself."""
    judge = Judge(0.0, 2, LIMIT, HANG)
    assert judge.verdict(5.0, [report(1, 9, waits=True), report(1, 8)]) is None
    assert judge.verdict(3005.0, [report(1, 9, waits=True), report(1, 8)]) is None
    silent = [judge.verdict(now, [report(2, 9), report(1, 9)]) for now in (3010.0, 3025.0, 3040.0, 3050.0)]
    assert silent[:3] == [None] * 3 and "from rank 1" in str(silent[3]), "who stays frozen is found all the same"


def test_many_ranks_fit_into_a_line():
    judge = Judge(0.0, 1024, LIMIT, HANG)
    assert [judge.verdict(now, [None] * 1024) for now in (SILENT / 2, SILENT)] == [None, None]
    gone = judge.verdict(SILENT + 1, [None] * 1024)
    assert str(gone).count("rank ") == 8 and "and 1,016 more" in str(gone)


def test_where_a_thread_is():
    frame = sys._getframe()
    assert not inside_collective(frame) and inside_collective(None) is False
    assert place(frame).startswith("test_watchdog.py:") and place(None) == "its end"
    assert watchdog.TORCH_DISTRIBUTED.endswith("torch/distributed")


def test_a_debugger_may_hold_a_process_that_nobody_waits_for(monkeypatch):
    """Plain `python train.py` has no watchdog. One process under torchrun has: its data may hang."""
    started: list[tuple] = []
    monkeypatch.setattr(watchdog, "Watchdog", lambda *args: started.append(args))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for ranks, torchrun, expected in ((1, None, 0), (2, None, 1), (1, "run", 1)):
        monkeypatch.setattr(titan_moe.runtime.dist, "get_world_size", lambda ranks=ranks: ranks)
        if torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", torchrun)
        started.clear()
        titan_moe.runtime.start_watchdog(Config(), REPO)
        assert len(started) == expected


def test_the_flight_recorder_is_written_where_nccl_would(tmp_path, monkeypatch):
    """As far as there is one without a GPU: an empty one."""
    monkeypatch.setattr(titan_moe.runtime, "DEVICE_TYPE", "cuda")
    watchdog.dump_flight_recorder(3)  # no folder was named, as with comm.trace_buf_size = 0
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    watchdog.dump_flight_recorder(3)
    trace = pickle.loads((tmp_path / "rank_3").read_bytes())
    assert "version" in trace and trace["entries"] == []


# Two ranks without a model: rank 1 does not come, or something holds its interpreter.
JOB = """
import ctypes, signal, sys, time
from datetime import timedelta
from pathlib import Path
import titan_moe.runtime as runtime
import torch
import torch.distributed as dist
from titan_moe import watchdog
folder, fault = Path(sys.argv[1]), sys.argv[2]
watchdog.SILENT, watchdog.STARVED = (5.0, 12.0) if fault != "hangs" else (40.0, 50.0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as run_train.sh does: time for the stack of who is held
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
half = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
runtime._watchdog = watchdog.Watchdog(folder, (60, 20 if fault != "hangs" else 5), 100)
runtime._watchdog.training()
for _ in range(3):
    dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(3), group=half)
time.sleep(3)  # both have reported
if dist.get_rank() == 1:
    if fault == "hangs":
        time.sleep(1000)
    elif fault == "holds":
        ctypes.PyDLL(None).sleep(1000)  # a call that keeps the interpreter
if fault != "none":
    dist.all_reduce(torch.ones(3))
runtime.leave_process_group()
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, float, str, dict[str, str]]]:
    """By fault: exit status, seconds, output, and what each rank wrote into the run folder. They run side by side."""
    root = tmp_path_factory.mktemp("watchdog")
    (root / "job.py").write_text(JOB)
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
    ]
    start, jobs, found = time.monotonic(), {}, {}
    for fault in ("hangs", "holds", "none"):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs[fault] = subprocess.Popen([*torchrun, str(root / "job.py"), str(root / fault), fault], env=env, **pipes)
    for fault, job in jobs.items():
        output, _ = job.communicate(timeout=120)
        stacks = {path.name: path.read_text() for path in (root / fault / "stacks").glob("*")}
        found[fault] = job.returncode, time.monotonic() - start, output, stacks
    return found


def stands_at(text: str) -> str:
    line = next(number for number, line in enumerate(JOB.splitlines(), start=1) if text in line)
    return f'job.py", line {line} in <module>'


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_all_write_their_stacks(faults):
    status, _, output, stacks = faults["hangs"]
    host = socket.gethostname()
    assert status == 1, output
    named = f"s for rank 1 on {host}, at job.py:"
    assert named in output and "Timed out waiting" not in output, output
    assert "The stacks of all ranks are in" in output
    assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
    assert named in stacks["rank-0.txt"] and "in all_reduce" in stacks["rank-0.txt"]
    assert named in stacks["rank-1.txt"] and stands_at("    time.sleep(1000)") in stacks["rank-1.txt"]


@pytest.mark.slow
def test_a_rank_whose_interpreter_is_held_is_named_and_still_writes_its_stack(faults):
    status, _, output, stacks = faults["holds"]
    assert status == 1, output
    assert "No sign of life for 5 s from rank 1 on " in output
    assert stands_at("PyDLL(None).sleep") in stacks["rank-1.txt"], stacks


@pytest.mark.slow
def test_a_run_that_ends_by_itself_leaves_nothing(faults):
    status, _, output, stacks = faults["none"]
    assert (status, stacks) == (0, {}), output


@pytest.mark.slow
def test_a_hung_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path):
    """Rank 1 hangs in step 6; a checkpoint of step 4 is there. Restarted, it ends as one that nothing happened to."""
    saving = ["--checkpoint.enable", "--checkpoint.interval=2", "--comm.train_timeout_seconds=20"]
    run = Started(tmp_path, *saving, f"--training.steps={STEPS}", HANGS="1", MAX_RESTARTS="1")
    assert run.status(240) == 0, run.output[-6000:]
    assert "have waited 16 s for rank 1 on " in run.output and ", at train.py:" in run.output
    assert sorted(path.name for path in (run.folder / "stacks").glob("*")) == ["rank-0.txt", "rank-1.txt"]
    assert "Training starts at step 5" in run.output
    assert run.losses == uninterrupted()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path):
    """kill -9 of a rank, with a restart: the run ends as if nothing were."""
    saving = ["--checkpoint.enable", "--checkpoint.interval=2"]
    run = Started(tmp_path, *saving, f"--training.steps={STEPS}", MAX_RESTARTS="1")
    run.until_step(5)
    run.kill(run.ranks()[1])
    assert run.status(240) == 0, run.output[-6000:]
    assert run.output.count("Training starts at step") == 2 and run.losses == uninterrupted()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_within_a_minute(tmp_path):
    run = Started(tmp_path, "--training.steps=100")
    run.until_step(3)
    killed = time.monotonic()
    run.kill(run.ranks()[1])
    assert run.status(60) == 1 and time.monotonic() - killed < 60


@pytest.mark.slow
def test_a_frozen_rank_is_named_within_a_minute(tmp_path):
    """As a node that the network has lost: its processes are there for nobody."""
    run = Started(tmp_path, "--training.steps=100")
    run.until_step(3)
    frozen = time.monotonic()
    os.kill(run.ranks()[1], signal.SIGSTOP)
    run.until(lambda: "No sign of life for 40 s from rank 1 on " in run.output, 60)
    assert time.monotonic() - frozen < 60
    assert run.status(60) == 1  # torchrun waits 30 s for the frozen process before it kills it
