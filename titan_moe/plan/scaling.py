"""The same run on more GPUs (or fewer): weak scaling, strong scaling, and what failures leave of both.

Weak: as many sequences per GPU and step as in the given plan, so the batch grows with the job. Strong: as many in all,
or a few less where they do not divide. The layout inside a copy of the model (TP, CP, PP, EP) stays; what grows is data
parallelism, and that in one of two ways, of which the faster one that fits is taken:

- more shards: parameters are gathered from more ranks, and each holds less;
- more copies of the sharded group (HSDP): each rank holds as much as before, and copies add up their gradients.

Strong scaling ends where ranks are more than sequences. Before that microbatches become smaller. Behind it only context
parallelism is tried, because it is the one degree that needs no decision about layers.

Every candidate is a configuration that passes training's own checks. Efficiency is tokens per second and GPU over the
given plan's; `lost` says which parts of the step take more GPU time per token than there.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from titan_moe.config import Config
from titan_moe.mesh_check import data_parallel_degree, sequences_per_step
from titan_moe.plan import hardware, parameters
from titan_moe.plan.check import plan_problems
from titan_moe.plan.choices import changed
from titan_moe.plan.goodput import BACKGROUND_SHARE, HOUR, Saving
from titan_moe.plan.job import Job
from titan_moe.plan.memory import Memory, predict_memory
from titan_moe.plan.model_states import BYTES
from titan_moe.plan.step import Prediction, predict

How = Literal["weak", "strong"]
Corrected = Callable[[Job, Prediction], Prediction]
DAY = 24 * HOUR
CONTEXT_TRIED = (2, 4, 8, 16)
"""Times the file's context-parallel degree, where the batch has fewer sequences than there are ranks"""
KEPT = 0.9
"""Share of the batch that strong scaling has to keep"""
SHOWN = 0.001
"""Share of the step from which on a part is named as lost"""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What failures make of a plan. Times in seconds."""

    saving: Saving
    steps: int
    """Between saves, at which goodput is best"""
    seconds: float
    """Of those steps"""
    goodput: float
    own_goodput: float | None
    """With the file's checkpoint.interval; None: it saves nothing"""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The run on `gpus` GPUs."""

    how: How
    gpus: int
    job: Job
    speed: Prediction
    memory: Memory
    efficiency: float
    lost: tuple[tuple[str, float], ...]
    """(part, share of the given plan's step that it takes more per token), largest first"""
    failures: Failures

    @property
    def tokens_per_day(self) -> float:
        """That are kept, failures included."""
        return self.speed.tokens_per_s_per_gpu * self.gpus * DAY * self.failures.goodput


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """There is no such run, and why."""

    how: How
    gpus: int
    why: str


def scale(config: Config, corrected: Corrected = lambda job, speed: speed) -> list[Scaled | Impossible]:
    """The plan on plan.gpus and on each of plan.scale, weak and then strong, by number of GPUs. `config` passes
    plan_problems. `corrected`: makes of each prediction what shall be believed."""
    assert config.plan.gpus is not None
    sizes = sorted({config.plan.gpus, *config.plan.scale})
    base = _planned(config, corrected)
    assert not isinstance(base, str)
    hows: tuple[How, ...] = ("weak", "strong")
    return [of_size(config, base, how, gpus, corrected) for how in hows for gpus in sizes]


def of_size(
    config: Config, base: tuple[Job, Prediction, Memory], how: How, gpus: int, corrected: Corrected
) -> Scaled | Impossible:
    """The best of `candidates`. `base` is the given plan."""
    problems, found = [], []
    for candidate in candidates(config, how, gpus):
        planned = candidate if isinstance(candidate, str) else _planned(candidate, corrected)
        if isinstance(planned, str):
            problems.append(planned)
        else:
            found.append((candidate, *planned))
    if not found:
        return Impossible(how=how, gpus=gpus, why="; ".join(dict.fromkeys((problems[0], problems[-1]))))
    chosen, job, speed, memory = max(found, key=lambda f: (f[3].fits, f[2].tokens_per_s_per_gpu))
    assert isinstance(chosen, Config)
    return Scaled(
        how=how,
        gpus=gpus,
        job=job,
        speed=speed,
        memory=memory,
        efficiency=speed.tokens_per_s_per_gpu / base[1].tokens_per_s_per_gpu,
        lost=_lost(job, speed, *base[:2]),
        failures=failures(chosen, job, speed),
    )


def _planned(config: Config, corrected: Corrected) -> tuple[Job, Prediction, Memory] | str:
    """The plan, or why there is none."""
    if problems := plan_problems(config):
        return problems[0]
    assert config.plan.gpus is not None
    try:
        job = Job.from_config(config, config.plan.gpus, hardware.resolve(config.plan.hardware))
    except ValueError as error:
        return str(error)
    return job, corrected(job, predict(job)), predict_memory(job)


# ---------------------------------------------------------------------------------------------------------------------
# Candidates


