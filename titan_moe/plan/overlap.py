"""One layer's wall time: kernels, the transfers between them, what hides what, and the host.

Without overlap, the four expert-parallel transfers of a layer (dispatch and combine, and their transposes in backward)
stand between kernels. With it, a layer's forward of one microbatch runs beside a layer's backward of another, in the
order of Megatron's combined 1F1B, which is also DualPipe's (`pair_ops`); or transfers run beside kernels of the same
microbatch (within_layer.py). What cannot be hidden is exposed: first what the scheduler finds no compute for, and then
a share of each transfer (constant `overlap_miss`) in which launches and waits keep either lane from running.

GPU and host run beside each other too, but not perfectly: the host is ahead in one layer and behind in the next. Their
times join as a p-norm, (gpu^p + host^p)^(1/p), with p the constant `host_norm`. Where the host waits for counts, the
GPU idles until the queue is full again (`STALL_LAUNCHES`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from titan_moe.plan import collectives, kernels, remembered, schedule, traffic, within_layer
from titan_moe.plan.constants import Constants
from titan_moe.plan.job import Job
from titan_moe.plan.layer import Kernel, Kind, layer_kernels
from titan_moe.plan.profiles import Software
from titan_moe.plan.schedule import Lane, Op, Placed
from titan_moe.plan.within_layer import WITHIN

DUALPIPE_MISS = 0.25
"""Share of `overlap_miss` that DualPipe has: it places transfers by hand (0.05-0.1 exposed against 0.22-0.3)"""
STALL_LAUNCHES = 8
"""Launches for which the GPU idles after the host waited for it: a copy, and the first kernels, one by one"""
UNBOUND_HOST = 1.6
"""Host time per launch of processes that are not pinned, over pinned ones"""
SERIAL_HOST = 1.2
"""Host time per launch without launching ahead, over with"""
MAX_MONTHS = 8
"""Months before the reference release beyond which the host was not slower still"""
GRAPH_REMAINDER = 0.03
"""Share of the launches of a captured region that is left"""
COVERED = {
    "none": (),
    "router": ("router", "shared"),
    "attention": ("router", "shared", "attention"),
    "full": ("router", "shared", "attention", "experts"),
}
"""Blocks that CUDA graphs of each scope hold"""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer (or embedding, or head) of one microbatch, in wall seconds with exposed transfers and the host."""

    forward: float
    backward: float
    wgrad: float
    """The part of `backward` that a schedule can move"""
    pair: float
    """Forward and backward in the steady state: less than their sum if transfers are hidden"""
    parts: dict[str, float]
    """Seconds of `pair` by cause"""


def host_seconds(launches: float, software: Software, c: Constants) -> float:
    """What the host takes for so many launches."""
    us = c.host_us * c.host_drift ** min(software.months_before, MAX_MONTHS)
    us *= (1.0 if software.bound_cpus else UNBOUND_HOST) * (1.0 if software.launch_overlap else SERIAL_HOST)
    return launches * us * 1e-6


def launches_left(job: Job, kernel: Kernel, software: Software) -> float:
    """Launches of a kernel that CUDA graphs leave."""
    covered = kernel.block in COVERED[job.graphs]
    if kernel.block == "shared" and job.graphs != "full" and not software.graphs_cover_shared:
        covered = False
    return kernel.launches * (GRAPH_REMAINDER if covered else 1.0)


def syncs(job: Job) -> int:
    """Times that the host waits for the GPU in one MoE layer's forward and backward, for counts."""
    if job.sync_free or job.ep == 1:
        return 0
    return 2 if job.dispatcher in ("alltoall", "dedup") else 1


def transfers(job: Job, software: Software, c: Constants) -> dict[str, float]:
    """Seconds alone of the four expert-parallel transfers of a layer; the backward of a combine is a dispatch."""
    nodes = traffic.nodes_of_ep(job)
    near, far = traffic.ep_copies(job)
    first = "fp8" if software.fp8_dispatch or job.mxfp8_payload else "bf16"
    found = {}
    for name, combine, payload in (
        ("dispatch", False, first),
        ("combine", True, "bf16"),
        ("combine backward", False, first),
        ("dispatch backward", True, "bf16"),
    ):
        row = traffic.row_bytes(job, payload) * job.tokens * traffic.IMBALANCE[job.routing]
        seconds = 0.0
        if job.ep > 1:
            seconds = kernels.ep_seconds(job.hardware, job.dispatcher, job.ep, nodes, near * row, far * row, combine, c)
        found[name] = seconds / software.ep_tuning
    if job.redispatch and job.recompute_mode != "none":
        found["dispatch backward"] += found["dispatch"]
    return found


