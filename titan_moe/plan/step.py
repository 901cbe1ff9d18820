"""One optimizer step, predicted: the list of its parts.

    step = (pipeline of stages + exposed data-parallel traffic + optimizer) x stragglers

A stage's forward and backward are the sums of its layers' (overlap.py), embedding and head. The slowest rank sets the
pipeline's period: uneven stages cost what they cost. In the steady state transfers hide behind the other direction's
kernels; while the pipeline fills and drains there is nothing to hide behind.

`predict` takes a Job; `dataclasses.replace` on it is how to ask what a change would do (improve.py does).
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from titan_moe.flavors import Flavor
from titan_moe.pipeline_check import SPLIT_BACKWARD
from titan_moe.plan import bands, collectives, flops, kernels, muon, overlap, profiles, schedule, traffic
from titan_moe.plan import constants as constants_file
from titan_moe.plan.constants import Constants
from titan_moe.plan.job import Job
from titan_moe.plan.layer import Kind, layer_kernels, linears
from titan_moe.plan.overlap import LayerTime
from titan_moe.plan.profiles import Software
from titan_moe.plan.schedule import Placed
from titan_moe.plan.stages import Stage
from titan_moe.plan.within_layer import WITHIN

KINDS: tuple[Kind, ...] = ("dense", "moe", "mtp")
LOGIT_BYTES = 24.0
"""Bytes moved for each logit, forward and backward: BF16 out, FP32 softmax and gradient, BF16 back in"""
STRAGGLERS_AT_256 = 0.06
"""Share by which the slowest of 256 GPUs holds the others up; grows with the logarithm of their number. Weak scaling
from 256 to 1,024 GPUs, all else equal, is then 1.06 / 1.075 = 98.6 %; published are 98.5 % (Megatron) and about 97 %
(TorchTitan). Throughputs at 256 GPUs say nothing of it: with 0.03 the fit is as good, and weak scaling 99.3 %"""
REDUCE_OVERLAP = 0.8
"""Share of the window beside backward that data-parallel reductions find free"""
NEVER_HIDDEN = 0.05
"""Share of them that no window hides: the first and the last bucket"""
OPTIMIZER_BYTES = 30.0
"""Per parameter of the shard: FP32 weights and two moments read and written, gradient read, BF16 written"""
WIDENING_BYTES = 24.0
"""More with BF16 moments (adamw.py): each is read and written as BF16 and as FP32 besides"""


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
    band_from: str = ""
    """The published runs whose errors those are"""
    exposed_comm: float = 0.0
    """Seconds of the step in which only communication runs"""


def predict(job: Job, software: Software | None = None, c: Constants | None = None) -> Prediction:
    """The step of `job`, by default with its release's software and the frozen constants."""
    software = software or profiles.of_release(job.release)[0]
    c = c or constants_file.fitted()
    parts = step_parts(job, software, c)
    seconds = sum(parts.values())
    rate = job.tokens_per_step / seconds / job.gpus
    per_token = [
        sum(flops.per_token(job.model, job.seq_len, num_mtp_layers=job.num_mtp_layers, causal=causal).values())
        for causal in (True, False)
    ]
    (low, high), whose = bands.of(job)
    return Prediction(
        step_seconds=seconds,
        tokens_per_s_per_gpu=rate,
        tflops_causal=per_token[0] * rate / 1e12,
        tflops_full=per_token[1] * rate / 1e12,
        mfu=per_token[0] * rate / 1e12 / job.hardware.peak_tflops(job.precision),
        parts=parts,
        timeline=timeline(job, software, c),
        limit=limit_of(parts),
        band=(rate * (1 + low), rate * (1 + high)),
        band_from=whose,
        exposed_comm=sum(s for name, s in parts.items() if name.startswith("exposed")),
    )


def tokens_per_s(job: Job, software: Software | None = None, c: Constants | None = None) -> float:
    """Tokens per second and GPU: what `predict` says of the speed, without the rest."""
    software = software or profiles.of_release(job.release)[0]
    return job.tokens_per_step / sum(step_parts(job, software, c or constants_file.fitted()).values()) / job.gpus


def stage_times(job: Job, software: Software, c: Constants) -> list[list[LayerTime]]:
    """What each stage runs of one microbatch: layers, embedding, heads."""
    layers = {(kind, False): overlap.layer_time(job, kind, software, c) for kind in KINDS if count(job, kind)}
    if job.kept_layers:
        high = replace(job, precision="bf16", kept_layers=frozenset())
        layers |= {(kind, True): overlap.layer_time(high, kind, software, c) for kind, _ in layers}
    embedding, head = embedding_time(job, c), head_time(job, c)
    stages: list[list[LayerTime]] = []
    for index, stage in enumerate(job.stages):
        kept = job.kept_in(index)
        held = [layers[kind, i < kept[kind]] for kind in KINDS for i in range(getattr(stage, kind))]
        held += [embedding] * stage.embedding + [head] * (stage.head * (1 + job.num_mtp_layers))
        stages.append(held)
    return stages


