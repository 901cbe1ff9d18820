"""The debug model on one GPU: the same curve with each experts backend."""

import math

import pytest
import torch

from tests.distributed.harness import Outcome, torchrun
from tests.gpu.backends import experts_backend
from titan_moe.flavors import FLAVORS

pytestmark = pytest.mark.gpu

STEPS = 5


def train(folder, *settings: str, ranks: int = 1) -> list[float]:
    """Loss of each step of the debug model, in bf16."""
    finished = torchrun(
        ranks,
        "train.py",
        "train_configs/debug_model.toml",
        *settings,
        f"--job.dump_folder={folder}",
        f"--training.steps={STEPS}",
        "--training.mixed_precision_param=bfloat16",
        "--validation.enable=false",
        "--metrics.log_freq=1",
    )
    assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
    return Outcome(folder).losses


def test_the_debug_model_trains(tmp_path):
    model = FLAVORS["debugmodel"]
    losses = train(tmp_path / "grouped_mm", "--moe.experts=grouped_mm")
    assert len(losses) == STEPS and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    by_te = experts_backend("TE, host splits", torch.bfloat16, model.dim, model.moe_hidden_dim)
    if isinstance(by_te, str):
        pytest.skip(f"trained with grouped_mm alone: {by_te}")
    assert train(tmp_path / "te", "--moe.experts=te") == pytest.approx(losses, rel=2e-2)
