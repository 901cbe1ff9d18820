"""Forward and backward of a whole optimizer step as one CUDA graph.

A step of a large model is some ten thousand kernels, and for each of them Python has to get to the point where it is
launched. Where kernels are short, the device waits for Python. A CUDA graph is the list of a step's kernels with all
their addresses, recorded once; afterwards the host launches the list.

    step 1    runs as always: what is compiled, measured or allocated once happens here (warm-up)
    step 2    runs while CUDA records what it would launch (capture), then the record is launched
    step 3 .. copies the new tokens to where the recorded kernels read them, and launches the record (replay)

torchtitan's `CUDAGraphWrapper` does all three, and so it does here. What is recorded is the whole step, all of its
microbatches: with accumulation they differ, the last one reduces the gradients. Clipping, guard, optimizer, validation
and logging run as always, on the addresses that the graph writes to.

**What cannot be recorded** is a host that reads the device: it would decide something once for all steps. So every
shape has to be known without looking (`moe.recv_buffer` is not "exact", or there is one expert-parallel rank), and what
Python does during a step has to be the same in each. `cuda_graph_check.py` refuses the rest before a process starts,
`problem` what only shows on the machine.

**What Python leaves behind.** A replay runs kernels and no Python, but forward and backward also leave tensors in
attributes: the gradients, the layers' auxiliary losses, what they tell of the router, their counts of dropped copies,
their overflow flags. Those who take them between two steps set them to None. So after each replay the tensors of the
capture, which now have the new step's numbers, are put there again. What modules add to in place, such as their load
counts, needs nothing.

**What is done in between.** An evaluation leaves some parameters gathered, as FSDP2 sees it for the next forward. A
capture that found them so would not record their gather, and every replay would use these weights; before a replay
nobody else would shard them again, and clipping and optimizer would look for gradients at the gathered ones. So FSDP2
is put back to where a step begins, before each.

**Growing buffers.** When a receive buffer has overflowed it grows (`moe/replay.py`), and the record is of other shapes.
It is thrown away, and the repeated step is a warm-up again.

Graphs are freed (`cudagraph_teardown`) before the process group is left: NCCL's communicators must outlive them.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from titan_moe.runtime import DEVICE_TYPE

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.cudagraph import CUDAGraphInputSpec, CUDAGraphWrapper
from torchtitan.tools.logging import logger

from titan_moe import in_flight
from titan_moe.config import Config
from titan_moe.inputs import Inputs
from titan_moe.moe.choices import experts_sync_problem
from titan_moe.moe.layer import FusedMoE, moe_layers
from titan_moe.moe.replay import Replay
from titan_moe.phases import Phases

Parts = dict[str, Tensor]
"""What is told of a step: its loss, and more"""
Compute = Callable[[list[Inputs], Tensor], Parts]
"""Forward and backward of a step's microbatches, whose loss is a mean over so many tokens, int64 []"""
Launch = Callable[[Compute, Tensor, list[Inputs]], Parts]


def launcher(config: Config, model_parts: Sequence[nn.Module], replay: Replay, phases: Phases) -> Launch:
    """What runs a step's forward and backward, by cuda_graph.scope. Raises ValueError where that cannot be."""
    if config.cuda_graph.scope == "none":
        return as_it_is
    if DEVICE_TYPE != "cuda":
        raise ValueError(f'cuda_graph.scope = "full": needs a CUDA GPU, and this is a {DEVICE_TYPE}; set it to "none"')
    dtype = getattr(torch, config.training.mixed_precision_param)
    for name, moe in (item for part in model_parts for item in moe_layers(part).items()):
        if why := problem(moe, dtype):
            raise ValueError(f'cuda_graph.scope = "full": {why} ({name}); set it to "none", or choose another')
    return StepGraph(model_parts, replay, phases)


def as_it_is(compute: Compute, valid_tokens: Tensor, microbatches: list[Inputs]) -> Parts:
    return compute(microbatches, valid_tokens)


def problem(moe: FusedMoE, dtype: torch.dtype, device: str = DEVICE_TYPE) -> str | None:
    """Why the host would wait for the device in this layer; None: it does not."""
    region = moe.routed_experts
    dispatcher, experts = region.dispatcher, region.inner_experts
    if dispatcher is not None and not dispatcher.sync_free:
        return f"the dispatcher {dispatcher.name} makes the host wait for the counts"
    sizes = dtype, experts.w2_EDF.shape[1], experts.w2_EDF.shape[2]
    if why := experts_sync_problem(experts.backend, device, *sizes, experts.recipe):
        return f"in the experts {experts.backend} {why}"
    return None


class StepGraph:
    """Call it as `as_it_is`. What it returns is overwritten by the next call.

    Every call must bring microbatches of the same shapes, and what `compute` does in Python must be the same each time.
    """

    def __init__(self, model_parts: Sequence[nn.Module], replay: Replay, phases: Phases) -> None:
        self.model_parts, self.replay, self.factor, self.phases = model_parts, replay, replay.factor, phases
        self.compute: Compute | None = None
        self.spec: CUDAGraphInputSpec | None = None
        self.graph: CUDAGraphWrapper | None = None
        self.places: list[tuple[Any, str]] = [(p, "grad") for part in model_parts for p in part.parameters()]
        for moe in (moe for part in model_parts for moe in moe_layers(part).values()):
            region = moe.routed_experts
            self.places += [(moe, "loss"), (moe.router.gate, "loss"), (moe, "decisions_2")]
            self.places += [(region, "dropped"), (region, "overflow")]
        self.left: list[Tensor | None] = []  # what the last run of Python put in these places

    def __call__(self, compute: Compute, valid_tokens: Tensor, microbatches: list[Inputs]) -> Parts:
        inputs = (microbatches, valid_tokens)
        if self.graph is not None and self.factor != self.replay.factor:
            self.forget()
        if self.graph is not None:  # nor before the first forward, when FSDP2 has no state yet
            for part in self.model_parts:
                cast(FSDPModule, part).reset_iter_state()
        if self.graph is None or self.spec is None:
            self.compute, self.factor = compute, self.replay.factor
            self.spec = CUDAGraphInputSpec(inputs)
            self.graph = CUDAGraphWrapper(self._run, self.spec.flatten(inputs))
        with self.phases.whole("graph"), in_flight.unnoted():  # a replay would not make their marks
            parts = self.graph(*self.spec.flatten(inputs))
        for (owner, name), value in zip(self.places, self.left, strict=True):
            setattr(owner, name, value)
        return parts

    def _run(self, *leaves: Any) -> Parts:
        """The Python of a step: called for warm-up and capture, not for a replay."""
        assert self.compute is not None and self.spec is not None
        self.left = []  # the warm-up's gradients need not be there beside those of the capture
        parts = self.compute(*self.spec.unflatten(leaves))
        self.left = [getattr(owner, name) for owner, name in self.places]
        return parts

    def forget(self) -> None:
        """Throw the record away: the next call is a warm-up."""
        assert self.graph is not None
        logger.info("The CUDA graph of the step is recorded anew: receive buffers have grown")
        self.graph.teardown()
        self.graph, self.left = None, []
