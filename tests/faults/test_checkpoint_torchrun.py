"""Whole training runs under torchrun, killed while they save, and on a disk that fills."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.cases import EP2
from tests.distributed.harness import REPO, SMALL_FP32, torchrun
from tests.distributed.test_train import kill_all_with
from titan_moe.checkpoint_folder import steps

pytestmark = pytest.mark.slow
ARGUMENTS = [*SMALL_FP32, EP2, "--checkpoint.enable", "--checkpoint.interval=1", "--lr_scheduler.total_steps=1000"]
ARGUMENTS += ["--validation.enable=false"]


def losses(folder: Path) -> list[tuple[int, int, float]]:
    """(attempt, step, loss) of every logged step; the last line of a killed run may be cut."""
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found.append((record["attempt"], record["step"], record["loss"]))
    return found


def test_torchrun_killed_10_times_while_saving(tmp_path):
    """Two ranks with EP = 2, a checkpoint after every step. Every start goes on from the newest that was published,
    with the losses of a run that nobody killed."""
    folder, moments, resumed_from = tmp_path / "killed", random.Random(1), [0]
    checkpoints = folder / "checkpoint"
    for i in range(10):
        mode = ("disabled", "async")[i % 2]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
        command += [
            *ARGUMENTS,
            f"--checkpoint.async_mode={mode}",
            "--training.steps=1000",
            f"--job.dump_folder={folder}",
        ]
        log = (tmp_path / f"log-{i}").open("w")
        job = subprocess.Popen(command, cwd=REPO, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 300
            while not (found := steps(checkpoints)) or found[0] < resumed_from[-1] + 2:
                assert job.poll() is None and time.monotonic() < deadline, (tmp_path / f"log-{i}").read_text()[-4000:]
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.5))
        finally:
            kill_all_with(str(folder))
            job.wait()
        resumed_from.append(steps(checkpoints)[0])
    last = f"--training.steps={resumed_from[-1] + 1}"
    finished = torchrun(2, "train.py", *ARGUMENTS, last, f"--job.dump_folder={folder}")
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    uninterrupted = torchrun(2, "train.py", *ARGUMENTS, last, f"--job.dump_folder={tmp_path / 'whole'}")
    assert uninterrupted.returncode == 0, uninterrupted.stdout[-4000:] + uninterrupted.stderr[-4000:]
    expected = {step: loss for _, step, loss in losses(tmp_path / "whole")}
    first: dict[int, int] = {}
    for attempt, step, loss in losses(folder):
        first.setdefault(attempt, step)
        assert step not in expected or loss == expected[step], (attempt, step)
    assert [first[attempt] for attempt in range(1, 12)] == [step + 1 for step in resumed_from]


def test_a_disk_that_fills_ends_the_run_which_goes_on_once_there_is_room(tmp_path):
    """All checkpoints are kept, about 5 MB each, on a disk of 16 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if (mounted := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"may not mount a tmpfs here: {mounted.stderr}")
    try:
        run = [*ARGUMENTS, "--checkpoint.keep_latest_k=0", "--training.steps=4", f"--job.dump_folder={disk / 'run'}"]
        full = torchrun(2, "train.py", *run, "--checkpoint.async_mode=async")
        said = full.stdout + full.stderr
        assert full.returncode != 0
        assert "could not be written; rank 0: [Errno 28] No space left on device: the checkpoint takes" in said, said
        there = steps(disk / "run" / "checkpoint")
        assert there and not list((disk / "run" / "checkpoint").glob(".step-*"))
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        again = torchrun(2, "train.py", *run)
        assert again.returncode == 0, again.stdout[-4000:] + again.stderr[-4000:]
        assert steps(disk / "run" / "checkpoint") == [4, 3, 2, 1]
        second = [step for attempt, step, _ in losses(disk / "run") if attempt == 2]
        assert second[0] == there[0] + 1
    finally:
        subprocess.run(["umount", disk], check=True)
