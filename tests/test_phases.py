"""Every moment of a step belongs to one phase, forward and backward, whatever runs between, again, or inside."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_moe import clock, phase_hooks
from titan_moe import phases as phases_module
from titan_moe.clock import Mark
from titan_moe.fsdp_traffic import GlooReduce, Reductions
from titan_moe.moe.exchange import start_combine, start_dispatch
from titan_moe.moe.moving import Moving
from titan_moe.moe.rows import RowMap, gather_rows
from titan_moe.phase_names import NAMES
from titan_moe.phases import Phases


@pytest.fixture
def ticks(monkeypatch):
    """Time that passes only when somebody says so."""
    now = [0.0]
    monkeypatch.setattr(clock, "mark", lambda: Mark(now[0]))
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: now[0])

    def pass_by(ticks: float) -> None:
        now[0] += ticks

    return pass_by


class Slow(torch.autograd.Function):
    """x, and some time in each direction."""

    @staticmethod
    def forward(ctx, x, pass_by, forward, backward):
        pass_by(forward)
        ctx.later = pass_by, backward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        pass_by, backward = ctx.later
        pass_by(backward)
        return grad, None, None, None


def slow(pass_by, forward: float, backward: float):
    return lambda x: Slow.apply(x, pass_by, forward, backward)


def told(phases: Phases) -> dict[str, float]:
    seconds, _ = phases.take()
    assert set(seconds) == set(NAMES)
    return {name: value for name, value in seconds.items() if value}


def test_backward_is_divided_where_forward_was(ticks):
    """Two phases with something between them that is none: what it takes in backward counts to the phase before."""
    phases = Phases()
    attention = phases.around(slow(ticks, 1, 10), "attention")
    experts = phases.around(slow(ticks, 2, 20), "experts")
    between = slow(ticks, 4, 40)
    phases.step()
    ticks(0.5)
    y = experts(between(attention(torch.ones(2, requires_grad=True)))).sum()
    with phases.backward():
        y.backward()
    ticks(0.25)
    expected = {"attention.forward": 1, "attention.backward": 10, "experts.forward": 2, "experts.backward": 60}
    assert told(phases) == {**expected, "other": 4.75}


def test_a_phase_inside_another_interrupts_it(ticks):
    phases = Phases()
    gather = phases.inside(lambda: ticks(3), "fsdp")

    def compute(x):
        ticks(1)
        gather()
        ticks(1)
        return x

    phases.step()
    phases.around(compute, "loss")(torch.ones(1))
    assert told(phases) == {"loss.forward": 2, "fsdp.forward": 3}


def test_a_tuple_and_a_record_begin_backward_with_whichever_comes_first(ticks):
    @dataclass
    class Record:
        x: torch.Tensor
        count: int

    phases = Phases()
    router = phases.around(lambda x: (slow(ticks, 0, 1)(x), torch.ones(1), None), "router")
    dispatch = phases.around(lambda x: Record(slow(ticks, 0, 2)(x), 3), "dispatch")
    x = torch.ones(2, requires_grad=True)
    phases.step()
    loss = dispatch(router(x)[0]).x.sum()
    with phases.backward():
        loss.backward()
    assert told(phases) == {"router.backward": 1, "dispatch.backward": 2}


def test_what_is_computed_again_is_backward_of_its_phase(ticks):
    """Recompute stops in the middle of the last phase, by an exception. What follows is the backward that asked."""
    phases = Phases()
    attention = phases.around(lambda x: slow(ticks, 1, 10)(x).sin(), "attention")  # sin keeps its input
    experts = phases.around(lambda x: slow(ticks, 2, 20)(x).exp().cos(), "experts")

    x = torch.ones(2, requires_grad=True)
    phases.step()
    y = checkpoint(lambda x: experts(attention(x)), x, use_reentrant=False)
    assert told(phases) == {"attention.forward": 1, "experts.forward": 2}
    with phases.backward():
        y.sum().backward()
    assert phases.now == "other"
    assert told(phases) == {"attention.backward": 1 + 10, "experts.backward": 2 + 20}


def test_nothing_shows_inside_of_a_whole_phase(ticks):
    phases = Phases()
    attention = phases.around(slow(ticks, 1, 10), "attention")
    phases.step()
    with phases.whole("validation"):
        y = attention(torch.ones(2, requires_grad=True)).sum()
        with phases.backward():
            y.backward()
        assert phases.repeats
    assert told(phases) == {"validation": 11} and phases.host_seconds == {"validation": 11}


def test_an_error_leaves_the_phase(ticks):
    phases = Phases()

    def fails(x):
        ticks(1)
        raise KeyError

    phases.step()
    with pytest.raises(KeyError):
        phases.around(fails, "experts")(torch.ones(1))
    ticks(2)
    assert told(phases) == {"experts.forward": 1, "other": 2}


def test_steps_and_what_was_before_the_first(ticks):
    phases = Phases()
    ticks(100)
    for _ in range(3):
        phases.step()
        with phases.whole("data"):
            ticks(1)
    seconds, steps = phases.take()
    assert steps == 3 and seconds["data"] == 3 and sum(seconds.values()) == 3
    ticks(5)  # logging, after it has been told
    phases.step()
    ticks(1)
    seconds, steps = phases.take()
    assert steps == 1 and seconds["other"] == 6


def test_a_gpu_is_only_asked_what_it_has_passed(monkeypatch):
    """A device that runs a step behind: reading a mark that it has not come to would stop the host, so no step may do
    it. Logging, which has waited for the device anyway, reads all."""
    passed, made, waits = [-1], [0], []

    class Event:
        def __init__(self):
            self.number = made[0]
            made[0] += 1

        def synchronize(self):
            if self.number > passed[0]:
                waits.append(self.number)

        def elapsed_time(self, other):
            return 1e3 * (other.number - self.number)

    monkeypatch.setattr(clock, "mark", lambda: Mark(0.0, Event()))
    phases = Phases()
    experts = phases.around(lambda x: x, "experts")
    began = -1
    for _ in range(5):
        passed[0] = began  # a whole step behind the host
        phases.step()
        began = made[0] - 1
        for _ in range(4):
            experts(torch.ones(1))
    assert len(phases._marks) < 2 * (2 * 4 + 2), "marks of earlier steps are still there"
    passed[0] = made[0]  # the loss has been read
    seconds, steps = phases.take()
    assert not waits and steps == 5
    assert seconds["experts.forward"] == 5 * 4 and sum(seconds.values()) == made[0] - 1


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_waiting_for_rows_is_found_on_both_sides_of_what_hides_it(ticks, group):
    """Something runs while rows travel, in backward too: what waits behind it there is the dispatch again."""
    phases = Phases()
    rows = RowMap(torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    splits = ([2], [2])

    def dispatch(x, w):
        arrived = start_dispatch(gather_rows(x, rows, zero_fill=False), w, splits, splits, group)
        yield
        return arrived()

    def combine(y):
        arrived = start_combine(y, splits, group)
        yield
        return arrived()

    start = phase_hooks._timed_moving(phases, lambda x, w: Moving(dispatch(x, w), 1), "dispatch")
    finish = phase_hooks._timed_moving(phases, lambda y: Moving(combine(y), 1), "combine")
    shared = phases.around(slow(ticks, 1, 10), "shared_expert")
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    monitor = type("Seen", (), {"begin": lambda self, name: seen.append(name), "end": lambda self: None})()
    phases.step()
    moving = start(x * 2, w)
    hidden = shared(x * 1)
    received, weights = moving.wait()
    out = finish(received * weights.sum()).wait()
    loss = (out + hidden).sum()
    assert type(moving) is phase_hooks.TimedMoving
    phases.ranges.append(monitor)
    with phases.backward():
        loss.backward()
    backward = [name for name in seen if name != "other"]
    assert backward[0] == "combine.backward" and "shared_expert.backward" in backward
    assert backward.index("dispatch.backward") < backward.index("shared_expert.backward")
    assert backward[backward.index("shared_expert.backward") + 1] == "dispatch.backward", backward
    assert told(phases) == {"shared_expert.forward": 1, "shared_expert.backward": 10}


def test_what_backward_waits_for_at_its_end_is_of_fsdp(ticks, monkeypatch):
    """On a CPU the last reductions of gradients are waited for when backward is over."""
    phases, reductions = Phases(), Reductions()
    calls = {name: lambda: None for name in phase_hooks.FSDP_CALLS}
    group = SimpleNamespace(_reduce_scatter_comm=GlooReduce(cast(Any, None), reductions), **calls)
    monkeypatch.setattr(phase_hooks, "param_groups", lambda _: [group, group])
    phase_hooks._watch_fsdp(phases, nn.Identity())

    def reduces(_: float) -> None:
        reductions.add(lambda: ticks(5))

    phases.step()
    y = phases.around(lambda x: Slow.apply(x, ticks, 1, 10), "experts")(torch.ones(2, requires_grad=True))
    y.register_hook(reduces)
    with phases.backward():
        y.sum().backward()
    assert told(phases) == {"experts.forward": 1, "experts.backward": 10, "fsdp.backward": 5}


def test_marks_are_cheap():
    """A call makes two of them and takes some 3 microseconds; 100 are too many."""
    phases = Phases()
    call = phases.around(lambda: None, "experts")
    phases.step()
    start = time.process_time()
    for _ in range(2000):
        call()
    assert time.process_time() - start < 0.2
