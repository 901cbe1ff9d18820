"""Exposed expert-parallel seconds of a layer from measured numbers instead of a data sheet's.

The planner's schedule (schedule.py, within_layer.py) says what hides what; how long kernels and transfers take it
usually computes from a GPU's data sheet. On a machine without one, a laptop's gloo for example, both can be measured:
blocks of kernels in a run without overlap, the link by transfers of several sizes. What is left to the planner are the
bytes and the schedule, and those are what a comparison with a trace then tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_moe.plan import schedule, traffic, within_layer
from titan_moe.plan.job import Job

TRANSFERS = ("dispatch", "combine", "combine backward", "dispatch backward")
WEIGHT_BYTES = 4
"""Of a routing weight, which travels with each copy to its expert, and whose gradient comes back"""


@dataclass(frozen=True)
class Link:
    """A transfer of n bytes takes latency + n / bytes_per_s seconds."""

    latency: float
    bytes_per_s: float

    @staticmethod
    def fitted(points: Sequence[tuple[float, float]]) -> "Link":
        """Through (bytes, seconds) of at least two sizes, by least squares of the relative errors: the small transfers
        count as much as the large ones."""
        # seconds = a + b n, weighted by 1 / seconds^2
        w = [1 / s**2 for _, s in points]
        total = sum(w)
        n0 = sum(wi * n for wi, (n, _) in zip(w, points)) / total
        s0 = sum(wi * s for wi, (_, s) in zip(w, points)) / total
        slope = sum(wi * (n - n0) * (s - s0) for wi, (n, s) in zip(w, points))
        slope /= sum(wi * (n - n0) ** 2 for wi, (n, _) in zip(w, points))
        return Link(max(s0 - slope * n0, 0.0), 1 / slope)

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bytes_per_s


def received_bytes(job: Job, element: int) -> dict[str, float]:
    """Bytes that a rank receives from others in each of a layer's transfers, rows being of `element`-byte numbers. Of
    one domain; of dispatchers "alltoall" and "dedup"."""
    near, far = traffic.ep_copies(job)
    assert far == 0.0, "one domain"
    # ep_copies counts the own rank in for dedup, which sends itself nothing.
    rows = near if job.dispatcher == "alltoall" else near * (job.ep - 1) / job.ep
    copies = job.model.top_k * (job.ep - 1) / job.ep
    row, weights = rows * job.tokens * job.model.dim * element, copies * job.tokens * WEIGHT_BYTES
    return {name: row + weights * name.startswith("dispatch") for name in TRANSFERS}


def exposed_seconds(job: Job, blocks: Mapping[str, float], link: Link, received: Mapping[str, float]) -> float:
    """Seconds of one MoE layer's forward and backward in which compute stands still for expert-parallel transfers, with
    `job.overlap`. `blocks`: seconds by block and phase ("attention forward", "experts backward", ...)."""
    if job.overlap == "none":
        return sum(link.seconds(size) for size in received.values())
    parts = 2 if job.overlap == "half_batch" else 1
    sent = {name: parts * link.seconds(size / parts) for name, size in received.items()}  # the ops take parts of this
    sides = within_layer.place(job, blocks, sent, "nvlink").values()
    return sum(schedule.makespan(placed) - schedule.busy(placed, "compute") for placed in sides)
