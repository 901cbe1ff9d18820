"""kill -9 while checkpoints are saved: what is found afterwards is whole, and is the newest that was published."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.checkpoint_run import Job, TinyRun
from titan_moe.checkpoint_folder import steps

MODES = ("disabled", "async")


def save_for_ever(tell: Callable, folder: Path, async_mode: str) -> None:
    """Resume from the newest, tell what came back, and save every step."""
    run = TinyRun(folder, async_mode=async_mode)
    run.manager.load()
    tell(sorted(run.steps()))
    step = run.progress.step
    while True:
        step += 1
        run.save(step)
        tell(step)


@pytest.mark.parametrize("times", [24, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_again_and_again_while_saving(tmp_path, times):
    """Runs of one and of two ranks, saving in the foreground and in the background, each killed at a random moment of
    one of its first saves and followed by the next, which comes back with the newest step-N there is, whole: each value
    of each rank is N's."""
    random_, folder, newest, torn = random.Random(1), tmp_path / "run", 0, 0
    for i in range(times + 1):
        ranks = 2 if i % 4 == 3 else 1
        job = Job(tmp_path / "store", save_for_ever, folder, MODES[i // 2 % 2], world_size=ranks)
        assert job.hear() == [[newest]] * ranks, f"start {i}"
        if i < times:
            for _ in range(random_.randint(1, 2)):
                begin = time.monotonic()
                job.hear()
            time.sleep(random_.uniform(0, 1.2) * (time.monotonic() - begin))
        job.kill()
        found = steps(folder / "checkpoint")
        assert not found or found[0] >= newest, "a published checkpoint is gone"
        newest = found[0] if found else 0
        torn += any((folder / "checkpoint").glob(".step-*.tmp"))
    assert torn >= 0.3 * times, f"only {torn} of {times} left a half-written checkpoint: the rest shows little"
    assert newest >= 0.6 * times
