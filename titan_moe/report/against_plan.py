"""What the planner predicts for a run, beside what the run measured.

The planner knows GPUs of its table, in BF16 and lower. So there is no prediction for a run on CPUs, on an unknown GPU
or in float32; the page then says why, in the planner's words. What it predicts is the configuration as it ran: on as
many GPUs, of `plan.hardware` or else of the kind that run.json names.
"""

from dataclasses import dataclass

from titan_moe.report import phases
from titan_moe.report.read import Run
from titan_moe.report.summary import typical

ALIKE = {
    "experts": ("grouped_gemm",),
    "attention": ("attention",),
    "router": ("router",),
    "optimizer": ("optimizer",),
}
"""Phases that are one part of a predicted step, or the sum of some"""


@dataclass(frozen=True)
class Row:
    quantity: str
    unit: str
    predicted: float
    measured: float | None
    low: float | None = None
    """80 % of runs lie between low and high"""
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    rows: list[Row]
    parts: dict[str, float]
    """Predicted seconds of a step by cause"""
    job: str
    """What was predicted, in words"""
    why_not: str
    """Why there is no prediction; "" if there is one"""


def compare(run: Run) -> Comparison:
    """Never raises: a report is not to fail over what it can do without."""
    try:
        return _compare(run)
    except Exception as error:  # whatever it is, the page shows it
        return Comparison(
            [], {}, "", f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        )


def _compare(run: Run) -> Comparison:
    if not run.config:
        raise ValueError("There is no config.toml to predict from")
    from titan_moe import config_file
    from titan_moe.plan import hardware
    from titan_moe.plan.check import plan_problems
    from titan_moe.plan.job import Job
    from titan_moe.plan.memory import GIB, predict_memory
    from titan_moe.plan.step import predict

    config = config_file.load([str(run.folder / "config.toml")])
    device, world = run.facts.get("device"), run.facts.get("world")
    if not config.plan.hardware:
        known = hardware.of_device(device) if isinstance(device, str) else None
        if known is None:
            where = (
                f"the run's device, {device}, is not one that the planner knows"
                if device
                else "run.json does not say what device the run is on"
            )
            raise ValueError(f"plan.hardware is not set, and {where}")
        config.plan.hardware = known.name
    config.plan.gpus = world if isinstance(world, int) and not isinstance(world, bool) else config.plan.gpus
    if problems := plan_problems(config):
        raise ValueError("; ".join(problems))
    assert config.plan.gpus is not None
    job = Job.from_config(config, config.plan.gpus, hardware.resolve(config.plan.hardware))
    speed, memory = predict(job), predict_memory(job)

    def measured(key: str) -> float | None:
        return typical(run.series.get(key))

    low, high = speed.band
    rows = [
        Row("tokens/s per GPU", "", speed.tokens_per_s_per_gpu, measured("tps"), low, high),
        Row("step time", "s", speed.step_seconds, measured("step_s")),
        Row("MFU", "%", 100 * speed.mfu, measured("mfu")),
        Row("memory", "GiB", memory.needed / GIB, run.last("memory_gib")),
        Row("exposed expert communication", "s", speed.parts.get("exposed EP", 0.0), measured("comm/exposed_s")),
    ]
    seconds = {phase.name: phase.seconds for phase in phases.table(run)}
    for name, parts in ALIKE.items():
        if name in seconds:
            rows.append(Row(f"{name} in a step", "s", sum(speed.parts.get(part, 0.0) for part in parts), seconds[name]))
    return Comparison(rows, speed.parts, f"{job.gpus:,} x {job.hardware.name}, {job.precision}", "")