def step_parts(job: Job, software: Software, c: Constants) -> dict[str, float]:
    """Seconds of one step by cause."""
    stages = stage_times(job, software, c)
    alone = sum(t.forward + t.backward for held in stages for t in held)
    steady = sum(t.pair for held in stages for t in held)
    hidden = steady / alone
    forward = [hidden * sum(t.forward for t in held) for held in stages]
    backward = [hidden * sum(t.backward for t in held) for held in stages]
    wgrad = [hidden * sum(t.wgrad for t in held) for held in stages]
    total, computing, sends = _pipeline(job, forward, backward, wgrad)
    # While the pipeline fills and drains, transfers have nothing to hide behind: pp microbatches of each rank, and
    # `steady` is one microbatch on all pp ranks.
    fill = (1 / hidden - 1) * steady
    ranks = [job.stage_indices(rank) for rank in range(job.pp)]
    busiest = max(ranks, key=lambda held: sum(t.pair for i in held for t in stages[i]))
    parts: dict[str, float] = {}
    microbatches = job.microbatches
    for time in (t for i in busiest for t in stages[i]):
        for name, seconds in time.parts.items():
            parts[name] = parts.get(name, 0.0) + seconds * microbatches
    parts = {name: s * (computing - sends) / sum(parts.values()) for name, s in parts.items()}
    parts["exposed PP"] = sends
    parts["bubble"] = total - computing + fill
    parts["exposed DP"] = _data_parallel(job, software, sum(forward) / job.pp, sum(backward) / job.pp)
    parts["optimizer"] = optimizer_seconds(job, c)
    parts["stragglers"] = sum(parts.values()) * stragglers(job)
    return parts


def stragglers(job: Job) -> float:
    """Seconds that the slowest of all GPUs holds a step up, as a share of what it would take without."""
    return STRAGGLERS_AT_256 * math.log2(max(job.gpus, 1)) / 8


def count(job: Job, kind: Kind) -> int:
    """Layers of the job."""
    return sum(getattr(stage, kind) for stage in job.stages)


def _pipeline(job: Job, forward: list[float], backward: list[float], wgrad: list[float]) -> tuple[float, float, float]:
    """(seconds of all microbatches, of which the busiest rank works, of which it waits for sends)."""
    send = send_seconds(job) if job.pp > 1 else 0.0
    if job.schedule in SPLIT_BACKWARD and job.pp > 1:
        dgrad = [b - w for b, w in zip(backward, wgrad)]
        held = [job.stage_indices(rank) for rank in range(job.pp)]
        total, computing = schedule.zero_bubble_seconds(job.schedule, forward, dgrad, wgrad, held, job.microbatches)
        return total, computing, 0.0
    sends = 0.0
    if job.vp == 1 and job.pp > 1:  # with one stage a rank, each microbatch is handed on before the next one starts
        forward, backward = [f + send for f in forward], [b + send for b in backward]
        sends = 2 * send * job.microbatches
    total, computing = schedule.pipeline_seconds(forward, backward, job.pp, job.microbatches, send)
    return total, computing, sends


def send_seconds(job: Job) -> float:
    """How long hidden states are under way from one pipeline stage to the next."""
    across = job.gpus > job.hardware.nvlink_domain
    return kernels.collective_seconds(job.hardware, traffic.pp_bytes(job), across=across)


def embedding_time(job: Job, c: Constants) -> LayerTime:
    table = job.tokens * job.model.dim * 8.0 / kernels.hbm_bytes_per_s(job.hardware, c)
    parts = {"elementwise": 3 * table}
    return LayerTime(forward=table, backward=2 * table, wgrad=0.0, pair=3 * table, parts=parts)


