"""README: its two commands, the first of them the debug run in full, and what it promises about itself. Its other
commands run in test_docs.py."""

import collections
import math
import re
from pathlib import Path

import pytest

from tests.shell_blocks import bash, clone, fenced, shell_blocks, text_of
from titan_moe.config import DataSource
from titan_moe.metrics import read_metrics
from titan_moe.sources.listing import list_source

BLOCKS = shell_blocks("README.md")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    return clone(tmp_path_factory.mktemp("clone"))


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
    """The two lines README promises: a loss that the target allows, in the format that the test above sees; and the
    page that explains the line shows the same one."""
    shown, tests, *_ = [block for language, block in fenced("README.md") if language == "text"]
    assert re.search(r"\d+ passed", tests)
    assert re.search(r"step: 160  loss:  2\.\d{5}  grad_norm", shown)
    assert float(re.search(r"validate step: 160  loss:  (\d\.\d{4})", shown).group(1)) < 0.85 * 3.14
    assert shown.splitlines()[0] in text_of("docs/telemetry.md")


def test_the_second_command_runs_the_tests(copy):
    """Collecting only, or it would run this test in turn."""
    assert BLOCKS[1] == "./run_tests.sh\n"
    assert re.search(r"\d+ tests collected", bash("./run_tests.sh --collect-only -q -m ''", copy))


def test_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 250


def test_measured_numbers_carry_their_command_and_commit():
    """What the two commands print, and the table that benchmarks/run.py makes."""
    assert len(re.findall(r"\(at [0-9a-f]{7,}[,)]", text_of("README.md").split("## What it is")[0])) == 2
    results = text_of("README.md").split("## Results")[1].split("\n## ")[0]
    assert re.search(r"`[^`]*benchmarks/run\.py [^`]+`\):\n", results)
    made = results.split("<!-- made by benchmarks/run.py --docs -->")[1].split("<!-- end of what is made -->")[0]
    assert "times better" in made and re.search(r"; commit [0-9a-f]{7,}", made)


@pytest.mark.slow
def test_the_debug_run_repeats_bit_for_bit(copy):
    """On all cores, in bf16: the first 20 steps of the first command, twice."""
    command = f"{BLOCKS[0].strip()} --training.steps=20 --lr_scheduler.total_steps=160 --metrics.log_freq=1"
    for name in ("once", "twice"):
        bash(f"{command} --job.dump_folder={name}", copy)
    once, twice = (read_metrics(copy / name) for name in ("once", "twice"))
    assert [record["loss"] for record in once.values()] == [record["loss"] for record in twice.values()]
    assert len(once) == 20
