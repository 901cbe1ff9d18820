"""Copies between a device and host memory, beside what computes, and the host memory that they use. See offload.py."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PIECE = 32 * 2**20  # bytes; a copy of so many takes far longer than its launch


class Pool:
    """Host memory that is used again, in pieces: how many rows a rank receives changes with every step, and whole
    buffers would never quite fit. What is left over after full pieces is in a smaller one, of a power of two bytes,
    which is what torch's pinned memory takes anyway."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned, self.allocated = pinned, 0
        self.free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> list[Tensor]:
        """Pieces that together have room for `size` bytes, each of PIECE but the last."""
        full, rest = divmod(size, PIECE)
        return [self._piece(n) for n in (*(PIECE,) * full, *((1 << (rest - 1).bit_length(),) if rest else ()))]

    def _piece(self, size: int) -> Tensor:
        if free := self.free.get(size):
            return free.pop()
        self.allocated += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)

    def give(self, pieces: list[Tensor]) -> None:
        for piece in pieces:
            self.free.setdefault(piece.nbytes, []).append(piece)


def _pairs(flat: Tensor, host: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a row of bytes, and those of the pieces that they belong in. Experts may get no rows, and no bytes."""
    for part, piece in zip(flat.split(PIECE) if len(flat) else (), host, strict=True):
        yield part, piece[: part.nbytes]


class StreamCopies:
    """On two streams, one each way, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.away, self.back = self.module.Stream(device), self.module.Stream(device)

    def to_host(self, flat: Tensor, host: list[Tensor]) -> Any:
        """Copy a device's row of bytes to pieces of a pool, after what the computing stream has been given so far."""
        return self._start(self.away, [(piece, part) for part, piece in _pairs(flat, host)])

    def from_host(self, host: list[Tensor], flat: Tensor) -> Any:
        """The same back."""
        return self._start(self.back, list(_pairs(flat, host)))

    def _start(self, stream: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, copy: Any) -> None:
        """Let the computing stream wait for it."""
        self.module.current_stream().wait_event(copy)


class LateCopies:
    """On a CPU: a copy is made when somebody waits for it, or for one that was started later."""

    def __init__(self) -> None:
        self.started: deque[list[tuple[Tensor, Tensor]]] = deque()

    def to_host(self, flat: Tensor, host: list[Tensor]) -> Any:
        return self._start([(piece, part) for part, piece in _pairs(flat, host)])

    def from_host(self, host: list[Tensor], flat: Tensor) -> Any:
        return self._start(list(_pairs(flat, host)))

    def _start(self, copies: list[tuple[Tensor, Tensor]]) -> Any:
        self.started.append(copies)
        return copies

    def wait(self, copy: Any) -> None:
        while any(copy is each for each in self.started):
            for to, source in self.started.popleft():
                to.copy_(source)
