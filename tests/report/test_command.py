"""`python -m titan_moe.report` as a user calls it: the text for a terminal, the picture, watching, mistakes."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe.report import watch
from titan_moe.report.__main__ import main
from titan_moe.report.read import read
from titan_moe.report.text import sparkline, summary

from .folders import line, loads, phases, write

REPO = Path(__file__).parents[2]


def test_writes_a_page_without_torch(tmp_path):
    """And from a folder that may not be the current one, beside which nothing else is written."""
    folder = write(tmp_path / "run", [line(1)])
    before = set(folder.iterdir())
    code = "import sys; from titan_moe.report.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(folder / "report.html"), "False"] and done.stderr == ""
    assert set(folder.iterdir()) - before == {folder / "report.html"}


def test_several_runs_on_one_page_and_a_picture(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    lines = [line(step, **loads([2, 1, 0]), **phases(experts=1.0)) for step in (1, 2, 3)]
    folders = [str(write(tmp_path / name, lines)) for name in ("one", "two")]
    assert main([*folders, folders[0], "--png", "--out", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert "<h1>2 runs</h1>" in page
    with image.open(tmp_path / "report.png") as picture:
        assert len(picture.convert("RGB").getcolors(10**6)) > 20
    assert not (tmp_path / "one" / "report.html").exists()


def test_a_picture_of_an_empty_folder(tmp_path):
    pytest.importorskip("PIL")
    assert main([str(tmp_path), "--png"]) == 0
    assert (tmp_path / "report.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{}/gone"], "there is no such folder; give one"),
        (["{}", "--out", "{}/gone/page.html"], "give another place with --out"),
        (["{}", "--watch=0.01"], "--watch=0.01: must be at least 0.5 seconds"),
        (["{}", "--watch=nan"], "must be at least"),
    ],
)
def test_mistakes(tmp_path, capsys, arguments, told):
    assert main([word.format(tmp_path) for word in arguments]) == 2
    assert told in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_text(tmp_path, capsys):
    lines = [
        line(
            step,
            **{**loads([6, 0, 3, 3]), "moe_max/mean.layers.2": 4.0, "moe_max/mean": 4.0, "moe_dead": 3},
            **phases(experts=0.3, attention=0.1),
        )
        for step in range(1, 9)
    ]
    lines[-1] |= {"skipped_steps": 1, "validation_loss": 5.25}
    folder = write(tmp_path / "run", lines)
    (folder / "run.json").unlink()
    assert main([str(folder), "--text"]) == 0
    printed = capsys.readouterr().out
    assert not (folder / "report.html").exists()
    assert summary(read(folder), width=100).splitlines() == [
        "run: finished, 100%",
        "  step                 8 of 8",
        "  loss                 4.4444",
        "  validation loss      5.2500",
        "  tokens/s, device     1,000",
        "  TFLOPS, device       0.5",
        "  step time            0.25 s",
        "  tokens seen          32,768",
        "  memory               1.50 GiB peak of rank 0",
        "  heaviest expert      4.00 × the mean, layers.2",
        "  skipped steps        1",
        "  restarts             0",
        "  loss        █▇▅▄▃▂▁▁ 4.4444 to 7.2727",
        "  validation  ▁ 5.25 to 5.25",
        "  grad norm   ▁▁▁▁▁▁▁▁ 0.5 to 0.5",
        "  tokens/s    ▁▁▁▁▁▁▁▁ 1,000 to 1,000",
        "  max/mean    ▁▁▁▁▁▁▁▁ 4 to 4",
        "  phases of a step, 0.4 s:",
        "    experts             0.3 s  75.0% ██████████████████████  slowest rank 3: 0.6 s",
        "    attention           0.1 s  25.0% ████████  slowest rank 3: 0.2 s",
        "  worst MoE layer: layers.2, heaviest expert 4.00 × mean, dead 1",
        "! skipped steps: 1 (12.50%)",
        "! dead experts: 3 without a token lately, 1 of them in layers.1",
        "! uneven load: an expert gets 4.00 times the mean of its layer (worst in detail: layers.2, 4.00)",
        "- run.json is missing: no environment, no count of attempts",
    ]
    assert printed.startswith("run: finished, 100%\n  step")
    write(folder, lines, world=2)
    assert "  tokens/s, device     1,000 of 2,000 on all 2" in summary(read(folder)).splitlines()


def test_text_does_not_steer_the_terminal(tmp_path):
    folder = write(tmp_path / "run\x1b[2J", [line(1)])
    assert "\x1b" not in summary(read(folder)) and "\\u001b" in summary(read(folder))


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, float("nan"), 1.0], 3) == "▁ █" and sparkline([float("nan")], 3) == ""


# ---------------------------------------------------------------------------------------------------------------------
# Watching


def test_watching_ends_with_the_run(tmp_path, monkeypatch):
    """Page after page while the lock is held, each whole; the last one, after the run, no longer loads itself again."""
    folder = write(tmp_path / "run", [line(1)])
    (folder / "config.toml").write_text("[training]\nsteps = 3\n")
    pages: list[str] = []
    page = folder / "report.html"

    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def sleep(seconds: float) -> None:
            """Between two reports the run goes on, and ends after its third step."""
            assert seconds == 0.5
            pages.append(page.read_text())
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(f'{{"step": {len(pages) + 1}, "loss": 2.0}}\n')
            if len(pages) == 2:
                fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(watch.time, "sleep", sleep)
        assert main([str(folder), "--watch=0.5"]) == 0
    pages.append(page.read_text())
    assert ['"refresh":0.5' in each for each in pages] == [True, True, False]
    assert all(each.endswith("</html>\n") for each in pages)
    assert [name for name in os.listdir(folder) if "report" in name] == ["report.html"]


def test_watching_waits_for_the_next_attempt(tmp_path, monkeypatch):
    """A run that has not done all of its steps counts as ended only after a minute without a process."""
    folder = write(tmp_path / "run", [line(1)])
    (folder / "config.toml").write_text("[training]\nsteps = 3\n")
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    refreshed: list[float | None] = []
    watch.watch([str(folder)], 20.0, lambda runs, refresh: refreshed.append(refresh))
    assert refreshed == [20.0, 20.0, 20.0, None]


def test_ctrl_c_leaves_a_page_that_rests(tmp_path, monkeypatch):
    folder = write(tmp_path / "run", [line(1)])
    (folder / "config.toml").write_text("[training]\nsteps = 3\n")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupted)
    assert main([str(folder), "--watch"]) == 0
    assert '"refresh":null' in (folder / "report.html").read_text()
