"""A disk that is full, or becomes read-only, while checkpoints are saved; and what is deleted when."""

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.checkpoint_run import Job, TinyRun, joined
from titan_moe import checkpoint_folder, checkpoint_io
from titan_moe.checkpoint_folder import DELETED, REPLACED, TMP, hidden, steps

SIZE = 1 << 17  # values: 512 KiB
DISK, LEFT = 2 << 20, 300 << 10  # bytes: room for two checkpoints, and for half of one


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"may not mount a tmpfs here: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(folder: Path) -> None:
    if dist.get_rank() == 0:
        free = shutil.disk_usage(folder).free
        (folder / "ballast").write_bytes(b"x" * (free - LEFT))
    dist.barrier()


def plenty_of_room() -> None:
    """As with a quota: the file system says that it has room, and has not."""
    checkpoint_io.Writer._free = lambda self: 1 << 40  # type: ignore[method-assign]


def save_until_full(tell: Callable, folder: Path, async_mode: str, quota: bool) -> None:
    """A checkpoint every 50 steps; before that of step 50 the disk fills. Ends with an error, told before: the step at
    whose end it came."""
    if quota:
        plenty_of_room()
    run = TinyRun(folder, size=SIZE, async_mode=async_mode, interval=50)
    run.save(0)
    run.manager.maybe_wait_for_saving()
    fill(folder)
    try:
        for step in range(49, 100):
            run.save(step)
            time.sleep(0.02)
    except ValueError:
        tell(step)
        raise
    finally:
        run.manager.close()


@pytest.mark.parametrize("quota", [False, True], ids=["known beforehand", "found out while writing"])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_full_disk_ends_the_run_and_costs_no_checkpoint(disk, tmp_path, async_mode, quota):
    """On both ranks at the same step: that of the save, or one soon after it when the save was in the background."""
    job = Job(tmp_path / "store", save_until_full, disk, async_mode, quota, world_size=2)
    at, again = job.hear()
    assert at == again and (at == 50 if async_mode == "disabled" else 50 < at < 100)
    one, other = job.hear()
    job.end()
    assert one == other
    assert "step-50 could not be written; rank " in one and "[Errno 28] No space left on device: " in one
    room = "1,024.000 GiB are free" if quota else f"{LEFT - (LEFT % 4096):,} bytes are free"
    assert "the checkpoint takes at least 536,288 bytes, " in one and room in one, one
    assert "the checkpoints of steps [0] are as they were: make room, or lower checkpoint.keep_latest_k = 2," in one
    assert [path.name for path in (disk / "checkpoint").iterdir()] == ["step-0"]
    (disk / "ballast").unlink()
    job = Job(tmp_path / "store", resume_size, disk)
    assert job.hear() == [[0]]
    job.end()


def resume_size(tell: Callable, folder: Path) -> None:
    run = TinyRun(folder, size=SIZE)
    run.to_step(7)
    run.manager.load(0)
    tell(sorted(run.model.weight.to_local().detach().unique().int().tolist()))
    run.manager.close()


