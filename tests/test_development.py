"""The recipes of docs/development.md: applied to a copy of the repository as they stand there, then trained with.

One job of two processes trains with each, with the options of the page's own commands, and with what was there before.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import Outcome
from tests.shell_blocks import clone, commands, fenced, shell_blocks, text_of

PAGE = "docs/development.md"

JOB = """
import json, sys
from pathlib import Path
from tests.distributed.harness import Case, run_cases
cases, out = json.loads(sys.argv[1]), Path(sys.argv[2])
base = ["train_configs/debug_model.toml", "--training.seq_len=64", "--training.local_batch_size=2"]
base += ["--model.dim=64", "--model.moe_hidden_dim=48", "--model.n_layers=2"]
base += ["--metrics.log_freq=1", "--metrics.enable_tensorboard=false", "--validation.enable=false"]
run_cases(2, {name: Case(argv, base=base) for name, argv in cases.items()}, out)

from titan_moe.config import DataSource
from titan_moe.config_check import check
from titan_moe.config_file import read
from titan_moe.sources.listing import list_source
pieces = list_source(DataSource(dataset="tables/a.csv")).pieces
texts = [text.decode() for piece in pieces for text in piece.documents()]
fixed = read([*base, *cases["allgather"], "--moe.recv_buffer=worst_case"])
(out / "refused.json").write_text(json.dumps(fixed.problems + check(fixed.config, 2)))
(out / "texts.json").write_text(json.dumps(texts))
"""


def applied(folder: Path) -> Path:
    """A copy of the repository with every new file and every patch of the page."""
    clone(folder)
    for language, block in fenced(PAGE):
        if language == "python":
            name = block.splitlines()[0].removeprefix("# ")
            assert name.startswith("titan_moe/") and not (folder / name).exists()
            (folder / name).write_text(block.partition("\n")[2])
        if language == "diff":
            patch = subprocess.run(["git", "apply", "-"], cwd=folder, input=block, text=True, capture_output=True)
            assert patch.returncode == 0, f"{patch.stderr}\n{block}"
    return folder


def options(words: str) -> list[str]:
    """Of the page's command that has these words; the base of JOB stands for the debug model."""
    (command,) = [line for block in shell_blocks(PAGE) for line in commands(block) if words in " ".join(line)]
    assert command[:2] == ["./run_train.sh", "train_configs/debug_model.toml"]
    return command[2:]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Name -> what that training left."""
    folder, out = applied(tmp_path_factory.mktemp("copy")), tmp_path_factory.mktemp("runs")
    (folder / "tables").mkdir()
    with open(folder / "tables" / "a.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "text"])
        rows.writerows([i, text] for i, text in enumerate((folder / "README.md").read_text().split("\n\n")))
    allgather, bmm = options("--moe.dispatcher=allgather"), options("--moe.experts=bmm")
    cases = {
        "dedup": [word for word in allgather if word != "--moe.dispatcher=allgather"],
        "allgather": allgather,
        "allgather_full": [*allgather, "--activation_checkpoint.mode=full"],
        "loop": [*bmm, "--moe.experts=loop"],
        "bmm": bmm,
        "bmm_late": [*bmm, "--moe.weighting=late"],
        "qwen3_raw": options("--model.name=qwen3_raw"),
        "csv": options("--training.dataset=tables/a.csv"),
    }
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps(cases), str(out)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {name: Outcome(out / name) for name in cases}


def compare(one: Outcome, other: Outcome) -> None:
    """Losses and each parameter's gradient, in fp32."""
    assert len(one.losses) == 2 and one.losses == pytest.approx(other.losses, rel=1e-5)
    expected = other.step1["gradients"]
    assert one.step1["gradients"].keys() == expected.keys()
    for name, gradient in one.step1["gradients"].items():
        assert torch.linalg.norm(gradient - expected[name]) <= 1e-5 * torch.linalg.norm(expected[name]), name


def test_the_dispatcher(outcome):
    compare(outcome["allgather"], outcome["dedup"])
    compare(outcome["allgather_full"], outcome["dedup"])
    ran = (outcome["allgather"].folder / "config.toml").read_text()
    assert 'dispatcher = "allgather"' in ran
    (refusal,) = json.loads((outcome["allgather"].folder.parent / "refused.json").read_text())
    assert refusal.startswith('moe.dispatcher = "allgather"')


def test_the_experts(outcome):
    compare(outcome["bmm"], outcome["loop"])
    compare(outcome["bmm_late"], outcome["loop"])  # the same sums, in fp32


def test_the_family(outcome):
    assert 'name = "qwen3_raw"' in (outcome["qwen3_raw"].folder / "config.toml").read_text()
    assert all(4 < loss < 7 for loss in outcome["qwen3_raw"].losses)


def test_the_kind_of_data(outcome):
    """Every row's text is a document, and they were trained on."""
    folder = outcome["csv"].folder
    assert json.loads((folder.parent / "texts.json").read_text()) == text_of("README.md").split("\n\n")
    assert '"csv"' in (folder / "data.json").read_text()
    assert all(4 < loss < 7 for loss in outcome["csv"].losses)
