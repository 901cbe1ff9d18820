"""async_with_pinned_mem: the checkpoint is written, and published, by a process of its own on each rank."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path

from titan_moe.runtime import DEVICE_TYPE

import pytest
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests.faults.checkpoint_run import Job, TinyRun
from titan_moe.checkpoint_folder import steps
from titan_moe.checkpoint_io import Writer


def test_a_writer_can_be_sent_to_another_process(tmp_path):
    writer = pickle.loads(pickle.dumps(Writer(tmp_path / "step-4")))
    assert writer.checkpoint == tmp_path / "step-4" and writer.path == tmp_path / ".step-4.tmp"
    with writer.fs.create_stream(tmp_path / "file", "wb") as stream:
        stream.write(b"abc")
    assert [file.size for file in writer.hashing.written] == [3]


def save_in_a_process(tell: Callable, folder: Path, pinned: bool) -> None:
    run = TinyRun(folder, async_mode="async_with_pinned_mem")
    if not pinned:  # torchtitan's stager with what a CPU lacks left out
        run.manager.stager = DefaultStager(StagingOptions(False, True, True, False))
    for step in (1, 2):
        run.save(step)
        run.manager.maybe_wait_for_staging()
        run.to_step(0)  # training goes on: what is saved has been copied
        run.manager.maybe_wait_for_saving()
    run.manager.load()
    tell((os.getpid(), steps(folder / "checkpoint"), sorted(run.steps())))
    (folder / "checkpoint" / ".step-3.tmp").touch()  # no folder can be made here
    run.save(3)
    run.manager.maybe_wait_for_saving()


class FreshJob(Job):
    """Ranks that are no forks, which a GPU's driver does not allow."""

    context = multiprocessing.get_context("spawn")


def check(folder: Path, *, pinned: bool) -> None:
    job = (FreshJob if pinned else Job)(folder / "store", save_in_a_process, folder, pinned, world_size=2)
    for _, found, loaded in job.hear():
        assert found == [2, 1] and loaded == [2]
    one, other = job.hear()
    assert one == other and "step-3 could not be written; rank 0: [Errno 17] File exists" in one
    job.end()


@pytest.mark.slow  # each rank's process imports torch
def test_two_ranks_save_through_processes(tmp_path):
    check(tmp_path, pinned=False)


@pytest.mark.gpu
def test_two_ranks_save_through_processes_and_pinned_memory(tmp_path):
    assert DEVICE_TYPE == "cuda"
    check(tmp_path, pinned=True)
