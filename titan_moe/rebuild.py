"""Activations that backward makes again instead of keeping them: output-discarding recompute.

Wrapping a norm in `torch.utils.checkpoint` saves nothing. What a norm keeps is its input, which is there anyway; its
*output* is what costs memory, and that is kept by the linear layer behind it. The wrap would have to include the linear
layer, and then repeats its GEMM. So the thing to drop is what a consumer saves:

    with rebuilding({"norms"}):                        around a block's forward
        y = rebuilt(("norms",), norm, x)               runs norm(x), as always, and notes: y is norm(x)
        z = linear(y)                                  saves y for its backward

Inside `rebuilding`, a pack hook sees every tensor that autograd saves. If its memory was made by a noted call, the node
gets a recipe instead (the function and its inputs), and y dies when forward is done with it. The first node of backward
that asks runs the function again, for all nodes that will ask. Nothing else changes: the same nodes in the same graph,
so the same gradients to the bit, and no operation runs twice but those noted. The consumer may be a linear layer, an
attention kernel, an autograd Function or another noted call: a recipe's input can be a recipe.

What `rebuilt` runs must give the same bits again: no random numbers, no effect on anything else, and no collectives,
because ranks do not promise each other when they ask. Its weights are read again, not kept: FSDP has gathered them
before a block's backward starts.

A schedule that splits backward (zero bubble) asks twice, for the input's gradient and later for the weights', and the
function runs twice: what was made for the first pass does not survive it.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import GraphExecGroup

from titan_moe import offload


@contextmanager
def rebuilding(kinds: Collection[str]) -> Iterator[None]:
    """Inside, what calls of `rebuilt` of these kinds return is not kept for backward."""
    global _scope
    outer, _scope = _scope, _Scope(frozenset(kinds), {}, set())
    try:
        with saved_tensors_hooks(partial(_pack, _scope.made), _unpack):
            yield
    finally:
        _scope = outer


def rebuilt(kinds: Collection[str], make: Callable[..., Any], *inputs: Any) -> Any:
    """`make(*inputs)`, a tensor or a tuple of them. Inside `rebuilding` of one of these kinds it is run again in
    backward rather than its result kept; elsewhere this is a plain call."""
    if _scope is None or _scope.kinds.isdisjoint(kinds) or not torch.is_grad_enabled():
        return make(*inputs)
    _scope.inputs.update(_memory(inputs))
    outputs = make(*inputs)
    _scope.note(make, inputs, (outputs,) if isinstance(outputs, Tensor) else outputs)
    return outputs


def _memory(inputs: tuple) -> set[StorageWeakRef]:
    return {StorageWeakRef(arg.untyped_storage()) for arg in inputs if isinstance(arg, Tensor)}


def has_anyway(tensor: Tensor) -> bool:
    """Whether backward will have `tensor` though no other node keeps it: a call of `rebuilt` is run again for it, or
    has it as an input."""
    if _scope is None:
        return False
    memory = StorageWeakRef(tensor.untyped_storage())
    return memory in _scope.inputs or _found(_scope.made, tensor) is not None


class _Scope(NamedTuple):
    kinds: frozenset[str]
    # By the memory that a call made: views of a result count as the result. The weak reference keeps the key from being
    # given to other memory, not the memory from being freed.
    made: dict[StorageWeakRef, "_Made"]
    inputs: set[StorageWeakRef]  # that recipes keep, or make again

    def note(self, make: Callable[..., Any], inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        # A function may return its input as it is, as .float() of an fp32 tensor does.
        given = _memory(inputs)
        recipe = _Recipe(make, [_Input.of(arg, self.made) for arg in inputs])
        for index, output in enumerate(outputs):
            key = StorageWeakRef(output.untyped_storage())
            if key not in given:
                self.made[key] = _Made(recipe, index, output.dtype, output._version)


_scope: _Scope | None = None


class _Made(NamedTuple):
    recipe: "_Recipe"
    index: int
    dtype: torch.dtype
    version: int


class _Piece(NamedTuple):
    """What a node keeps instead of a tensor: which result of which recipe, and how the tensor lies in its memory."""

    recipe: "_Recipe"
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _found(made: dict[StorageWeakRef, _Made], tensor: Tensor) -> _Made | None:
    found = made.get(StorageWeakRef(tensor.untyped_storage()))
    # Written to since it was made, or read as another type: the recipe would not give this.
    if found is None or found.version != tensor._version or found.dtype != tensor.dtype:
        return None
    return found


def _pack(made: dict[StorageWeakRef, _Made], tensor: Tensor) -> Any:
    found = _found(made, tensor)
    if found is None:
        return offload.pack(tensor)
    found.recipe.handed_out += 1
    return _Piece(found.recipe, found.index, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _Piece):
        return offload.unpack(kept)
    return kept.recipe.take(kept.index).as_strided(kept.size, kept.stride, kept.offset)


class _Input(NamedTuple):
    kept: Any
    is_tensor: bool
    requires_grad: bool
    version: int | None

    @classmethod
    def of(cls, arg: Any, made: dict[StorageWeakRef, _Made]) -> "_Input":
        if not isinstance(arg, Tensor):
            return cls(arg, False, False, None)
        kept = _pack(made, arg.detach())  # detached: it must not hold the graph that leads to it
        return cls(kept, True, arg.requires_grad, arg._version if isinstance(kept, Tensor) else None)

    def get(self) -> Any:
        kept = self.kept
        if isinstance(kept, Tensor):
            assert kept._version == self.version, "written to after it was used in forward"
        return _unpack(kept).detach().requires_grad_(self.requires_grad) if self.is_tensor else kept


class _Recipe:
    """One noted call. Its results exist while nodes of one backward are asking for them: until as many have as were
    handed out, at the latest until the pass ends."""

    def __init__(self, make: Callable[..., Any], inputs: list[_Input]) -> None:
        self.make, self.inputs = make, inputs
        self.handed_out = self.taken = 0
        self.outputs: tuple[Tensor, ...] | None = None

    def take(self, index: int) -> Tensor:
        outputs = self.outputs
        if outputs is None:
            outputs = self._run()
            if torch._C._current_graph_task_id() == -1:  # somebody looks at a node outside of backward
                return outputs[index]
            self.outputs = outputs
            # By a weak reference, because the pass is long, and the recipe is gone when its nodes are. In a group one
            # pass is several calls of autograd, which free nodes as they go.
            if GraphExecGroup._get_current_group() is None:
                Variable._execution_engine.queue_callback(partial(_forget, weakref.ref(self)))
        self.taken += 1
        if self.taken == self.handed_out:
            self.forget()
        return outputs[index]

    def _run(self) -> tuple[Tensor, ...]:
        # With gradients on, though none are wanted: without them an operation may choose another algorithm.
        with torch.enable_grad():
            outputs = self.make(*(item.get() for item in self.inputs))
        return tuple(output.detach() for output in ((outputs,) if isinstance(outputs, Tensor) else outputs))

    def forget(self) -> None:
        self.outputs, self.taken = None, 0


def _forget(recipe: "weakref.ref[_Recipe]") -> None:
    if (alive := recipe()) is not None:
        alive.forget()
