"""Collectives under way: issued in one place, waited for in another, and noted on the way if somebody keeps a log.

What communication costs is not how long it takes but how long somebody waits for it. A transfer is in flight from its
issue until the last byte is there; it is exposed for as long as the compute stream (on a CPU: the host) stands still in
`wait`. The share that is hidden is 1 - exposed / in flight. `log` collects both, if it is set.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from titan_moe.clock import Mark, mark, seconds


@dataclass(slots=True)
class Transfer:
    """One collective of this rank."""

    name: str
    """What it is for: "dispatch", "combine", "gather", "reduce" """
    backward: bool
    sent: int
    """Bytes for other ranks"""
    issued: Mark
    waited: Mark | None = None
    """When somebody began to wait for it"""
    done: Mark | None = None
    """When the wait was over"""

    @property
    def exposed(self) -> float:
        """Seconds waited for it."""
        assert self.waited is not None and self.done is not None
        return seconds(self.waited, self.done)


log: list[Transfer] | None = None
"""Transfers in the order of their issue, for whoever takes them out (and empties it); None: nobody looks"""


class InFlight:
    """A collective that has been issued. Nothing may touch its result before `wait`."""

    def __init__(self, work: dist.Work, name: str, *, backward: bool, sent: int, result: Tensor) -> None:
        self.work, self.result = work, result
        self.transfer = Transfer(name, backward, sent, mark()) if log is not None else None
        if self.transfer is not None and log is not None:
            log.append(self.transfer)

    def wait(self) -> Tensor:
        """The result, usable by what this stream does next."""
        if self.transfer is not None:
            self.transfer.waited = mark()
        self.work.wait()
        if self.transfer is not None:
            self.transfer.done = mark()
        return self.result
