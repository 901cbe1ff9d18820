"""What moe.overlap hides inside one layer: its forward and its backward, as operations on two lanes.

    "shared_expert"   the shared expert's kernels run while rows travel to the experts, and, in backward, back from them
    "half_batch"      the two halves of a microbatch, one step apart (half_batch.py): each half's transfers beside the
                      other half's kernels

Kernels of half a batch take half as long here. On the GPU they take more, because half of the rows fill it less well;
that they are launched twice the planner does count (overlap.py).
"""

from collections.abc import Callable, Mapping

from titan_moe.plan import schedule
from titan_moe.plan.job import Job
from titan_moe.plan.schedule import Lane, Op, Placed

WITHIN = ("shared_expert", "half_batch")
"""Kinds of overlap that need no second microbatch"""
Seconds = Callable[..., float]


def place(job: Job, blocks: Mapping[str, float], sent: dict[str, float], lane: Lane) -> dict[str, list[Placed]]:
    """A layer's forward, and its backward, placed on their lanes as if neither lane slowed the other. `blocks`: seconds
    of kernels by block and phase ("attention forward", ...); `sent`: those of transfers by name, on `lane`."""

    def of(*names: str) -> float:
        return sum(blocks.get(name, 0.0) for name in names)

    return {
        "forward": schedule.run(forward_ops(job, of, sent, lane)),
        "backward": schedule.run(backward_ops(job, of, sent, lane)),
    }


def forward_ops(job: Job, of: Seconds, sent: dict[str, float], lane: Lane) -> list[Op]:
    """`of("attention forward", ...)` are seconds of kernels by block and phase, `sent` those of transfers by name."""
    first, experts = of("attention forward", "router forward"), of("experts forward")
    shared, there, back = of("shared forward"), sent["dispatch"], sent["combine"]
    if job.overlap == "shared_expert":
        return [
            Op("attention forward", "compute", first),
            Op("dispatch", lane, there, ("attention forward",)),
            Op("shared forward", "compute", shared),
            Op("experts forward", "compute", experts, ("dispatch",)),
            Op("combine", lane, back, ("experts forward",)),
        ]
    return [
        *(Op(f"attention forward {half}", "compute", first / 2) for half in "ab"),
        *(Op(f"dispatch {half}", lane, there / 2, (f"attention forward {half}",)) for half in "ab"),
        *(Op(f"experts forward {half}", "compute", experts / 2, (f"dispatch {half}",)) for half in "ab"),
        *(Op(f"combine {half}", lane, back / 2, (f"experts forward {half}",)) for half in "ab"),
        Op("shared forward", "compute", shared),
    ]


def backward_ops(job: Job, of: Seconds, sent: dict[str, float], lane: Lane) -> list[Op]:
    """The same of backward: the mirror image."""

    def both(block: str) -> float:
        return of(f"{block} backward", f"{block} wgrad")

    last, experts, shared = both("attention") + both("router"), both("experts"), both("shared")
    back, there = sent["combine backward"], sent["dispatch backward"]
    if job.overlap == "shared_expert":
        return [
            Op("combine backward", lane, back),
            Op("experts backward", "compute", experts, ("combine backward",)),
            Op("dispatch backward", lane, there, ("experts backward",)),
            Op("shared backward", "compute", shared),
            Op("attention backward", "compute", last, ("dispatch backward",)),
        ]
    return [
        *(Op(f"combine backward {half}", lane, back / 2) for half in "ba"),
        Op("shared backward", "compute", shared),
        *(Op(f"experts backward {half}", "compute", experts / 2, (f"combine backward {half}",)) for half in "ba"),
        *(Op(f"dispatch backward {half}", lane, there / 2, (f"experts backward {half}",)) for half in "ba"),
        *(Op(f"attention backward {half}", "compute", last / 2, (f"dispatch backward {half}",)) for half in "ba"),
    ]
