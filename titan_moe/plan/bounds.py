"""What a job can reach at best before all of it is decided: the throughput that no choice left open can exceed, and the
memory that none can go below.

A search (search.py) decides on a job from what costs most to what costs least; each function here ignores what is
decided later. They are the planner's own formulas with terms left out that are never negative, so nothing is modelled
twice:

    compute   kernels of all layers, embedding and head, each joined with its launches, and the transfers of tensor and
              context parallelism, shared out over all GPUs without a rest. Not: what experts are sent
    layers    the same with what experts are sent, and what moe.overlap hides of it
    pipelined the slowest pipeline rank and the bubble, before FSDP's gathers
    mesh      the same with FSDP's gathers, what ranks send to each other, and the optimizer. Not: gradient reduction

Recompute and offloading only add time, and only take memory away, so a job is bounded with neither for speed and with
all of both for memory. Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from titan_moe.pipeline_check import SPLIT_BACKWARD
from titan_moe.plan import activations, collectives, memory, overlap, remembered, step
from titan_moe.plan.constants import Constants
from titan_moe.plan.job import Job
from titan_moe.plan.overlap import LayerTime
from titan_moe.plan.parameters import Kind
from titan_moe.plan.profiles import Software
from titan_moe.plan.schedule import zero_bubble_seconds
from titan_moe.plan.stages import Stage

HIDES = 1e-6
"""Share of a stage's time that rounding may make up"""


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


def layer_times(job: Job, software: Software, c: Constants) -> dict[Kind, LayerTime]:
    """By kind: one layer of one microbatch, as in `layers`."""
    found = {}
    for kind in step.KINDS:
        if step.count(job, kind):
            found[kind] = _least([overlap.layer_time(bare, kind, software, c) for bare in _bare(job)])
    return found


def _least(times: Sequence[LayerTime]) -> LayerTime:
    """What is no slower than any of these. (More weight gradients leave less of a bubble.)"""
    forward, backward, pair = (min(getattr(t, name) for t in times) for name in ("forward", "backward", "pair"))
    return LayerTime(forward=forward, backward=backward, wgrad=max(t.wgrad for t in times), pair=pair, parts={})


class Pipeline(NamedTuple):
    """A pipeline of which nothing else is decided."""

    schedule: str
    stages: Sequence[Stage]
    ranks: Sequence[Sequence[int]]
    """Places in `stages` that each rank holds"""


def pipelined(job: Job, times: Mapping[Kind, LayerTime], pipeline: Pipeline, c: Constants) -> float:
    """Tokens per second and GPU of the job on this pipeline, before anything else of the mesh is decided. `times`:
    `layer_times`."""
    ranks_of_data = job.gpus // (job.tp * job.cp * len(pipeline.ranks))
    microbatches = job.global_batch_size // (job.micro_batch_size * ranks_of_data)
    held = _held(job, pipeline.stages, times, c)
    seconds = _pipeline_seconds(pipeline.schedule, held, pipeline.ranks, microbatches, send=0.0)
    return job.tokens_per_step / (seconds * (1 + step.stragglers(job))) / job.gpus


TIMES = ("forward", "backward", "wgrad", "pair")


class Held(NamedTuple):
    """What a stage runs of one microbatch, in seconds."""

    forward: float
    backward: float
    wgrad: float
    pair: float
    moe: float
    """Of `pair`, MoE layers"""


def _held(job: Job, stages: Sequence[Stage], times: Mapping[Kind, LayerTime], c: Constants) -> list[Held]:
    embedding, head = step.embedding_time(job, c), step.head_time(job, c)
    found: dict[Stage, Held] = {}  # most stages are alike
    for stage in stages:
        if stage in found:
            continue
        runs = [(getattr(stage, kind), time) for kind, time in times.items()]
        runs += [(int(stage.embedding), embedding), (stage.head * (1 + job.num_mtp_layers), head)]
        sums = [sum(n * getattr(time, name) for n, time in runs if n) for name in TIMES]
        # An MTP layer may gain more than an MoE layer: then less is known.
        moe = stage.moe * times["moe"].pair if stage.moe and "mtp" not in times else 0.0
        found[stage] = Held(*sums, moe=moe)
    return [found[stage] for stage in stages]