READ = (
    *("model", "hardware", "precision", "low_precision", "micro_batch_size", "seq_len", "tp", "cp", "ep"),
    *("recompute_mode", "recompute", "dispatcher", "mxfp8_payload", "routing", "early_weighting", "redispatch"),
    *("overlap", "comm_sms", "graphs", "fp8_attention", "fused_grouped_mlp", "sync_free"),
)
"""What of a job decides how long its kernels and expert-parallel transfers take: not how many of them there are, which
ranks share parameters, nor what waits in host memory. A test changes everything else"""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A layer's kernels and transfers, before anything but expert parallelism runs beside them. Seconds."""

    parts: dict[str, float]
    gpu: dict[str, float]
    """Of kernels, by side: "forward" and "backward\""""
    sent: dict[str, float]
    hidden: dict[str, tuple[float, float]]
    """`within` of a job that overlaps inside a layer, by side"""
    busy: float
    """`pair_seconds` of a job that overlaps across microbatches, or 0"""
    slowed: float
    host: dict[str, float]
    stall: float
    wgrad: float


@remembered.by(READ)
def alone_of(job: Job, kind: Kind, software: Software, c: Constants) -> Alone:
    """Of a layer of this kind."""
    listed, moe = layer_kernels(job, kind, software, c), kind != "dense"
    sent = transfers(job, software, c) if moe else {}
    hidden, busy, slowed = {}, 0.0, 0.0
    if job.overlap in WITHIN and moe:
        hidden = within(job, listed, sent, c)
        slowed = sum(stretch for _, stretch in hidden.values())
    elif job.overlap != "none" and moe:
        busy, slowed = pair_seconds(job, listed, sent, c)
    times = 2 if job.overlap == "half_batch" and moe else 1  # that everything is launched
    launches = _sum((_side(k), launches_left(job, k, software)) for k in listed)
    return Alone(
        parts=_sum((k.part, k.seconds) for k in listed),
        gpu=_sum((_side(k), k.seconds) for k in listed),
        sent=sent,
        hidden=hidden,
        busy=busy,
        slowed=slowed,
        host={side: host_seconds(times * count, software, c) for side, count in launches.items()},
        stall=times * host_seconds(syncs(job) * STALL_LAUNCHES * moe, software, c),
        wgrad=sum(k.seconds for k in listed if k.phase == "wgrad"),
    )


@lru_cache(maxsize=4096)
def layer_time(job: Job, kind: Kind, software: Software, c: Constants) -> LayerTime:
    """The layer as the steady state of the pipeline runs it."""
    found = alone_of(job, kind, software, c)
    parts, gpu, sent, host = dict(found.parts), dict(found.gpu), found.sent, found.host
    beside = collectives.beside(job, kind, gpu["forward"], gpu["backward"])
    for name, (forward, backward) in beside.items():
        gpu["forward"] += forward
        gpu["backward"] += backward
        parts[name] = forward + backward
    alone = {
        "forward": gpu["forward"] + sent.get("dispatch", 0.0) + sent.get("combine", 0.0),
        "backward": gpu["backward"] + sent.get("combine backward", 0.0) + sent.get("dispatch backward", 0.0),
    }
    for side, (saved, stretch) in found.hidden.items():
        alone[side] -= saved - stretch
    forward, backward = (join(alone[side], host[side], c) for side in ("forward", "backward"))
    forward += found.stall
    steady = sum(alone.values())
    pair = forward + backward
    if found.busy:
        steady = found.busy + sum(f + b for f, b in beside.values())
        pair = min(pair, join(steady, sum(host.values()), c) + found.stall)
    parts["slowed by communication"] = found.slowed
    parts["exposed EP"] = steady - sum(gpu.values()) - found.slowed
    parts["host"] = pair - steady
    return LayerTime(forward=forward, backward=backward, wgrad=found.wgrad, pair=pair, parts=parts)


def _side(kernel: Kernel) -> str:
    return "forward" if kernel.phase == "forward" else "backward"


