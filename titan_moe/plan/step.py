"""One optimizer step, predicted: the list of its parts, and what would help most.

    step = pipeline(stages) + exposed data-parallel traffic + optimizer, times stragglers

A stage is its layers, each a list of kernels (layer.py) and four expert-parallel transfers: dispatch and combine, and
their transposes in backward. Without overlap the transfers stand between kernels; with it, a layer's forward of one
microbatch runs beside a layer's backward of another, ordered as Megatron's combined 1F1B and DualPipe do (`_pair`), and
what the scheduler cannot hide is exposed. FSDP gathers the next layer beside this one.

GPU and host run beside each other too, but not perfectly: a queue runs dry after each wait for the GPU. Their times join
as a p-norm, (gpu^p + host^p)^(1/p), with p the constant `host_norm`.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from titan_moe.plan import constants as constants_file
from titan_moe.plan import flops, kernels, profiles, schedule, traffic
from titan_moe.plan.constants import Constants
from titan_moe.plan.job import Job
from titan_moe.plan.layer import Kernel, Kind, layer_kernels, linears
from titan_moe.plan.profiles import Software
from titan_moe.plan.schedule import Lane, Op


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A change, and what it would make of the step."""

    change: str
    tokens_per_s_per_gpu: float
    gain: float
    """Relative gain in tokens per second"""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step of a Job takes. Times in seconds on the slowest pipeline rank."""

    step_seconds: float
    tokens_per_s_per_gpu: float
    tflops_causal: float
    """Per GPU, Megatron's convention"""
    tflops_full: float
    """Per GPU, torchtitan's convention: attention counted in full"""
    mfu: float
    """tflops_causal over the hardware's dense peak in the job's precision"""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the step by cause; they add up to step_seconds"""
    timeline: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(lane, name, start, end) in seconds: one MoE layer's forward and backward of one microbatch"""
    limit: str = ""
    """What binds the speed"""
    band: tuple[float, float] = (0.0, 0.0)
    """80 % band of tokens_per_s_per_gpu, from the validation's errors with a cell left out"""
    exposed_comm: float = 0.0
    """Seconds of the step in which only communication runs"""


@dataclass(frozen=True)
class LayerTime:
    """One layer, one microbatch. `forward` and `backward` are wall seconds with exposed transfers and the host."""

    forward: float
    backward: float
    wgrad: float
    """Part of `backward`"""
    pair: float
    """Forward and backward in the steady state: less than their sum if transfers are hidden"""
    parts: dict[str, float]
    """Seconds of the pair by cause"""


DUALPIPE_MISS = 0.25
"""Share of `overlap_miss` that DualPipe has: it places transfers by hand (0.05-0.1 exposed against 0.22-0.3)"""
SYNC_LAUNCHES = 10
"""Launches that a wait for the GPU costs the host"""
UNBOUND_HOST = 1.9
"""Host time per launch of processes that are not pinned"""
GRAPH_REMAINDER = 0.03
"""Launches that are left of a graph"""