def head_time(job: Job, c: Constants) -> LayerTime:
    """Logits and cross-entropy."""
    rows, vocab = job.tokens * job.tp, job.model.vocab_size / job.tp
    precision = job.precision_of(["lm_head"])
    forward, dgrad, wgrad = (
        kernels.gemm_seconds(job.hardware, precision, phase, rows, vocab, job.model.dim, c) for phase in kernels.PHASES
    )
    loss = rows * vocab * LOGIT_BYTES / 2 / kernels.hbm_bytes_per_s(job.hardware, c)
    parts = {"dense_gemm": forward + dgrad + wgrad, "elementwise": 2 * loss}
    return LayerTime(
        forward=forward + loss,
        backward=dgrad + wgrad + loss,
        wgrad=wgrad,
        pair=sum(parts.values()),
        parts=parts,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Data parallelism and the optimizer


def rank_weights(job: Job) -> tuple[float, float]:
    """(dense, expert) parameters of the pipeline rank that holds most, before sharding over data-parallel ranks."""
    held = tuple(tuple(job.stages_of_rank(rank)) for rank in range(job.pp))
    return _rank_weights(job.model, job.tp, held, tuple(_layer_weights(job, kind) for kind in KINDS))


def _layer_weights(job: Job, kind: Kind) -> tuple[float, float]:
    found = linears(job, kind)
    experts = sum(w.k * w.n * w.groups for w in found if w.block == "experts")
    return sum(w.k * w.n * w.groups for w in found) - experts, experts


@lru_cache(maxsize=1 << 14)
def _rank_weights(
    model: Flavor, tp: int, ranks: tuple[tuple[Stage, ...], ...], layers: tuple[tuple[float, float], ...]
) -> tuple[float, float]:
    def of_rank(stages: tuple[Stage, ...]) -> tuple[float, float]:
        numbers = [sum(getattr(stage, kind) for stage in stages) for kind in KINDS]
        dense, experts = (sum(n * layer[i] for n, layer in zip(numbers, layers)) for i in range(2))
        ends = sum(stage.embedding + stage.head for stage in stages)
        return dense + ends * model.dim * model.vocab_size / tp, experts

    return max((of_rank(stages) for stages in ranks), key=sum)


def _data_parallel(job: Job, software: Software, forward: float, backward: float) -> float:
    """Exposed seconds of one step's gradient reduction and parameter gather. `forward` and `backward` are one
    microbatch's on one rank: what the last reductions and the first gathers run beside."""
    if job.sharding == "fsdp" and job.pp == 1:
        return 0.0  # layer by layer, in each layer's time
    dense, experts = rank_weights(job)
    # Chunks of an interleaved pipeline finish one after the other, while the last round of microbatches runs.
    rounds = job.pp * (job.vp - 1) / job.vp if job.vp > 1 else 1.0
    exposed = 0.0
    # Megatron reduces in BF16; FSDP2 here in FP32.
    for window, width in ((backward, 4.0 if job.sharding == "fsdp" else 2.0), (forward, 2.0)):
        moved = collectives.sharded_seconds(job, dense * width, job.dp * job.cp, job.tp)
        moved += collectives.sharded_seconds(job, experts * width, job.edp, job.ep)
        free = REDUCE_OVERLAP * window * rounds if software.reduce_overlap else 0.0
        exposed += max(moved - free, NEVER_HIDDEN * moved)
    return exposed


def optimizer_seconds(job: Job, c: Constants) -> float:
    dense, experts = rank_weights(job)
    shard = dense / (job.dp * job.cp) + experts / job.edp
    clear_and_norm = 8.0 * (dense + experts) if job.sharding == "zero1" else 8.0 * shard
    each = OPTIMIZER_BYTES + WIDENING_BYTES * (job.moment_dtype != job.param_dtype and job.sharding == "fsdp")
    found = (each * shard + clear_and_norm) / kernels.hbm_bytes_per_s(job.hardware, c)
    return found + (muon.seconds(job, c) if job.muon else 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# What the report shows


def timeline(job: Job, software: Software, c: Constants) -> list[tuple[str, str, float, float]]:
    """(lane, name, start, end) of one MoE layer's forward and backward: beside each other if another microbatch hides
    transfers, else one after the other."""
    listed = layer_kernels(job, "moe", software, c)
    sent = overlap.transfers(job, software, c)
    if job.overlap in WITHIN:
        sides = overlap.place_within(job, listed, sent)
        now = schedule.makespan(sides["forward"])
        backward = [replace(p, start=p.start + now, end=p.end + now) for p in sides["backward"]]
        middle = [*sides["forward"], *backward]
    elif job.overlap != "none":
        placed, _ = overlap.place_pairs(job, listed, sent, c, 3)
        middle = [p for p in placed if p.name.endswith(" 1")]
    else:
        middle = overlap.place_alone(job, listed, sent)
    first = min(p.start for p in middle)
    return [(p.lane, _plain(p), p.start - first, p.end - first) for p in middle if p.end > p.start]


def _plain(placed: Placed) -> str:
    return placed.name.rstrip(" 0123456789")


LIMITS = {
    "GEMM throughput": ("grouped_gemm", "dense_gemm"),
    "attention throughput": ("attention",),
    "memory bandwidth": ("elementwise", "permute", "quantize", "router"),
    "expert-parallel communication": ("exposed EP", "slowed by communication"),
    "other communication": ("exposed TP", "exposed CP", "exposed FSDP", "exposed DP", "exposed PP"),
    "copies to the host": ("exposed offload",),
    "the host": ("host",),
    "pipeline bubble": ("bubble",),
}


def limit_of(parts: dict[str, float]) -> str:
    """What takes the largest share of the step, with the share."""
    shares = {name: sum(parts.get(part, 0.0) for part in held) for name, held in LIMITS.items()}
    name = max(shares, key=shares.__getitem__)
    return f"{name} ({shares[name] / sum(parts.values()):.0%} of the step)"
