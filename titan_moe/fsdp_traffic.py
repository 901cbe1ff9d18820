"""FSDP2's gathers and gradient reductions, beside expert-parallel traffic.

Two kinds of traffic can be under way at once, on a large machine over two networks: FSDP's (parameters and gradients)
across nodes, dispatch and combine inside the NVLink domain. Three things decide whether they are.

**Communicators.** What is issued on one communicator runs in that order, one after the other. torch gives each axis of
a mesh its own, but for an axis that holds all ranks: that one gets the default group. With as many expert-parallel as
shard ranks, and no other axis, every dispatch would wait for a gather that was issued before it. So
`runtime.build_meshes` gives expert parallelism a group of its own, and `prepare` checks that no FSDP group is it.

**Order.** FSDP2 issues the gather of the next layer when a layer starts, as soon as its own parameters are there:
before its attention and its dispatch, and in backward before the transpose of its combine. That is the order wanted
here. The gather has until the next layer starts and takes long; a dispatch is waited for soon. Issued first, the gather
is under way beside the whole layer. It must be asked for by name (`set_modules_to_forward_prefetch`; torchtitan does
with EP, parallel.py for more layers than one): left to itself FSDP2 gathers a layer when the host comes to it, and
relies on a host that runs ahead of the device. A host that waits in each plan for counts does not. Gradients are
reduced when a layer's backward is over, beside the backward of the layer before. All ranks issue in the same order, for
it is the program's: kernels of two communicators that each wait for the other's SMs cannot lock up.

**Streams.** On a GPU FSDP2 has a stream for gathers and one for reductions, and the host waits for neither. A CPU has
no streams, and the host would stand still in each. Where the backend is gloo, therefore,

- gathers are issued with a handle, which FSDP2 waits for where it copies the parameters out;
- a reduction is waited for when backward ends, or when the next layer but one issues its own: FSDP2 keeps the input of
  one layer's at a time. It is waited for at once where FSDP2 reads the result right away: to add it to gradients that
  are there, to add up replicas (HSDP), in a pipeline, which reduces outside of backward;
- it runs as the all-reduce that gloo makes of a reduce-scatter anyway, in place instead of on a copy: the same bits.

Both kinds are in the log of in_flight.py when somebody keeps it, as "gather" and "reduce". On a CPU they last from
issue until the last byte; on a GPU FSDP2's own waits are not seen, so that a transfer has `issued` and `ended`, events
around it on its stream, but nothing that says who waited.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titan_moe import in_flight
from titan_moe.clock import mark
from titan_moe.in_flight import InFlight, Transfer
from titan_moe.torch_helpers import in_backward

LINK = "fsdp"
"""All of FSDP's groups share one link"""
seconds_per_byte = 0.0
"""Makes that link slow on a CPU, as in_flight.py's does that of expert parallelism, to see what lies beside what"""
UNDER_WAY = 2
"""Reductions under way in a backward: those of one layer, whose experts have a group apart"""


def prepare(model: nn.Module, ep_group: ProcessGroup | None) -> None:
    """Let FSDP2's collectives in `model` go through this file. `ep_group` is what dispatch and combine use."""
    gloo, reductions = dist.get_backend() == "gloo", Reductions()
    for group in param_groups(model):
        assert ep_group is None or ep_group.group_name not in group_names(group), "dispatch and FSDP share a group"
        # The public setters refuse a module whose parameters lie on two meshes, as those with experts do.
        group._all_gather_comm = GlooGather() if gloo else Gather()
        group._reduce_scatter_comm = GlooReduce(group, reductions) if gloo else Reduce()
        group.unshard_async_op = gloo
        if gloo and group.mesh_info.mesh.size() == 1:
            group._reduce_scatter_comm = NoReduce()
            group.gradient_divide_factor = None  # 1, by which FSDP2 would divide, into one more buffer


def param_groups(model: nn.Module) -> Iterator[FSDPParamGroup]:
    """FSDP2's groups of parameters that are gathered together; those of modules sharded as one come once."""
    states = {id(state): state for m in model.modules() if isinstance(m, FSDPModule) for state in [m._get_fsdp_state()]}
    for state in states.values():
        yield from state._fsdp_param_groups


