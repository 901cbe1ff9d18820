"""Marks in time that cost no wait: of the host on a CPU, of the current stream on a GPU.

A GPU runs behind the host, and asking it for the time would stop both. So `mark` leaves an event on the stream, and
`seconds` reads the difference when somebody asks for it, a step later, when the device has passed both.
"""

import time
from dataclasses import dataclass
from typing import Any

from titan_moe.runtime import DEVICE_TYPE

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    host: float
    """time.perf_counter() when it was made"""
    event: Any = None
    """On the device's current stream; None on a CPU, which has none"""


def mark() -> Mark:
    """Now, on the host and on the current stream."""
    if DEVICE_TYPE == "cpu":
        return Mark(time.perf_counter())
    # In a CUDA graph that is being captured, an ordinary event would mark a place in the graph, which has no time.
    recorded = {"external": True} if DEVICE_TYPE == "cuda" and torch.cuda.is_current_stream_capturing() else {}
    event = torch.get_device_module(DEVICE_TYPE).Event(enable_timing=True, **recorded)
    event.record()
    return Mark(time.perf_counter(), event)


def seconds(start: Mark, end: Mark) -> float:
    """From one mark to a later one. On a GPU waits until it has passed the later one: ask a step late."""
    if start.event is None or end.event is None:
        return end.host - start.host
    end.event.synchronize()
    return start.event.elapsed_time(end.event) / 1e3
