"""Collectives under way: issued in one place, waited for in another, and noted on the way if somebody keeps a log.

What communication costs is not how long it takes but how long somebody waits for it. A transfer is in flight from its
issue until the last byte is there; it is exposed for as long as the compute stream (on a CPU: the host) stands still in
`wait`. The share that is hidden is 1 - exposed / in flight. `log` collects both, if it is set.

On one machine transfers take next to no time, and there is little to hide. For tests of what hides them,
`seconds_per_byte` (debug.comm_delay_ns_per_byte) makes a link slow: its transfers follow each other, each takes so long
for every byte that this rank receives from others, and whoever waits sleeps for what is left of that.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from titan_moe.clock import Mark, mark, seconds


@dataclass(slots=True)
class Transfer:
    """One transfer of this rank."""

    name: str
    """What it is for: "dispatch", "combine", "gather", "reduce" """
    backward: bool
    """Whether it carries gradients: "dispatch" then is the transpose of forward's dispatch, which sends rows back"""
    sent: int
    """Bytes for other ranks"""
    received: int
    """Bytes from other ranks"""
    issued: Mark
    ended: Mark | None = None
    """When the last byte was there"""
    waited: Mark | None = None
    """When somebody began to wait for it"""
    done: Mark | None = None
    """When the wait was over"""

    @property
    def exposed(self) -> float:
        """Seconds waited for it."""
        assert self.waited is not None and self.done is not None
        return seconds(self.waited, self.done)

    @property
    def in_flight(self) -> float:
        """Seconds from its issue until it was there, at the latest until the wait for it was over."""
        assert self.done is not None
        until_done = seconds(self.issued, self.done)
        return until_done if self.ended is None else min(seconds(self.issued, self.ended), until_done)


@dataclass(slots=True)
class Total:
    """Of some transfers together. Seconds and bytes."""

    calls: int = 0
    sent: int = 0
    in_flight: float = 0.0
    exposed: float = 0.0


log: list[Transfer] | None = None
"""Transfers in the order of their issue, for whoever takes them out (and empties it); None: nobody looks"""

seconds_per_byte = 0.0
_link_free: dict[str, float] = {}  # when the last transfer of each slow link will be over


@contextmanager
def unnoted() -> Iterator[None]:
    """Nobody keeps a log inside."""
    global log
    kept, log = log, None
    try:
        yield
    finally:
        log = kept


def summary(transfers: Iterable[Transfer]) -> dict[str, Total]:
    """What those that have been waited for come to: "dispatch", "combine", ... and "dispatch backward", ..., each
    together with its total."""
    found: dict[str, Total] = {}
    for transfer in transfers:
        if transfer.done is None:
            continue
        total = found.setdefault(transfer.name + " backward" * transfer.backward, Total())
        total.calls += 1
        total.sent += transfer.sent
        total.in_flight += transfer.in_flight
        total.exposed += transfer.exposed
    return found


class InFlight:
    """Collectives that have been issued and make one transfer. Nothing may touch their results before `wait`.

    Arguments:
        works: their handles.
        results: what `wait` returns.
        name, backward, sent, received: see Transfer.
        link: transfers over the same one follow each other if it is slow.
        slow: seconds per byte received; None: `seconds_per_byte`.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        results: tuple[Tensor, ...],
        name: str,
        *,
        backward: bool,
        sent: int,
        received: int,
        link: str = "",
        slow: float | None = None,
    ) -> None:
        self.works, self.results, self.until = works, results, 0.0
        slow = seconds_per_byte if slow is None else slow
        if slow:
            now = time.perf_counter()
            self.until = _link_free[link] = max(now, _link_free.get(link, now)) + received * slow
        self.transfer = None
        if log is not None:
            self.transfer = Transfer(name, backward, sent, received, mark())
            log.append(self.transfer)
            for work in works:
                work.get_future().add_done_callback(self._note_end)

    def _note_end(self, _) -> None:
        assert self.transfer is not None
        self.transfer.ended = mark()  # the last of them stays

    def wait(self) -> tuple[Tensor, ...]:
        """The results, usable by what this stream does next."""
        if self.transfer is not None:
            self.transfer.waited = mark()
        for work in self.works:
            work.wait()
        if self.until and (left := self.until - time.perf_counter()) > 0:
            time.sleep(left)
        if self.transfer is not None:
            self.transfer.done = mark()
            if self.until and (self.transfer.ended is None or self.transfer.ended.host < self.until):
                self.transfer.ended = Mark(self.until)
        return self.results
