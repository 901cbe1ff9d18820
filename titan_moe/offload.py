"""Activations that wait for backward in host memory.

A layer's activations are used twice, in its forward and in its backward, and a GPU holds them for all of the time in
between. `[activation_offload] tensors` names some that leave it: each is copied to host memory behind the kernels that
use it in forward, and comes back before backward asks for it.

Where a tensor is made, `offloaded("attn_q", q)` marks its memory. Nothing else in the model knows about it. Around a
block's forward (offload_blocks.py) a pack hook sees every tensor that autograd saves, and keeps a handle instead
(`_Kept`). If the memory is marked, before or after, the handle points to a copy of the memory (`_Sent`), one for all
nodes that save it. An attention kernel saves its own output, which can only be marked when it has returned: hence the
handles. What selective recompute saves goes the same way, and so do inputs of calls that are made again (rebuild.py).

**Forward.** Copies go on a stream of their own. When the next block is done, the computing stream waits for those of
the block before, and only then is their memory given back. So two blocks' tensors are on the device at most, whatever
the link does, and a slow link shows as waiting, not as an exhausted memory.

**Backward.** The first node that asks for a tensor of a block starts the copies of the block before it, which come back
under this block's kernels. The first block of a microbatch starts those of the next microbatch's last block, which
pipelines come to next. A schedule that splits backward asks twice, and may have what came back copied again.

**Memory.** One rule keeps it whole: neither a device's nor the host's memory is given back before the computing stream
has waited for the copy that reads or writes it. Memory that was freed is handed out again in the order of that stream,
so nobody else needs to be told. Host memory is pinned, and goes back to a pool when the graph drops the handle.

On a CPU the same code copies into plain host memory. A copy is made there when somebody waits for it, which is the
latest that a stream could be: a wait that is missing shows as wrong numbers.
"""

import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from titan_moe.clock import Mark, mark, seconds
from titan_moe.host_copies import LateCopies, Pool, StreamCopies

WAITS_KEPT = 4096  # pairs of marks; the older half of them is read, which the device passed long ago


def leaves(name: str) -> bool:
    """Whether `offloaded` of that name does anything here."""
    return _scope is not None and name in _scope.offloader.names


def offloaded(name: str, tensor: Tensor) -> Tensor:
    """`tensor` itself. Inside a block whose offloader has that name its memory leaves the device until backward."""
    if _scope is not None and name in _scope.offloader.names:
        _scope.mark(name, tensor)
    return tensor


def pack(tensor: Tensor) -> "Tensor | _Kept":
    """What a node should keep instead of `tensor`: the pack hook, for those who have one of their own."""
    return tensor if _scope is None else _scope.keep(tensor)


def unpack(kept: "Tensor | _Kept") -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.get()


class _Scope:
    """One block's forward."""

    def __init__(self, offloader: "Offloader", block: "Block") -> None:
        self.offloader, self.block = offloader, block
        # By memory: views count as what they are views of. (rebuild.py tells why weak references make good keys.)
        self.held: dict[StorageWeakRef, list[_Kept]] = {}
        self.marked: dict[StorageWeakRef, str] = {}
        self.sent: dict[StorageWeakRef, _Sent] = {}

    def mark(self, name: str, tensor: Tensor) -> None:
        key = StorageWeakRef(tensor.untyped_storage())
        self.marked.setdefault(key, name)
        for kept in self.held.pop(key, []):
            self._send(key, kept)

    def keep(self, tensor: Tensor) -> "_Kept":
        key, kept = StorageWeakRef(tensor.untyped_storage()), _Kept(tensor)
        if key in self.marked:
            self._send(key, kept)
        else:
            self.held.setdefault(key, []).append(kept)
        return kept

    def _send(self, key: StorageWeakRef, kept: "_Kept") -> None:
        tensor = kept.tensor
        assert tensor is not None
        if key not in self.sent:
            self.sent[key] = self.offloader.send(self.marked[key], tensor, self.block)
        sent = self.sent[key]
        if sent.version == tensor._version:  # else it was written to since, and what was sent is not this
            kept.point_to(sent)


_scope: _Scope | None = None


