"""Checkpoints that are not as they were written: refused, with the file named; an older one is taken, or none."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.faults.checkpoint_run import Job, TinyRun, join
from titan_moe import checkpoint_folder, checkpoint_io
from titan_moe.checkpoint import load
from titan_moe.checkpoint_folder import MANIFEST, Damaged, File, Manifest, read_manifest, steps
from titan_moe.checkpoint_manager import VerifiedCheckpoints


def save_1_and_2(tell: Callable, folder: Path) -> None:
    run = TinyRun(folder)
    run.save(1)
    run.save(2)
    run.manager.close()
    tell("saved")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run folder with checkpoints of steps 1 and 2, by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    job = Job(folder / "store", save_1_and_2, folder, world_size=2)
    assert job.hear() == ["saved"] * 2
    job.end()
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Iterator[None]:
    """This process is a process group."""
    join(0, 1, str(tmp_path_factory.mktemp("group") / "store"))
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(saved, one_rank, tmp_path) -> Path:
    """A copy of the run folder's checkpoints, and a process group to load them in."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def flip(path: Path, at: float) -> None:
    """One bit, at this part of the file."""
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 1
    path.write_bytes(content)


def cut(path: Path, to: float) -> None:
    """The end off, one byte at least."""
    os.truncate(path, min(int(to * path.stat().st_size), path.stat().st_size - 1))


DAMAGE: dict[str, Callable[[Path], None]] = {
    **{f"a byte at {at} is another": lambda path, at=at: flip(path, at) for at in (0, 0.3, 0.7, 1)},
    **{f"cut to {to}": lambda path, to=to: cut(path, to) for to in (0, 0.5, 1)},
    "gone": Path.unlink,
}
FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", MANIFEST]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_loaded_and_the_file_is_named(folder, caplog, name, damage):
    DAMAGE[damage](folder / "step-2" / name)
    run = TinyRun(folder.parent)
    assert load(run.manager, -1)
    assert run.steps() == {1}
    assert f"CHECKPOINT step-2 IS DAMAGED AND NOT LOADED: {name} " in caplog.text.replace("it has no ", "")
    assert "WENT BACK TO CHECKPOINT step-1" in caplog.text
    assert steps(folder) == [1] and (folder / "damaged-step-2" / FILES[0]).exists() != (damage, name) == ("gone", name)
    run.save(2)  # as the run comes to that step again
    run.manager.close()
    assert steps(folder) == [2, 1] and TinyRun(folder.parent).manager.load() and (folder / "damaged-step-2").is_dir()
