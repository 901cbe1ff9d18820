"""Checkpoints that are not as they were written: refused, with the file named; an older one is taken, or none."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.faults.checkpoint_run import Job, TinyRun, joined
from titan_moe import checkpoint_folder, checkpoint_io
from titan_moe.checkpoint import load
from titan_moe.checkpoint_folder import MANIFEST, Damaged, File, ForeignFormat, Manifest, read_manifest, steps


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
    with joined(0, 1, str(tmp_path_factory.mktemp("group") / "store")):
        yield


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
    assert load(run.manager, -1) and run.steps() == {1}
    assert re.search(f"CHECKPOINT step-2 IS DAMAGED AND NOT LOADED: (it has no )?{name}", caplog.text)
    assert "WENT BACK FROM CHECKPOINT step-2 TO step-1" in caplog.text
    assert steps(folder) == [1] and (folder / "damaged-step-2").is_dir()
    run.save(2)  # the run comes to that step again
    run.manager.close()
    again = TinyRun(folder.parent)
    assert again.manager.load() and again.steps() == {2} and (folder / "damaged-step-2").is_dir()
    again.manager.close()


@pytest.mark.parametrize("name", FILES)
def test_with_none_before_it_is_an_error_not_a_fresh_start(folder, name):
    shutil.rmtree(folder / "step-1")
    flip(folder / "step-2" / name, 0.4)
    run = TinyRun(folder.parent)
    with pytest.raises(ValueError, match=rf"No checkpoint of .*\n +step-2: {re.escape(name)} .*\nBring one back"):
        load(run.manager, -1)
    assert steps(folder) == [2], "nothing was moved"
    run.manager.close()


def test_a_step_that_was_asked_for_is_not_replaced_by_another(folder):
    flip(folder / "step-2" / "__0_0.distcp", 0.5)
    run = TinyRun(folder.parent)
    with pytest.raises(ValueError, match="step-2: __0_0.distcp has another content"):
        load(run.manager, 2)
    assert load(run.manager, 1) and run.steps() == {1}
    run.manager.close()


@pytest.mark.parametrize("verify", ["full", "none"])
def test_a_step_that_is_not_there_is_told(folder, verify):
    run = TinyRun(folder.parent, verify=verify)
    with pytest.raises(ValueError, match=r"checkpoint.load_step = 9: .* has steps \[1, 2\]; choose one"):
        load(run.manager, 9)
    run.manager.close()


def test_a_checkpoint_of_another_format_is_told_from_a_damaged_one(folder):
    """A later version's manifest may say more than this one knows."""
    path = folder / "step-2" / MANIFEST
    content = json.loads(path.read_text()) | {"version": 2, "more": [1]}
    content["sha256"] = checkpoint_folder._digest({key: value for key, value in content.items() if key != "sha256"})
    path.write_text(json.dumps(content))
    run = TinyRun(folder.parent)
    with pytest.raises(ForeignFormat, match="is of format 2, from another version of this program"):
        load(run.manager, -1)  # and not gone back from: it is whole
    run.manager.close()
    assert sorted(steps(folder)) == [1, 2]
    path.write_text(path.read_text().replace("__0_0", "__0_9"))
    with pytest.raises(Damaged, match="its own hash do not fit"):
        read_manifest(folder / "step-2")


def test_all_ranks_go_back_when_one_reads_a_damaged_file(folder, tmp_path):
    flip(folder / "step-2" / "__1_0.distcp", 0.5)
    job = Job(tmp_path / "store", resume, folder.parent, world_size=2)
    assert job.hear() == [[1], [1]]
    job.end()


def resume(tell: Callable, folder: Path) -> None:
    run = TinyRun(folder)
    run.manager.load()
    tell(sorted(run.steps()))
    run.manager.close()