def candidates(config: Config, how: How, gpus: int) -> Iterator[Config | str]:
    """Configurations of the run on so many GPUs, or why there are none."""
    assert config.plan.gpus is not None
    p, t = config.parallelism, config.training
    grown = Fraction(gpus, config.plan.gpus)
    replicate, shard = data_parallel_degree(config, config.plan.gpus)
    ways = {(replicate, shard * grown), (replicate * grown, shard)}
    whole = sorted((int(r), int(s)) for r, s in ways if r.denominator == s.denominator == 1)
    if not whole:
        copy = p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree
        yield f"{gpus:,} GPUs: must be a multiple of cp x tp x pp = {copy}, with whole shards or copies of the model"
        return
    batch = sequences_per_step(config, config.plan.gpus)
    if how == "weak":
        for r, s in whole:
            if (batch * grown).denominator == 1:
                yield _laid_out(config, gpus, r, s, int(batch * grown), t.local_batch_size)
            else:
                yield f"{batch:,} x {gpus:,} / {config.plan.gpus:,} sequences per step: must be a whole number"
        return
    for r, s in whole:
        yield from _strong(config, gpus, r, s, batch)
    ranks = whole[0][0] * whole[0][1]
    if ranks > batch:
        for times in CONTEXT_TRIED:
            for r, s in whole:
                if s % times == 0 and ranks // times <= batch:
                    cp = times * p.context_parallel_degree
                    split = changed(config, {"parallelism.context_parallel_degree": cp})
                    yield from _strong(split, gpus, r, s // times, batch)


def _strong(config: Config, gpus: int, replicate: int, shard: int, batch: int) -> Iterator[Config | str]:
    """With microbatches as they are, and with smaller ones. A pipeline's are small already: there the share of a rank
    becomes smaller."""
    ranks, p, local = replicate * shard, config.parallelism, config.training.local_batch_size
    if ranks > batch:
        yield f"{ranks:,} data-parallel ranks are more than {batch:,} sequences per step"
        return
    if p.pipeline_parallel_degree > 1:
        piece = p.pipeline_parallel_microbatch_size
        sizes = [batch // (ranks * piece) * piece]
    else:
        sizes = [local >> halved for halved in range(local.bit_length())]
    shared = {size: batch // (ranks * size) * ranks * size for size in sizes if size}
    kept = {size: trained for size, trained in shared.items() if trained >= KEPT * batch}
    for size, trained in kept.items():
        yield _laid_out(config, gpus, replicate, shard, trained, size)
    if not kept:
        most = max(shared.values(), default=0)
        yield f"{ranks:,} data-parallel ranks share at most {most:,} of {batch:,} sequences evenly"


def _laid_out(config: Config, gpus: int, replicate: int, shard: int, batch: int, local: int) -> Config:
    return changed(
        config,
        {
            "plan.gpus": gpus,
            "parallelism.data_parallel_replicate_degree": replicate,
            "parallelism.data_parallel_shard_degree": shard,
            "training.global_batch_size": batch,
            "training.local_batch_size": local,
        },
    )


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


def _lost(job: Job, speed: Prediction, base: Job, before: Prediction) -> tuple[tuple[str, float], ...]:
    """See `Scaled.lost`."""
    times = (job.gpus / job.tokens_per_step) / (base.gpus / base.tokens_per_step) / before.step_seconds
    shares = {
        part: speed.parts.get(part, 0.0) * times - before.parts.get(part, 0.0) / before.step_seconds
        for part in {*speed.parts, *before.parts}
    }
    return tuple(sorted(((part, s) for part, s in shares.items() if s >= SHOWN), key=lambda item: -item[1]))


def checkpoint_bytes(job: Job) -> float:
    """Of one checkpoint: parameters and two moments, with Muon one of the layers' matrices. Once, however many copies
    of the model there are."""
    of_all = parameters.total(job.model)
    moments = 2 * of_all - (parameters.of_muon(job.model) if job.muon else 0)
    return float(of_all * BYTES[job.param_dtype] + moments * BYTES[job.moment_dtype])


def saving(config: Config, job: Job) -> Saving:
    """What a save and a failure cost this run. In the foreground training waits for the whole write. In the background
    it waits for the copy to the host, and is slowed while the rest is written."""
    size, plan = checkpoint_bytes(job), config.plan
    write = size / (plan.storage_gb_s * 1e9 * job.gpus)
    reads = 2 if config.checkpoint.verify == "full" else 1  # it reads all of it once more, to compare
    held_up, written = write, 0.0
    if config.checkpoint.async_mode != "disabled":
        copy = size / (job.gpus / job.dp_replicate) / (job.hardware.host_gb_s * 1e9)
        held_up, written = copy + BACKGROUND_SHARE * write, write
    return Saving(
        mtbf=plan.failure_gpu_hours * HOUR / job.gpus,
        held_up=held_up,
        written=written,
        restart=plan.restart_seconds + reads * write,
    )


def failures(config: Config, job: Job, speed: Prediction) -> Failures:
    """The best number of steps between saves, and its goodput."""
    costs, step = saving(config, job), speed.step_seconds
    near = costs.best() / step
    around = {max(1, math.floor(near)), math.ceil(near)}
    steps = max((n for n in around if n * step >= (1 - 1e-9) * costs.least), key=lambda n: costs.goodput(n * step))
    own = max(config.checkpoint.interval * step, costs.least)
    return Failures(
        saving=costs,
        steps=steps,
        seconds=steps * step,
        goodput=costs.goodput(steps * step),
        own_goodput=costs.goodput(own) if config.checkpoint.enable else None,
    )
