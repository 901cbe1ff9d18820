"""The mean loss per token over held-out documents: the same samples each time, on every mesh."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils

from titan_moe import parallel
from titan_moe.inputs import Batch, to_device

if TYPE_CHECKING:
    from train import Run

Evaluate = Callable[["Run", list[Batch]], torch.Tensor]
"""This rank's share of the cross-entropy of so many microbatches, summed over their tokens"""


@torch.no_grad()
def validate(run: "Run", evaluate: Evaluate) -> float:
    """All ranks must call it."""
    with run.telemetry.phase("validation"):
        for part in run.model_parts:
            part.eval()  # the router counts its load in training mode only
        sums = run.replay.until_it_fits(partial(held_out_loss, run, evaluate), "validation")
        for part in run.model_parts:
            part.train()
        batch_mesh = run.parallel_dims.get_optional_mesh("batch")
        loss_sum = parallel.sum_of_sequence(run.parallel_dims, sums["loss"])
        return dist_utils.dist_sum(loss_sum, batch_mesh) / dist_utils.dist_sum(sums["labels"], batch_mesh)


def held_out_loss(run: "Run", evaluate: Evaluate) -> dict[str, torch.Tensor]:
    """This rank's share of the cross-entropy of all held-out batches, summed, and how many labels it is of."""
    assert run.validation_dataloader is not None
    batches = iter(run.validation_dataloader)
    loss_sum = torch.zeros((), device=run.device)
    valid = torch.zeros((), dtype=torch.int64, device=run.device)
    for _ in range(run.config.validation.steps):
        microbatches = [to_device(next(batches), run.device) for _ in range(run.microbatches)]
        valid += torch.stack([(labels_BL != IGNORE_INDEX).sum() for _, labels_BL in microbatches]).sum()
        loss_sum += evaluate(run, microbatches)
    return {"loss": loss_sum, "labels": valid}
