"""Where the time of a step goes: a timeline for each rank, on which every moment belongs to exactly one phase.

**Exclusive times.** A phase begins where the one before it ends, and what nobody claims is "other". So phases add up to
the step, and the share of "other" says how much is not explained. A phase inside another one interrupts it: the gathers
of FSDP while the loss is computed are of "fsdp", not of "loss".

**Forward** is where the code says so: a phase is wrapped around a call (`around`), and lasts as long as the call.

**Backward** has no such code. It runs node by node through the graph that forward left. But a phase's backward begins
with the node that made what the phase returned, and the phase before it in forward comes next. So `around` leaves a
hook on the nodes of its results, which says that its backward begins, and each lasts until the next one says so. What
lies between two phases in forward, such as the sum of a residual connection, counts in backward to the one that ran
before it. Hooks are called by the thread that runs backward, between two nodes: no node is added to the graph.

What activation checkpointing computes again counts as backward, of the phase that it belongs to: it is inside backward
that somebody waits for it.

**Reading.** A mark costs a microsecond or two and no wait (clock.py). `step` reads the marks of the step before the
last, which a GPU has passed by now, so that they do not pile up; `take` reads all of them, and belongs where the host
has waited for the device anyway.

A trace and Nsight Systems show the same phases while somebody is in `ranges` (profiling.py).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, Protocol, TypeVar, cast

import titan_moe.runtime  # noqa: F401

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

from titan_moe import clock
from titan_moe.clock import Mark
from titan_moe.phase_names import NAMES, OTHER, WHOLE

Call = TypeVar("Call", bound=Callable[..., Any])


class Ranges(Protocol):
    """Whoever shows phases as ranges, one after the other. A range begins and ends in the same thread."""

    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


class Phases:
    """One per run. `host_seconds`: of `whole` phases by the host's clock, for whoever takes them out. On a GPU that is
    not the same: the device may still be busy with what came before."""

    def __init__(self) -> None:
        self.now = OTHER
        self.in_backward = False
        self.ranges: list[Ranges] = []
        self.host_seconds: defaultdict[str, float] = defaultdict(float)
        self.closed = False  # in a phase that is told as a whole
        self._ends = False  # the end of this backward will be noted
        self._marks: list[tuple[str, Mark]] = []
        self._started = False
        self._clear()

    def _clear(self) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)  # from marks that have been read
        self._steps = 0
        self._step_start = 0  # the mark that the last step began with

    @property
    def repeats(self) -> bool:
        """Whether a forward that runs now is none of a training step: it is repeated in backward, or validates."""
        return self.in_backward or self.closed

    def switch(self, name: str) -> None:
        """From here on it is `name`."""
        if name == self.now:
            return
        self.now = name
        for ranges in self.ranges:
            ranges.end()
        self._marks.append((name, clock.mark()))
        for ranges in self.ranges:
            ranges.begin(name)

    # -----------------------------------------------------------------------------------------------------------------
    # What belongs to a phase

    def around(self, call: Call, name: str, nodes: Callable[[Any], Iterable[Node]] | None = None) -> Call:
        """`call` as a phase of forward and, from the nodes of the tensors that it returns, of backward. `nodes`: finds
        those that the phase's backward begins with, in what `call` returns."""
        inside, find = self.inside(call, name), nodes or nodes_of
        backward = f"{name}.backward"

        def begins(_: Any) -> None:
            self._begin_backward(backward)

        @wraps(call)
        def timed(*args, **kwargs):
            result = inside(*args, **kwargs)
            if not self.repeats:
                for node in find(result):
                    node.register_prehook(begins)
            return result

        return cast(Call, timed)

    def inside(self, call: Call, name: str) -> Call:
        """`call` as a phase, in backward if that calls it."""
        forward, backward = (f"{name}.forward", f"{name}.backward") if name not in WHOLE else (name, name)

        @wraps(call)
        def timed(*args, **kwargs):
            if self.closed:
                return call(*args, **kwargs)
            before = self.now
            self.switch(backward if self.in_backward else forward)
            try:
                return call(*args, **kwargs)
            finally:  # recompute stops early, by an exception
                self.switch(before)

        return cast(Call, timed)

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """All that is done inside, whatever it is, as one phase."""
        before, was_closed, start = self.now, self.closed, time.perf_counter()
        if not was_closed:
            self.switch(name)
        self.closed = True
        try:
            yield
        finally:
            self.closed = was_closed
            if not was_closed:
                self.switch(before)
                self.host_seconds[name] += time.perf_counter() - start

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a call that runs backward."""
        before, was_backward = self.now, self.in_backward
        self.in_backward, self._ends = True, False
        if not self.closed:
            self.switch(OTHER)
        try:
            yield
        finally:
            self.in_backward = was_backward
            if not self.closed:
                self.switch(before)

    def _begin_backward(self, name: str) -> None:
        if self.closed:
            return
        if not self._ends:
            # Called by the thread that runs backward, where a range that began there has to end.
            Variable._execution_engine.queue_callback(self._end_backward)
            self._ends = True
        self.switch(name)

    def _end_backward(self) -> None:
        self.switch(OTHER)

    # -----------------------------------------------------------------------------------------------------------------
    # Reading

    def step(self) -> None:
        """A step begins. What was before the first one does not count."""
        if not self._started:
            self._marks.clear()
            self._started = True
        self._marks.append((self.now, clock.mark()))
        self._read(self._step_start)
        self._step_start = len(self._marks) - 1
        self._steps += 1

    def take(self) -> tuple[dict[str, float], int]:
        """Seconds of each phase since the last call, or since the first step began, and the steps that they are of.
        Waits for the device if it has not come here yet."""
        self._marks.append((self.now, clock.mark()))
        self._read(len(self._marks) - 1)
        taken = self._seconds, self._steps
        self._clear()
        return taken

    def _read(self, until: int) -> None:
        """Add up what lies before that mark, and forget it."""
        for (name, start), (_, end) in pairwise(self._marks[: until + 1]):
            self._seconds[name] += clock.seconds(start, end)
        del self._marks[:until]


def nodes_of(result: Any) -> Iterator[Node]:
    """Of the tensors that a call returned: alone, in a tuple, or in a record."""
    values: Iterable[Any] = (result,)
    if isinstance(result, tuple | list):
        values = result
    elif hasattr(result, "__dataclass_fields__"):
        values = vars(result).values()
    for value in values:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield value.grad_fn
