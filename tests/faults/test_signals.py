"""Signals to run_train.sh: a run that is asked to stop loses nothing, one that is told twice ends at once, and whatever
is killed leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.harness import REPO
from tests.faults.started import STEPS, Started, uninterrupted
from titan_moe.supervise import SAME_SIGNAL_SECONDS

SAVING = ["--checkpoint.enable", "--checkpoint.interval=100", "--checkpoint.last_save_model_only"]


def stop_and_resume(tmp_path: Path, seconds: float, slow_ranks: str = "01", *args: str) -> None:
    """SIGTERM after step 2, while a save takes `seconds`, once to the script and once more to all of its processes as
    SLURM does; then the same command again."""
    slow = {"SLOW_SAVE": str(seconds), "SLOW_RANKS": slow_ranks}
    first = Started(tmp_path, *SAVING, "--training.steps=100", *args, **slow)
    first.until_step(2)
    asked = time.monotonic()
    first.signal(signal.SIGTERM)
    for pid in first.processes():
        os.kill(pid, signal.SIGTERM)
    assert first.status(seconds + 60) == 75, first.output[-6000:]
    assert time.monotonic() - asked > seconds
    stopped = max(first.losses)
    assert f"Stopped after step {stopped}, as asked to (SIGTERM on " in first.output and stopped < STEPS
    assert [path.name for path in (first.folder / "checkpoint").glob("step-*")] == [f"step-{stopped}"]
    assert not (first.folder / "stop").exists()

    (first.folder / "stop").touch()  # as a killed attempt leaves it
    second = Started(tmp_path, *SAVING, f"--training.steps={STEPS}")
    assert second.status() == 0, second.output[-6000:]
    assert f"Training starts at step {stopped + 1}" in second.output
    assert second.losses == uninterrupted()


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_bit_for_bit(tmp_path):
    """Asked in the middle of its steps. The checkpoint is a whole one, though the last may hold only weights."""
    stop_and_resume(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_may_take_longer_than_torchrun_waits(tmp_path, mode):
    """And than ranks wait for each other in training: one alone has a slow disk."""
    stop_and_resume(tmp_path, 45, "1", "--comm.train_timeout_seconds=30", f"--checkpoint.async_mode={mode}")


@pytest.mark.slow
def test_asked_before_the_first_step_and_without_checkpoints(tmp_path):
    """A stop during the set-up leaves the first step to be done; a run that saves nothing ends as the signal says."""
    early = Started(tmp_path / "early", *SAVING)
    early.until(lambda: (early.folder / "run.json").exists())
    early.signal(signal.SIGUSR1)
    assert early.status() == 75 and "Stopped after step 1," in early.output, early.output[-6000:]
    unsaved = Started(tmp_path / "unsaved", "--training.steps=100")
    unsaved.until_step(2)
    (unsaved.folder / "stop").touch()  # by hand
    assert unsaved.status() == 128 + signal.SIGTERM and "nothing is saved" in unsaved.output


@pytest.mark.slow
def test_a_second_signal_ends_a_save(tmp_path):
    run = Started(tmp_path, *SAVING, "--training.steps=100", SLOW_SAVE="600")
    run.until_step(2)
    run.signal(signal.SIGINT)
    run.until(lambda: "Saving" in run.output)
    time.sleep(2 * SAME_SIGNAL_SECONDS)  # on a busy machine the first may be heard late
    run.signal(signal.SIGINT)
    assert run.status(60) == 128 + signal.SIGINT
    assert not list((run.folder / "checkpoint").glob("step-*/.metadata"))


# ---------------------------------------------------------------------------------------------------------------------
# The chain of processes, with a stand-in for torch: no 6 s for its import

# As torch.distributed.run: a worker in a session of its own; it is ended by SIGTERM when the file "close" appears.
TORCHRUN = """
import pathlib, subprocess, sys, time
def main():
    folder = pathlib.Path(sys.argv[1])
    worker = subprocess.Popen([sys.executable, str(folder / "worker.py"), str(folder)], start_new_session=True)
    while worker.poll() is None:
        if (folder / "close").exists():
            worker.terminate()
        time.sleep(0.02)
    sys.exit(worker.returncode != 0)
"""

# With LEAVES, it leaves a process that nothing but the supervisor can find. With ANSWER, it does as it is asked.
WORKER = """
import os, pathlib, subprocess, sys, time
import titan_moe.processes
from titan_moe.stop_file import Outcome, asked
folder = pathlib.Path(sys.argv[1])
if "LEAVES" in os.environ:
    subprocess.Popen(["sh", "-c", "sleep 1000 & echo $! > left"], cwd=folder, start_new_session=True).wait()
