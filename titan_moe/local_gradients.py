"""A look at this rank's own gradients, before they are added to those of other ranks.

Afterwards nobody can tell whose they were: one rank's NaN is in everybody's sum. FSDP2 hands a module's gradients to
one function, which reduces them over data-parallel ranks and replicas (HSDP), whether it has one rank or many, after
the last microbatch or after each. There they are seen: whole along data parallelism, this rank's part of those that
tensor or expert parallelism cuts, and with accumulation the sum over the microbatches so far.

torch has a public seam for a reduce-scatter of one's own, but does not call it where a mesh has one rank, and refuses
it for modules whose parameters lie on two meshes, as those with experts do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

Observer = Callable[[list[str], list[Tensor]], None]

_observers: list[Observer] = []
_reduce = _fsdp_param_group.foreach_reduce


def _observed_reduce(fsdp_params, unsharded_grads, *args, **kwargs):
    with torch.no_grad():
        for observer in _observers:
            observer([parameter._param_fqn or "" for parameter in fsdp_params], unsharded_grads)
    return _reduce(fsdp_params, unsharded_grads, *args, **kwargs)


_fsdp_param_group.foreach_reduce = _observed_reduce


@contextmanager
def seen_by(observer: Observer) -> Iterator[None]:
    """Inside, `observer(names, gradients)` is called with each group of gradients right before FSDP2 reduces it, on the
    stream that computed them. It must not keep them: it would keep their memory."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
