"""What `--plan --plan.calibrate=RUN` prints where the runs were on CPUs: the speed of the run on that machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.config_file import ConfigError
from titan_moe.plan import machine, parameters, work
from titan_moe.plan.calibrate import Measured
from titan_moe.plan.job import Job
from titan_moe.plan.machine import Machine


@dataclass(frozen=True, kw_only=True)
class CpuPlan:
    job: Job
    machine: Machine
    phases: dict[str, float]
    """Seconds of a step"""
    runs: tuple[tuple[Measured, float], ...]
    """The runs that the machine was learnt from, and seconds of a step as it has them"""

    @property
    def step(self) -> float:
        return sum(self.phases.values())

    @property
    def tokens_per_s(self) -> float:
        """Of one rank."""
        return self.job.tokens_per_step / self.step / self.job.gpus


def make(config: Config, runs: Sequence[Measured], name: str) -> CpuPlan:
    """Raises ConfigError with all problems."""
    problems = []
    if config.plan.gpus is None:
        problems.append("plan.gpus: is not set; give the number of ranks, as in --plan.gpus=4")
    for key in ("scale", "png"):
        if getattr(config.plan, key):
            problems.append(f"plan.{key}: is of GPUs, and plan.calibrate names runs on CPUs; leave one of them out")
    if problems := problems or check(config, config.plan.gpus or 1):
        raise ConfigError(name, problems)
    assert config.plan.gpus is not None
    try:
        learnt = machine.learn(runs)
        job = Job.from_config(config, config.plan.gpus, machine.ANY)
        phases = learnt.predict(job)
        known = tuple((run, sum(learnt.predict(machine.job_of(run)).values())) for run in runs)
    except ValueError as error:
        raise ConfigError(name, [f"plan.calibrate: {error}"]) from error
    return CpuPlan(job=job, machine=learnt, phases=phases, runs=known)


def to_text(plan: CpuPlan) -> str:
    job, learnt = plan.job, plan.machine
    f, crowd = job.model, learnt.crowd(job.gpus)
    lines = [
        f"Plan     {job.model_name}: {parameters.total(f) / 1e6:,.1f} M parameters, {f.n_layers} layers, width {f.dim}",
        f"         {job.gpus:,} ranks on {learnt.cores:,} CPU cores; FSDP {job.dp_shard}, EP {job.ep}; "
        f"{job.global_batch_size:,} sequences x {job.seq_len:,} per step, {job.microbatches} x {job.micro_batch_size} "
        "on a rank",
        "",
        f"Speed    {plan.tokens_per_s:,.0f} tokens/s per rank, {plan.tokens_per_s * job.gpus:,.0f} in all; "
        f"{plan.step:,.3f} s per step, on a machine that does nothing else",
    ]
    if crowd > 1:
        lines.append(
            f"         {job.gpus} ranks with {learnt.threads} thread(s) each share {learnt.cores} cores: all takes "
            f"{crowd:.1f} times as long"
        )
    rates = [f"{1 / learnt.flop / 1e9:,.1f} GFLOPS"] if learnt.flop else []
    rates += [f"{1 / learnt.byte / 1e9:,.1f} GB/s of memory"] if learnt.byte else []
    rates += [f"{1e6 * learnt.operation:,.1f} us an operation"] if learnt.operation else []
    rates += [f"{phase} {1 / link / 1e9:,.2f} GB/s" for phase, link in learnt.links.items() if link]
    lines += [f"Machine  per rank: {', '.join(rates)}", "", "Step time (s)"]
    for phase, seconds in sorted(plan.phases.items(), key=lambda item: -item[1]):
        lines.append(f"  {phase:<22} {seconds:>8.3f} {seconds / plan.step:>6.1%}")
    lines += ["", "Learnt from: seconds of a step as measured, and as the machine has it; MB sent, and counted here"]
    for run, seconds in plan.runs:
        planned = work.of_job(machine.job_of(run))["dispatch and combine"].wire
        sent = f"; {run.sent / 1e6:,.1f} MB, {planned / 1e6:,.1f} MB" if run.sent or planned else ""
        lines.append(
            f"  {run.folder}: {run.ranks} rank{'s' * (run.ranks > 1)}, {run.step:,.3f} s, {seconds:,.3f} s "
            f"({seconds / run.step - 1:+.1%}){sent}"
        )
    return "\n".join(lines)


def to_json(plan: CpuPlan) -> dict[str, Any]:
    """The same as data. Seconds, bytes, and seconds per unit."""
    job, learnt = plan.job, plan.machine
    return {
        "model": job.model_name,
        "ranks": job.gpus,
        "cores": learnt.cores,
        "step_seconds": plan.step,
        "tokens_per_s_per_rank": plan.tokens_per_s,
        "step_parts_seconds": plan.phases,
        "crowd": learnt.crowd(job.gpus),
        "seconds_per_flop": learnt.flop,
        "seconds_per_byte": learnt.byte,
        "seconds_per_operation": learnt.operation,
        "seconds_per_byte_from_other_ranks": dict(learnt.links),
        "factors": dict(learnt.factors),
        "runs": [
            {"folder": run.folder, "ranks": run.ranks, "step_seconds": run.step, "as_learnt": seconds}
            for run, seconds in plan.runs
        ],
    }
