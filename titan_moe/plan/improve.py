"""The changes that would speed a run up most: each is tried on the Job and predicted again.

Only what the job's hardware and layout allow is tried, one change at a time, and none that the model says nothing of
(accuracy of a lower precision, stability). Whether the changed run still fits into memory is for the report to say.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from titan_moe.plan.job import Job
from titan_moe.plan.step import Prediction, predict
from titan_moe.plan.within_layer import WITHIN

WORTH = 0.003  # gains below this are not shown


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A change, and what it would make of the step."""

    change: str
    job: Job
    tokens_per_s_per_gpu: float
    gain: float
    """Relative gain in tokens per second"""


def improvements(job: Job, now: Prediction | None = None, count: int = 3) -> list[Improvement]:
    """The `count` changes of software or layout that would speed `job` up most, best first."""
    rate = (now or predict(job)).tokens_per_s_per_gpu
    found = []
    for change, changed in variants(job):
        changed_rate = predict(changed).tokens_per_s_per_gpu
        if changed_rate / rate - 1 > WORTH:
            found.append(
                Improvement(change=change, job=changed, tokens_per_s_per_gpu=changed_rate, gain=changed_rate / rate - 1)
            )
    return sorted(found, key=lambda each: -each.gain)[:count]


def variants(job: Job) -> Iterator[tuple[str, Job]]:
    """Every single change worth trying on this job."""
    if job.ep > 1:
        for dispatcher in ("dedup", "hybridep", "deepep"):
            if job.dispatcher in ("alltoall", "dedup") and dispatcher != job.dispatcher:
                yield f'moe.dispatcher = "{dispatcher}"', replace(job, dispatcher=dispatcher)
        if job.overlap == "none" and (job.microbatches > 1 or job.pp > 1):
            yield "expert-parallel communication beside another microbatch", replace(job, overlap="1f1b_delayed_wgrad")
        if job.overlap == "none" and job.dispatcher in ("alltoall", "dedup"):
            for kind in WITHIN:
                possible = job.model.num_shared_experts > 0 if kind == "shared_expert" else job.micro_batch_size > 1
                if possible:
                    yield f'moe.overlap = "{kind}"', replace(job, overlap=kind)
        if not job.sync_free:
            yield "no host waits for counts (static receive buffers)", replace(job, sync_free=True)
    if job.graphs in ("none", "router"):
        yield "CUDA graphs of attention and router", replace(job, graphs="attention")
    if job.sync_free and job.graphs != "full":
        yield "CUDA graphs of the whole step", replace(job, graphs="full")
    if job.precision == "bf16" and job.hardware.fp8_tflops:
        low = "mxfp8" if job.hardware.architecture in ("blackwell", "blackwell_ultra", "cdna4") else "fp8_current"
        yield f'precision.recipe = "{low}"', replace(job, precision=low)
    if job.recompute_mode != "none" or job.recompute:
        yield "no recompute", replace(job, recompute_mode="none", recompute=frozenset())
    if job.routing == "natural":
        yield "perfectly balanced experts", replace(job, routing="balanced_random")
    doubled = job.micro_batch_size * 2
    if job.global_batch_size % (doubled * job.dp) == 0:
        yield f"{doubled} sequences per microbatch", replace(job, micro_batch_size=doubled)
    if job.global_batch_size < 2**16:
        yield "twice the global batch", replace(job, global_batch_size=2 * job.global_batch_size)
    if job.pp > 1 and job.vp == 1:
        yield from _interleaved(job)
    for ep in (job.ep // 2, job.ep * 2) if job.ep > 1 else (min(job.model.num_experts, job.hardware.nvlink_domain),):
        if ep >= 1 and job.model.num_experts % ep == 0 and job.dp * job.cp * job.tp % ep == 0:
            dispatcher = "local" if ep == 1 else "dedup" if job.ep == 1 else job.dispatcher
            yield f"expert parallelism {ep} instead of {job.ep}", replace(job, ep=ep, dispatcher=dispatcher)


def _interleaved(job: Job) -> Iterator[tuple[str, Job]]:
    halves = []
    for stage in job.stages:
        first = replace(stage, dense=-(-stage.dense // 2), moe=stage.moe // 2, mtp=0, head=False)
        halves += [first, replace(stage, dense=stage.dense - first.dense, moe=stage.moe - first.moe, embedding=False)]
    yield (
        "two stages per pipeline rank (interleaved)",
        replace(job, vp=2, stages=tuple(halves), schedule="Interleaved1F1B"),
    )
