"""scaling.png: efficiency over the number of GPUs, and goodput over the time between checkpoints."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from titan_moe.plan.pictures import COLORS, EDGE, GRID, INK, PALE, WIDTH, Canvas, job_line
from titan_moe.plan.report import Plan
from titan_moe.plan.scaling import Scaled

HEIGHT, TOP, BOTTOM, GAP, LEFT = 475, 130, 60, 90, 50
MINUTES = (1, 3, 10, 30, 100, 300, 1000, 3000)
POINTS = 200  # of a curve
Point = tuple[float, float]


def draw(plan: Plan, path: Path) -> Path:
    """Efficiency with weak and strong scaling on the left; on the right, for each size of the weak one, goodput over
    minutes between checkpoints with the best marked."""
    rows = [row for row in plan.scaling if isinstance(row, Scaled)]
    weak = [row for row in rows if row.how == "weak"]
    canvas = Canvas(HEIGHT)
    canvas.heading(title(weak), [job_line(plan)])
    middle = (WIDTH - GAP) / 2
    _efficiency(canvas, rows, EDGE + LEFT, middle)
    _goodput(canvas, weak, middle + GAP, WIDTH - EDGE)
    return canvas.save(path, summary(plan))


def title(weak: Sequence[Scaled]) -> str:
    last = weak[-1]
    return (
        f"{last.gpus:,} GPUs: {last.efficiency:.1%} of the speed per GPU, {last.failures.goodput:.1%} of the time kept "
        f"with a checkpoint every {last.failures.seconds / 60:,.3g} min"
    )


def summary(plan: Plan) -> str:
    """The numbers in the picture, which it carries as metadata."""
    rows = (row for row in plan.scaling if isinstance(row, Scaled))
    return "; ".join(
        f"{row.how} {row.gpus:,}: {row.efficiency:.4f}, {row.failures.steps:,} steps, {row.failures.goodput:.4f}"
        for row in rows
    )


def _axes(
    canvas: Canvas, left: float, right: float, x: tuple[float, float], low: float, name: str
) -> Callable[[float, float], Point]:
    """Frame and percentages from `low` to 1; returns where a point of logarithmic x and share y lies."""
    bottom = HEIGHT - BOTTOM
    span = math.log(x[1] / x[0]) or 1.0

    def at(value: float, share: float) -> Point:
        return left + math.log(value / x[0]) / span * (right - left), bottom - (share - low) / (1 - low) * (
            bottom - TOP
        )

    step = next(s for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if (1 - low) / s <= 6)
    for i in range(int((1 - low) / step + 1e-9) + 1):
        y = at(x[0], 1 - i * step)[1]
        canvas.line(left, y, right, y, GRID)
        canvas.text(left - 8, y, f"{1 - i * step:.4g}" if step < 0.01 else f"{1 - i * step:.0%}", 13, PALE, "rm")
    canvas.text(left, TOP - 18, name, 15)
    return at


def _curve(canvas: Canvas, points: Sequence[Point], color: str, width: float = 2) -> None:
    for (x0, y0), (x1, y1) in pairwise(points):
        canvas.line(x0, y0, x1, y1, color, width)


def _dot(canvas: Canvas, at: Point, color: str) -> None:
    canvas.box(at[0] - 5, at[1] - 5, at[0] + 5, at[1] + 5, color)


def _floor(share: float) -> float:
    """A round share below."""
    return max(0.0, math.floor(10 * share - 1e-9) / 10)


def _efficiency(canvas: Canvas, rows: Sequence[Scaled], left: float, right: float) -> None:
    sizes = sorted({row.gpus for row in rows})
    low = _floor(min(row.efficiency for row in rows))
    top = max(1.0, *(row.efficiency for row in rows))
    at = _axes(canvas, left, right, (sizes[0], sizes[-1]), low, "Tokens/s per GPU, of this plan's")
    for size in sizes:
        x = at(size, low)[0]
        canvas.text(x, HEIGHT - BOTTOM + 18, f"{size:,}", 13, PALE, "mm")
    canvas.text(right, HEIGHT - BOTTOM + 40, "GPUs", 13, PALE, "rm")
    for i, how in enumerate(("weak", "strong")):
        # More than the plan's own speed, as smaller jobs may have, is drawn at the upper edge.
        mine = [(at(row.gpus, min(row.efficiency, 1.0)), row) for row in rows if row.how == how]
        _curve(canvas, [point for point, _ in mine], COLORS[i])
        for point, _ in mine:
            _dot(canvas, point, COLORS[i])
        if mine:
            x = left + 130 * i
            canvas.box(x, HEIGHT - BOTTOM + 34, x + 14, HEIGHT - BOTTOM + 48, COLORS[i])
            canvas.text(x + 20, HEIGHT - BOTTOM + 41, f"{how} scaling", 13)
    if top > 1:
        canvas.text(right, TOP - 18, f"up to {top:.0%}", 13, PALE, "rm")


def _goodput(canvas: Canvas, rows: Sequence[Scaled], left: float, right: float) -> None:
    best = [row.failures.seconds / 60 for row in rows]
    shown = [m for m in MINUTES if min(best) / 10 <= m <= max(best) * 10]
    shown = shown if len(shown) > 1 else list(MINUTES)
    low = _floor(min(row.failures.goodput for row in rows) - 0.05)
    at = _axes(canvas, left, right, (shown[0], shown[-1]), low, "Time kept, over minutes between checkpoints")
    for minutes in shown:
        canvas.text(at(minutes, low)[0], HEIGHT - BOTTOM + 18, f"{minutes:g}", 13, PALE, "mm")
    canvas.text(right, HEIGHT - BOTTOM + 40, "minutes, dots: the best", 13, PALE, "rm")
    for i, row in enumerate(rows):
        saving, color = row.failures.saving, COLORS[i % len(COLORS)]
        times = (shown[0] * (shown[-1] / shown[0]) ** (j / POINTS) for j in range(POINTS + 1))
        seen = [(m, saving.goodput(60 * m)) for m in times if 60 * m >= saving.least]
        _curve(canvas, [at(m, share) for m, share in seen if share >= low], color)
        x = left + 130 * i
        canvas.box(x, HEIGHT - BOTTOM + 34, x + 14, HEIGHT - BOTTOM + 48, color)
        canvas.text(x + 20, HEIGHT - BOTTOM + 41, f"{row.gpus:,} GPUs", 13)
        if shown[0] <= row.failures.seconds / 60 <= shown[-1]:
            _dot(canvas, at(row.failures.seconds / 60, row.failures.goodput), INK)
