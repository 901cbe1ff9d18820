"""The run folder: one process at a time, no two runs mixed, the same run always let in again, and a record of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe import run_folder
from titan_moe.config import Config
from titan_moe.run_folder import claim, refusal

ROOT = Path(__file__).parent.parent


def other_process(folder: Path, then: str, run_id: str = "other") -> subprocess.Popen[str]:
    """A process that claims the folder, says so, and goes on with the statement `then`."""
    code = f"""
import os, sys, time
from pathlib import Path
from titan_moe import run_folder
run_folder.claim(Path({str(folder)!r}), {run_id!r}, False, {{}})
print("claimed", flush=True)
{then}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "claimed\n"
    return process


def run_json(folder: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((folder / "run.json").read_text())
    return loaded


def test_choice_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = Config()
    assert run_folder.choose(config, {"RUN_ID": "r1"}) == Path("outputs/r1")
    with pytest.raises(ValueError, match="RUN_ID is not set"):
        run_folder.choose(config, {})
    config.job.dump_folder = "~/runs/a"
    assert run_folder.choose(config, {}) == Path("/home/me/runs/a")


def test_run_ids_name_the_configuration_and_do_not_repeat() -> None:
    ids = {run_folder.new_run_id(path) for path in ["a/debug_model.toml"] * 5}
    assert len(ids) > 1
    assert all(re.fullmatch(r"\d{8}-\d{6}-debug_model-[0-9a-f]{4}", run_id) for run_id in ids)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", run_folder.new_run_id("模型 x/größe!.v2 .toml"))
    assert len(run_folder.new_run_id("x" * 250 + ".toml")) < 100


def test_a_new_folder_is_attempt_one_and_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert refusal(folder, "r1", False) is None and not (tmp_path / "a").exists()
    assert claim(folder, "r1", False, {"description": "größer 🚀"}) == 1
    record = run_json(folder)
    assert (record["run_id"], record["attempt"], record["description"]) == ("r1", 1, "größer 🚀")
    assert record["created"] == record["updated"]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "run.json"]


def test_an_existing_folder_without_a_run_is_free(tmp_path: Path) -> None:
    """Slurm's log, a note, or older run folders side by side are no run."""
    (tmp_path / "slurm-1.out").touch()
    (tmp_path / "older" / "checkpoint" / "step-5").mkdir(parents=True)
    assert claim(tmp_path, "r1", False, {}) == 1


def test_the_same_run_comes_back_even_without_checkpoints(tmp_path: Path) -> None:
    with other_process(tmp_path, "", "r1"):
        pass
    (tmp_path / "metrics.jsonl").touch()
    first = run_json(tmp_path)
    assert claim(tmp_path, "r1", False, {}) == 2
    assert claim(tmp_path, "r1", False, {}) == 3  # also from the process that holds it already
    assert run_json(tmp_path)["created"] == first["created"]


def test_another_run_is_refused_with_three_ways_out_unless_it_resumes(tmp_path: Path) -> None:
    with other_process(tmp_path, ""):
        pass
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"another run \(other\); .*another --job.dump_folder.*leave it out.*--checkpoint.enable"
    ):
        claim(tmp_path, "r2", False, {})
    assert run_json(tmp_path)["run_id"] == "other"
    assert claim(tmp_path, "r2", True, {}) == 2
    assert run_json(tmp_path)["run_id"] == "r2"


def test_a_run_without_checkpoints_is_not_resumed_but_one_that_was_to_save_them_is(tmp_path: Path) -> None:
    """There is nothing to go on from: to start over here would mix two runs. Killed before its first save is another
    thing: the same command must go on."""
    with other_process(tmp_path, ""):
        pass
    assert "another run (other), without checkpoints" in str(refusal(tmp_path, "r2", True))
    (tmp_path / "run.json").write_text('{"run_id": "other", "attempt": 1, "checkpoints": true}')
    assert refusal(tmp_path, "r2", True) is None


def test_without_a_run_id_nobody_is_the_same_run(tmp_path: Path) -> None:
    assert claim(tmp_path, "", False, {}) == 1
    assert "another run" in str(refusal(tmp_path, "", False))


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoint", "elsewhere/step-10", "run.json"])
def test_traces_of_a_run_without_a_record_count_as_another_run(tmp_path: Path, trace: str) -> None:
    (tmp_path / trace).mkdir(parents=True)
    assert "holds another run (without a readable run.json)" in str(refusal(tmp_path, "r1", False))
    assert (refusal(tmp_path, "r1", True) is None) == ("step-" in trace)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"run_id": "r1"}', '{"run_id": "r1", "attempt": null}'])
def test_a_broken_record_counts_as_another_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    assert "holds another run" in str(refusal(tmp_path, "r1", False))
    assert claim(tmp_path, "r1", True, {}) == 2
    assert run_json(tmp_path)["attempt"] == 2


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="is not a folder that you may write in"):
            claim(folder, "r1", False, {})


def test_two_claims_at_once(tmp_path: Path) -> None:
    """While a process lives, nobody else gets its folder: not the same run, nor one that resumes. Then it is free."""
    with other_process(tmp_path, "sys.stdin.read()") as process:
        for run_id, resume in (("other", False), ("r2", True)):
            with pytest.raises(ValueError, match="another process trains in this folder"):
                claim(tmp_path, run_id, resume, {})
        process.kill()
    assert claim(tmp_path, "other", False, {}) == 2


def test_looking_disturbs_nobody(tmp_path: Path) -> None:
    """All nodes of a requeued job look at the folder at once: a look takes no lock that another look would meet."""
    with other_process(tmp_path, ""):
        pass
    import fcntl

    with (tmp_path / ".lock").open("rb") as other_look:
        fcntl.flock(other_look, fcntl.LOCK_SH)
        assert refusal(tmp_path, "other", False) is None


def test_a_forked_worker_does_not_keep_the_folder(tmp_path: Path) -> None:
    """A data loader worker that outlives its killed parent by a moment must not shut out the restart."""
    fork = "if os.fork() == 0: print(os.getpid(), flush=True); sys.stdin.read()\nos._exit(1)"
    with other_process(tmp_path, fork) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.wait()
        os.kill(worker, 0)  # the worker still lives
        assert claim(tmp_path, "other", False, {}) == 2


def test_a_file_system_without_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match="no locks on this file system"):
        assert claim(tmp_path, "r1", False, {}) == 1


def test_a_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    claim(tmp_path, "r1", False, {})
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        claim(tmp_path, "r1", False, {})
    assert run_json(tmp_path)["attempt"] == 1


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    there = run_folder.provenance()
    assert there["git_commit"] is None or re.fullmatch("[0-9a-f]{40}", there["git_commit"])
    assert there["python"].startswith("3.") and there["argv"] == sys.argv
    assert list(there["versions"]) == ["torch", "torchtitan", "triton", "torchdata", "transformer-engine"]
    json.dumps(there)
    monkeypatch.setenv("PATH", "")
    bare = run_folder.provenance()
    assert (bare["git_commit"], bare["git_dirty"]) == (None, None)


def test_provenance_takes_only_its_own_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed in a .venv inside somebody's repository, we are not that repository's commit; tracked in it, we are."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(tmp_path)]
    (tmp_path / "run_folder.py").touch()
    (tmp_path / "other.py").touch()
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "run_folder.py"))
    for words in (["init", "-q"], ["add", "other.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    assert run_folder.provenance()["git_commit"] is None
    for words in (["add", "run_folder.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    assert run_folder.provenance()["git_dirty"] is False
    (tmp_path / "other.py").write_text("1")
    assert run_folder.provenance()["git_dirty"] is True