def _pipeline_seconds(
    schedule: str, stages: Sequence[Held], ranks: Sequence[Sequence[int]], microbatches: int, send: float
) -> float:
    """Seconds that all microbatches take at least in `step.step_parts`, also with recompute.

    A rank r runs all its microbatches between the forward of one through the stages before its first, and the backward
    of one through them. What the zero-bubble family leaves of that, schedule.py has a formula for.

    If another microbatch hides transfers, step.py shortens all stages by one factor, the mean of what layers gain. So
    of one rank no more is known than the mean of all ranks, and that its MoE layers, which gain most, take no less than
    their own time.
    """
    pp, steady = len(ranks), sum(stage.pair for stage in stages)
    if pp == 1:
        return microbatches * steady
    zero_bubble = schedule in SPLIT_BACKWARD
    one_each = len(stages) == pp and not zero_bubble
    if steady < (1 - HIDES) * sum(stage.forward + stage.backward for stage in stages):
        each, mean = [stage.moe for stage in stages], microbatches * steady / pp
    else:
        each, mean = [stage.forward + stage.backward for stage in stages], 0.0
    if zero_bubble:
        if mean:
            return max(mean, microbatches * max(sum(each[i] for i in held) for held in ranks))
        forward, wgrad = [stage.forward for stage in stages], [stage.wgrad for stage in stages]
        dgrad = [stage.backward - stage.wgrad for stage in stages]
        return zero_bubble_seconds(schedule, forward, dgrad, wgrad, [[*held] for held in ranks], microbatches)[0]
    before, longest = 0.0, mean
    for rank, held in enumerate(ranks):
        waits = 2 * send * (microbatches + rank) if one_each else 0.0
        longest = max(longest, microbatches * sum(each[i] for i in held) + before + waits)
        before += each[rank]
    return longest


def _layers(job: Job, pair: Callable[[Job, Kind], float]) -> float:
    """Seconds of one microbatch in all layers."""
    numbers = {kind: n for kind in step.KINDS if (n := step.count(job, kind))}
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
        held = [
            Held(*(sum(getattr(time, name) for time in times) for name in TIMES), moe=0.0)
            for times in step.stage_times(job, software, c)
        ]
    else:
        times = {kind: overlap.layer_time(job, kind, software, c) for kind in step.KINDS if step.count(job, kind)}
        held = _held(job, job.stages, times, c)
    ranks = [job.stage_indices(rank) for rank in range(job.pp)]
    send = step.send_seconds(job) if job.pp > 1 else 0.0
    whole = _pipeline_seconds(job.schedule, held, ranks, job.microbatches, send) + step.optimizer_seconds(job, c)
    return job.tokens_per_step / (whole * (1 + step.stragglers(job))) / job.gpus


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class Fixed(NamedTuple):
    """Bytes of a pipeline rank that no saving takes away."""

    rank: int
    outside: float
    """Of PyTorch's allocator"""
    inside: float


def fixed_memory(job: Job) -> list[Fixed]:
    """Of three pipeline ranks (another may need more) of a job that recomputes and offloads nothing: states, buffers,
    what FSDP has gathered and not yet reduced, and what is alive while one layer computes, of which recomputing and
    offloading can only make more. The ranks are the first, the last, and the first of those with most MoE layers: where
    a model begins with dense layers, that one may need two to four times what the first rank does."""
    moe = [sum(stage.moe for stage in job.stages_of_rank(rank)) for rank in range(job.pp)]
    return [_fixed(job, rank) for rank in sorted({0, moe.index(max(moe)), job.pp - 1})]


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
    each = {kind: _kept(job, kind) for kind in step.KINDS if step.count(job, kind)}
    stages = [sum(getattr(stage, kind) * size for kind, size in each.items()) for stage in job.stages_of_rank(rank)]
    return max(sum(n * size for n, size in zip(held, stages)) for held in memory.in_flight(job, rank))


@remembered.by((*activations.READ, "offload"))
def _kept(job: Job, kind: Kind) -> float:
    """Bytes that one layer keeps of one microbatch."""
    return sum(item.size for item in activations.kept(job, activations.layer(job, kind)))
