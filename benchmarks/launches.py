"""What one pass through routed experts does: kernels that a GPU would launch, and where the host would wait for it.

- Launches: aten ops that compute something, from torch.profiler. An op that calls others counts as those; views,
  allocations and collectives do not count. By phase, for our region: the plan, dispatch and combine, the experts,
  backward.
- Host syncs: where the host would wait for a GPU: Tensor.cpu, .tolist, .item and their like, on what is not a copy on
  the host already, and ops whose result's shape depends on values. They are counted at the call, because on a CPU these
  calls copy nothing and no dispatch mode sees them.

Experts run by the code that a GPU runs, torch._grouped_mm, here on torch's own CPU kernel: what we do on a CPU instead,
GEMMs in pieces, says nothing about a GPU.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import titan_moe.runtime  # noqa: F401

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler reports each start and stop otherwise

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from titan_moe.moe import experts
from titan_moe.moe.region import FusedRoutedExperts

PHASES = ("plan", "dispatch + combine", "experts", "backward")
SYNC = "host sync"
SYNC_METHODS = ("cpu", "tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")
SYNC_OPS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount")
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")


def labelled(name: str, function: Callable) -> Callable:
    def call(*args, **kwargs):
        with record_function(name):
            return function(*args, **kwargs)

    return call


@contextmanager
def marked_syncs() -> Iterator[None]:
    """Each call that would wait for a GPU leaves a mark in the profile."""
    on_host: list[Tensor] = []  # kept, so that no other tensor gets their memory

    def marking(name: str) -> Callable:
        method = getattr(torch.Tensor, name)

        def call(self, *args, **kwargs):
            if any(self.data_ptr() == host.data_ptr() for host in on_host):
                return method(self, *args, **kwargs)
            with record_function(SYNC):
                found = method(self, *args, **kwargs)
            if name == "cpu":
                on_host.append(found)
            return found

        return call

    with mock.patch.multiple(torch.Tensor, **{name: marking(name) for name in SYNC_METHODS}):
        yield


@cache
def computes(name: str) -> bool:
    """Whether an op, by its name in the profile, does more than look at memory or allocate it."""
    library, _, op = name.partition("::")
    packet = getattr(torch.ops.aten, op, None) if library == "aten" else None
    if packet is None or op in ALLOCATIONS:
        return False
    arguments = getattr(packet, packet.overloads()[0])._schema.arguments
    return not any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)


def count(event, phase: str, launches: Counter, syncs: Counter) -> int:
    """Add up an event of the profile and what it called, by phase; returns its launches."""
    if event.name in PHASES:
        phase = event.name
    if event.name == SYNC or event.name in SYNC_OPS:
        syncs[phase] += 1
        return 0
    inner = 0
    if event.name != "aten::_grouped_mm":  # one kernel on a GPU, a loop on a CPU
        inner = sum(count(child, phase, launches, syncs) for child in event.cpu_children)
    if inner == 0 and computes(event.name):
        launches[phase] += 1
        return 1
    return inner


def counts(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Counter[str], Counter[str]]:
    """(launches, host syncs) of one forward and backward, by phase."""
    grad = torch.randn_like(inputs[0])
    for tensor in inputs:
        tensor.grad = None  # or it would be added to
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(experts, "_PiecewiseGemm", experts._GroupedGemm))
        for region in (m for m in layer.modules() if isinstance(m, FusedRoutedExperts)):
            assert region.dispatcher is not None
            for owner, name, phase in (
                (region.dispatcher, "plan", "plan"),
                (region.inner_experts, "forward", "experts"),
            ):
                stack.enter_context(mock.patch.object(owner, name, labelled(phase, getattr(owner, name))))
        profiled = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        stack.enter_context(marked_syncs())
        out = labelled("dispatch + combine", layer)(*inputs)
        labelled("backward", out.backward)(grad)
    layer.zero_grad(set_to_none=True)
    launches, syncs = Counter(), Counter()
    for event in profiled.events():
        if event.cpu_parent is None:
            count(event, "other", launches, syncs)
    return launches, syncs
