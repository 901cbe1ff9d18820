"""A run in a few numbers and sentences: what stands at the top of the page, and in a terminal."""

import math
import statistics
from dataclasses import dataclass

from titan_moe import stop_file
from titan_moe.report.read import Run, Series

UNEVEN = 3.0
"""Load of an expert over the mean of its layer that is worth a warning"""
WAITS = 5.0
"""Percent of the time spent waiting for data that is"""


@dataclass(frozen=True)
class Number:
    """A tile: `text` is the value as it is shown, `note` says more in small print."""

    label: str
    text: str
    note: str = ""


def typical(series: Series | None) -> float | None:
    """The median of the finite values in the last quarter: neither start-up nor one slow step moves it."""
    if series is None:
        return None
    newest = series.values[-max(1, len(series) // 4) :]
    finite = [value for value in newest if math.isfinite(value)]
    return statistics.median(finite) if finite else series.last()


def numbers(run: Run) -> list[Number]:
    """The key numbers, those that are known."""
    found: list[Number] = []

    def add(label: str, value: float | None, text: str, note: str = "") -> None:
        if value is not None:
            found.append(Number(label, text.format(value), note))

    steps = f"of {run.planned_steps:,}" if run.planned_steps else ""
    add("step", run.last_step or None, "{:,}", steps)
    add("loss", run.last("loss"), "{:.4f}", at(run, "loss"))
    add("validation loss", run.last("validation_loss"), "{:.4f}", at(run, "validation_loss"))
    for key in (key for key in run.series if key.startswith("validation_loss/")):
        name = key.removeprefix("validation_loss/")
        perplexity = run.last(f"validation_perplexity/{name}")
        add(f"loss on {name}", run.last(key), "{:.4f}", "" if perplexity is None else f"perplexity {show(perplexity)}")
    world = run.facts.get("world")
    rate = typical(run.series.get("tps"))
    all_devices = f"of {large(rate * world)} on all {world:,}" if rate and isinstance(world, int) and world > 1 else ""
    add("tokens/s, device", rate, "{:,.0f}", all_devices)
    add("MFU", typical(run.series.get("mfu")), "{:.1f} %")
    if run.last("mfu") is None:
        add("TFLOPS, device", typical(run.series.get("tflops")), "{:,.3g}")
    add("step time", typical(run.series.get("step_s")), "{:,.3g} s")
    tokens = run.last("tokens_seen")
    found += [] if tokens is None else [Number("tokens seen", large(tokens))]
    add("memory", run.last("memory_gib"), "{:,.2f} GiB", "peak of rank 0")
    worst = worst_layer(run)
    add("heaviest expert", run.last("moe_max/mean"), "{:.2f} ×", f"the mean, {worst[0] if worst else 'worst layer'}")
    add("skipped steps", run.last("skipped_steps"), "{:,.0f}")
    if started := attempts(run):
        found.append(Number("restarts", f"{started - 1:,}"))
    return found


def at(run: Run, key: str) -> str:
    """Where the newest finite value of a quantity is from, if that is not the last step."""
    series = run.series[key] if key in run.series else Series()
    known = [step for step, value in zip(series.steps, series.values) if math.isfinite(value)]
    return "" if not known or known[-1] == run.last_step else f"at step {known[-1]:,}"


def attempts(run: Run) -> int | None:
    """How often the run was started, as far as anything tells."""
    attempt = run.facts.get("attempt")
    told = attempt if isinstance(attempt, int) else 0
    seen = max([number for _, number in run.restarts], default=1 if run.steps else 0)
    return max(told, seen) or None


def layers_of(run: Run, quantity: str) -> dict[str, Series]:
    """Series of a quantity by layer: "layers.3" -> that of "moe_dead.layers.3"."""
    start = f"{quantity}."
    return {key.removeprefix(start): series for key, series in run.series.items() if key.startswith(start)}


def layer_order(name: str) -> tuple[str, int]:
    """Sorts layers.2 before layers.10, and the layers before those of multi-token prediction."""
    start, _, number = name.rpartition(".")
    return start, int(number) if number.isdecimal() else 0


def worst_layer(run: Run) -> tuple[str, float] | None:
    """(layer, load of its heaviest expert over the mean) that is most uneven in its newest line."""
    last = {layer: series.last() for layer, series in layers_of(run, "moe_max/mean").items()}
    known = {layer: value for layer, value in last.items() if value is not None}
    if not known:
        return None
    layer = max(known, key=known.__getitem__)
    return layer, known[layer]


def warnings(run: Run) -> list[str]:
    """What somebody should look at, beside what is missing from the folder."""
    found = []
    loss = run.series.get("loss", Series())
    if loss and not math.isfinite(loss.values[-1]):
        found.append(f"the loss of the last step, {loss.steps[-1]:,}, is not finite")
    if skipped := run.last("skipped_steps"):
        found.append(f"skipped steps: {skipped:,.0f} ({skipped / max(run.last_step, 1):.2%})")
    if dead := run.last("moe_dead"):
        by_layer = {layer: series.last() or 0 for layer, series in layers_of(run, "moe_dead").items()}
        worst = max(by_layer, key=by_layer.__getitem__, default="")
        where = f", {by_layer[worst]:,.0f} of them in {worst}" if worst and by_layer[worst] else ""
        found.append(f"dead experts: {dead:,.0f} without a token lately{where}")
    heaviest, worst = run.last("moe_max/mean"), worst_layer(run)
    if heaviest is not None and heaviest > UNEVEN:
        where = f" (worst in detail: {worst[0]}, {worst[1]:.2f})" if worst else ""
        found.append(f"uneven load: an expert gets {heaviest:.2f} times the mean of its layer{where}")
    if dropped := run.last("moe_dropped"):
        found.append(f"{dropped:.2%} of the copies are dropped by the capacity factor")
    if replays := run.last("overflow_replays"):
        found.append(f"steps and validations that ran again because a receive buffer was too small: {replays:,.0f}")
    waits = typical(run.series.get("data_percent"))
    if waits is not None and waits > WAITS:
        found.append(f"{waits:.1f} % of the time is spent waiting for data")
    if run.alive and stop_file.asked(run.folder):
        found.append("the run has been asked to stop, and will after its step")
    return found


def large(value: float) -> str:
    """1,234 as it is; 12.3 M, 4.56 B, 1.2 T beyond."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:,.3g} {letter}" if value < 1000 * size else f"{value / size:,.0f} {letter}"
    return f"{value:,.0f}"


def show(value: float | None) -> str:
    """A number of unknown kind, short."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.5g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.3e}"