left = (folder / "left").read_text() if "LEAVES" in os.environ else ""
(folder / "pids").write_text(f"{os.getppid()} {os.getpid()} {left}")
answer = os.environ.get("ANSWER")
while not (answer and asked(folder)):
    time.sleep(0.02)
Outcome(answer == "saved").write()
"""


class Chain:
    """A supervisor with its torchrun and worker, and a process that these have left."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        module = folder / "torch" / "distributed"
        module.mkdir(parents=True)
        for package in (module.parent, module):
            (package / "__init__.py").touch()
        (module / "run.py").write_text(TORCHRUN)
        (folder / "worker.py").write_text(WORKER)
        path = f"{folder}:{REPO}"
        command = [sys.executable, "-m", "titan_moe.supervise", str(folder), str(folder)]
        env = {**os.environ, "PYTHONPATH": path, **env}
        self.supervisor = subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
        try:
            self.wait_for(lambda: (folder / "pids").exists() and (folder / "pids").read_text())
        except AssertionError:
            self.supervisor.kill()
            raise
        self.others = [int(pid) for pid in (folder / "pids").read_text().split()]
        self.torchrun, self.worker = self.others[:2]

    def wait_for(self, condition, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def status(self) -> int:
        status = self.supervisor.wait(20)
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.others)
        return status


@pytest.mark.parametrize(("answer", "status"), [("saved", 75), ("not saved", 128 + signal.SIGUSR2)])
def test_a_signal_asks_by_a_file_and_the_answer_is_the_status(tmp_path, answer, status):
    """The same signal to all processes at once is one; torchrun and its workers do not die of it."""
    chain = Chain(tmp_path, ANSWER=answer)
    for pid in (chain.worker, chain.torchrun, chain.supervisor.pid, chain.supervisor.pid):
        os.kill(pid, signal.SIGUSR2)
    assert chain.status() == status
    assert not (tmp_path / "stop").exists()


def test_a_stop_outlives_the_terminal_or_pipe_that_it_is_told_to(tmp_path):
    """Ctrl-C ends the `tee` behind `2>&1 |` too, and a terminal that is closed sends SIGHUP."""
    chain = Chain(tmp_path, ANSWER="saved")
    assert chain.supervisor.stderr is not None
    chain.supervisor.stderr.close()
    chain.supervisor.send_signal(signal.SIGHUP)
    assert chain.status() == 75


def test_a_second_signal_ends_everything_at_once(tmp_path):
    chain = Chain(tmp_path, LEAVES="yes")
    assert len(chain.others) == 3
    chain.supervisor.send_signal(signal.SIGTERM)
    chain.wait_for((tmp_path / "stop").exists)
    (tmp_path / "stop").unlink()  # as another node's script does, which started only now
    chain.wait_for((tmp_path / "stop").exists)
    time.sleep(2 * SAME_SIGNAL_SECONDS)
    start = time.monotonic()
    chain.supervisor.send_signal(signal.SIGTERM)
    assert chain.status() == 128 + signal.SIGTERM
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_second_signal_after_the_save_loses_nothing(tmp_path):
    """The run has ended, and the supervisor waits for what it has left."""
    chain = Chain(tmp_path, ANSWER="saved", LEAVES="yes")
    chain.supervisor.send_signal(signal.SIGTERM)
    chain.wait_for(lambda: not Path(f"/proc/{chain.torchrun}").exists())
    time.sleep(2 * SAME_SIGNAL_SECONDS)
    chain.supervisor.send_signal(signal.SIGTERM)
    assert chain.status() == 75


def test_torchrun_can_end_its_workers_and_a_failure_is_one(tmp_path):
    chain = Chain(tmp_path, ANSWER="saved")
    os.kill(chain.worker, signal.SIGTERM)  # from anybody else: nothing
    time.sleep(0.3)
    assert Path(f"/proc/{chain.worker}").exists()
    (tmp_path / "close").touch()
    assert chain.status() == 1


@pytest.mark.parametrize("who", ["supervisor", "torchrun"])
def test_what_is_killed_takes_those_below_with_it(tmp_path, who):
    chain = Chain(tmp_path)
    os.kill(chain.supervisor.pid if who == "supervisor" else chain.torchrun, signal.SIGKILL)
    if who == "torchrun":
        assert chain.status() == 128 + signal.SIGKILL
        return
    chain.supervisor.wait(20)
    chain.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in chain.others))


def test_an_ignored_hangup_stays_ignored(tmp_path):
    """nohup ./run_train.sh: the terminal may go."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        chain = Chain(tmp_path, ANSWER="saved")
    finally:
        signal.signal(signal.SIGHUP, ignored)
    chain.supervisor.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert not (tmp_path / "stop").exists()
    chain.supervisor.send_signal(signal.SIGTERM)
    assert chain.status() == 75
