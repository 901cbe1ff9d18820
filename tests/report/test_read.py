"""A run folder in any state is read as far as it goes, and told of."""

import fcntl
import json
import math

import pytest

from titan_moe.metrics import read_metrics
from titan_moe.report.page import make
from titan_moe.report.read import read

from .folders import line, loads, write


def losses(run) -> dict[int, float]:
    series = run.series["loss"]
    return dict(zip(series.steps, series.values))


def test_a_whole_folder_has_no_problems(tmp_path):
    lines = [line(step, **loads([4, 0, 2, 2])) for step in range(1, 6)]
    run = read(write(tmp_path / "run", lines))
    assert run.problems == [] and run.state() == "finished" and run.last_step == 5
    assert losses(run) == {step: record["loss"] for step, record in read_metrics(tmp_path / "run").items()}
    assert [list(counts) for counts in run.loads["mtp_layers.0"].counts] == [[4, 0, 2, 2]] * 5
    assert run.config["training.steps"] == 5 and run.facts["device"] == "CPU"


def test_a_restart_replaces_what_it_does_again(tmp_path):
    """Steps 5 to 7 of the first attempt were lost with it; step 7 is not there until the second attempt logs it."""
    first = [line(step, loss=float(step), **loads([step, 1])) for step in range(1, 8)]
    second = [line(step, 2, loss=100.0 + step) for step in (5, 6)]
    run = read(write(tmp_path / "run", first + second, attempt=2))
    assert losses(run) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 105, 6: 106}
    assert list(run.loads["layers.1"].steps) == [1, 2, 3, 4]
    assert run.restarts == [(5, 2)] and run.last_step == 6


def test_a_restart_before_another_forgets_it(tmp_path):
    lines = [line(1), line(2), line(2, 2), line(3, 2), line(1, 3), line(2, 3)]
    assert read(write(tmp_path / "run", lines)).restarts == [(1, 3)]


def test_skipped_steps_are_told_where_they_were_logged(tmp_path):
    lines = [line(10), line(20, skipped_steps=2), line(30, skipped_steps=2), line(40, skipped_steps=3)]
    assert read(write(tmp_path / "run", lines)).skips() == [(20, 2), (40, 1)]


def test_the_state_of_a_run(tmp_path):
    folder = write(tmp_path / "run", [line(step) for step in (1, 2)])
    assert read(folder).state() == "finished"
    (folder / "config.toml").write_text("[training]\nsteps = 3\n")
    assert read(folder).state() == "stopped"
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(folder).state() == "running"
        (folder / "metrics.jsonl").unlink()
        assert read(folder).state() == "starting"
    assert read(folder).state() == "no steps"


def test_an_empty_folder(tmp_path):
    run = read(tmp_path)
    assert [problem.split(" is")[0] for problem in run.problems] == ["run.json", "config.toml", "metrics.jsonl"]
    assert all("is missing" in problem for problem in run.problems)
    page = make([run])
    assert "metrics.jsonl is missing" in page and "no steps" in page


@pytest.mark.parametrize(
    "bad",
    [
        b'{"step": 3, "loss": 1.',  # cut off
        b"\xff\xfe\x00\x01",
        b"[1, 2]",
        b'{"step": "3"}',
        b'{"step": true}',
        b'{"step": -3}',
        b'{"step": 3, "attempt": "x"}',
        b'{"step": 1, "attempt": 1, "loss": 0.0}',  # goes back without a restart
        b'{"step": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"null",
        b"\0" * 4096,  # blocks that a crash left unwritten
    ],
    ids=lambda bad: repr(bad[:24]),
)
def test_a_broken_line_costs_that_line(tmp_path, bad):
    folder = write(tmp_path / "run", [line(1), line(2)])
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole + bad + b"\n" + json.dumps(line(9)).encode() + b"\n")
    run = read(folder)
    assert list(run.steps) == [1, 2, 9]
    assert any("metrics.jsonl: 1 line could not be read" in problem for problem in run.problems)
    make([run])


@pytest.mark.parametrize("size", range(0, 260, 7))
def test_a_cut_file_keeps_its_whole_lines(tmp_path, size):
    """Wherever the cut is: as many lines as were whole, and a page."""
    folder = write(tmp_path / "run", [line(1), line(2)])
    whole = (folder / "metrics.jsonl").read_bytes()[: 120 + size]
    (folder / "metrics.jsonl").write_bytes(whole)
    run = read(folder)
    assert len(run.steps) == len([each for each in whole.split(b"\n") if each.endswith(b"}")])
    told = [problem for problem in run.problems if "could not be read" in problem]
    cut = not whole.endswith((b"}", b"}\n"))
    assert told == ["metrics.jsonl: 1 line could not be read: it is cut off"] * cut


