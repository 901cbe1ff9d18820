"""Which memory lived when, and what it was for.

The ledger has a line for every storage: when it was made, when it went, its bytes, what it was for. Sums are taken when
the step is over, so that what a storage was for may become known after the peak: a tensor is an activation because it
was still there when a backward went on.

torch's own trackers (torch.distributed._tools) do not serve here: FSDPMemTracker wants one parameter group in each FSDP
module, where dense and expert parameters of a layer are two, and it wants a module to run once per step, where a
pipeline's stage runs once per microbatch.

Bytes are those asked for. What PyTorch's allocator adds, rounding to 512 bytes and fragmentation, is not in them.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.utils.weak import WeakIdKeyDictionary

from titan_moe.torch_helpers import in_backward

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS = "parameters", "gradients", "optimizer", "buffers"
GATHERED, UNREDUCED = "gathered parameters", "unreduced gradients"
ACTIVATIONS, WORKING, PIPELINE = "activations", "working set", "pipeline's buffers"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, GATHERED, UNREDUCED, ACTIVATIONS, WORKING, PIPELINE)
"""The planner's names (plan/memory.py), "buffers" of the model, and gradients that pipeline stages receive"""


@dataclass(eq=False)
class Line:
    """One storage, from one change of its size to the next."""

    size: int
    made: int
    """Number of the event"""
    in_forward: bool
    backwards: int
    """Events of backward passes before that"""
    assumed: str | None
    """What everything was for that was made then"""
    label: str | None = None
    """What it is known to be for"""
    gone: int | None = None
    """None: it is still there"""
    outlived_forward: bool = True

    @property
    def kind(self) -> str:
        if known := self.label or self.assumed:
            return known
        return ACTIVATIONS if self.in_forward and self.outlived_forward else WORKING


class Ledger:
    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.events = self.backwards = 0
        self._open: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storage -> its line, and what closes it
        self._assumed: str | None = None

    def see(self, tensor: Tensor) -> None:
        """A line for the tensor's memory if it has none."""
        for storage in get_untyped_storages(tensor):
            self._line(storage)

    def label(self, tensor: Tensor | None, kind: str) -> None:
        """Say what the tensor's memory is for; what was said first stays."""
        for storage in () if tensor is None else get_untyped_storages(tensor):
            line = self._line(storage)
            line.label = line.label or kind

    @contextmanager
    def assuming(self, kind: str) -> Iterator[None]:
        """Inside, what is made is for `kind`, unless it is known to be for something else."""
        outer, self._assumed = self._assumed, kind
        try:
            yield
        finally:
            self._assumed = outer

    @contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """Inside, a storage that is resized, as FSDP does with gathered parameters, closes its line and opens one."""
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            label = None
            if storage in self._open:
                line, _ = self._open.pop(storage)
                label = line.label
                self._close(line)
            self._line(storage).label = label or GATHERED

        torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _line(self, storage: torch.UntypedStorage) -> Line:
        if storage in self._open:
            return self._open[storage][0]
        line = Line(storage.nbytes(), self._next_event(), not in_backward(), self.backwards, self._assumed)
        self.lines.append(line)
        self._open[storage] = line, weakref.ref(storage, partial(self._close, line))
        return line

    def _close(self, line: Line, _: weakref.ref | None = None) -> None:
        line.gone = self._next_event()
        # What forward drops is gone before any backward goes on; what it keeps is not. Schedules that split backward
        # may drop it between the halves.
        line.outlived_forward = self.backwards > line.backwards

    def _next_event(self) -> int:
        self.events += 1
        self.backwards += in_backward()
        return self.events - 1

    # -----------------------------------------------------------------------------------------------------------------
    # Sums, in bytes

    def most(self, kind: str) -> int:
        """The most that was held of `kind` at any time."""
        return max(self._over_time(kind), default=0)

    def at_peak(self) -> dict[str, int]:
        """What was held of each kind when the sum of all was largest."""
        totals = self._over_time()
        peak = totals.index(max(totals))
        sums = dict.fromkeys(KINDS, 0)
        for line in self.lines:
            if line.made <= peak and (line.gone is None or line.gone > peak):
                sums[line.kind] += line.size
        return sums

    def _over_time(self, kind: str | None = None) -> list[int]:
        changes = [0] * self.events
        for line in self.lines:
            if kind in (None, line.kind):
                changes[line.made] += line.size
                if line.gone is not None:
                    changes[line.gone] -= line.size
        return list(accumulate(changes))
