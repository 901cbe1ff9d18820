"""--help: every key with type, default and what it does; one section in full; and it is TOML."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe import config_file, config_help
from titan_moe.config import Config
from titan_moe.config_file import LEAVES, SECTIONS
from titan_moe.config_help import first_sentence, help_text, type_text

ROOT = Path(__file__).parents[1]


def test_every_key_has_one_line_with_type_default_and_text() -> None:
    lines = help_text().splitlines()
    for key, hint in LEAVES.items():
        section, _, name = key.rpartition(".")
        start = lines.index(f"[{section}]")
        end = lines.index("", start) if "" in lines[start:] else len(lines)
        (line,) = [line for line in lines[start:end] if line.startswith((f"{name} = ", f"# {name} is not set"))]
        assert f" # {type_text(hint)}: " in line and not line.endswith(": ")
    assert [line for line in lines if line.startswith("[")] == [f"[{section}]" for section in SECTIONS]


@pytest.mark.parametrize("what", ["", *SECTIONS])
def test_the_help_is_a_configuration_of_defaults(tmp_path: Path, what: str) -> None:
    path = tmp_path / "help.toml"
    path.write_text(help_text(what), encoding="utf-8")
    assert config_file.load([str(path)]) == Config()


def test_one_section_or_key_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    moe = help_text("moe")
    assert max(map(len, moe.splitlines())) <= 60 and "[training" not in moe
    assert "0: off, as in torchtitan" in " ".join(moe.split()).replace(" # ", " ")  # what a line of --help leaves out
    assert "[training.dataloader]" in help_text("training")
    assert help_text("training.steps") == "[training]\n\n# Optimizer steps\n# integer\nsteps = 10000"
    with pytest.raises(ValueError, match=r"unknown section \[mo\] \(did you mean \[moe\]\?\); sections are job, model"):
        help_text("mo")
    with pytest.raises(ValueError, match=r"unknown key moe.expert \(did you mean moe.experts\?\)"):
        help_text("moe.expert")


def test_the_base_and_the_keys_of_an_entry_have_help_too() -> None:
    assert help_text("base").startswith('# base = "OTHER.toml" at the top of a file')
    assert help_text("training.mixture.weight") == (
        "# of each [[training.mixture]]:\n# weight: float: Share of the training tokens, relative to the other entries"
    )
    with pytest.raises(
        ValueError, match="unknown key training.mixture.wight; an entry of training.mixture has dataset, w"
    ):
        help_text("training.mixture.wight")


def test_texts() -> None:
    assert first_sentence("Weight; DeepSeek-V3 has 1e-4. 0: off") == "Weight; DeepSeek-V3 has 1e-4"
    assert first_sentence("Steps between 1.5 and 2.5.") == "Steps between 1.5 and 2.5"
    assert type_text(LEAVES["model.score_func"]) == '"sigmoid" | "softmax" | "none"'
    assert type_text(LEAVES["compile.components"]) == 'list of "model" | "loss"'
    assert type_text(LEAVES["moe.recv_buffer"]) == '"exact" | "worst_case" | float'
    texts = config_help.documentation()
    assert texts.keys() == LEAVES.keys() and all(texts.values())


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-S", "-m", "titan_moe.config_help", *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_needs_nothing_but_python() -> None:
    """-S: without site-packages, as before the first set-up."""
    done = run("--moe")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("[moe]\n")
    done = run("nothing")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("--help: unknown section [nothing]")


def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    command = f"{sys.executable} -m titan_moe.config_help | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("# base = ")