def predict(job: Job, software: Software | None = None, c: Constants | None = None) -> Prediction:
    """The step of `job` (see the module's docstring), with the release's software and the frozen constants by default."""
    software = software or profiles.of_release(job.release)[0]
    c = c or constants_file.fitted()
    layers = {kind: _layer(job, kind, software, c) for kind in ("dense", "moe", "mtp") if _has(job, kind)}
    ends = _ends(job, software, c)
    forward, backward, wgrad, pair = [], [], [], []
    by_stage: list[dict[str, float]] = []
    for stage in job.stages:
        times = [
            *(layers[kind] for kind in layers for _ in range(getattr(stage, kind))),
            *[ends["embedding"]] * stage.embedding,
            *[ends["head"]] * (stage.head * (1 + job.num_mtp_layers)),
        ]
        forward.append(sum(t.forward for t in times))
        backward.append(sum(t.backward for t in times))
        wgrad.append(sum(t.wgrad for t in times))
        pair.append(sum(t.pair for t in times))
        by_stage.append(_add(*(t.parts for t in times)))
    hidden = sum(pair) / max(sum(forward) + sum(backward), 1e-12)
    total, computing = _pipeline(job, [f * hidden for f in forward], [b * hidden for b in backward], [w * hidden for w in wgrad])
    warm_up = (1 - hidden) * (sum(forward) + sum(backward)) * (job.pp - 1) / job.pp  # nothing to hide behind yet
    on_rank = [job.stage_indices(rank) for rank in range(job.pp)]
    busiest = max(on_rank, key=lambda held: sum(pair[s] for s in held))
    parts = {name: s * job.microbatches for name, s in _add(*(by_stage[s] for s in busiest)).items()}
    scale = computing / max(sum(parts.values()), 1e-12)
    parts = {name: s * scale for name, s in parts.items()}
    parts["pipeline bubble"] = total - computing + warm_up
    parts["exposed DP"], parts["optimizer"] = _data_parallel(job, software, c, sum(forward) / job.pp, sum(backward) / job.pp)
    seconds = sum(parts.values())
    import math
    parts["stragglers"] = seconds * (c.straggle - 1) * math.log2(max(job.gpus, 2)) / 8
    seconds += parts["stragglers"]
    rate = job.tokens_per_step / seconds / job.gpus
    causal, full = (
        sum(flops.per_token(job.model, job.seq_len, num_mtp_layers=job.num_mtp_layers, causal=how).values()) * rate / 1e12
        for how in (True, False)
    )
    return Prediction(
        step_seconds=seconds,
        tokens_per_s_per_gpu=rate,
        tflops_causal=causal,
        tflops_full=full,
        mfu=causal / job.hardware.peak_tflops(job.precision),
        parts=parts,
        exposed_comm=sum(s for name, s in parts.items() if name.startswith("exposed")),
    )


def _has(job: Job, kind: str) -> bool:
    return any(getattr(stage, kind) for stage in job.stages)


