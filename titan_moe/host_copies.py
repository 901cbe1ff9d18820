"""Copies between a device and host memory, beside what computes, and the host memory that they use. See offload.py."""

from collections import deque
from typing import Any

import torch
from torch import Tensor


class StreamCopies:
    """On two streams, one each way, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.away, self.back = self.module.Stream(device), self.module.Stream(device)

    def start(self, to: Tensor, source: Tensor) -> Any:
        """Copy, one of them being pinned host memory, after what the computing stream has been given so far."""
        stream = self.away if to.device.type == "cpu" else self.back
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, copy: Any) -> None:
        self.module.current_stream().wait_event(copy)


class LateCopies:
    """On a CPU: a copy is made when somebody waits for it, or for one that was started later."""

    def __init__(self) -> None:
        self.started: deque[tuple[Tensor, Tensor]] = deque()

    def start(self, to: Tensor, source: Tensor) -> Any:
        self.started.append((to, source))
        return self.started[-1]

    def wait(self, copy: Any) -> None:
        while any(copy is each for each in self.started):
            to, source = self.started.popleft()
            to.copy_(source)


class Pool:
    """Host memory that is used again, in sizes of powers of two, which torch's pinned memory has anyway."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned, self.allocated = pinned, 0
        self.free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        """At least `size` bytes."""
        size = 1 << max(size - 1, 0).bit_length()
        if free := self.free.get(size):
            return free.pop()
        self.allocated += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)

    def give(self, buffer: Tensor) -> None:
        self.free.setdefault(buffer.nbytes, []).append(buffer)
