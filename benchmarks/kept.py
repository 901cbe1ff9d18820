"""Bytes that autograd holds between forward and backward.

Storages, each counted once, without those of parameters; of our region also the tensors of its plan, which autograd
does not hold.
"""

from collections.abc import Callable

import titan_moe.runtime  # noqa: F401

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from titan_moe.moe.region import FusedRoutedExperts


def kept_bytes(layer: nn.Module, call: Callable[[], object]) -> int:
    """What is kept after `call`, a forward through `layer`."""
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def counting(plan: Callable) -> Callable:
        def planned(*args):
            found = plan(*args)
            for tensor in (*found.rows, *found.copies, found.padded_counts_e):
                count(tensor)
            return found

        return planned

    regions = [module for module in layer.modules() if isinstance(module, FusedRoutedExperts)]
    plans = []
    for region in regions:
        assert region.dispatcher is not None
        plans.append(region.dispatcher.plan)
        region.dispatcher.plan = counting(region.dispatcher.plan)
    try:
        with saved_tensors_hooks(count, lambda tensor: tensor):
            out = call()
    finally:
        for region, plan in zip(regions, plans):
            region.dispatcher.plan = plan
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found = sum(size for storage, size in storages.items() if storage not in parameters)
    del out  # not before: freed memory could be another tensor's
    return found
