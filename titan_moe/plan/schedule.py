"""What runs beside what: a list scheduler for lanes, and pipeline schedules for microbatches.

A GPU has four lanes: compute, NVLink, network, and copies to the host. Work on one lane runs in the order given; it
starts when the lane is free and what it needs is done. Exposed communication is then a result: the time in which the
compute lane has nothing to run.

Two transfers at once, or a transfer beside kernels, slow each other: communication kernels take SMs from compute and
reach a share of their isolated bandwidth (constant `contention`).

A pipeline is simulated the same way, one lane a rank, in the order of Megatron's (interleaved) 1F1B. In the steady
state the slowest rank sets the period, so a few microbatches are enough and the rest is arithmetic. For the zero-bubble
family the bubble is the papers' closed form.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from titan_moe.pipeline_layout import V_SHAPED

Lane = Literal["compute", "nvlink", "network", "copy"]


@dataclass(frozen=True)
class Op:
    """Work of some seconds on a lane; `needs` are names of ops that must be done before."""

    name: str
    lane: Lane
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    name: str
    lane: Lane
    start: float
    end: float


def run(ops: list[Op]) -> list[Placed]:
    """When each op runs. Ops of a lane keep their order; all of `needs` must come earlier in the list or on a lane that
    does not wait for this one."""
    queues: dict[str, list[Op]] = {}
    for op in ops:
        queues.setdefault(op.lane, []).append(op)
    done: dict[str, float] = {}
    free = dict.fromkeys(queues, 0.0)
    placed: list[Placed] = []
    while any(queues.values()):
        ready = [queue for queue in queues.values() if queue and all(need in done for need in queue[0].needs)]
        assert ready, f"ops wait for each other: {[queue[0].name for queue in queues.values() if queue]}"
        for queue in ready:
            op = queue.pop(0)
            start = max([free[op.lane], *(done[need] for need in op.needs)])
            done[op.name] = free[op.lane] = start + op.seconds
            placed.append(Placed(op.name, op.lane, start, start + op.seconds))
    return placed


def makespan(placed: list[Placed]) -> float:
    return max((p.end for p in placed), default=0.0)


def busy(placed: list[Placed], *lanes: Lane) -> float:
    """Seconds in which at least one op of these lanes runs."""
    total, until = 0.0, 0.0
    for start, end in sorted((p.start, p.end) for p in placed if p.lane in lanes):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines

SIMULATED_ROUNDS = 4  # rounds of pp microbatches: warm-up takes at most three


def per_round(pp: int, microbatches: int) -> int:
    """Microbatches that interleaved schedules run through one stage of a rank before they turn to the next: `pp`, and
    a few more where that leaves a rest."""
    return -(-microbatches // max(1, microbatches // pp))


@lru_cache(maxsize=1024)
def order(
    rank: int, pp: int, vp: int, microbatches: int, warm_up: int | None = None
) -> tuple[tuple[str, int, int], ...]:
    """(F or B, stage, microbatch) as rank runs them: Megatron's interleaved 1F1B, plain 1F1B for vp = 1. `warm_up` are
    the forwards before the first pair, if others than that schedule's."""
    total, each = microbatches * vp, per_round(pp, microbatches)
    steps = []
    for first in range(0, microbatches, each):
        group = range(first, min(first + each, microbatches))
        steps += [(chunk, mb) for chunk in range(vp) for mb in group]
    forward = [("F", chunk * pp + rank, mb) for chunk, mb in steps]
    backward = [("B", (vp - 1 - chunk) * pp + rank, mb) for chunk, mb in steps]
    if warm_up is None:
        warm_up = (pp - rank - 1) * 2 + (vp - 1) * each if vp > 1 else pp - rank - 1
    warm_up = min(total, warm_up)
    found = forward[:warm_up]
    for i in range(total - warm_up):
        found += [forward[warm_up + i], backward[i]]
    return tuple(found + backward[total - warm_up :])


@lru_cache(maxsize=1 << 14)
def held(schedule: str, rank: int, pp: int, vp: int, microbatches: int, ahead: int = 0) -> frozenset[tuple[int, ...]]:
    """Microbatches whose activations a rank holds, of each of its stages, at every moment that may be its fullest: at
    none does it hold more of one stage and no less of the others. Which is worst, the sizes of the stages decide.

    `ahead` are forwards run earlier than 1F1B would. Schedules that split backward hold a microbatch until its weight
    gradients. V-shaped ones hold what 1F1B's first rank does, on every rank; DualPipeV one more.
    """
    if schedule in V_SHAPED:
        first, second = 2 * pp - rank, rank + 1
        pairs = [(first, second)] if schedule == "DualPipeV" else [(first, second - 1), (first - 1, second)]
        return _fullest({(min(a, microbatches), min(b, microbatches)) for a, b in pairs})
    each = per_round(pp, microbatches)
    simulated = min(microbatches, SIMULATED_ROUNDS * each)
    delayed = warm_up = None
    if schedule == "InterleavedZeroBubble":  # a weight gradient for each input gradient, `rank` of them later
        delayed, warm_up = rank, pp - rank - 1 + (vp - 1) * each
    elif ahead:
        warm_up = ahead + ((pp - rank - 1) * 2 + (vp - 1) * each if vp > 1 else pp - rank - 1)
    counts, seen, waiting = dict.fromkeys(range(rank, pp * vp, pp), 0), set(), deque[int]()
    for kind, stage, _ in order(rank, pp, vp, simulated, warm_up):
        if kind == "F":
            counts[stage] += 1
            seen.add(tuple(counts.values()))
        else:
            waiting.append(stage)
            if len(waiting) > (delayed or 0):
                counts[waiting.popleft()] -= 1
    return _fullest(seen)


