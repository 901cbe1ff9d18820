"""Which charts the page has, and their data: decimated, so that a run of any length makes a page of a few megabytes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_moe.report import decimate
from titan_moe.report.read import Run, Series

POINTS = 130_000
"""Of all curves together, of some 16 bytes each; a bucket of a curve has three: two extremes, and the mean"""
BUCKETS = (80, 1000)
"""Of one curve at least, and at most, which is a few for each pixel"""
OTHERS = 24
"""Charts of quantities that have none of their own"""


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    curves: dict[str, str]
    """Key in metrics.jsonl -> what the curve is called besides its run; "" where the title says it"""
    group: str = "training"
    log: bool = False
    """Offers a logarithmic axis"""
    smooth: bool = False
    """Is noise around a mean, which the slider smooths"""
    rare: bool = False
    """Is shown only where it is not 0 all the time"""
    instead_of: str = ""
    """Is shown only where this key has no values"""
    further: str = ""
    """Keys that begin so are curves too, called what follows"""
    scale: float = 1.0
    """What values are multiplied by to be in the unit"""


CHARTS = (
    Chart(
        "Loss",
        "nats per token",
        {"loss": "training", "validation_loss": "validation"},
        log=True,
        smooth=True,
        further="validation_loss/",
    ),
    Chart("Validation perplexity", "e to the loss", {}, log=True, further="validation_perplexity/"),
    Chart("Gradient norm", "before clipping", {"grad_norm": ""}, log=True, smooth=True),
    Chart("Learning rate", "", {"lr": ""}),
    Chart("Throughput", "tokens/s per device", {"tps": ""}, group="speed", smooth=True),
    Chart("MFU", "% of the dense peak", {"mfu": ""}, group="speed", smooth=True),
    Chart("Model FLOPs", "TFLOPS per device", {"tflops": ""}, group="speed", smooth=True, instead_of="mfu"),
    Chart("Step time", "s", {"step_s": ""}, group="speed", smooth=True),
    Chart(
        "Slowest rank",
        "s per step above the mean, waiting left out",
        {"slowest_rank_s": ""},
        group="speed",
        smooth=True,
    ),
    Chart("Which rank is slowest", "its number", {"slowest_rank": ""}, group="speed"),
    Chart("Memory", "GiB, peak of rank 0", {"memory_gib": ""}, group="speed"),
    Chart("Waiting for data", "% of the time", {"data_percent": ""}, group="speed", smooth=True),
    Chart(
        "Communication of experts",
        "s per step",
        {"comm/in_flight_s": "in flight", "comm/exposed_s": "exposed"},
        group="speed",
        smooth=True,
    ),
    Chart("Communication hidden", "%", {"comm/hidden": ""}, group="speed", smooth=True, scale=100),
    Chart(
        "Bandwidth of experts' exchange",
        "GB/s per rank",
        {"comm/dispatch_gb_s": "dispatch", "comm/combine_gb_s": "combine"},
        group="speed",
        smooth=True,
    ),
    Chart(
        "Bytes of experts' exchange",
        "MB per rank and step",
        {"comm/dispatch_bytes": "dispatch", "comm/combine_bytes": "combine"},
        group="speed",
        smooth=True,
        scale=1e-6,
    ),
    Chart("Activations offloaded", "GB per step", {"offload/bytes": ""}, group="speed", scale=1e-9),
    Chart("Waiting for offloaded activations", "s per step", {"offload/wait_s": ""}, group="speed", smooth=True),
    Chart("Heaviest expert", "load over the mean of its layer, worst layer", {"moe_max/mean": ""}, group="moe"),
    Chart(
        "MaxVio",
        "heaviest load over mean, less 1",
        {"moe_maxvio": "worst layer", "moe_maxvio_floor": "random routing"},
        group="moe",
        log=True,
    ),
    Chart("Dead experts", "all layers, no token lately", {"moe_dead": ""}, group="moe"),
    Chart(
        "Router entropy and confidence",
        "0 to 1, mean over layers",
        {"moe_entropy": "entropy", "moe_confidence": "confidence"},
        group="moe",
    ),
    Chart("Router bias", "range over all layers", {"moe_bias_max": "largest", "moe_bias_min": "smallest"}, group="moe"),
    Chart("Dropped copies", "% of all", {"moe_dropped": ""}, group="moe", scale=100, rare=True),
    Chart("Auxiliary loss", "", {"moe_aux_loss": ""}, group="moe", smooth=True),
    Chart(
        "Ranks that a token goes to",
        "mean",
        {"comm/unique_ranks": "measured", "comm/unique_ranks_predicted": "predicted"},
        group="moe",
    ),
    Chart("Padded over valid rows", "", {"comm/padded_over_valid": ""}, group="moe"),
    Chart("Overflow replays", "since the start", {"overflow_replays": ""}, group="moe", rare=True),
)
GROUPS = {"training": "Training", "speed": "Speed", "moe": "Mixture of experts", "other": "Everything else"}
QUIET = {"max_loss", "time_s", "tokens_seen", "skipped_steps"}
"""Quantities that tiles, markers and axes tell of"""


def charts(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    """(those that any of the runs has data for, quantities that were left out because there were too many)."""
    found = []
    for chart in CHARTS:
        if chart.instead_of and any(_known(run, chart.instead_of) for run in runs):
            continue
        curves = {key: label for key, label in chart.curves.items() if any(_known(run, key) for run in runs)}
        if chart.further:
            more = sorted({key for run in runs for key in run.series if key.startswith(chart.further)})
            curves |= {key: key.removeprefix(chart.further) for key in more}
        if chart.rare and not any(any(run.series[key].values) for run in runs for key in curves if key in run.series):
            continue
        if curves:
            found.append(replace(chart, curves=curves))
    shown = QUIET | {key for chart in [*CHARTS, *found] for key in chart.curves}
    others = sorted({key for run in runs for key in run.series if key not in shown and _stands_alone(key, run)})
    found += [Chart(key, "", {key: ""}, group="other") for key in others[:OTHERS]]
    return found, others[OTHERS:]


def _known(run: Run, key: str) -> bool:
    return run.last(key) is not None


def _stands_alone(key: str, run: Run) -> bool:
    """Whether no phase or layer: those have pictures and tables of their own."""
    part = key.startswith(("phase/", "phase_max/", "phase_rank/")) or re.search(r"\.(mtp_)?layers\.\d+$", key)
    return not part and _known(run, key)


def payload(runs: Sequence[Run], chosen: Sequence[Chart]) -> list[dict[str, Any]]:
    """What the page draws: per chart its curves, each of one run, as {run, label, x, y} and, where points were left
    out, the means of buckets as {mx, my}. x are steps."""
    curves = sum(_known(run, key) for run in runs for chart in chosen for key in chart.curves)
    buckets = min(BUCKETS[1], max(BUCKETS[0], POINTS // 3 // max(curves, 1)))
    return [
        {
            "title": chart.title,
            "unit": chart.unit,
            "group": chart.group,
            "log": chart.log,
            "smooth": chart.smooth,
            "curves": [
                {"run": i, "label": label, "points": key.startswith("validation_")}
                | curve(run.series[key], buckets, chart.scale, chart.smooth)
                for key, label in chart.curves.items()
                for i, run in enumerate(runs)
                if _known(run, key)
            ],
        }
        for chart in chosen
    ]


def curve(series: Series, buckets: int, scale: float = 1.0, smooth: bool = True) -> dict[str, list]:
    """x and y of the points to show, and of the means if there are fewer points than values."""
    values = series.values if scale == 1.0 else [scale * value for value in series.values]
    kept = decimate.extremes(values, buckets)
    found: dict[str, list] = {
        "x": [series.steps[i] for i in kept],
        "y": [decimate.rounded(values[i]) for i in kept],
    }
    if smooth and len(kept) < len(series):
        x, y = decimate.means(series.steps, values, buckets)
        found |= {"mx": [round(step) for step in x], "my": [decimate.rounded(value) for value in y]}
    return found
