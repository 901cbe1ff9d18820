"""Running a step again when a receive buffer was too small for it.

With `moe.recv_buffer` a factor of the mean, routing may bring more rows than a layer has room for. The forward that
meets this goes on, with rows missing, and says so in a flag on its device: nobody waits. After forward and backward of
the whole step the ranks ask each other, in one all-reduce and one read on the host. If any layer of any rank lacked
rows, all ranks throw the step away together (`guards.discard`). All buffers grow, the random numbers are turned back,
and the same microbatches run again. What the optimizer sees is what exact sizes would have given it. A pipeline needs
nothing more: every rank has run its whole schedule when it is asked.

The read could come one step late, as the guard's does. Then two steps would have to run again, the later one too, which
did not see the earlier one's update: with the batches, the random numbers and the token counts of both kept until it is
known that they are not needed. What that buys is the moment in which the device has nothing to do between the last
kernel of backward and the first of clipping, once a step. So it is read at once.

Tokens that are not numbers all go to the same experts, and may need any room. A step whose loss is not finite is lost
anyway: nothing grows for it, and the guard skips it.

Buffers stay as large as they have become until the run ends. A resumed run starts with the configured factor again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.tools.logging import logger

from titan_moe import random_state
from titan_moe.moe import layout
from titan_moe.moe.layer import moe_layers


class Replay:
    """One per run. All ranks of the job must call its methods together.

    Arguments:
        recv_buffer: "exact", "worst_case" or a factor, of which only the last can overflow.
        model_parts: this rank's pipeline stages; it may have no MoE layer.
    """

    def __init__(self, recv_buffer: str | float, model_parts: Sequence[nn.Module], device: torch.device) -> None:
        self.configured = self.factor = 1.0 if isinstance(recv_buffer, str) else recv_buffer
        self.device = device
        self.layers = {name: moe for part in model_parts for name, moe in moe_layers(part).items()}
        self.repeats = 0  # steps and validations that ran again, since the start
        self.names: list[str] = []  # of all ranks' layers whose buffers may overflow; the same list everywhere
        if not isinstance(recv_buffer, str):
            self._find_layers()

    def _find_layers(self) -> None:
        dispatchers = {name: moe.routed_experts.dispatcher for name, moe in self.layers.items()}
        mine = [name for name, dispatcher in dispatchers.items() if dispatcher is not None and dispatcher.can_overflow]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        self.names = sorted({name for names in everywhere for name in names})

    def until_it_fits(
        self, compute: Callable[[], dict[str, Tensor]], what: str, discard: Callable[[], None] = lambda: None
    ) -> dict[str, Tensor]:
        """What `compute` returns, which is run again as long as any rank's buffers were too small for it, unless a
        rank's "loss" in it is not finite. `discard` undoes what it left behind. Raises ValueError on all ranks when the
        buffers have grown to their bound."""
        while self.names:
            before = random_state.states(self.device)  # forced random routing must draw the same ids again
            result = compute()
            overflowed = self._overflowed(result["loss"])
            if not overflowed:
                return result
            discard()
            self.repeats += 1
            self._grow(f"{what}: more rows than the receive buffer holds in {', '.join(overflowed)}")
            random_state.turn_back(self.device, before)
        return compute()  # every buffer holds whatever may come

    def _overflowed(self, loss: Tensor) -> list[str]:
        """The layers that lacked rows on any rank, since the last call; none if any rank's loss is not finite."""
        flags = torch.zeros(len(self.names) + 1, dtype=torch.int32, device=self.device)
        flags[-1] = ~torch.isfinite(loss)
        for i, name in enumerate(self.names):
            if name in self.layers:
                region = self.layers[name].routed_experts
                if region.overflow is not None:
                    flags[i] = region.overflow
                region.overflow = None
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        *lacking, lost = flags.tolist()
        return [] if lost else [name for name, flag in zip(self.names, lacking) if flag]

    def _grow(self, why: str) -> None:
        # Here and not only in the dispatchers, so that ranks without a MoE layer stop too.
        factor = layout.next_factor(self.configured, self.factor)
        if dist.get_rank() == 0:
            logger.warning(f"{why}. It grows from {self.factor:g} to {factor:g} times the mean; the same again")
        self.factor = factor
        for moe in self.layers.values():
            dispatcher = moe.routed_experts.dispatcher
            assert dispatcher is not None
            dispatcher.grow()
        self._find_layers()