def save_on_read_only(tell: Callable, disk: Path) -> None:
    run = TinyRun(disk)
    run.save(1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        run.save(2)
    except ValueError as error:
        tell(str(error))
    run.manager.close()
    TinyRun(disk)


def test_a_read_only_folder_is_told_when_it_is_saved_to_and_at_the_next_start(disk, tmp_path):
    job = Job(tmp_path / "store", save_on_read_only, disk)
    ((saving,), (starting,)) = job.hear(), job.hear()
    job.end()
    assert "step-2 could not be written; rank 0: [Errno 30] Read-only file system: " in saving
    assert "the checkpoints of steps [1] are as they were: mend that and start again" in saving
    assert starting.startswith(f"ValueError: checkpoint.folder: {disk / 'checkpoint'} cannot be written: [Errno 30]")


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    with joined(0, 1, str(tmp_path / "store")):
        yield


def save_and_wait(run: TinyRun, step: int) -> None:
    run.save(step)
    run.manager.maybe_wait_for_saving()


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp"])
def test_a_file_that_ends_in_the_middle_of_a_tensor(one_rank, tmp_path, monkeypatch, async_mode, name):
    """Without a disk of its own: writing fails after 40 KiB. torch.save hides the reason; the message has it."""
    run = TinyRun(tmp_path, async_mode=async_mode)
    save_and_wait(run, 1)
    write = checkpoint_io.HashingFile.write

    def fails(file: checkpoint_io.HashingFile, data) -> int:
        if file.path.name == name and (file.size > 40 << 10 or name == ".metadata.tmp"):
            file.error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(file.path))
            raise file.error
        return write(file, data)

    monkeypatch.setattr(checkpoint_io.HashingFile, "write", fails)
    with pytest.raises(ValueError, match=r"step-2 could not be written; rank 0: .*Errno 122.*GiB are free: '.*step-2"):
        save_and_wait(run, 2)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-1"]
    run.save(3)
    run.manager.close()
    assert steps(tmp_path / "checkpoint") == [3, 1]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_old_checkpoints_go_only_when_the_new_one_is_there(one_rank, tmp_path, monkeypatch, async_mode):
    run, there = TinyRun(tmp_path, async_mode=async_mode), []
    publish = checkpoint_io.publish

    def watch(*what) -> None:
        there.append(steps(tmp_path / "checkpoint"))
        publish(*what)

    monkeypatch.setattr(checkpoint_io, "publish", watch)
    for step in range(1, 6):
        run.save(step, last_step=step == 5)
    run.manager.close()
    assert there == [[], [1], [2, 1], [3, 2], [4, 3]]
    assert steps(tmp_path / "checkpoint") == [5, 4]
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-4", "step-5"}


def test_a_start_removes_what_a_killed_run_left_and_nothing_else(one_rank, tmp_path):
    run = TinyRun(tmp_path)
    run.save(1)
    run.save(2)
    run.manager.close()
    folder = tmp_path / "checkpoint"
    (folder / "step-1").rename(hidden(folder / "step-1", DELETED))
    shutil.copytree(folder / "step-2", hidden(folder / "step-3", TMP))  # whole, but not published: was it synced?
    (folder / "step-2").rename(hidden(folder / "step-2", REPLACED))  # killed between two renames
    for kept in ("damaged-step-9", ".step-x.tmp", "mine"):
        (folder / kept).mkdir()
    hidden(folder / "step-0", DELETED).symlink_to(folder / "mine")  # a step that was moved to another disk
    hidden(folder / "step-4", REPLACED).touch()  # a file in the place of a step, which was there then
    (folder / "step-4").mkdir()
    checkpoint_folder.prepare(folder)
    expected = [".step-x.tmp", "damaged-step-9", "mine", "step-2", "step-4"]
    assert sorted(path.name for path in folder.iterdir()) == expected
    (folder / "step-4").rmdir()
    run = TinyRun(tmp_path)
    assert run.manager.load() and run.steps() == {2}
    run.manager.close()


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_checkpoint_that_lacks_a_rank_s_file_is_not_published(one_rank, tmp_path, monkeypatch, async_mode):
    """As where a node writes into a folder of its own: no other checkpoint may go for that one."""
    run = TinyRun(tmp_path, async_mode=async_mode, keep_latest_k=2)
    run.save(1)
    save_and_wait(run, 2)
    publish = checkpoint_io.publish

    def lose(checkpoint, *what) -> None:
        (hidden(checkpoint, TMP) / "__0_0.distcp").rename(tmp_path / "elsewhere")
        publish(checkpoint, *what)

    monkeypatch.setattr(checkpoint_io, "publish", lose)
    with pytest.raises(ValueError, match=r"step-3 could .*__0_0.distcp is missing .*do all nodes see the same folder"):
        save_and_wait(run, 3)
    run.manager.close()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-1", "step-2"]


def test_an_error_elsewhere_waits_for_the_checkpoint_in_the_background(one_rank, tmp_path, monkeypatch, caplog):
    """The run ends by another error: what is being written is finished first, and if that fails, it hides nothing."""
    run = TinyRun(tmp_path, async_mode="async")
    run.save(1)
    run.manager.close()
    assert steps(tmp_path / "checkpoint") == [1]
    run = TinyRun(tmp_path, async_mode="async")
    monkeypatch.setattr(checkpoint_io.HashingFile, "write", lambda file, data: os.read(-1, 1))
    run.save(2)
    run.manager.close()
    assert "step-2 could not be written; rank 0: [Errno 9] Bad file descriptor" in caplog.text
    assert steps(tmp_path / "checkpoint") == [1]
