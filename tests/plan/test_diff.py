"""A difference between two plans is complete: parts add up to the whole, in numbers and as printed."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe import config_file
from titan_moe.plan import diff, report
from titan_moe.plan.__main__ import main

REPO = Path(__file__).parents[2]
CONFIGS = REPO / "train_configs"


def planned(name: str, *overrides: str):
    config = config_file.load([str(CONFIGS / f"{name}.toml"), *overrides])
    return config, diff.plain(report.job_of(config, name))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("deepseek_v3_671b", "deepseek_v3_671b_gb200"),
        ("deepseek_v3_671b", "deepseek_v3_671b_h100"),
        ("deepseek_v3_671b_b200", "qwen3_235b_a22b"),
    ],
)
def test_parts_add_up(before: str, after: str) -> None:
    """Of seconds per step, or of a million tokens where a step has not as many on a GPU; and of bytes."""
    (_, a), (_, b) = planned(before), planned(after)
    found = diff.of_plans(a, b)
    changes = sum(term.change for term in found.seconds)
    if found.unit == "s of the step":
        assert changes == pytest.approx(b.speed.step_seconds - a.speed.step_seconds, rel=1e-9)
    else:
        assert changes == pytest.approx(1e6 / found.rates[1] - 1e6 / found.rates[0], rel=1e-9)
    assert sum(t.change for t in found.memory) == pytest.approx(b.memory.needed - a.memory.needed, rel=1e-9)
    for terms in (found.seconds, found.memory):
        assert [abs(t.change) for t in terms] == sorted((abs(t.change) for t in terms), reverse=True)
        assert len({t.name for t in terms}) == len(terms)


def test_printed_figures_add_up_to_the_last_digit() -> None:
    (one, a), (other, b) = planned("deepseek_v3_671b"), planned("deepseek_v3_671b_gb200")
    text = diff.to_text(diff.of_plans(a, b, (one, other)), ("a", "b"))
    assert "  parallelism.expert_parallel_degree  32 -> 64" in text
    for title in ("Time", "Memory"):
        rows = re.search(rf"^{title}.*\n.*\n((?:  .*\n?)+)", text, re.MULTILINE)
        assert rows is not None
        figures = [
            [round(float(n.replace(",", "")) * 1000) for n in re.findall(r"[-+]?[\d,]+\.\d+(?!\d*%)", row)[-3:]]
            for row in (line.rsplit(None, 1)[0] for line in rows[1].splitlines())
        ]
        *parts, whole = figures
        assert [sum(column) for column in zip(*parts)] == whole
        assert all(a + change == b for a, b, change in figures)


def test_rounding_keeps_the_sum() -> None:
    draw = random.Random(0)
    for _ in range(200):
        values = [draw.uniform(-1, 10) for _ in range(draw.randrange(1, 12))]
        found = diff.rounded(values, 2)
        assert sum(found) == round(100 * sum(values))
        assert all(abs(n - 100 * value) <= 1 for n, value in zip(found, values))


def test_equal_files_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "deepseek_v3_16b.toml")
    assert main([path, f"--plan.diff={path}"]) == 0
    assert "Equal: no part of time or memory differs." in capsys.readouterr().out
    assert main([path, f"--plan.diff={path}", "--plan.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True and found["settings"] == [] and found["gain"] == 0


def test_settings_that_the_planner_does_not_know_are_listed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "deepseek_v3_16b.toml")
    assert main([path, f"--plan.diff={path}", "--optimizer.lr=1e-3"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.lr  0.00042 -> 0.001" in out and "Equal: no part" in out


def test_as_two_files_on_the_command_line() -> None:
    """`--plan.diff BEFORE AFTER`; [plan] on the command line holds for both."""
    files = [str(CONFIGS / f"{name}.toml") for name in ("deepseek_v3_671b", "deepseek_v3_671b_gb200")]
    done = subprocess.run(
        [str(REPO / "run_train.sh"), "--plan.diff", *files, "--plan.hardware=GB300"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Change from {files[0]} to {files[1]}")
    assert "plan.hardware" not in done.stdout and "expert_parallel_degree  32 -> 64" in done.stdout


def test_mistakes_name_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = str(CONFIGS / "deepseek_v3_16b.toml"), tmp_path / "other.toml"
    assert main([path, f"--plan.diff={other}"]) == 2
    assert "other.toml: cannot be read" in capsys.readouterr().err
    other.write_text(f'base = "{path}"\n[parallelism]\nexpert_parallel_degree = 7\n')
    assert main([path, f"--plan.diff={other}"]) == 2
    err = capsys.readouterr().err
    assert "other.toml" in err and "expert_parallel_degree = 7: must divide" in err
