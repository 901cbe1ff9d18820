"""Steps that are skipped: loss or gradients are not finite, or far from what they have been.

One bad batch, or one bad number in a backward, must not end a run of weeks, nor get into its weights. After forward,
backward and clipping all ranks hold the same two numbers, loss and gradient norm, and decide alike. A step is skipped

- when either is not finite;
- when either is above mean + sigma standard deviations of the last 128 steps that were not skipped, and there have been
  so many (`guards.spike_sigma`; 0: never).

What a skipped step leaves as it was: parameters, moments and step counts of the optimizer, router biases, the history
of losses and norms, and the learning-rate schedule, which counts updates. What goes on: the step number, the data (its
documents are not read again), and the tokens seen, which were. So a run takes its `training.steps` steps, some of them
without an update, and the schedule ends as many updates early.

Nobody waits for the device. The verdict is made there, and handed to the optimizer there: fused AdamW takes `found_inf`
as from a gradient scaler and then changes nothing; the balancer adds nothing to its biases. A copy of it starts towards
the host, which looks at it in the next step, right before that step's update (`settle`), when the device is at work on
that step's backward. Only then the host counts, tells, ends the run after too many, and moves the schedule on. Because
it does so before the next update uses the rate, every update has the very rate that it would have if the host had known
at once: update number u has that of step u of the schedule. Logging and saving settle first, so that a checkpoint holds
no open question, and a resumed run goes on bit for bit.

What it costs: an all-reduce of one number per rank, two reductions over 128 numbers, and one reading of this rank's
gradients, to say whose were not finite. With `optimizer.implementation` "foreach" or "for-loop" torch has nothing that
could skip on the device, so there the host waits for the verdict, as torch's gradient scaler does.

Whose numbers were not finite: a rank whose own loss was; if none, one whose own gradients were, of the parameters that
see only its tokens; if none, one with such gradients of experts, which see other ranks' tokens too. In a pipeline the
loss is that of the last stage's rank, whichever stage is to blame.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.tools.logging import logger

from titan_moe.checkpoint import Progress
from titan_moe.config import Config
from titan_moe.local_gradients import seen_by
from titan_moe.mesh_check import sequences_per_step
from titan_moe.moe.layer import moe_layers

WINDOW = 128
"""Steps that a spike is measured against"""

LOSS, GRADIENTS, EXPERTS = 4, 2, 1
"""What a rank says of itself: the sum of what was not finite"""
PLACES = {LOSS: "the loss", GRADIENTS: "the gradients", EXPERTS: "the gradients of the experts"}

ACCEPTED, SKIPPED, IN_A_ROW = range(3)


def discard(model_parts: Sequence[nn.Module]) -> None:
    """Forget what forward and backward of a step left behind: gradients, load counts, dropped copies, overflow flags,
    auxiliary losses."""
    for part in model_parts:
        part.zero_grad(set_to_none=True)
        for moe in moe_layers(part).values():
            moe.forget()


def judge(values_2: Tensor, history_2N: Tensor, accepted: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """(bool scalar, whether to skip; float64 [2], the limits) for a step's loss and gradient norm, after `accepted`
    steps, the last of which are in `history_2N`, in any order."""
    deviation_2, mean_2 = torch.std_mean(history_2N, dim=1, correction=0)
    # Where they do not move at all, as with data learned by heart, the last bit of a float32 is no spike.
    deviation_2 = deviation_2.maximum(mean_2.abs() * torch.finfo(torch.float32).eps)
    limits_2 = mean_2 + sigma * deviation_2
    skip = ~torch.isfinite(values_2).all()
    if sigma:
        skip = skip | ((values_2 > limits_2).any() & (accepted >= history_2N.shape[1]))
    return skip, limits_2


@dataclass(kw_only=True)
class Pending:
    """A verdict on its way to the host: [skip, skipped in all, in a row, loss, norm, their limits, what each rank
    said], there when `event` has come; None on a CPU."""

    step: int
    first_sample: int
    told: Tensor
    event: torch.Event | None


class Guard(Stateful):
    """One per run. All ranks of the job must call its methods together.

    Arguments:
        lr_schedulers: moved on here, one update at a time.
        progress: the step that is judged, and where in the data it began: read before its tokens are counted.
        tensor_ranks: ranks that hold the same loss.
    """

    def __init__(
        self,
        config: Config,
        model_parts: Sequence[nn.Module],
        lr_schedulers: LRSchedulersContainer,
        progress: Progress,
        tensor_ranks: int,
        device: torch.device,
    ) -> None:
        self.guards, self.seq_len = config.guards, config.training.seq_len
        self.sequences_per_step = sequences_per_step(config, dist.get_world_size())
        self.model_parts, self.lr_schedulers, self.progress = model_parts, lr_schedulers, progress
        self.tensor_ranks = tensor_ranks
        self.history_2N = torch.zeros(2, WINDOW, dtype=torch.float64, device=device)  # loss, gradient norm
        self.counts_3 = torch.zeros(3, dtype=torch.int64, device=device)
        self.fault = torch.zeros((), dtype=torch.int64, device=device)  # of this rank's gradients of the step so far
        self.pending: Pending | None = None
        self.skipped = 0  # as of the last `settle`

    # ---------------------------------------------------------------------------------------------- during the step

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step's forward and backward: see whether this rank's own gradients are finite."""
        self.fault.zero_()
        with seen_by(self._look):
            yield

    def _look(self, names: list[str], gradients: list[Tensor]) -> None:
        for fault, chosen in ((EXPERTS, True), (GRADIENTS, False)):
            group = [g for name, g in zip(names, gradients) if (".routed_experts." in name) == chosen and g.numel()]
            if group:
                # Not finite if one number is not, or if their squares overflow: then the norm over all parameters is
                # not finite either. Looking for the largest number takes a CPU 13 times as long.
                norms = torch.stack(torch._foreach_norm(group))
                self.fault |= torch.where(torch.isfinite(norms).all(), 0, fault)

    def discard(self) -> None:
        """Forget the step so far: it runs again."""
        discard(self.model_parts)
        self.fault.zero_()

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """The verdict on a step, for the optimizer: float32 scalar on the device, 1 to skip it, 0 to take it.

        loss: this rank's share of the step's loss.
        grad_norm: of all gradients, the same on all ranks.
        Raises RuntimeError when the steps before were too many in a row to be skipped.
        """
        self.settle()
        said = torch.zeros(1 + dist.get_world_size(), dtype=torch.float64, device=self.counts_3.device)
        said[0] = loss / self.tensor_ranks
        said[1 + dist.get_rank()] = self.fault | torch.where(torch.isfinite(loss), 0, LOSS)
        dist.all_reduce(said)
        values_2 = torch.stack([said[0], grad_norm.double()])
        skip, limits_2 = judge(values_2, self.history_2N, self.counts_3[ACCEPTED], self.guards.spike_sigma)
        here_N = torch.arange(WINDOW, device=skip.device) == self.counts_3[ACCEPTED] % WINDOW
        self.history_2N = torch.where(here_N & ~skip, values_2[:, None], self.history_2N)
        one_more = torch.where(skip, 1, -self.counts_3[IN_A_ROW])
        self.counts_3 = self.counts_3 + torch.stack([(~skip).long(), skip.long(), one_more])
        self._tell(torch.cat([skip[None].double(), self.counts_3[SKIPPED:].double(), values_2, limits_2, said[1:]]))
        return skip.float()

    def _tell(self, verdict: Tensor) -> None:
        """Start copying it to the host."""
        event = None
        if verdict.device.type != "cpu":
            on_host = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=True)
            verdict, event = on_host.copy_(verdict, non_blocking=True), torch.Event(verdict.device.type)
            event.record()
        first_sample = self.progress.tokens_seen // self.seq_len
        self.pending = Pending(step=self.progress.step, first_sample=first_sample, told=verdict, event=event)

    # ---------------------------------------------------------------------------------------------- one step later

    def settle(self) -> None:
        """Look at the last verdict, if nobody has: move the schedule on, or tell of the step that was skipped.

        Raises RuntimeError after too many in a row.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        if pending.event is not None:
            pending.event.synchronize()
        skip, skipped, in_a_row, *told = pending.told.tolist()
        self.skipped = int(skipped)
        if not skip:
            self.lr_schedulers.step()
            return
        why = f"Step {pending.step} skipped: {self._reason(told[:2], told[2:4], told[4:])}. {self._data(pending)}"
        if dist.get_rank() == 0:
            logger.warning(f"{why}; {int(in_a_row)} in a row, {self.skipped} in all")
        if in_a_row > self.guards.max_skipped_steps:
            raise RuntimeError(
                f"{why}. That makes {int(in_a_row)} steps in a row, and guards.max_skipped_steps = "
                f"{self.guards.max_skipped_steps}: stopping. The weights are those from before them. Look at that data "
                "and at the ranks named; an earlier checkpoint (checkpoint.load_step) or a lower optimizer.lr may get "
                "past it, and if losses have changed for good, a higher guards.spike_sigma"
            )

    def _reason(self, values: list[float], limits: list[float], faults: list[float]) -> str:
        loss, norm = values
        if math.isfinite(loss) and math.isfinite(norm):
            named = zip(("loss", "gradient norm"), values, limits)
            high = [f"{name} {value:.5g} is above {limit:.5g}" for name, value, limit in named if value > limit]
            return f"{' and '.join(high)}, mean + {self.guards.spike_sigma:g} sigma of {WINDOW} steps"
        found = f"loss {loss:.5g}, gradient norm {norm:.5g}"
        for fault, place in PLACES.items():
            if ranks := [rank for rank, said in enumerate(faults) if int(said) & fault]:
                return f"{found}; not finite in {place} of {_ranks(ranks)}"
        return f"{found}; not finite in no rank's own numbers, but in their sum"

    def _data(self, pending: Pending) -> str:
        last = pending.first_sample + self.sequences_per_step - 1
        return f"Its data: samples {pending.first_sample} to {last} of the global order"

    # ---------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Fresh tensors; settles first, so that the schedule, saved after this, is up to date."""
        self.settle()
        return {"history": self.history_2N.clone(), "counts": self.counts_3.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history_2N.copy_(state_dict["history"])
        self.counts_3.copy_(state_dict["counts"])
        self.skipped, self.pending = int(self.counts_3[SKIPPED]), None


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
