"""What a job can reach at best before all of it is decided: the throughput that no choice left open can exceed, and the
memory that none can go below.

A search (search.py) decides on a job from what costs most to what costs least; each function here ignores what is
decided later. They are the planner's own formulas with terms left out that are never negative, so nothing is modelled
twice:

    compute   kernels of all layers, embedding and head, each joined with its launches, and the transfers of tensor and
              context parallelism, shared out over all GPUs without a rest. Not: what experts are sent
    layers    the same with what experts are sent, and what moe.overlap hides of it
    mesh      the slowest pipeline rank with FSDP's gathers, every microbatch, and the optimizer. Not: bubble, sends,
              gradient reduction

Recompute and offloading only add time, and only take memory away, so a job is bounded with neither for speed and with
all of both for memory. Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from titan_moe.plan import activations, collectives, memory, overlap, step
from titan_moe.plan.constants import Constants
from titan_moe.plan.job import Job
from titan_moe.plan.parameters import Kind
from titan_moe.plan.profiles import Software
from titan_moe.plan.stages import Stage


def compute(job: Job, software: Software, c: Constants) -> float:
    """Tokens per second and GPU, before it is decided how tokens reach their experts."""

    def pair(bare: Job, kind: Kind) -> float:
        bare = replace(bare, overlap="none")
        alone = overlap.alone_of(bare, kind, software, c)
        beside = collectives.beside(bare, kind, alone.gpu["forward"], alone.gpu["backward"]).values()
        return sum(
            overlap.join(alone.gpu[name] + sum(both[side] for both in beside), alone.host[name], c)
            for side, name in enumerate(("forward", "backward"))
        )

    return _rate(job, _layers(job, pair), c)


def layers(job: Job, software: Software, c: Constants) -> float:
    """Tokens per second and GPU, before it is decided which ranks hold which layers and parameters."""
    return _rate(job, _layers(job, lambda bare, kind: overlap.layer_time(bare, kind, software, c).pair), c)


def layer_seconds(job: Job, software: Software, c: Constants) -> dict[Kind, float]:
    """By kind: one layer's forward and backward of one microbatch, as in `layers`."""
    pair = {}
    for kind in step.KINDS:
        if _number(job, kind):
            pair[kind] = min(overlap.layer_time(bare, kind, software, c).pair for bare in _bare(job))
    return pair


def pipelined(job: Job, times: Mapping[Kind, float], ranks: Sequence[Sequence[Stage]], c: Constants) -> float:
    """Tokens per second and GPU with these stages on the pipeline's ranks, before anything else of the mesh is decided.
    `times`: `layer_seconds`."""
    ends = step.embedding_time(job, c).pair, (1 + job.num_mtp_layers) * step.head_time(job, c).pair
    slowest = max(
        sum(
            sum(getattr(stage, kind) * seconds for kind, seconds in times.items())
            + stage.embedding * ends[0]
            + stage.head * ends[1]
            for stage in stages
        )
        for stages in ranks
    )
    ranks_of_data = job.gpus // (job.tp * job.cp * len(ranks))
    microbatches = job.global_batch_size / (job.micro_batch_size * ranks_of_data)
    return job.tokens_per_step / (microbatches * slowest * (1 + step.stragglers(job))) / job.gpus


def _layers(job: Job, pair: Callable[[Job, Kind], float]) -> float:
    """Seconds of one microbatch in all layers."""
    numbers = {kind: n for kind in step.KINDS if (n := _number(job, kind))}
    return sum(n * min(pair(each, kind) for each in _bare(job)) for kind, n in numbers.items())


def _bare(job: Job) -> list[Job]:
    """The job when nothing of FSDP shows (what `collectives.beside` then leaves are TP and CP) and nothing is
    offloaded. With layers that are kept in BF16, in either precision, of which the lower need not be the faster."""
    bare = replace(job, sharding="zero1", offload=frozenset())
    return [bare, replace(bare, precision="bf16", kept_layers=frozenset())] if job.kept_layers else [bare]


