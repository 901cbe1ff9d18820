"""300 steps of the debug model's structure in every recipe, against bf16 from the same weights on the same batches."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe.metrics import read_metrics

REPO = Path(__file__).parents[2]
# A smaller debug model on its own data: text, which leaves something to learn for all of the steps. At a third of its
# learning rate and twice the batch, rounding alone (fp32 against bf16) comes to half a percent, not to a whole one.
SMALL = [
    *("train_configs/debug_model.toml", "--training.steps=300", "--training.seq_len=64"),
    *("--training.local_batch_size=8", "--optimizer.lr=1e-3", "--model.dim=128", "--model.n_layers=3"),
    "--model.moe_hidden_dim=64",
    *("--model.dense_hidden_dim=256", "--model.n_heads=2", "--model.q_lora_rank=64", "--model.kv_lora_rank=64"),
    *("--metrics.log_freq=1", "--metrics.enable_tensorboard=false", "--validation.freq=300", "--validation.steps=32"),
]
LAST = 50  # steps that the final loss is the mean of
FP8 = ("fp8_current", "fp8_block", "mxfp8")
WITHIN = {**dict.fromkeys(FP8, 0.02), "nvfp4": 0.02}
RECIPES = ["bf16", "fp32", *WITHIN]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, tuple[float, float]]:
    """(training loss over the last steps, validation loss) by recipe, seed 0; two trainings at a time."""
    out = tmp_path_factory.mktemp("learning")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    for pair in zip(RECIPES[::2], RECIPES[1::2]):
        started = []
        for recipe in pair:
            plain = recipe in ("bf16", "fp32")
            precision = [
                f"--precision.recipe={recipe}",
                *([] if plain else ["--training.mixed_precision_param=bfloat16"]),
            ]
            command = [sys.executable, "train.py", *SMALL, *precision, f"--job.dump_folder={out / recipe}"]
            with open(out / f"{recipe}.log", "w", encoding="utf-8") as log:
                started.append(subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log))
        for recipe, process in zip(pair, started):
            assert process.wait() == 0, (out / f"{recipe}.log").read_text()[-3000:]
    found = {}
    for recipe in RECIPES:
        metrics = read_metrics(out / recipe)
        losses = [record["loss"] for record in metrics.values()]
        found[recipe] = (statistics.fmean(losses[-LAST:]), metrics[300]["validation_loss"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", WITHIN)
def test_the_final_loss_is_that_of_bf16(results, recipe):
    """In the mean of the last 50 steps, whose batches are the same: 2 %, and the three FP8 recipes together 1 %. One
    trajectory alone differs by half a percent from one kind of CPU to the next: fp8_block ended 1.25 % above bf16 on an
    Intel CPU with AMX, and within 1 % on an AMD EPYC. What is printed besides is to judge it by: fp32 differs from bf16
    by rounding alone, and the loss on 32 batches of held-out documents, after so short a training, differs by more than
    training's from one trajectory to the next."""
    (got, held_out), (bf16, bf16_held_out), (fp32, fp32_held_out) = (results[name] for name in (recipe, "bf16", "fp32"))
    print(f"{recipe}: {got:.4f}, {got / bf16 - 1:+.2%} of bf16's; fp32 {fp32 / bf16 - 1:+.2%}")
    print(f"held out: {held_out / bf16_held_out - 1:+.2%}; fp32 {fp32_held_out / bf16_held_out - 1:+.2%}")
    assert got == pytest.approx(bf16, rel=WITHIN[recipe])
    assert statistics.fmean(results[name][0] for name in FP8) == pytest.approx(bf16, rel=0.01)
    assert got < 3.1, "no better than knowing how frequent each byte is"