def test_the_checkpoint_of_another_run_is_verified_too(folder, tmp_path):
    start = str(folder / "step-2")
    run = TinyRun(tmp_path / "new", initial_load_path=start)
    assert load(run.manager, -1) and run.steps() == {2}
    cut(folder / "step-2" / "__1_0.distcp", 0.5)
    with pytest.raises(ValueError, match="initial_load_path = .*__1_0.distcp has .* bytes; .* were written; .*none"):
        load(run.manager, -1)
    assert (folder / "step-2").is_dir(), "it belongs to another run"
    run.manager.close()
    run = TinyRun(tmp_path / "new", initial_load_path=str(folder), verify="none")
    with pytest.raises(ValueError, match="initial_load_path = .* holds some; name one of them, such as .*/step-2"):
        load(run.manager, -1)
    run.manager.close()


def test_size_finds_what_is_cut_and_none_looks_at_nothing(folder):
    """And a checkpoint without a manifest, as stock torchtitan's, needs "none"."""
    sizes, nothing = (TinyRun(folder.parent, verify=verify, load_only=True) for verify in ("size", "none"))
    (folder / "step-2" / MANIFEST).unlink()
    assert load(nothing.manager, -1) and nothing.steps() == {2}
    assert load(sizes.manager, -1) and sizes.steps() == {1}
    flip(folder / "step-1" / "__0_0.distcp", 0.5)
    cut(folder / "step-1" / "__1_0.distcp", 0.99)
    with pytest.raises(ValueError, match='step-2: it has no manifest.json.*\n +step-1: __1_0.*\n.*"none" loads'):
        load(sizes.manager, -1)
    with pytest.raises(ValueError, match='could not be read: .*checkpoint.verify = "full"'):
        load(nothing.manager, 1)
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-2"}, "load_only moves nothing"
    sizes.manager.close()
    nothing.manager.close()


def test_no_byte_of_a_manifest_can_change_unnoticed(tmp_path):
    text = Manifest(7, 2, [File("__0_0.distcp", 123, "ab" * 32), File(".metadata", 45, "cd" * 32)]).text().encode()
    for at in range(len(text)):
        changed = bytearray(text)
        changed[at] ^= 1 << at % 8
        (tmp_path / MANIFEST).write_bytes(changed)
        with pytest.raises(Damaged, match=MANIFEST):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(text)
    assert read_manifest(tmp_path).step == 7


def test_a_checkpoint_of_another_step_is_refused(folder, caplog):
    """A folder that was renamed, or copied over another."""
    (folder / "step-2").rename(folder / "step-3")
    run = TinyRun(folder.parent)
    assert load(run.manager, -1) and run.steps() == {1}
    assert "the folder is of step 3, its manifest.json of 2" in caplog.text
    run.manager.close()


# Security: whoever can write the files can write the manifest too, so these would pass every check of hashes.


class Malice:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self):
        return Path.touch, (self.touched,)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_metadata_as_dcp_itself_writes_it_is_read(tmp_path):
    dcp.save({"a": torch.zeros(2, dtype=torch.bfloat16), "b": {"c": 1}}, checkpoint_id=tmp_path, no_dist=True)
    assert checkpoint_io.read_metadata(tmp_path).state_dict_metadata.keys() == {"a", "b.c"}


def test_metadata_that_calls_something_is_refused(folder, tmp_path):
    touched = tmp_path / "touched"
    (folder / "step-2" / ".metadata").write_bytes(pickle.dumps(Malice(touched)))
    run = TinyRun(folder.parent, verify="none")
    with pytest.raises(ValueError, match=r"\.metadata asks for .*, which no checkpoint needs"):
        load(run.manager, 2)
    assert not touched.exists()
    run.manager.close()


def test_metadata_that_points_outside_its_folder_is_refused(folder):
    metadata = checkpoint_io.read_metadata(folder / "step-2")
    next(iter(metadata.storage_data.values())).relative_path = "../step-1/__0_0.distcp"
    (folder / "step-2" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match="outside its folder"):
        checkpoint_io.read_metadata(folder / "step-2")


def test_a_value_that_calls_something_is_refused(one_rank, tmp_path):
    touched = tmp_path / "touched"
    run = TinyRun(tmp_path)
    run.to_step(1)
    run.states[0].values["optimizer.note"]["text"] = Malice(touched)
    run.manager.save(1)
    run.to_step(0)
    with pytest.raises(ValueError, match="something else than tensors and plain values"):
        load(run.manager, 1)
    assert not touched.exists()
    run.manager.close()
