"""Is what this machine computes the same when it computes it again?

A GPU or CPU core that now and then computes wrongly, without any error, poisons weights for days before a loss shows
it. With every operation deterministic the same computation gives the same bits, so a difference is a fault of the
machine (or an operation that does not repeat after all). Every `guards.corruption_check_every` steps, before the step
itself, all ranks run forward and backward of its first microbatch twice, throw both away, turn the random numbers back,
and compare. Training does not notice. A fault that comes with every repetition is not found: that takes another
machine, or known results.

Compared are digests, one number each: of what every layer returns, of the loss, of the gradient that every layer is
handed in backward, and of this rank's own gradients before they are reduced (local_gradients.py). Other ranks' faults
arrive through expert, tensor and pipeline parallelism, but later. So the rank whose first difference comes earliest in
the order of computation, forward from the first layer to the loss and backward to the first layer, is the one to blame.

Cost: no memory but that of a microbatch in flight; the time of two microbatches every N steps, and of two steps with a
pipeline, whose schedule runs whole steps only.

A digest is the sum of the bit patterns as integers, each row weighted with an odd number of its own, modulo 2^64: any
one flipped bit changes it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger

from titan_moe import random_state
from titan_moe.config import Config
from titan_moe.guards import discard
from titan_moe.inputs import Inputs
from titan_moe.local_gradients import seen_by
from titan_moe.moe.layer import moe_layers
from titan_moe.torch_helpers import local

FORWARD, LOSS, BACKWARD = range(3)
AFTER_ALL_LAYERS = 10**9


class Place(NamedTuple):
    """Where a number comes from; places sort in the order in which a microbatch computes them."""

    phase: int
    depth: int
    of_parameters: bool
    name: str

    @classmethod
    def of(cls, phase: int, module: str, of_parameters: bool = False) -> "Place":
        found = re.match(r"(mtp_)?layers\.(\d+)", module)
        depth = -1 if module.startswith("tok_embeddings") else AFTER_ALL_LAYERS
        if found is not None:
            depth = int(found[2]) + (AFTER_ALL_LAYERS // 2 if found[1] else 0)
            module = found[0]
        return cls(phase, -depth if phase == BACKWARD else depth, of_parameters, module)

    def __str__(self) -> str:
        if self.phase == LOSS:
            return "the loss"
        if self.phase == FORWARD:
            return f"the output of {self.name}"
        return f"the gradients of {self.name}'s {'parameters' if self.of_parameters else 'output'}"


Digests = dict[Place, Tensor]  # int64 scalars on the device


def digest(x: Tensor) -> Tensor:
    """int64 scalar, of any tensor's bits."""
    x = local(x.detach())
    bits = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    sums = bits.reshape(-1, bits.shape[-1] if bits.ndim else 1).sum(-1, dtype=torch.int64)
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()


class CorruptionCheck:
    """One per run. All ranks of the job must call `check` together.

    Raises ValueError when a dispatcher does not promise to repeat bit for bit.
    """

    def __init__(self, config: Config, model_parts: Sequence[nn.Module], device: torch.device) -> None:
        self.every, self.device, self.model_parts = config.guards.corruption_check_every, device, model_parts
        self.pipelined = config.parallelism.pipeline_parallel_degree > 1
        self.sound = 0  # the last step that was checked
        for part in model_parts if self.every else ():
            for moe in moe_layers(part).values():
                dispatcher = moe.routed_experts.dispatcher
                if dispatcher is not None and not dispatcher.deterministic:
                    raise ValueError(
                        f"guards.corruption_check_every = {self.every}: compares what is computed twice bit for bit, "
                        f"which dispatcher {dispatcher.name} does not promise to repeat; choose another with "
                        "moe.dispatcher, or leave the check out"
                    )

    def check(
        self, step: int, compute: Callable[[list[Inputs]], dict[str, Tensor]], microbatches: list[Inputs]
    ) -> None:
        """`compute`, forward and backward of some microbatches, returns this rank's share of their "loss". Does nothing
        but at every N-th step. Raises RuntimeError on all ranks when any rank computed something else the second time.
        """
        if not self.every or step % self.every:
            return
        before, runs = random_state.states(self.device), []
        for _ in range(2):
            random_state.turn_back(self.device, before)
            with self._recording() as digests:
                loss = compute(microbatches if self.pipelined else microbatches[:1])["loss"]
            digests[Place.of(LOSS, "loss")] = digest(loss)
            runs.append(digests)
            discard(self.model_parts)
        random_state.turn_back(self.device, before)
        firsts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(firsts, first_difference(*runs))
        self._raise_on(firsts, step)
        self.sound = step

    def _raise_on(self, firsts: list[Place | None], step: int) -> None:
        differing = {rank: place for rank, place in enumerate(firsts) if place is not None}
        if not differing:
            if dist.get_rank() == 0:
                logger.info(f"Corruption check at step {step}: all ranks computed the same twice")
            return
        earliest = min(differing.values())
        culprits = [str(rank) for rank, place in differing.items() if place == earliest]
        others = {rank: place for rank, place in differing.items() if place != earliest}
        seen = "".join(f"; later on rank {rank} in {place}" for rank, place in others.items())
        sound = f"at step {self.sound} it computed the same twice" if self.sound else "it is this start's first check"
        raise RuntimeError(
            f"Step {step}: computed twice, {earliest} differed on rank {', '.join(culprits)}{seen}. The same "
            f"computation must give the same bits, so that rank's device is suspect ({sound}). Take its machine out, "
            "and go on from a checkpoint of a step that you trust (checkpoint.load_step)"
        )

    @contextmanager
    def _recording(self) -> Iterator[Digests]:
        """Inside, digests of what the layers compute are added to the dictionary."""
        digests: Digests = {}

        def add(place: Place, x: Tensor) -> None:
            digests[place] = digests.get(place, 0) * 31 + digest(x)  # of several microbatches, in their order

        def output_of(name: str, output: Tensor) -> None:
            add(Place.of(FORWARD, name), output)
            if output.requires_grad:
                output.register_hook(lambda grad: add(Place.of(BACKWARD, name), grad))

        def gradients(names: list[str], tensors: list[Tensor]) -> None:
            for name, tensor in zip(names, tensors):
                add(Place.of(BACKWARD, canonical_fqn(name), of_parameters=True), tensor)

        with ExitStack() as stack:
            stack.enter_context(seen_by(gradients))
            for name, layer in self._layers():
                # Bound now: the loop goes on. What a hook returns would replace the output.
                handle = layer.register_forward_hook(lambda _, args, output, name=name: output_of(name, output))
                stack.callback(handle.remove)
            yield digests

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Of this rank, but for those compiled whole, which have hooks no more: they are seen through the next one."""
        for part in self.model_parts:
            for name, module in part.named_modules():
                if re.fullmatch(r"(mtp_)?layers\.\d+", name) and module._compiled_call_impl is None:
                    yield name, module


def first_difference(once: Digests, again: Digests) -> Place | None:
    """The earliest place whose digests differ."""
    assert once.keys() == again.keys(), "the second run computed other things than the first"
    places = sorted(once)
    pairs = torch.stack([torch.stack([once[place], again[place]]) for place in places]).tolist()
    return next((place for place, (a, b) in zip(places, pairs) if a != b), None)