def _rate(job: Job, in_layers: float, c: Constants) -> float:
    ends = step.embedding_time(job, c).pair + (1 + job.num_mtp_layers) * step.head_time(job, c).pair
    seconds = job.microbatches * (in_layers + ends) / job.pp * (1 + step.stragglers(job))
    return job.tokens_per_step / seconds / job.gpus


def mesh(job: Job, software: Software, c: Constants) -> float:
    """Tokens per second and GPU, before recompute and offloading are chosen (`job` has none)."""
    if job.kept_layers:
        stages = [[(1, time) for time in held] for held in step.stage_times(job, software, c)]
    else:
        kinds = {kind: overlap.layer_time(job, kind, software, c) for kind in step.KINDS if _number(job, kind)}
        embedding, head = step.embedding_time(job, c), step.head_time(job, c)
        stages = [
            [
                *((getattr(stage, kind), time) for kind, time in kinds.items()),
                (int(stage.embedding), embedding),
                (stage.head * (1 + job.num_mtp_layers), head),
            ]
            for stage in job.stages
        ]
    seconds = [sum(n * (t.forward + t.backward) for n, t in held) for held in stages]
    hidden = sum(n * t.pair for held in stages for n, t in held) / sum(seconds)
    period = max(sum(seconds[i] for i in job.stage_indices(rank)) for rank in range(job.pp))
    whole = job.microbatches * hidden * period + step.optimizer_seconds(job, c)
    return job.tokens_per_step / (whole * (1 + step.stragglers(job))) / job.gpus


def _number(job: Job, kind: Kind) -> int:
    return sum(getattr(stage, kind) for stage in job.stages)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class Fixed(NamedTuple):
    """Bytes of a pipeline rank that no saving takes away."""

    rank: int
    outside: float
    """Of PyTorch's allocator"""
    inside: float


def fixed_memory(job: Job) -> list[Fixed]:
    """Of the first and the last pipeline rank (another may need more) of a job that recomputes and offloads nothing:
    states, buffers, what FSDP has gathered and not yet reduced, and what is alive while one layer computes, of which
    recomputing and offloading can only make more."""
    return [_fixed(job, rank) for rank in sorted({0, job.pp - 1})]


def _fixed(job: Job, rank: int) -> Fixed:
    outside = inside = 0.0
    for entry in memory.entries_of_rank(job, rank, keeps=False):
        if entry.group == memory.OUTSIDE:
            outside += entry.size
        elif job.microbatches > 1 or entry.group != "gradients":  # else they may take the place of activations
            inside += entry.size
    return Fixed(rank, outside, inside)


def least_memory(job: Job, fixed: list[Fixed]) -> float:
    """Bytes that `job` needs at least, with its recompute and offloading, beside what is fixed: what its layers keep of
    the microbatches in flight."""
    return max(of.outside + (of.inside + _kept_by_rank(job, of.rank)) * (1 + memory.ALLOCATOR_MARGIN) for of in fixed)


def _kept_by_rank(job: Job, rank: int) -> float:
    each = {kind: _kept(job, kind) for kind in step.KINDS if _number(job, kind)}
    stages = [sum(getattr(stage, kind) * size for kind, size in each.items()) for stage in job.stages_of_rank(rank)]
    return max(sum(n * size for n, size in zip(held, stages)) for held in memory.in_flight(job, rank))


_KEPT: dict[tuple, float] = {}


def _kept(job: Job, kind: Kind) -> float:
    """Bytes that one layer keeps of one microbatch."""
    key = (activations.READ(job), job.offload, kind)
    if key not in _KEPT:
        if len(_KEPT) >= activations.REMEMBERED:
            _KEPT.clear()
        _KEPT[key] = sum(item.size for item in activations.kept(job, activations.layer(job, kind)))
    return _KEPT[key]
