"""CUDA graphs on a CPU: what is run inside `torch.cuda.graph` is recorded op by op, and a replay runs the ops again.

As on a GPU, a replay runs no Python but the ops', reads and writes the very memory of the capture, and what the host
saw of a tensor during capture is decided for good. And as there, capture itself computes nothing that stays: what it
has written to tensors from outside is taken back. What a GPU would refuse, a host that reads the device, this does not:
tests/sync_free_worker.py does.

Memory that FSDP2 frees in the middle of a step would be another tensor's by the time of a replay; a graph's pool knows
when that is, the double keeps it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed import cudagraph

from titan_moe.moe import exchange

IN_HALVES = {
    op._opoverload: op._init_fn
    for op in (exchange._start_dispatch, exchange._wait_dispatch, exchange._start_combine, exchange._wait_combine)
}
"""Ops that leave something behind in Python: what they do is recorded, as on a GPU, not that they were called"""


class Recorder(TorchDispatchMode):
    """Notes each op with its tensors, and what tensors from outside held before the first op wrote to them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[OpOverload, tuple, dict[str, Any], dict[int, Tensor]]] = []  # with what it made
        self.made: set[int] = set()  # memory of the capture's own
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in IN_HALVES:
            with self:
                return IN_HALVES[func](*args, **kwargs)
        for schema, value in zip(func._schema.arguments, args):
            if schema.alias_info is not None and schema.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    self._keep(tensor)
        out = _waited_for(func, func(*args, **kwargs))
        given = {_memory(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        results = enumerate(pytree.tree_leaves(out))
        fresh = {i: x for i, x in results if isinstance(x, Tensor) and _memory(x) not in given}
        self.made |= {_memory(tensor) for tensor in fresh.values()}
        self.ops.append((func, args, kwargs, fresh))
        return out

    def _keep(self, tensor: Tensor) -> None:
        if _memory(tensor) not in self.made and _memory(tensor) not in self.before:
            self.before[_memory(tensor)] = (tensor, tensor.detach().clone())

    def take_back(self) -> None:
        for tensor, value in self.before.values():
            tensor.detach().copy_(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Graph:
    """In place of `torch.cuda.CUDAGraph`. `replays` counts those of all graphs."""

    captures = replays = 0

    def __init__(self) -> None:
        self.recorder = Recorder()

    def replay(self) -> None:
        Graph.replays += 1
        with torch.no_grad():
            for func, args, kwargs, fresh in self.recorder.ops:
                for i, result in enumerate(pytree.tree_leaves(_waited_for(func, func(*args, **kwargs)))):
                    if i in fresh:
                        fresh[i].detach().copy_(result)


def _waited_for(func: OpOverload, out: Any) -> Any:
    """What an op returned, when it is there. A collective's work is replaced by one that is done: gloo's own copies its
    result in `wait`, by ops that would be recorded too."""

    def wait(leaf: Any) -> Any:
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
            return FakeWork().boxed()
        return leaf

    return pytree.tree_map(wait, out) if func.namespace == "c10d" else out


@contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    Graph.captures += 1
    with graph.recorder:
        yield
    with torch.no_grad():
        graph.recorder.take_back()


@contextmanager
def cuda_graphs() -> Iterator[type[Graph]]:
    """Inside, torchtitan's CUDA graphs are these."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    doubles = {
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
    }
    Graph.captures = Graph.replays = 0
    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, double))
        stack.enter_context(mock.patch.object(_fsdp_param, "free_storage"))
        try:
            yield Graph
        finally:
            cudagraph.cudagraph_teardown()
