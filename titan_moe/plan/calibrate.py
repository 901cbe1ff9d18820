"""`--plan.calibrate=RUN[,RUN...]`: predictions that start from what runs on this machine measured.

A run folder has all that is needed: config.toml says what ran, run.json on what, metrics.jsonl how long each phase of a
step took and how much expert parallelism sent. Nothing else is kept anywhere: the folders are given each time.

- From CPUs: every number of the planner's tables is replaced; see machine.py.
- From GPUs: the planner predicts the run that was measured too, and each group of causes of the new prediction is
  corrected by what it was off there (`Corrections`). Software, clocks, network and imbalance of the machine are in the
  measurement; what changes with the scale stays the planner's.

A phase's seconds are the mean over ranks, and here the median over the logged steps after the first few, which set
things up.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.config_file import ConfigError
from titan_moe.plan import hardware
from titan_moe.plan.check import plan_problems
from titan_moe.plan.choices import changed
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.step import Prediction, limit_of, predict
from titan_moe.report import read as run_folders

WARM_UP = 3  # steps
LEAST = 3  # lines after them
BYTES = ("comm/dispatch_bytes", "comm/combine_bytes")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run says. Seconds of one step."""

    folder: str
    config: Config
    ranks: int
    device: str
    """"CPU", or the driver's name of the GPU"""
    cores: int
    """Of the machine, for all ranks"""
    threads: int
    """That each rank computes with"""
    step: float
    phases: Mapping[str, float]
    """By the names of phases.py without forward and backward"""
    sent: float
    """Bytes of a rank's dispatch and combine to other ranks; 0: not told"""
    lines: int


def measured(folder: str) -> Measured:
    """Raises ValueError, which begins with the folder, for a run that nothing can be learnt from."""
    run = run_folders.read(Path(folder))
    if broken := [problem for problem in run.problems if problem.startswith(("metrics.jsonl", "run.json", "config."))]:
        raise ValueError(f"{folder}: {broken[0]}; calibrate from a run that is whole")
    try:
        config = config_file.load([str(Path(folder) / "config.toml")])
    except ConfigError as error:
        raise ValueError(f"{folder}: {error}") from error
    steps = [step for step in list(run.steps)[1:] if step > WARM_UP]
    if len(steps) < LEAST:
        raise ValueError(
            f"{folder}: metrics.jsonl has {len(steps)} lines behind the first one and step {WARM_UP}, which set things "
            f"up; {LEAST} are needed: train longer, or with metrics.log_freq=1"
        )

    def typical(key: str) -> float:
        series = run.series.get(key)
        values = dict(zip(series.steps, series.values)) if series else {}
        return statistics.median(values.get(step, 0.0) for step in steps)

    names = {key.removeprefix("phase/") for key in run.series if key.startswith("phase/")}
    phases: dict[str, float] = {}
    for name in names - {"step"}:
        plain = name.removesuffix(".forward").removesuffix(".backward")
        phases[plain] = phases.get(plain, 0.0) + typical(f"phase/{name}")
    if not phases:
        raise ValueError(f"{folder}: metrics.jsonl has no times of phases; calibrate from a run of this version")
    numbers = {key: run.facts.get(key) for key in ("world", "cores", "threads")}
    for key, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{folder}: run.json has no number of {key}; calibrate from a run of this version")
    return Measured(
        folder=folder,
        config=config,
        ranks=numbers["world"],  # type: ignore[arg-type]
        device=str(run.facts.get("device")),
        cores=numbers["cores"],  # type: ignore[arg-type]
        threads=numbers["threads"],  # type: ignore[arg-type]
        step=typical("step_s"),
        phases=phases,
        sent=sum(typical(key) for key in BYTES),
        lines=len(steps),
    )


def runs(config: Config, name: str) -> list[Measured]:
    """Those of plan.calibrate, which must be of one machine and of a model like `config`'s. Raises ConfigError, which
    `name`s the configuration, with all that is wrong."""
    found, problems = [], []
    for folder in dict.fromkeys(config.plan.calibrate):
        try:
            run = measured(folder)
        except ValueError as error:
            problems.append(f"plan.calibrate: {error}")
            continue
        if strange := _strange(run, config):
            problems.append(f"plan.calibrate: {folder}: {strange}")
        found.append(run)
    for attribute, what in (("device", "on"), ("cores", "with cores:"), ("threads", "with threads per rank:")):
        values = {str(getattr(run, attribute)): run.folder for run in found}
        if len(values) > 1 and (attribute == "device" or found[0].device == "CPU"):
            told = ", ".join(f"{folder} ran {what} {value}" for value, folder in values.items())
            remedy = "; start them all with the same OMP_NUM_THREADS" if attribute == "threads" else ""
            problems.append(f"plan.calibrate: {told}: must be the same machine{remedy}")
    if problems:
        raise ConfigError(name, problems)
    return found


