"""A result about a tensor, computed once although several ask: wq_a and wkv_a both quantize what the norm returned, w1
and w3 both the same tokens, and both may keep the same bytes for backward.

A tensor is recognised by its memory, while that is alive and nobody has written to it. Only the last few are
remembered: who shares a tensor asks soon, and what is remembered is not freed.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

REMEMBERED = 2  # tensors: between wq_a and wkv_a comes wq_b, with an input of its own

# By memory and how the tensor lies in it. The weak reference keeps the key from being given to other memory, not the
# memory from being freed.
_results: OrderedDict[tuple, dict[Hashable, Any]] = OrderedDict()


def once(x: Tensor, what: Hashable, make: Callable[[], Any]) -> Any:
    """`make()`, or what it returned for the same `x` and `what`."""
    for key in [key for key in _results if key[0].expired()]:
        del _results[key]
    memory = StorageWeakRef(x.untyped_storage())
    key = (memory, x._version, x.storage_offset(), x.shape, x.stride(), x.dtype)
    found = _results.setdefault(key, {})
    _results.move_to_end(key)
    if len(_results) > REMEMBERED:
        _results.popitem(last=False)
    if what not in found:
        found[what] = make()
    return found[what]