def _sum(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, seconds in items:
        total[name] = total.get(name, 0.0) + seconds
    return total


def join(gpu: float, host: float, c: Constants) -> float:
    return (gpu**c.host_norm + host**c.host_norm) ** (1 / c.host_norm)


# ---------------------------------------------------------------------------------------------------------------------
# Transfers beside kernels of the same microbatch


def place_within(job: Job, listed: list[Kernel], sent: dict[str, float]) -> dict[str, list[Placed]]:
    """`within_layer.place` of these kernels."""
    blocks = _sum((f"{k.block} {k.phase}", k.seconds) for k in listed)
    return within_layer.place(job, blocks, sent, "network" if traffic.nodes_of_ep(job) > 1 else "nvlink")


def within(job: Job, listed: list[Kernel], sent: dict[str, float], c: Constants) -> dict[str, tuple[float, float]]:
    """(seconds saved, of kernels that are slowed meanwhile) of a layer's forward and of its backward. A transfer beside
    kernels reaches `contention` of its speed, so that so much less of it is hidden, and the constant share stays
    exposed."""
    total = sum(k.seconds for k in listed)
    bound = sum(k.seconds for k in listed if k.part in ("grouped_gemm", "dense_gemm", "attention")) / total
    taken = job.comm_sms / job.hardware.sms
    found = {}
    for side, placed in place_within(job, listed, sent).items():
        saved = (sum(p.end - p.start for p in placed) - schedule.makespan(placed)) * c.contention * (1 - miss(job, c))
        found[side] = saved, bound * saved * taken / (1 - taken)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# A forward beside a backward


def pair_seconds(job: Job, listed: list[Kernel], sent: dict[str, float], c: Constants) -> tuple[float, float]:
    """(wall seconds of one layer's forward and another's backward in the steady state, of which kernels are slower
    because communication holds SMs)."""
    placed, slowed = place_pairs(job, listed, sent, c, 4)
    ends = [max(p.end for p in placed if p.name.endswith(f" {i}")) for i in (1, 3)]
    return (ends[1] - ends[0]) / 2 + miss(job, c) * sum(sent.values()), slowed


def miss(job: Job, c: Constants) -> float:
    """Share of each transfer that stays exposed whatever the schedule finds."""
    return c.overlap_miss * (DUALPIPE_MISS if job.overlap == "dualpipe" else 1.0)


def place_pairs(
    job: Job, listed: list[Kernel], sent: dict[str, float], c: Constants, layers: int
) -> tuple[list[Placed], float]:
    """(so many layers' forward beside as many backward, placed on their lanes; seconds by which one is slowed)."""
    lane: Lane = "network" if traffic.nodes_of_ep(job) > 1 else "nvlink"
    blocks = _sum((f"{k.block} {k.phase}", k.seconds) for k in listed)
    total = sum(blocks.values())
    # SMs matter to GEMMs and attention; memory-bound kernels have enough of them left.
    bound = sum(k.seconds for k in listed if k.part in ("grouped_gemm", "dense_gemm", "attention")) / total
    hidden = {name: s * (1 - miss(job, c)) / c.contention for name, s in sent.items()}
    taken = job.comm_sms / job.hardware.sms
    beside = min(sum(hidden.values()) / total, 1.0)
    stretch = 1.0 + bound * beside * (1 / (1 - taken) - 1)
    ops = [
        op for i in range(layers) for op in pair_ops(i, {n: s * stretch for n, s in blocks.items()}, hidden, lane, job)
    ]
    return schedule.run(ops), (stretch - 1) * total


def pair_ops(i: int, blocks: dict[str, float], hidden: dict[str, float], lane: Lane, job: Job) -> list[Op]:
    """The i-th layer's forward and backward: three phases, in each of which a transfer runs beside kernels that do not
    need it. Delayed weight gradients run while the transfer that follows them is under way."""

    def of(*names: str) -> float:
        return sum(blocks.get(name, 0.0) for name in names)

    experts = of("experts backward", "shared backward", "router backward")
    experts_wgrad = of("experts wgrad", "shared wgrad")
    attention, attention_wgrad = of("attention backward"), of("attention wgrad")
    if job.overlap == "1f1b":
        experts, experts_wgrad = experts + experts_wgrad, 0.0
        attention, attention_wgrad = attention + attention_wgrad, 0.0
    forward = of("attention forward", "router forward")
    after = (f"attention backward {i - 1}",) if i else ()
    compute = [
        ("attention forward", forward, (f"combine {i - 1}",) if i else ()),
        ("experts backward", experts, (f"combine backward {i}",)),
        ("experts wgrad", experts_wgrad, ()),
        ("experts forward", of("experts forward", "shared forward"), (f"dispatch {i}",)),
        ("attention backward", attention, (f"dispatch backward {i}",)),
        ("attention wgrad", attention_wgrad, ()),
    ]
    comm = [
        ("combine backward", after),
        ("dispatch", (f"attention forward {i}",)),
        ("dispatch backward", (f"experts backward {i}",)),
        ("combine", (f"experts forward {i}",)),
    ]
    ops = [Op(f"{name} {i}", "compute", seconds, needs) for name, seconds, needs in compute]
    return ops + [Op(f"{name} {i}", lane, hidden[name], needs) for name, needs in comm]


def place_alone(job: Job, listed: list[Kernel], sent: dict[str, float]) -> list[Placed]:
    """A layer's forward and then its backward without overlap, placed on their lanes."""
    lane: Lane = "network" if traffic.nodes_of_ep(job) > 1 else "nvlink"
    blocks = _sum((f"{k.block} {k.phase}", k.seconds) for k in listed)
    path: list[tuple[str, Lane, float]] = [
        ("attention forward", "compute", blocks["attention forward"] + blocks["router forward"]),
        ("dispatch", lane, sent["dispatch"]),
        ("experts forward", "compute", blocks["experts forward"]),
        ("combine", lane, sent["combine"]),
        ("shared forward", "compute", blocks.get("shared forward", 0.0)),
        ("shared backward", "compute", blocks.get("shared backward", 0.0) + blocks.get("shared wgrad", 0.0)),
        ("combine backward", lane, sent["combine backward"]),
        ("experts backward", "compute", blocks["experts backward"]),
        ("experts wgrad", "compute", blocks["experts wgrad"]),
        ("dispatch backward", lane, sent["dispatch backward"]),
        ("attention backward", "compute", blocks["attention backward"] + blocks["router backward"]),
        ("attention wgrad", "compute", blocks["attention wgrad"]),
    ]
    names = [None, *(name for name, _, _ in path)]
    return schedule.run(
        [Op(name, lane, seconds, (before,) if before else ()) for (name, lane, seconds), before in zip(path, names)]
    )
