"""A harness in which code that makes the host wait for a device fails, on a machine without a GPU.

Under `FakeTensorMode` without a `ShapeEnv` tensors have no values: `.item()`, `.tolist()`, `bool()`, `nonzero`, boolean
masks, `bincount`, `repeat_interleave` of unknown length raise. What it lets pass is a plain copy to the host, which
waits all the same, so two more things are refused: on fake GPU tensors, an op that copies from the one kind of device
to the other; on fake CPU tensors, where `.cpu()` is no op at all, a call of it.

Backward runs on fake CPU tensors alone: for others autograd wants the device. Ops of our own run their fake kernels,
which for plans of fixed size are the real ones; but the second check sees what they do inside only if their Python
functions are called in their place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def sync_free() -> Iterator[None]:
    """Inside, tensors are fake and nothing may wait for one."""
    with FakeTensorMode(), RefuseCopiesToHost(), mock.patch.multiple(torch.Tensor, cpu=_refuse, numpy=_refuse):
        yield


class RefuseCopiesToHost(TorchDispatchMode):
    """Fake tensors let a plain `.cpu()` pass, which on a GPU waits for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = [t.device.type for t in (out, *args) if isinstance(t, torch.Tensor)]
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            assert len(set(devices)) == 1, f"{func} from {devices[-1]} to {devices[0]}"
        return out


def _refuse(tensor: torch.Tensor, *_args, **_kwargs):
    raise AssertionError(f"a copy from {tensor.device.type} to cpu")


@contextmanager
def fake_group(ranks: int) -> Iterator[dist.ProcessGroup]:
    """A group whose collectives return at once; what they return is undefined."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