def _add(*tables: dict[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for name, seconds in table.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _pipeline(job: Job, forward: list[float], backward: list[float], wgrad: list[float]) -> tuple[float, float]:
    if job.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV") and job.pp > 1:
        dgrad = [b - w for b, w in zip(backward, wgrad)]
        return schedule.zero_bubble_seconds(job.schedule, forward, dgrad, wgrad, job.pp, job.microbatches)
    across = job.gpus > job.hardware.nvlink_domain
    send = kernels.collective_seconds(job.hardware, traffic.pp_bytes(job), across=across)
    return schedule.pipeline_seconds(forward, backward, job.pp, job.microbatches, send)


# ---------------------------------------------------------------------------------------------------------------------
# One layer


def host_seconds(launches: float, software: Software, c: Constants) -> float:
    """What the host takes for so many launches."""
    us = c.host_us * c.host_drift**software.months_before
    us *= (1.0 if software.bound_cpus else UNBOUND_HOST) * (1.0 if software.launch_overlap else 1.2)
    return launches * us * 1e-6


def launches_left(job: Job, kernel: Kernel) -> float:
    """Launches of a kernel that CUDA graphs leave."""
    covered = {
        "none": (),
        "router": ("router",),
        "attention": ("router", "attention", "shared"),
        "full": ("router", "attention", "shared", "experts"),
    }[job.graphs]
    return kernel.launches * (GRAPH_REMAINDER if kernel.block in covered else 1.0)


def syncs(job: Job) -> float:
    """Times that the host waits for the GPU in one MoE layer's forward and backward."""
    if job.sync_free or job.ep == 1:
        return 0.0
    return {"alltoall": 2.0, "dedup": 2.0, "deepep": 1.0}.get(job.dispatcher, 1.0)


def transfers(job: Job, software: Software, c: Constants) -> dict[str, float]:
    """Seconds alone of the four expert-parallel transfers of a layer; backward of a combine is a dispatch."""
    if job.ep == 1:
        return dict.fromkeys(("dispatch", "combine", "combine backward", "dispatch backward"), 0.0)
    from titan_moe.plan.layer import IMBALANCE

    nodes = traffic.nodes_of_ep(job)
    near, far = traffic.ep_copies(job)
    found = {}
    for name, combine, payload in (
        ("dispatch", False, "fp8" if software.fp8_dispatch else "bf16"),
        ("combine", True, "bf16"),
        ("combine backward", False, "fp8" if software.fp8_dispatch else "bf16"),
        ("dispatch backward", True, "bf16"),
    ):
        row = traffic.row_bytes(job, payload) * job.tokens * IMBALANCE[job.routing]
        seconds = kernels.ep_seconds(job.hardware, job.dispatcher, job.ep, nodes, near * row, far * row, combine, c)
        found[name] = seconds / software.ep_tuning
    return found


@lru_cache(maxsize=4096)
def _layer(job: Job, kind: Kind, software: Software, c: Constants) -> LayerTime:
    listed = layer_kernels(job, kind, software, c)
    gpu = _add(*({f"{k.block} {k.phase}": k.seconds} for k in listed))
    parts = _add(*({k.part: k.seconds} for k in listed))
    moe = kind != "dense"
    sent = transfers(job, software, c) if moe else {}
    launches = {phase: sum(launches_left(job, k) for k in listed if (k.phase == "forward") == (phase == "forward")) for phase in ("forward", "backward")}
    if moe:
        wait = syncs(job) * SYNC_LAUNCHES
        launches["forward"] += wait
    split = {
        "forward": sum(s for name, s in gpu.items() if name.endswith("forward")),
        "backward": sum(s for name, s in gpu.items() if not name.endswith("forward")),
    }
    if job.tp > 1:
        tp = kernels.collective_seconds(job.hardware, traffic.tp_bytes_per_layer(job, moe), across=False)
        split["forward"] += 0.4 * tp
        split["backward"] += 0.6 * tp
        parts["exposed TP"] = tp
    if job.cp > 1:
        across = job.tp * job.cp > job.hardware.nvlink_domain
        cp = kernels.collective_seconds(job.hardware, traffic.cp_bytes_per_layer(job), across=across)
        split["forward"] += cp / 3
        split["backward"] += cp * 2 / 3
        parts["exposed CP"] = cp
    alone = {
        "forward": split["forward"] + sent.get("dispatch", 0) + sent.get("combine", 0),
        "backward": split["backward"] + sent.get("combine backward", 0) + sent.get("dispatch backward", 0),
    }
    if job.overlap == "none" or not moe:
        pair_gpu = alone["forward"] + alone["backward"]
    else:
        pair_gpu = _pair(job, gpu, sent, c) + parts.get("exposed TP", 0) + parts.get("exposed CP", 0)
    exposed = pair_gpu - sum(split.values())
    if moe:
        parts["exposed EP"] = exposed
    p = c.host_norm
    host = {phase: host_seconds(launches[phase], software, c) for phase in launches}

    def join(g: float, h: float) -> float:
        return (g**p + h**p) ** (1 / p)

    f, b = join(alone["forward"], host["forward"]), join(alone["backward"], host["backward"])
    together = f + b if job.overlap == "none" or not moe else min(f + b, join(pair_gpu, sum(host.values())))
    parts["host"] = together - pair_gpu
    wgrad = sum(s for name, s in gpu.items() if name.endswith("wgrad"))
    return LayerTime(f, b, wgrad, together, parts)


def _pair(job: Job, gpu: dict[str, float], sent: dict[str, float], c: Constants) -> float:
    """Seconds of one layer's forward beside another's backward in the steady state."""
    lane: Lane = "network" if traffic.nodes_of_ep(job) > 1 else "nvlink"
    get = lambda name: gpu.get(name, 0.0)  # noqa: E731
    miss = c.overlap_miss * (DUALPIPE_MISS if job.overlap == "dualpipe" else 1.0)
    stretch = 1.0
    span = {}
    for _ in range(3):
        for n in (2, 4):
            ops: list[Op] = []
            for i in range(n):
                before = (f"combine {i - 1}",) if i else ()
                prior = (f"attention backward {i - 1}",) if i else ()
                compute = [
                    ("attention forward", get("attention forward") + get("router forward"), before),
                    ("experts backward", get("experts backward") + get("shared backward"), (f"combine backward {i}",)),
                    ("experts wgrad", get("experts wgrad") + get("shared wgrad"), ()),
                    ("experts forward", get("experts forward") + get("shared forward"), (f"dispatch {i}",)),
                    ("attention backward", get("attention backward") + get("router backward"), (f"dispatch backward {i}",)),
                    ("attention wgrad", get("attention wgrad"), ()),
                ]
                if job.overlap == "1f1b":
                    compute[1], compute[2] = (
                        ("experts backward", compute[1][1] + compute[2][1], compute[1][2]),
                        ("experts wgrad", 0.0, ()),
                    )
                comm = [
                    ("combine backward", sent["combine backward"], prior),
                    ("dispatch", sent["dispatch"], (f"attention forward {i}",)),
                    ("dispatch backward", sent["dispatch backward"], (f"experts backward {i}",)),
                    ("combine", sent["combine"], (f"experts forward {i}",)),
                ]
                ops += [Op(f"{name} {i}", "compute", s * stretch, needs) for name, s, needs in compute]
                ops += [Op(f"{name} {i}", lane, s * (1 - miss) / c.contention, needs) for name, s, needs in comm]
            placed = schedule.run(ops)
            span[n] = schedule.makespan(placed)
            share = schedule.busy(placed, lane) / max(span[n], 1e-12)
        stretch = 1 / (1 - job.comm_sms / job.hardware.sms * share)
    return (span[4] - span[2]) / 2 + miss * sum(sent.values())


# ---------------------------------------------------------------------------------------------------------------------
# Embedding, head, data parallelism, optimizer


def _ends(job: Job, software: Software, c: Constants) -> dict[str, LayerTime]:
    f, hw, rows = job.model, job.hardware, job.tokens * job.tp
    vocab = f.vocab_size / job.tp
    gemm = {
        phase: kernels.gemm_seconds(hw, "bf16", phase, rows, vocab, f.dim, c) for phase in ("forward", "dgrad", "wgrad")
    }
    rate = kernels.hbm_bytes_per_s(hw, c)
    logits = rows * vocab * LOGIT_BYTES / 2 / rate
    parts = {"dense_gemm": sum(gemm.values()), "elementwise": 2 * logits}
    head = LayerTime(gemm["forward"] + logits, gemm["dgrad"] + gemm["wgrad"] + logits, gemm["wgrad"], sum(parts.values()), parts)
    table = job.tokens * f.dim * 8.0 / rate
    embedding = LayerTime(table, 2 * table, 0.0, 3 * table, {"elementwise": 3 * table})
    return {"head": head, "embedding": embedding}


LOGIT_BYTES = 24.0
"""Bytes moved for each logit, forward and backward: BF16 out, FP32 softmax and gradient, BF16 back in"""


def _data_parallel(job: Job, software: Software, c: Constants, forward: float, backward: float) -> tuple[float, float]:
    """(exposed seconds of reduction and gather, optimizer's seconds) of one step."""
    hw, f = job.hardware, job.model
    dense = experts = 0.0
    rank = max(range(job.pp), key=lambda r: sum(s.moe + s.mtp for s in job.stages_of_rank(r)))
    for stage in job.stages_of_rank(rank):
        for kind in ("dense", "moe", "mtp"):
            n = getattr(stage, kind)
            for linear in linears(job, kind) if n else ():
                weights = n * linear.k * linear.n * linear.groups
                dense, experts = (dense, experts + weights) if linear.block == "experts" else (dense + weights, experts)
        dense += (stage.embedding + stage.head) * f.dim * f.vocab_size / job.tp
    across = job.gpus // job.pp > hw.nvlink_domain
    dense_ranks = job.dp * job.cp
    moved = {}
    for what, params, ranks in (("dense", dense, dense_ranks), ("experts", experts, job.edp)):
        for direction, width in (("reduce", 4 if job.grad_dtype == "float32" else 2), ("gather", 2)):
            moved[direction] = moved.get(direction, 0.0) + kernels.collective_seconds(
                hw, traffic.fsdp_gather_bytes(params, ranks, width), across=across
            )
    window = {"reduce": backward, "gather": forward}
    overlap = 0.8 if software.reduce_overlap else 0.0
    exposed = sum(max(moved[d] - overlap * window[d], 0.05 * moved[d]) for d in moved)
    shard = dense / max(dense_ranks, 1) + experts / job.edp
    rate = kernels.hbm_bytes_per_s(hw, c)
    optimizer = (shard * 30.0 + (dense + experts) * 8.0) / rate
    return exposed, optimizer


def improvements(job: Job) -> list[Improvement]:
    """The three changes of software or layout that would speed `job` up most, best first."""
    return []
