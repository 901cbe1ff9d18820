"""Stopping when asked to: all ranks after the same step, with a checkpoint of it.

Who asks writes a file into the run folder (stop_file.py). Rank 0 looks for it before each step, and says what it saw in
a collective that a step has anyway: the sum of its valid tokens, which counts over all ranks for this. So every rank
learns the same about the same step, on every mesh. Nobody waits for it: the sum is copied to the host as the device
comes to it, and looked at before the next step. By then the device has begun the step that was just issued to it, or
has that wait before it, with all of the step's work still to do. What was asked for before step s is so known before
step s + 1, which is the last: it is logged, saved and left. What was asked for during the set-up is known before the
first step.
"""

from pathlib import Path

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.tools.logging import logger

from titan_moe import stop_file
from titan_moe.checkpoint_manager import VerifiedCheckpoints
from titan_moe.config import Config


class Stop:
    """One per run. All ranks of the job must make it, and call its methods, together."""

    def __init__(self, config: Config, folder: Path, device: torch.device, checkpointer: VerifiedCheckpoints) -> None:
        self.folder, self.device, self.checkpointer = folder, device, checkpointer
        self.saves = config.checkpoint.enable and not config.checkpoint.load_only
        self.done = False
        # On the host: how many ranks saw the file before the newest step, or during the set-up.
        self.told = torch.tensor(runtime.on_rank_0(lambda: stop_file.asked(folder)), dtype=torch.int64)
        self.arrived: torch.Event | None = None  # when it is there

    def sum_over_ranks(self, count: Tensor) -> Tensor:
        """The sum of `count` [], int64, over all ranks of the job; and whether rank 0 sees a reason to stop."""
        sees = dist.get_rank() == 0 and stop_file.asked(self.folder)
        sums = torch.stack([count, torch.full_like(count, sees)])  # full_like is a kernel, which no host waits for
        dist.all_reduce(sums)
        self._tell(sums[1])
        return sums[0]

    def _tell(self, sees: Tensor) -> None:
        if self.device.type == "cpu":
            self.told = sees
            return
        if self.arrived is None:
            self.told = torch.zeros_like(sees, device="cpu", pin_memory=True)
            self.arrived = torch.Event(self.device)
        self.told.copy_(sees, non_blocking=True)
        self.arrived.record()

    def agreed(self) -> bool:
        """Whether the step that now begins is to be the last. To be asked before each step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return bool(self.told.item())

    def save(self, step: int, *, last: bool, stops: bool) -> None:
        """Save a checkpoint when one is due. A run that `stops`, and is not at its end, saves all of itself and is
        done."""
        if last or not stops:
            self.checkpointer.save(step, last_step=last)
            return
        if self.saves:
            self.checkpointer.last_save_model_only, self.checkpointer.export_weights = False, None
            self.checkpointer.save(step, last_step=True)
            self.checkpointer.maybe_wait_for_saving()
        if dist.get_rank() == 0:
            saved = "the same command goes on from here" if self.saves else "nothing is saved (checkpoint.enable)"
            logger.info(f"Stopped after step {step}, as asked to ({stop_file.why(self.folder)}): {saved}")
            stop_file.withdraw(self.folder)
        stop_file.Outcome(self.saves).write()
        self.done = True