def _fullest(moments: set[tuple[int, ...]]) -> frozenset[tuple[int, ...]]:
    def covered(moment: tuple[int, ...]) -> bool:
        return any(other != moment and all(a >= b for a, b in zip(other, moment)) for other in moments)

    return frozenset(moment for moment in moments if not covered(moment))


def received_ahead(schedule: str, rank: int, pp: int, microbatches: int) -> int:
    """Hidden states and gradients, at most, that a rank of this trainer has posted a receive for and does not yet
    compute with.

    torch posts a receive when the other rank has sent. Interleaved schedules come to the later stages of the first
    rank, and back to the earlier ones of the last, most of a round after that; elsewhere what is received is soon used.
    """
    most = 4
    if schedule == "1F1B":
        most = 2  # it waits for each, and keeps the last gradient until it gets the next
    elif schedule.startswith("Interleaved") and rank in (0, pp - 1):
        each = per_round(pp, microbatches)
        most = max(most, each if rank == 0 else each - pp // 2 + 2)
    return min(most, 2 * microbatches)


def pipeline_seconds(
    forward: list[float], backward: list[float], pp: int, microbatches: int, send: float
) -> tuple[float, float]:
    """(seconds of all microbatches, seconds that the busiest rank computes), with (interleaved) 1F1B.

    `forward` and `backward` are seconds per stage; `send` is how long hidden states are under way between two stages.
    """
    vp = len(forward) // pp
    period = max(sum(forward[rank::pp]) + sum(backward[rank::pp]) for rank in range(pp))
    if pp == 1:
        return microbatches * period, microbatches * period
    simulated = min(microbatches, SIMULATED_ROUNDS * pp)
    last = pp * vp - 1
    # When each microbatch's forward and backward of each stage are done; -1: not yet.
    forward_done, backward_done = ([[-1.0] * simulated for _ in range(pp * vp)] for _ in range(2))
    orders = [order(rank, pp, vp, simulated) for rank in range(pp)]
    place, free = [0] * pp, [0.0] * pp
    moved = True
    while moved:
        moved = False
        for rank in range(pp):
            steps, now = orders[rank], free[rank]
            for i in range(place[rank], len(steps)):
                kind, stage, mb = steps[i]
                if kind == "F":
                    ready = forward_done[stage - 1][mb] if stage else 0.0
                    here, seconds, waits = forward_done, forward[stage], send if stage else 0.0
                else:
                    ready = backward_done[stage + 1][mb] if stage < last else forward_done[stage][mb]
                    here, seconds, waits = backward_done, backward[stage], send if stage < last else 0.0
                if ready < 0:
                    break
                now = max(now, ready + waits) + seconds
                here[stage][mb] = now
                place[rank] = i + 1
                moved = True
            free[rank] = now
    assert all(place[rank] == len(orders[rank]) for rank in range(pp)), "pipeline order waits for itself"
    return max(free) + (microbatches - simulated) * period, microbatches * period


def zero_bubble_seconds(
    schedule: str,
    forward: list[float],
    dgrad: list[float],
    wgrad: list[float],
    held: list[list[int]],
    microbatches: int,
) -> tuple[float, float]:
    """The same for schedules that move weight gradients W into the bubble; `held` are the stages of each rank.

    Bubble, with F, B and W the forward, dgrad and wgrad of one rank: InterleavedZeroBubble (pp - 1)(F + B - W) / vp
    (ZB-H1, arXiv 2401.10241); ZBVZeroBubble (pp - 1)(F + B - 2 W) / vp (ZB-V, arXiv 2405.15362: none if all are equal);
    DualPipeV (pp / 2 - 1)(F&B + B' - 3 W), with F&B the overlapped forward and backward and B' = B + W (arXiv
    2412.19437, table 2).
    """
    pp, vp = len(held), len(held[0])
    f, b, w = (sum(times) / pp for times in (forward, dgrad, wgrad))
    period = max(sum(forward[s] + dgrad[s] + wgrad[s] for s in stages) for stages in held)
    if schedule == "DualPipeV":
        bubble = max(pp / 2 - 1, 0.0) * max((f + b + w) + (b + w) - 3 * w, 0.0)
    elif schedule == "ZBVZeroBubble":
        bubble = (pp - 1) * max(f + b - 2 * w, 0.0) / vp
    else:
        bubble = (pp - 1) * max(f + b - w, 0.0) / vp
    return microbatches * period + bubble, microbatches * period