def group_names(group: FSDPParamGroup) -> set[str]:
    """The process groups that this one communicates in."""
    kinds = ("shard", "reduce_scatter", "replicate")
    found = [getattr(group.mesh_info, f"{kind}_process_group", None) for kind in kinds]
    return {process_group.group_name for process_group in found if process_group is not None}


# ---------------------------------------------------------------------------------------------------------------------
# On streams: FSDP2's own, with marks around them if somebody looks


class Gather(DefaultAllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size = input_tensor.nbytes * (group.size() - 1)
        with noted("gather", size):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class Reduce(DefaultReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op, async_op: bool = False
    ) -> dist.Work | None:
        with noted("reduce", output_tensor.nbytes * (group.size() - 1)):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


@contextmanager
def noted(name: str, size: int) -> Iterator[None]:
    """A Transfer around a collective that runs on the current stream."""
    if in_flight.log is None:
        yield
        return
    transfer = Transfer(name, in_backward(), size, size, mark())
    yield
    transfer.ended = mark()
    in_flight.log.append(transfer)


# ---------------------------------------------------------------------------------------------------------------------
# Without streams


class Pending(dist.Work):
    """What FSDP2 waits for where it would wait for the collective."""

    def __init__(self, transfer: InFlight) -> None:
        super().__init__()
        self.transfer = transfer

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.transfer.wait()
        return True


class GlooGather(DefaultAllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = super().__call__(output_tensor, input_tensor, group, async_op=True)
        pending = Pending(issued("gather", work, output_tensor, input_tensor.nbytes * (group.size() - 1)))
        if async_op:
            return pending
        pending.wait()
        return None


class GlooReduce(DefaultReduceScatter):
    """For the reductions of `parameters`, one of FSDP2's groups."""

    def __init__(self, parameters: FSDPParamGroup, reductions: "Reductions") -> None:
        self.parameters, self.reductions = parameters, reductions

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op, async_op: bool = False
    ) -> None:
        self.reductions.make_room()
        work = dist.all_reduce(input_tensor, op, group, async_op=True)
        transfer = issued("reduce", work, input_tensor, output_tensor.nbytes * (group.size() - 1))

        def finish() -> None:
            (total,) = transfer.wait()
            output_tensor.copy_(total.view(group.size(), -1)[group.rank()])

        if self.is_read_at_once(output_tensor) or not in_backward():
            finish()
        else:
            self.reductions.add(finish)

    def is_read_at_once(self, result: Tensor) -> bool:
        """Whether FSDP2 does more with the result than to call parts of it gradients."""
        group = self.parameters
        return (
            isinstance(group.mesh_info, DDPMeshInfo)
            or result.dtype != group._orig_dtype
            or any(parameter.sharded_param.grad is not None for parameter in group.fsdp_params)
        )


class NoReduce(DefaultReduceScatter):
    """Of one rank, whose gradients FSDP2 copies into one buffer and on into another: it gets the same one for both."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None  # given out as the input

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks twice, for the input and then for the output."""
        if self.buffer is None:
            self.buffer = super().allocate(size, dtype=dtype, device=device)
            return self.buffer
        given, self.buffer = self.buffer, None
        assert tuple(given.shape) == tuple(size) and given.dtype == dtype, "not the output of that input"
        return given


def issued(name: str, work: dist.Work | None, result: Tensor, size: int) -> InFlight:
    """The transfer that `work` is; `size`: bytes to and from other ranks."""
    assert work is not None  # this process belongs to the group
    sizes = {"sent": size, "received": size}
    return InFlight([work], (result,), name, backward=in_backward(), **sizes, link=LINK, slow=seconds_per_byte)


class Reductions:
    """Those under way in this backward, in the order of their issue."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], None]] = deque()
        self.backward = -1  # that `finish` has been left to

    def make_room(self) -> None:
        while len(self.pending) >= UNDER_WAY:
            self.pending.popleft()()

    def add(self, finish: Callable[[], None]) -> None:
        if self.backward != torch._C._current_graph_task_id():
            self.backward = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self.finish)
        self.pending.append(finish)

    def finish(self) -> None:
        while self.pending:
            self.pending.popleft()()
