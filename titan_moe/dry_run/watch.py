"""The dispatch mode of a dry run: every operation's results go to the ledger, collectives are counted."""

from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_moe.dry_run.collectives import Collectives
from titan_moe.dry_run.ledger import GATHERED, UNREDUCED, Ledger

FSDP = {
    "fsdp::all_gather_copy_in": GATHERED,
    "fsdp::split_with_sizes_copy": GATHERED,
    "fsdp::chunk_cat": UNREDUCED,
}
"""FSDP2's operations, all of whose tensors are for one thing: shards to be gathered, gathered parameters, gradients to
be reduced"""


class Watch(TorchDispatchMode):
    def __init__(self, ledger: Ledger, collectives: Collectives) -> None:
        super().__init__()
        self.ledger, self.collectives = ledger, collectives
        self._fake_mode = active_fake_mode()

    def __torch_dispatch__(self, func, types, args: tuple = (), kwargs=None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again as operations on local tensors
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the fake one returns a copy
        result = func(*args, **kwargs)
        if active_fake_mode() is not self._fake_mode:
            return result  # DTensor asks for shapes
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.ledger.see(tensor)
        if kind := FSDP.get(func.name().split(".")[0]):
            for tensor in tree_leaves((args, kwargs, result)):
                if isinstance(tensor, torch.Tensor):
                    self.ledger.label(tensor, kind)
        self.collectives.count(func, args, result)
        return result
