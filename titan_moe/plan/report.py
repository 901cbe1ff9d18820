"""What `--plan` prints: the answer first (fits, how fast, what limits it), then how it comes about.

`make` predicts; `to_text` and `to_json` only write down. Tokens per second and GPU come first, because TFLOPS depend on
how attention is counted (flops.py) and MFU on the peak besides: here always the dense peak of the run's precision.
Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from titan_moe.config import Config
from titan_moe.config_file import ConfigError
from titan_moe.plan import hardware, improve, parameters, scaling, scaling_report
from titan_moe.plan.calibrate import Corrections
from titan_moe.plan.check import plan_problems
from titan_moe.plan.improve import Improvement
from titan_moe.plan.job import Job
from titan_moe.plan.memory import GIB, Memory, predict_memory
from titan_moe.plan.scaling import Impossible, Scaled
from titan_moe.plan.step import Prediction, predict

SHOWN = 0.004
"""Parts below this share of the whole are summed up as "other" in tables"""
TRIED = 12
"""Improvements that are looked at for those that fit"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    job: Job
    speed: Prediction
    memory: Memory
    improvements: tuple[Improvement, ...]
    """The three that would help most among those that fit (all of them if the plan itself does not)"""
    out_of_reach: Improvement | None
    """One that would help more than the first of them, but does not fit"""
    scaling: tuple[Scaled | Impossible, ...] = ()
    """The same run on plan.gpus and plan.scale GPUs; empty if that was not asked"""
    calibrated: tuple[str, ...] = ()
    """What the speed was corrected by, in lines"""


def make(config: Config, name: str, corrections: Corrections | None = None) -> Plan:
    """Plan the run of `config`, which errors call `name`, with the speed as it is after `corrections`; advice is left
    as the tables have it. Raises ConfigError with all problems."""
    job = job_of(config, name)
    plan, corrected = of_job(job), corrections.apply if corrections else lambda job, speed: speed
    if corrections is not None:
        plan = replace(plan, speed=corrections.apply(job, plan.speed), calibrated=corrections.told)
    return replace(plan, scaling=tuple(scaling.scale(config, corrected))) if config.plan.scale else plan


def job_of(config: Config, name: str) -> Job:
    """The run of `config`. Raises ConfigError with all problems."""
    if problems := plan_problems(config):
        raise ConfigError(name, problems)
    assert config.plan.gpus is not None
    try:
        return Job.from_config(config, config.plan.gpus, hardware.resolve(config.plan.hardware))
    except ValueError as error:  # a layout that training does not check yet
        raise ConfigError(name, [str(error)]) from error


def of_job(job: Job) -> Plan:
    speed, memory = predict(job), predict_memory(job)
    tried = improve.improvements(job, speed, TRIED)
    fitting = [change for change in tried if predict_memory(change.job).fits or not memory.fits]
    first = fitting[0].gain if fitting else 0.0
    beyond = next((change for change in tried if change not in fitting and change.gain > first), None)
    return Plan(job=job, speed=speed, memory=memory, improvements=tuple(fitting[:3]), out_of_reach=beyond)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def to_text(plan: Plan) -> str:
    speed, memory = plan.speed, plan.memory
    lines = [
        *summary(plan),
        "",
        *_table("Step time", "s", speed.parts.items(), speed.step_seconds, "{:,.3f}"),
        "",
        *_memory_table(memory),
        "",
        *_improvements(plan),
        *(("", "Corrected by runs on this machine", *plan.calibrated) if plan.calibrated else ()),
        *scaling_report.text(plan.scaling),
    ]
    return "\n".join(line.rstrip() for line in lines)


def summary(plan: Plan) -> list[str]:
    """The answers, without how they come about."""
    job, speed, memory = plan.job, plan.speed, plan.memory
    peak = job.hardware.peak_tflops(job.precision)
    low, high = speed.band
    return [
        *_heading(job),
        "",
        f"Speed    {speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU (80 % of runs: {low:,.0f} to {high:,.0f}), "
        f"{speed.tokens_per_s_per_gpu * job.gpus / 1e6:,.2f} M tokens/s in all; {speed.step_seconds:,.2f} s per step",
        f"         {speed.tflops_causal:,.0f} TFLOPS per GPU with causal attention, {speed.tflops_full:,.0f} counting "
        f"all of it; MFU {speed.mfu:.1%} of {peak:,.0f} {job.precision} TFLOPS",
        f"         exposed communication {speed.exposed_comm:,.2f} s ({speed.exposed_comm / speed.step_seconds:.1%}); "
        f"limited by {speed.limit}",
        f"         80 % from the errors of {speed.band_from}",
        f"Memory   {_verdict(memory)}",
    ]


