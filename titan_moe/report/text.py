"""A run on some twenty lines of a terminal, for those who look at it over SSH."""

import math
import shutil
from statistics import fmean

from titan_moe.config_keys import printable
from titan_moe.report import phases
from titan_moe.report.decimate import cuts
from titan_moe.report.read import Run, Series
from titan_moe.report.summary import layers_of, numbers, show, typical, warnings, worst_layer

LEVELS = "▁▂▃▄▅▆▇█"
CURVES = {
    "loss": "loss",
    "validation_loss": "validation",
    "grad_norm": "grad norm",
    "tps": "tokens/s",
    "moe_max/mean": "max/mean",
}
SHOWN = 6
"""Phases"""


def summary(run: Run, width: int | None = None) -> str:
    """`width`: of the terminal, in characters; default: as it is."""
    width = width or shutil.get_terminal_size().columns
    lines = [_headline(run)]
    lines += [f"  {number.label:<21}{number.text} {number.note}" for number in numbers(run)]
    lines += [line for key, label in CURVES.items() if (line := _curve(label, run.series.get(key), width - 36))]
    lines += _phases(run, width)
    if worst := worst_layer(run):
        layer, value = worst
        more = {"dead": "moe_dead", "entropy": "moe_entropy", "dropped": "moe_dropped"}
        last = {name: layers_of(run, key).get(layer, Series()).last() for name, key in more.items()}
        told = "".join(f", {name} {show(number)}" for name, number in last.items() if number is not None)
        lines.append(f"  worst MoE layer: {layer}, heaviest expert {value:.2f} × mean{told}")
    lines += [f"! {warning}" for warning in warnings(run)]
    lines += [f"- {problem}" for problem in run.problems]
    return "\n".join(printable(line).rstrip() for line in lines)


def _headline(run: Run) -> str:
    share = ""
    if run.planned_steps and run.steps:
        share = f", {run.last_step / run.planned_steps:.0%}{_left(run)}"
    return f"{run.name}: {run.state()}{share}"


def _left(run: Run) -> str:
    """How long it will take, of a run that trains."""
    seconds = typical(run.series.get("step_s"))
    if not run.alive or seconds is None or not run.planned_steps:
        return ""
    minutes = seconds * max(run.planned_steps - run.last_step, 0) / 60
    return f", {minutes:.0f} minutes to go" if minutes < 120 else f", {minutes / 60:,.0f} hours to go"


def sparkline(values: list[float], width: int) -> str:
    """Means of neighbouring values as blocks, from the smallest to the largest; a blank where nothing is finite."""
    means = []
    for start, end in cuts(len(values), max(width, 1)):
        finite = [value for value in values[start:end] if math.isfinite(value)]
        means.append(fmean(finite) if finite else math.nan)
    known = [mean for mean in means if not math.isnan(mean)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    heights = [
        len(LEVELS) - 1 if math.isnan(m) else int((m - low) / span * (len(LEVELS) - 1e-9)) if span else 0 for m in means
    ]
    return "".join(" " if math.isnan(mean) else LEVELS[height] for mean, height in zip(means, heights))


def _curve(label: str, series: Series | None, width: int) -> str:
    line = sparkline(list(series.values), min(width, 60)) if series else ""
    if not line or series is None:
        return ""
    finite = [value for value in series.values if math.isfinite(value)]
    return f"  {label:<12}{line} {show(min(finite))} to {show(max(finite))}"


def _phases(run: Run, width: int) -> list[str]:
    found = phases.inside(run)
    whole = math.fsum(phase.seconds for phase in found)
    if not whole:
        return []
    lines = [f"  phases of a step, {whole:.3g} s:"]
    for phase in found[:SHOWN]:
        share = phase.seconds / whole
        slowest = (
            f"  slowest rank {phase.rank}: {phase.slowest:.3g} s" if phase.slowest and phase.rank is not None else ""
        )
        bar = "█" * round(share * min(30, max(width - 60, 5)))
        lines.append(f"    {phase.name:<14}{phase.seconds:>9.3g} s {share:>6.1%} {bar}{slowest}")
    return lines