class _Kept:
    """What a node keeps: a tensor, or the way it lies in memory that was sent away."""

    __slots__ = ("dtype", "lies", "sent", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.sent: _Sent | None = None

    def point_to(self, sent: "_Sent") -> None:
        assert self.tensor is not None
        self.dtype = self.tensor.dtype
        self.lies = self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset()
        self.sent, self.tensor = sent, None
        sent.handed_out += 1

    def get(self) -> Tensor:
        if self.sent is None:
            assert self.tensor is not None
            # autograd looks after this itself, but not for tensors that went through hooks.
            assert self.tensor._version == self.version, "written to after it was saved for backward"
            return self.tensor
        return self.sent.take().view(self.dtype).as_strided(*self.lies)


class _Sent:
    """One tensor's memory on its way: on the device, on the host, or both."""

    def __init__(self, offloader: "Offloader", block: "Block", tensor: Tensor) -> None:
        self.offloader, self.block, self.bytes = offloader, block, tensor.untyped_storage().nbytes()
        numbers = tensor.detach().as_strided((self.bytes // tensor.itemsize,), (1,), 0)
        self.flat: Tensor | None = numbers.view(torch.uint8)
        self.version = tensor._version
        self.host = offloader.pool.take(self.bytes)
        self.leaving: Any = offloader.copies.to_host(self.flat, self.host)
        self.coming: Any = None
        self.handed_out = self.taken = 0

    def left(self) -> None:
        """Give the device's memory back: it is on the host."""
        assert self.flat is not None and self.flat._version == self.version, "written to while it was being offloaded"
        self.offloader.wait(self.leaving)
        self.leaving = self.flat = None
        self.taken = 0

    def come(self) -> None:
        """Begin to bring it back."""
        assert self.flat is None
        self.flat = torch.empty(self.bytes, dtype=torch.uint8, device=self.offloader.device)
        self.coming = self.offloader.copies.from_host(self.host, self.flat)
        self.offloader.coming.add(self)

    def arrived(self) -> None:
        if self.coming is not None:
            self.offloader.wait(self.coming)
            self.coming = None
            self.offloader.coming.remove(self)

    def forget(self) -> None:
        """Give back what came back."""
        if self.leaving is None:
            self.arrived()
            self.flat, self.taken = None, 0

    def take(self) -> Tensor:
        """Its memory as one row of bytes on the device, until as many have asked as were handed out."""
        self.offloader.backward_reaches(self.block)
        if self.flat is None:
            self.come()  # for the second time, or nobody foresaw it
        self.arrived()
        flat = self.flat
        assert flat is not None
        self.taken += 1
        if self.taken >= self.handed_out:
            self.forget()
        return flat

    def __del__(self) -> None:
        self.offloader.pool.give(self.host)


class Forward(NamedTuple):
    """One microbatch's forward through one part of the model."""

    blocks: list["Block"]
    then: list["Forward"]  # the next microbatch's through this part, if there has been one


class Block:
    """What one block's forward of one microbatch sent away. Its handles are the graph's: here they are weak."""

    def __init__(self, forward: Forward) -> None:
        self.forward, self.index = forward, len(forward.blocks)
        self.sent: list[weakref.ref[_Sent]] = []
        forward.blocks.append(self)

    def before(self) -> "Block | None":
        """Where backward goes from here."""
        if self.index:
            return self.forward.blocks[self.index - 1]
        return self.forward.then[0].blocks[-1] if self.forward.then else None

    def alive(self) -> list[_Sent]:
        return [sent for ref in self.sent if (sent := ref()) is not None]


class Offloader:
    """Moves the named activations of this process's blocks, all its pipeline stages together."""

    def __init__(self, names: Collection[str], device: torch.device) -> None:
        self.names, self.device = frozenset(names), device
        self.copies: StreamCopies | LateCopies = LateCopies() if device.type == "cpu" else StreamCopies(device)
        self.pool = Pool(pinned=device.type != "cpu")
        self.leaving: list[_Sent] = []  # of the block that was through forward last
        self.coming: set[_Sent] = set()  # on the way back; nobody has waited for it yet
        self.reached: Block | None = None  # by backward
        self.bytes = dict.fromkeys(sorted(self.names), 0)
        self.waited = 0.0
        self.waits: deque[tuple[Mark, Mark]] = deque()

    @contextmanager
    def scope_of(self, block: Block) -> Iterator[None]:
        """Around a block's forward: what is marked inside leaves."""
        global _scope
        assert _scope is None, "blocks are not inside each other"
        _scope = scope = _Scope(self, block)
        try:
            with saved_tensors_hooks(scope.keep, unpack):
                yield
        finally:
            _scope = None
        self.settle()
        self.leaving = list(scope.sent.values())

    def send(self, name: str, tensor: Tensor, block: Block) -> _Sent:
        sent = _Sent(self, block, tensor)
        block.sent.append(weakref.ref(sent))
        self.bytes[name] += sent.bytes
        return sent

    def settle(self) -> None:
        """Wait until what leaves has left, and give its memory on the device back."""
        for sent in self.leaving:
            sent.left()
        self.leaving = []

    def backward_reaches(self, block: Block) -> None:
        """Have its tensors on the device, and those that come next on their way; give back all others."""
        if block is self.reached:
            return
        passed, self.reached, ahead = self.reached, block, block.before()
        if any(sent.block is not block for sent in self.leaving):
            self.settle()
        wanted = [*block.alive(), *(ahead.alive() if ahead is not None else [])]
        for sent in [*self.coming, *(passed.alive() if passed is not None else [])]:
            if sent not in wanted:
                sent.forget()
        for sent in wanted:
            if sent.flat is None:
                sent.come()

    def wait(self, copy: Any) -> None:
        """Let the computing stream wait for a copy; how long it did is told later."""
        start = mark()
        self.copies.wait(copy)
        self.waits.append((start, mark()))
        if len(self.waits) > WAITS_KEPT:
            self._read(WAITS_KEPT // 2)

    def _read(self, count: int) -> None:
        self.waited += sum(seconds(*self.waits.popleft()) for _ in range(count))

    def statistics(self) -> dict[str, float]:
        """Bytes sent to the host, by name, and seconds waited for copies of either direction ("wait_s"), by this rank
        since the last call. On a GPU it waits for the last of these copies."""
        self._read(len(self.waits))
        found = {**self.bytes, "wait_s": self.waited}
        self.bytes, self.waited = dict.fromkeys(self.bytes, 0), 0.0
        return found
