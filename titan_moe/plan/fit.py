"""Fits the planner's constants and writes constants.toml: `python -m titan_moe.plan.fit` (a few minutes).

The data are the published runs with a layout, and the what-if ladder, whose 13 rungs share one configuration and count
as two rows. Held out, so that they test the fit: the H800 trace, the overlap and global-batch differences, and, in
turn, all runs of one (model, hardware) cell. Leaving out single runs would leak: a cell's runs share what is special to
it.

Minimized is the sum of squares of

    ln(predicted / measured) / SIGMA          of each run (half as heavy where its recipe is uncertain)
    ln(constant / prior) / width              of each constant, width a quarter of its range in logarithm

by Levenberg-Marquardt in the constants' logarithms, kept inside their ranges. The second kind makes a constant that the
data say nothing of stay at its prior, and one that leaves it cost something.

It also fits two wrong models, one without expert-parallel communication and one without the host. They are kept in the
file to show which checks reject them.
"""

import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from functools import lru_cache, partial
from pathlib import Path

from titan_moe.plan import bands, whatif
from titan_moe.plan import constants as constants_file
from titan_moe.plan.constants import Constants, Described
from titan_moe.plan.job import Job
from titan_moe.plan.published import RUNS, Run, read, runs_of
from titan_moe.plan.step import tokens_per_s

SIGMA = 0.06
LADDER_WEIGHT = math.sqrt(2 / len(whatif.LADDER))
UNCERTAIN_WEIGHT = 0.5
TINY_STEP = 0.01  # in ln(constant), for derivatives

WITHOUT = {"communication": {"comm": 1e9, "overlap_miss": 1e-9}, "host": {"host_us": 1e-9}}
"""Constants that switch a cause off"""


def residuals(values: dict[str, float], runs: Sequence[Run], known: list[Described]) -> list[float]:
    """What is minimized, before squares."""
    c = Constants(**values)
    found = []
    for run in runs:
        weight = UNCERTAIN_WEIGHT if run.uncertain else 1.0
        found.append(weight * math.log(_rate(run.job, c) / run.measured) / SIGMA)
    for rung in _ladder(c):
        found.append(LADDER_WEIGHT * math.log(rung.predicted / rung.measured) / SIGMA)
    for each in known:
        width = math.log(each.high / each.low) / 4
        found.append(math.log(values[each.name] / each.prior) / width)
    return found


# The refits without a cell begin at the same constants: they share these.
@lru_cache(maxsize=4096)
def _rate(job: Job, c: Constants) -> float:
    return tokens_per_s(job, c=c)


@lru_cache(maxsize=256)
def _ladder(c: Constants) -> list[whatif.Check]:
    return whatif.ladder(c)


def fit(
    runs: Sequence[Run], start: dict[str, float] | None = None, fixed: dict[str, float] | None = None, rounds: int = 8
) -> dict[str, float]:
    """The constants fitted to `runs`, those in `fixed` as they are given there."""
    known = [each for each in constants_file.described() if each.name not in (fixed or {})]
    values = {each.name: each.prior for each in constants_file.described()} | (start or {}) | (fixed or {})
    limits = {each.name: (each.low, each.high) for each in known}
    current = residuals(values, runs, known)
    damping = 0.01
    for _ in range(rounds):
        columns = []
        for each in known:
            step = TINY_STEP if values[each.name] * math.exp(TINY_STEP) <= each.high else -TINY_STEP
            moved = residuals({**values, each.name: values[each.name] * math.exp(step)}, runs, known)
            columns.append([(after - before) / step for after, before in zip(moved, current)])
        normal = [[_dot(a, b) for b in columns] for a in columns]
        downhill = [-_dot(a, current) for a in columns]
        before = _dot(current, current)
        for _ in range(5):
            damped = [[x * (1 + damping) if i == j else x for j, x in enumerate(row)] for i, row in enumerate(normal)]
            change = dict(zip((each.name for each in known), solve(damped, downhill)))
            tried = dict(values)
            for name, step in change.items():
                low, high = limits[name]
                tried[name] = min(max(values[name] * math.exp(max(min(step, 0.5), -0.5)), low), high)
            after = residuals(tried, runs, known)
            if _dot(after, after) < before:
                values, current, damping = tried, after, damping / 3
                break
            damping *= 4
        if before - _dot(current, current) < 0.01:
            break
    return values


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b))


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x with matrix x = right, by Gaussian elimination with pivoting."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i])]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - sum(rows[i][k] * x[k] for k in range(i + 1, n))) / rows[i][i]
    return x


def without_cell(cell: str, runs: Sequence[Run], start: dict[str, float]) -> dict[str, float]:
    """The constants fitted to all runs but those of one cell."""
    return fit([run for run in runs if run.cell != cell], start, rounds=2)


def left_out_errors(runs: Sequence[Run], cells: dict[str, dict[str, float]]) -> list[tuple[Job, float]]:
    """(job, measured / predicted - 1) of each run, predicted without its cell."""
    return [(run.job, run.measured / tokens_per_s(run.job, c=Constants(**cells[run.cell])) - 1) for run in runs]


# ---------------------------------------------------------------------------------------------------------------------
# The file


def write(
    values: dict[str, float],
    cells: dict[str, dict[str, float]],
    wrong: dict[str, dict[str, float]],
    errors: Sequence[tuple[Job, float]],
    path: Path = constants_file.FILE,
) -> None:
    """Write constants.toml, with the ranges, priors and sources that it has now."""
    held = bands.half_width([error for _, error in errors])
    lines = [
        "# The planner's constants: written by `python -m titan_moe.plan.fit`, which says how. Edit ranges, priors and",
        "# sources here and run it again.",
        "",
        "[fit]",
        f"date = {_text(date.today().isoformat())}",
        f"runs = {len(errors)}",
        f"band = [{-held:.3f}, {held:.3f}]",
    ]
    for name, found in bands.by_group(errors).items():
        lines += ["", f"[bands.{_text(name)}]", f"runs = {len(found)}", f"half = {bands.half_width(found):.3f}"]
    for each in constants_file.described():
        lines += ["", f"[constants.{each.name}]"]
        lines += [
            f"value = {values[each.name]:.5g}",
            *(f"{key} = {value!r}" for key, value in asdict(each).items() if key in ("prior", "low", "high")),
            f"unit = {_text(each.unit)}",
            f"source = {_text(each.source)}",
        ]
    for table, entries in (("cells", cells), ("without", wrong)):
        for name, found in entries.items():
            lines += ["", f"[{table}.{_text(name)}]", *(f"{key} = {value:.5g}" for key, value in found.items())]
    path.write_text("\n".join(lines) + "\n")


def _text(value: str) -> str:
    assert '"' not in value and "\\" not in value
    return f'"{value}"'


def main() -> None:
    runs = runs_of(read(RUNS))
    values = fit(runs)
    print("fitted:", ", ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)
    names = sorted({run.cell for run in runs})
    with ProcessPoolExecutor() as pool:
        refit: Callable[[str], dict[str, float]] = partial(without_cell, runs=runs, start=values)
        cells = dict(zip(names, pool.map(refit, names)))
        wrong = dict(zip(WITHOUT, pool.map(partial(fit, runs, values), WITHOUT.values())))
    write(values, cells, wrong, left_out_errors(runs, cells))
    print(f"written: {constants_file.FILE}")


if __name__ == "__main__":
    sys.exit(main())