def test_the_line_being_written_is_no_problem(tmp_path):
    folder = write(tmp_path / "run", [line(1, **loads([1, 1]))])
    with (folder / "metrics.jsonl").open("ab") as file, (folder / ".lock").open("ab") as lock:
        file.write(b'{"step": 2, "lo')
        file.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(folder).problems == []
        file.write(b"\n[]\n" * 2 + b'{"step"')
        file.flush()
        assert read(folder).problems == ["metrics.jsonl: 3 lines could not be read"]
    assert read(folder).problems == ["metrics.jsonl: 4 lines could not be read, the last of them cut off"]


def test_numbers_that_are_none(tmp_path):
    folder = write(tmp_path / "run", [line(1, loss=None), line(2, loss=math.inf, grad_norm=math.nan)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 3, "loss": 1e999, "grad_norm": ' + "9" * 400 + ', "lr": "high", "tps": true, "mfu": [1]}\n'
        )
    run = read(folder)
    assert [math.isnan(value) for value in run.series["loss"].values] == [True] * 3
    assert list(run.series["lr"].steps) == [1, 2] and math.isnan(run.series["grad_norm"].values[-1])
    page = make([run])
    assert "the loss of the last step, 3, is not finite" in page


@pytest.mark.parametrize("load", [[], [1, None], [1.5, 2], [-1, 2], ["a"], [2**70], {"a": 1}, "x", [[1]], [1, 2, 3]])
def test_loads_that_are_none(tmp_path, load):
    """Neither fails, nor does it mix layers of different sizes."""
    run = read(
        write(tmp_path / "run", [line(1, **{"moe_load.layers.1": [1, 1]}), line(2, **{"moe_load.layers.1": load})])
    )
    assert list(run.loads["layers.1"].steps) == [1]
    make([run])


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("run.json", b"{", "run.json is broken"),
        ("run.json", b"\xff", "run.json is broken"),
        ("run.json", b"[]", "run.json holds no table"),
        ("config.toml", b"[training\n", "config.toml is broken"),
        ("config.toml", b"\xff", "config.toml is broken"),
        ("config.toml", b"a" + b".a" * 3000 + b" = 1", None),  # nested without end
        ("config.toml", b"[training]\nsteps = 1979-05-27\n[checkpoint]\nfolder = 3", None),
        (
            "run.json",
            b'{"world": "two", "attempt": null, "device": 3, "argv": 1, "a": ' + b"[" * 500 + b"]" * 500 + b"}",
            None,
        ),
    ],
)
def test_other_files_broken(tmp_path, name, content, told):
    folder = write(tmp_path / "run", [line(1, **loads([1, 1]))])
    (folder / name).write_bytes(content)
    run = read(folder)
    assert list(run.steps) == [1]
    assert told is None or any(told in problem for problem in run.problems)
    make([run])


def test_files_that_are_folders(tmp_path):
    for name in ("run.json", "config.toml", "metrics.jsonl", ".lock"):
        (tmp_path / name).mkdir()
    run = read(tmp_path)
    assert len(run.problems) == 4 and all("cannot be read" in problem for problem in run.problems)
    make([run])


def test_a_line_without_end_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_moe.report.read.LONGEST", 1000)
    folder = write(tmp_path / "run", [line(1)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("x" * 4500 + "\n" + json.dumps(line(2)) + "\n")
    run = read(folder)
    assert list(run.steps) == [1, 2]
    assert any("1 line could not be read" in problem for problem in run.problems)


def test_checkpoints_stacks_and_damage(tmp_path):
    folder = write(tmp_path / "run", [line(1)])
    for name in ("step-20", "step-3", ".step-40.tmp", "damaged-step-10", "step-x"):
        (folder / "checkpoint" / name).mkdir(parents=True)
    (folder / "stacks").mkdir()
    (folder / "stacks" / "rank-0.txt").write_text("")
    (folder / "stacks" / "rank-7.txt").write_text("Thread ...")
    run = read(folder)
    assert run.checkpoints == [3, 20]
    told = " ".join(run.problems)
    assert "damaged-step-10" in told and "stacks/rank-7.txt" in told and "rank-0" not in told


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder; give one"):
        read(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        read(tmp_path / "file")