def _heading(job: Job) -> list[str]:
    f = job.model
    total, active = parameters.total(f), parameters.total(f, active=True)
    mtp = f", {job.num_mtp_layers} MTP" if job.num_mtp_layers else ""
    shards = f"{job.dp_replicate} x FSDP {job.dp_shard}" if job.dp_replicate > 1 else f"FSDP {job.dp_shard}"
    degrees = {"TP": job.tp, "CP": job.cp, "PP": job.pp, "EP": job.ep}
    others = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    recompute = ", ".join(sorted(job.recompute)) or job.recompute_mode
    plural = "microbatch" if job.microbatches == 1 else "microbatches"
    lines = [
        f"Plan     {job.model_name}: {total / 1e9:,.1f} B parameters, {active / 1e9:,.1f} B active, "
        f"{f.n_layers} layers{mtp}",
        f"         {job.gpus:,} x {job.hardware.name}, {job.precision}; {shards}{', ' + others if others else ''}; "
        f"dispatcher {job.dispatcher}, {job.routing.replace('_', ' ')} routing; recompute {recompute}",
        f"         {job.global_batch_size:,} sequences x {job.seq_len:,} = {job.tokens_per_step / 1e6:,.2f} M tokens "
        f"per step: {job.microbatches} {plural} of {job.micro_batch_size} x {job.dp} data-parallel ranks",
    ]
    if job.pp > 1:
        sizes = " ".join(str(stage.layers) for stage in job.stages)
        lines.append(f"         {job.schedule}, layers per stage: {sizes}")
    return lines


def _verdict(memory: Memory) -> str:
    of = f"{memory.needed / GIB:,.1f} of {memory.capacity / GIB:,.1f} GiB"
    if memory.fits:
        return f"fits: {of}, {memory.free / GIB:,.1f} GiB free"
    return f"DOES NOT FIT: {of}, {-memory.free / GIB:,.1f} GiB too much"


def _table(title: str, unit: str, rows, whole: float, number: str) -> list[str]:
    """Aligned rows of name, value and share of `whole`, largest first."""
    rows = sorted(((name.replace("_", " "), value) for name, value in rows), key=lambda row: -row[1])
    small = [row for row in rows if row[1] < SHOWN * whole]
    if len(small) > 1:
        rows = [row for row in rows if row not in small] + [("other", sum(value for _, value in small))]
    cells = [(name, number.format(value), f"{value / whole:.1%}") for name, value in rows]
    cells.append(("total", number.format(whole), ""))
    wide = [max(len(cell[i]) for cell in cells) for i in range(3)]
    return [f"{title} ({unit})", *(f"  {n:<{wide[0]}}  {v:>{wide[1]}}  {share:>{wide[2]}}" for n, v, share in cells)]


def _memory_table(memory: Memory) -> list[str]:
    rank = (
        f", pipeline rank {memory.rank} of {len(memory.allocated_by_rank)}" if len(memory.allocated_by_rank) > 1 else ""
    )
    named = {"activations": "activations: ", "working set": "backward of a layer or the head: "}
    rows = [(named.get(entry.group, "") + entry.name, entry.size / GIB) for entry in memory.entries]
    rows.append(("margin for fragmentation", memory.margin / GIB))
    return _table(f"Memory per GPU{rank}", "GiB", rows, memory.needed / GIB, "{:,.2f}")


def _improvements(plan: Plan) -> Iterator[str]:
    if not plan.improvements:
        yield "No single change that the planner knows would help."
    else:
        yield "What would help most, one change at a time"
    for i, change in enumerate(plan.improvements, start=1):
        needs = predict_memory(change.job)
        yield f"  {i}. {change.gain:+.1%}  {change.change}: {_speed(change)}, {_verdict(needs)}"
    if plan.out_of_reach is not None:
        change = plan.out_of_reach
        needs = predict_memory(change.job)
        yield f"     {change.gain:+.1%}  {change.change}, if there were {-needs.free / GIB:,.1f} GiB more"


def _speed(change: Improvement) -> str:
    return f"{change.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def to_json(plan: Plan) -> dict[str, Any]:
    """The same as data. Seconds, bytes and shares."""
    job, speed, memory = plan.job, plan.speed, plan.memory
    return {
        "model": job.model_name,
        "parameters": parameters.total(job.model),
        "active_parameters": parameters.total(job.model, active=True),
        "hardware": job.hardware.name,
        "gpus": job.gpus,
        "precision": job.precision,
        "layout": {name: getattr(job, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "vp", "ep")},
        "global_batch_size": job.global_batch_size,
        "micro_batch_size": job.micro_batch_size,
        "seq_len": job.seq_len,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "tokens_per_s_per_gpu_80_percent": list(speed.band),
        "band_from": speed.band_from,
        "step_seconds": speed.step_seconds,
        "tflops_per_gpu_causal": speed.tflops_causal,
        "tflops_per_gpu_full_attention": speed.tflops_full,
        "peak_tflops": job.hardware.peak_tflops(job.precision),
        "mfu": speed.mfu,
        "exposed_communication_seconds": speed.exposed_comm,
        "limit": speed.limit,
        "step_parts_seconds": speed.parts,
        "fits": memory.fits,
        "memory": {
            "needed_bytes": memory.needed,
            "allocated_bytes": memory.allocated,
            "capacity_bytes": memory.capacity,
            "free_bytes": memory.free,
            "margin_bytes": memory.margin,
            "pipeline_rank": memory.rank,
            "allocated_bytes_by_pipeline_rank": list(memory.allocated_by_rank),
            "entries": [entry._asdict() for entry in memory.entries],
        },
        "improvements": [
            {
                "change": change.change,
                "gain": change.gain,
                "tokens_per_s_per_gpu": change.tokens_per_s_per_gpu,
                "fits": predict_memory(change.job).fits,
            }
            for change in plan.improvements
        ],
        "assumed": list(job.notes),
        **({"calibrated": list(plan.calibrated)} if plan.calibrated else {}),
        **scaling_report.data(plan.scaling),
    }