def _strange(run: Measured, config: Config) -> str | None:
    """What makes a run say nothing about `config`."""
    for key in ("model.name", "training.mixed_precision_param", "precision.recipe", "compile.enable"):
        section, _, field = key.partition(".")
        ran, asked = (getattr(getattr(c, section), field) for c in (run.config, config))
        if ran != asked:
            return f"ran with {key} = {ran}, and asked is {asked}: that says nothing of it"
    return None


def on_cpus(found: Sequence[Measured]) -> bool:
    return found[0].device == "CPU"


# ---------------------------------------------------------------------------------------------------------------------
# GPUs

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # name: (phases of a run, parts of a predicted step)
    "computing": (
        ("embedding", "norms", "attention", "dense", "router", "experts", "shared_expert", "mtp", "loss", "graph")
        + ("wgrad",),
        ("grouped_gemm", "dense_gemm", "attention", "elementwise", "quantize", "router", "host")
        + ("slowed by communication", "exposed TP", "exposed CP", "exposed offload"),
    ),
    "dispatch and combine": (("dispatch", "combine"), ("permute", "exposed EP")),
    "data parallelism": (("fsdp",), ("exposed FSDP", "exposed DP", "stragglers")),
    "optimizer": (("clip", "optimizer"), ("optimizer",)),
    "pipeline": (("pipeline",), ("exposed PP", "bubble")),
}
REST = ("data", "logging", "other")
"""Phases that the planner knows nothing of: their seconds are added"""
SHARE = 0.01
"""Of the step: where measured or predicted is less than this, the difference is carried over and not the ratio"""


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What the planner was off for the runs: of each group of GROUPS a factor, or seconds to add; and seconds of the
    rest."""

    factors: Mapping[str, float]
    added: Mapping[str, float]
    told: tuple[str, ...]
    """Lines that say so"""

    def apply(self, job: Job, speed: Prediction) -> Prediction:
        """The prediction as it starts from these runs. Its 80 % band is what it was around the new speed."""
        parts = dict(speed.parts)
        for name, (_, mine) in GROUPS.items():
            for part in mine:
                if part in parts:
                    parts[part] *= self.factors.get(name, 1.0)
            if seconds := self.added.get(name):
                known = max(mine, key=lambda part: parts.get(part, 0.0))
                parts[known] = max(parts.get(known, 0.0) + seconds, 0.0)
        parts["data, logging, other"] = self.added.get("rest", 0.0)
        seconds = sum(parts.values())
        times = speed.step_seconds / seconds
        return replace(
            speed,
            step_seconds=seconds,
            tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu * times,
            tflops_causal=speed.tflops_causal * times,
            tflops_full=speed.tflops_full * times,
            mfu=speed.mfu * times,
            parts=parts,
            limit=limit_of(parts),
            band=(speed.band[0] * times, speed.band[1] * times),
            exposed_comm=sum(s for name, s in parts.items() if name.startswith("exposed")),
        )


def corrections(found: Sequence[Measured], name: str) -> Corrections:
    """Means over the runs, which were on GPUs that the planner knows."""
    ratios: dict[str, list[float]] = {}
    added: dict[str, list[float]] = {}
    told = []
    for run in found:
        speed = _planned_run(run, name)
        told.append(
            f"{run.folder}: {run.ranks:,} x {run.device}, {run.step:,.3f} s a step, planned {speed.step_seconds:,.3f} s"
        )
        for group, (phases, parts) in GROUPS.items():
            seen = sum(run.phases.get(phase, 0.0) for phase in phases)
            planned = sum(speed.parts.get(part, 0.0) for part in parts)
            if min(seen, planned) >= SHARE * run.step:
                ratios.setdefault(group, []).append(seen / planned)
            elif seen or planned:
                added.setdefault(group, []).append(seen - planned)
        added.setdefault("rest", []).append(sum(run.phases.get(phase, 0.0) for phase in REST))
    factors = {group: statistics.geometric_mean(values) for group, values in ratios.items()}
    seconds = {group: statistics.fmean(values) for group, values in added.items() if group not in factors}
    told += [f"{group}: {factor:.2f} times what is planned" for group, factor in factors.items()]
    told += [f"{group}: {more:+.3f} s" for group, more in seconds.items()]
    return Corrections(factors=factors, added=seconds, told=tuple(told))


def _planned_run(run: Measured, name: str) -> Prediction:
    """What the planner says of a run that was measured."""
    known = hardware.of_device(run.device)
    if not run.config.plan.hardware and known is None:
        names = ", ".join(HARDWARE)
        raise ConfigError(name, [f"plan.calibrate: {run.folder}: ran on {run.device}, which is none of {names}"])
    named = run.config.plan.hardware or (known.name if known else "")
    config = changed(run.config, {"plan.hardware": named, "plan.gpus": run.ranks})
    if problems := plan_problems(config):
        raise ConfigError(name, [f"plan.calibrate: {run.folder}: {problem}" for problem in problems])
    return predict(Job.from_config(config, run.ranks, hardware.resolve(config.plan.hardware)))
