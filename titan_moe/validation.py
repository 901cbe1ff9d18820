"""The mean loss per token over held-out documents, of each set: the same samples each time, on every mesh."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils

from titan_moe import parallel
from titan_moe.data import PackedDataLoader
from titan_moe.inputs import Batch, to_device

if TYPE_CHECKING:
    from train import Run

Evaluate = Callable[["Run", list[Batch]], torch.Tensor]
"""This rank's share of the cross-entropy of so many microbatches, summed over their tokens"""


@torch.no_grad()
def validate(run: "Run", evaluate: Evaluate) -> dict[str, float]:
    """{name of a set, or "" for that of validation.dataset: its mean loss}. All ranks must call it."""
    with run.telemetry.phase("validation"):
        for part in run.model_parts:
            part.eval()  # the router counts its load in training mode only
        evaluated = {
            name: run.replay.until_it_fits(partial(held_out_loss, run, evaluate, loader), "validation")
            for name, loader in run.validation_dataloaders.items()
        }
        for part in run.model_parts:
            part.train()
        batch_mesh, losses = run.parallel_dims.get_optional_mesh("batch"), {}
        for name, sums in evaluated.items():
            loss_sum = parallel.sum_of_sequence(run.parallel_dims, sums["loss"])
            losses[name] = dist_utils.dist_sum(loss_sum, batch_mesh) / dist_utils.dist_sum(sums["labels"], batch_mesh)
        return losses


def held_out_loss(run: "Run", evaluate: Evaluate, loader: PackedDataLoader) -> dict[str, torch.Tensor]:
    """This rank's share of the cross-entropy of all batches of a set, summed, and how many labels it is of."""
    batches = iter(loader)
    loss_sum = torch.zeros((), device=run.device)
    valid = torch.zeros((), dtype=torch.int64, device=run.device)
    for _ in range(run.config.validation.steps):
        microbatches = [to_device(next(batches), run.device) for _ in range(run.microbatches)]
        valid += torch.stack([(labels_BL != IGNORE_INDEX).sum() for _, labels_BL in microbatches]).sum()
        loss_sum += evaluate(run, microbatches)
    return {"loss": loss_sum, "labels": valid}
