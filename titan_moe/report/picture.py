"""The main charts as one PNG, where a page cannot be opened: in a chat, a mail, a pull request.

Drawn with Pillow as the planner's pictures are, which comes with tensorboard.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from titan_moe.plan.pictures import ALARM, COLORS, EDGE, GRID, INK, PALE, WIDTH, Canvas
from titan_moe.report import heat, phases
from titan_moe.report.charts import curve
from titan_moe.report.decimate import cuts
from titan_moe.report.read import Run
from titan_moe.report.summary import numbers
from titan_moe.whole_file import replacing

PANELS = (
    ("Loss", ("loss", "validation_loss")),
    ("Gradient norm", ("grad_norm",)),
    ("Tokens/s per device", ("tps",)),
    ("Heaviest expert, load over mean", ("moe_max/mean",)),
)
PANEL_HEIGHT, GAP, MARGIN = 210, 40, 58
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#c264a0", "#a67c00", "#3a9bd1", "#6b4fbb", "#5f6672")
"""As on the page"""
BUCKETS = 300


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture. Raises ValueError without Pillow, OSError where it cannot be written."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ValueError("--png needs Pillow, which the training environment has; or pip install pillow") from error
    panels = [panel for panel in PANELS if any(key in run.series for run in runs for key in panel[1])]
    with_phases = next((run for run in runs if phases.names(run)), None)
    maps = next((run for run in runs if heat.overview(run)), None)
    slots = len(panels) + (with_phases is not None) + (maps is not None)
    rows = (slots + 1) // 2
    head = 60 + 24 * min(len(runs), 8)
    canvas = Canvas(head + rows * (PANEL_HEIGHT + GAP) + EDGE)
    _heading(canvas, runs)
    places = [(EDGE + (i % 2) * (WIDTH - EDGE) / 2, head + (i // 2) * (PANEL_HEIGHT + GAP)) for i in range(slots)]
    for (title, keys), (x, y) in zip(panels, places):
        _curves(canvas, runs, title, keys, x, y)
    rest = iter(places[len(panels) :])
    if with_phases is not None:
        _phases(canvas, with_phases, *next(rest))
    if maps is not None:
        _heat(canvas, maps, *next(rest))
    with replacing(path) as file:
        canvas.image.quantize(128).save(file, "PNG", optimize=True)


def _heading(canvas: Canvas, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs[:8]):
        y = EDGE + 8 + 24 * i
        told = "   ".join(
            f"{n.label} {n.text}" for n in numbers(run) if n.label in ("step", "loss", "tokens/s, device")
        )
        canvas.box(EDGE, y - 7, EDGE + 14, y + 7, RUN_COLORS[i % 8])
        name = run.name if len(run.name) <= 60 else f"{run.name[:57]}..."
        canvas.text(EDGE + 22, y, f"{name}   {run.state()}   {told}", 16)


def _frame(canvas: Canvas, title: str, x: float, y: float) -> tuple[float, float, float, float]:
    """Title of a panel; returns where its picture goes: left, top, right, bottom."""
    canvas.text(x, y, title, 15)
    return x + MARGIN, y + 18, x + (WIDTH - EDGE) / 2 - EDGE, y + PANEL_HEIGHT


def _curves(canvas: Canvas, runs: Sequence[Run], title: str, keys: Sequence[str], x: float, y: float) -> None:
    left, top, right, bottom = _frame(canvas, title, x, y)
    found = [
        (i, key, curve(run.series[key], BUCKETS))
        for key in keys
        for i, run in enumerate(runs)
        if key in run.series and run.series[key].last() is not None
    ]
    values = [value for _, _, each in found for value in each["y"] if value is not None]
    steps = [step for _, _, each in found for step in each["x"]]
    if not values:
        canvas.text(left, (top + bottom) / 2, "nothing finite", 13, PALE)
        return
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - abs(low or 1) / 2, high + abs(high or 1) / 2)
    first, last = min(steps), max(max(steps), min(steps) + 1)
    for share in (0.0, 0.5, 1.0):
        line = bottom - share * (bottom - top)
        canvas.line(left, line, right, line, GRID)
        canvas.text(left - 6, line, f"{low + share * (high - low):.4g}", 12, PALE, "rm")
    for step, anchor, at in ((first, "lm", left), (last, "rm", right)):
        canvas.text(at, bottom + 12, f"{step:,}", 12, PALE, anchor)

    def place(step: float, value: float) -> tuple[float, float]:
        return left + (step - first) / (last - first) * (right - left), bottom - (value - low) / (high - low) * (
            bottom - top
        )

    for i, key, each in found:
        dots = key == "validation_loss"
        color = INK if dots and len(runs) == 1 else RUN_COLORS[i % 8]
        points = [place(step, value) if value is not None else None for step, value in zip(each["x"], each["y"])]
        for start, end in pairwise(points):
            if start and end and not dots:
                canvas.line(*start, *end, color, 1.3)
        for point in points if dots or len(points) == 1 else []:
            if point:
                canvas.box(point[0] - 3, point[1] - 3, point[0] + 3, point[1] + 3, color)
    for i, run in enumerate(runs):
        for step, _ in (mark for mark in run.skips() if first <= mark[0] <= last):
            at = place(step, high)[0]
            canvas.line(at, top, at, top + 8, ALARM, 1.5)
        for step, _ in (mark for mark in run.restarts if first <= mark[0] <= last):
            at = place(step, high)[0]
            canvas.line(at, top, at, bottom, RUN_COLORS[i % 8], 0.5)


def _phases(canvas: Canvas, run: Run, x: float, y: float) -> None:
    found = phases.inside(run)[: len(COLORS)]
    left, top, right, _ = _frame(canvas, f"Seconds of a step by phase, {run.name[:40]}", x, y)
    left += 60
    high = min(24.0, (PANEL_HEIGHT - 24) / max(len(found), 1))
    largest = max((phase.seconds for phase in found), default=0) or 1.0
    for i, phase in enumerate(found):
        line = top + (i + 0.5) * high
        end = left + phase.seconds / largest * (right - left - 60)
        canvas.text(left - 8, line, phase.name.replace("_", " "), 12, PALE, "rm")
        canvas.box(left, line - high * 0.36, max(end, left + 1), line + high * 0.36, COLORS[i])
        canvas.text(end + 6, line, f"{phase.seconds:.3g}", 12)


def _heat(canvas: Canvas, run: Run, x: float, y: float) -> None:
    grid = heat.overview(run)
    assert grid is not None
    left, top, right, bottom = _frame(
        canvas, f"Heaviest expert by layer, {run.name[:40]}: 1 (pale) to 4 times the mean", x, y
    )
    high, wide = (bottom - top) / len(grid.rows), (right - left) / len(grid.ends)
    for row, cells in enumerate(grid.cells):
        for column, byte in enumerate(cells):
            share = min(max(math.log2(heat.ratio_of(byte) or 1), 0) / 2, 1)
            red, green, blue = (round(a + (b - a) * share) for a, b in zip((240, 241, 243), (190, 70, 0)))
            at = left + column * wide, top + row * high
            canvas.box(*at, at[0] + wide, at[1] + high, f"#{red:02x}{green:02x}{blue:02x}")
    for start, _ in cuts(len(grid.rows), min(len(grid.rows), 8)):
        canvas.text(left - 6, top + (start + 0.5) * high, grid.rows[start].removeprefix("layers."), 11, PALE, "rm")
    canvas.text(left, bottom + 12, f"{run.steps[0]:,}", 12, PALE, "lm")
    canvas.text(right, bottom + 12, f"{grid.ends[-1]:,}", 12, PALE, "rm")
