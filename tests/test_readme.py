"""README's shell commands, run as they stand there in a copy of the repository; the first is the debug run in full."""

import collections
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe.config import DataSource
from titan_moe.metrics import read_metrics
from titan_moe.sources.listing import list_source

REPO = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (REPO / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """What a clone of this working tree would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        check=True,
    )
    folder = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPO / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    return folder


def bash(block: str, folder: Path) -> str:
    # With this Python first on the path, the scripts find all packages there instead of setting up a second .venv.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def unigram_entropy(dataset: str) -> float:
    """Nats per byte of a model that knows nothing but how frequent each byte is."""
    counts = collections.Counter[int]()
    for piece in list_source(DataSource(dataset=dataset)).pieces:
        for text in piece.documents():
            counts.update(text)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def test_the_first_command_trains_the_debug_model(copy):
    """Ends as README says, and has learnt: held-out loss below 0.85 of the unigram entropy of the text."""
    output = re.sub(r"\x1b\[[0-9;]*m", "", bash(BLOCKS[0], copy))
    (folder,) = (copy / "outputs").iterdir()
    metrics = read_metrics(folder)
    assert max(metrics) == 160
    entropy = unigram_entropy("python_stdlib")
    assert 3 < entropy < 3.6
    assert metrics[160]["validation_loss"] < 0.85 * entropy
    # The line as torchtitan prints it, up to mfu.
    assert re.search(
        r"- INFO - step: 160  loss:  \d\.\d{5}  grad_norm:  \d\.\d{4}  memory:  \d\.\d\dGiB\(\d+\.\d\d%\)  "
        r"tps: [\d,]+  tflops: \d\.\d\d  mfu: n/a  lr: 3\.\d\de-04  data: \d\.\d%  moe_max/mean: \d\.\d\d  "
        r"100\.0%  eta: 0m00s",
        output,
    )
    assert f"validate step: 160  loss: {metrics[160]['validation_loss']:7.4f}" in output
    assert list((folder / "tb").glob("events.*"))


def test_readme_shows_what_a_run_prints():
    """The two lines README promises: a loss that the target allows, in the format that the test above sees."""
    shown, tests, *_ = re.findall(r"```text\n(.*?)```", (REPO / "README.md").read_text(), flags=re.DOTALL)
    assert re.search(r"\d+ passed", tests)
    assert re.search(r"step: 160  loss:  2\.\d{5}  grad_norm", shown)
    assert float(re.search(r"validate step: 160  loss:  (\d\.\d{4})", shown).group(1)) < 0.85 * 3.14


def test_the_second_command_runs_the_tests(copy):
    """Collecting only, or it would run this test in turn."""
    assert BLOCKS[1] == "./run_tests.sh\n"
    assert re.search(r"\d+ tests collected", bash("./run_tests.sh --collect-only -q -m ''", copy))


@pytest.mark.parametrize("block", BLOCKS[2:])
def test_the_other_commands_run(copy, block):
    assert "step:" in bash(block, copy)


def test_own_data_takes_three_commands_from_jsonl_to_a_run():
    """The test above runs them."""
    (block,) = [block for block in BLOCKS[2:] if "titan_moe.tokenize" in block]
    commands = re.findall(r"^(mkdir|\$\(python3|\./run_train\.sh)", block, flags=re.MULTILINE)
    assert len(commands) == 3 and "my_texts/a.jsonl" in block


@pytest.mark.slow
def test_the_debug_run_repeats_bit_for_bit(copy):
    """On all cores, in bf16: the first 20 steps of the first command, twice."""
    command = f"{BLOCKS[0].strip()} --training.steps=20 --lr_scheduler.total_steps=160 --metrics.log_freq=1"
    for name in ("once", "twice"):
        bash(f"{command} --job.dump_folder={name}", copy)
    once, twice = (read_metrics(copy / name) for name in ("once", "twice"))
    assert [record["loss"] for record in once.values()] == [record["loss"] for record in twice.values()]
    assert len(once) == 20
