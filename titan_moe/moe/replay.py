"""Running a step again when a receive buffer was too small for it.

With `moe.recv_buffer` a factor of the mean, routing may bring more rows than a layer has room for. The forward that
meets this goes on, with rows missing, and says so in a flag on its device: nobody waits. After forward and backward of
the whole step the ranks ask each other, in one all-reduce and one read on the host. If any layer of any rank lacked
rows, all ranks throw the step away together: gradients, load counts and auxiliary losses. All buffers grow, the random
numbers are turned back, and the same microbatches run again. What the optimizer sees is what exact sizes would have
given it. A pipeline needs nothing more: every rank has run its whole schedule when it is asked.

Buffers stay as large as they have become until the run ends. A resumed run starts with the configured factor again.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.tools.logging import logger

from titan_moe import random_state
from titan_moe.moe import layout
from titan_moe.moe.layer import moe_layers

T = TypeVar("T")


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
        self.names: list[str] = []  # of all ranks' layers whose buffers may overflow; the same list everywhere
        if not isinstance(recv_buffer, str):
            self._find_layers()

    def _find_layers(self) -> None:
        dispatchers = {name: moe.routed_experts.dispatcher for name, moe in self.layers.items()}
        mine = [name for name, dispatcher in dispatchers.items() if dispatcher is not None and dispatcher.can_overflow]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        self.names = sorted({name for names in everywhere for name in names})

    def until_it_fits(self, compute: Callable[[], T], what: str, discard: Callable[[], None] | None = None) -> T:
        """What `compute` returns, which is run again as long as any rank's buffers were too small for it. `discard`
        undoes what it left behind beside the layers' own counts. Raises ValueError on all ranks when the buffers have
        grown to their bound."""
        while self.names:
            before = random_state.states(self.device)  # forced random routing must draw the same ids again
            result = compute()
            overflowed = self._overflowed()
            if not overflowed:
                return result
            for moe in self.layers.values():
                moe.forget()
            if discard is not None:
                discard()
            self._grow(f"{what}: more rows than the receive buffer holds in {', '.join(overflowed)}")
            random_state.turn_back(self.device, before)
        return compute()  # every buffer holds whatever may come

    def _overflowed(self) -> list[str]:
        """The layers that lacked rows on any rank, since the last call."""
        flags = torch.zeros(len(self.names), dtype=torch.int32, device=self.device)
        for i, name in enumerate(self.names):
            if name in self.layers:
                region = self.layers[name].routed_experts
                if region.overflow is not None:
                    flags[i] = region.overflow
                region.overflow = None
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return [name for name, flag in zip(self.names, flags.tolist()) if flag]

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
