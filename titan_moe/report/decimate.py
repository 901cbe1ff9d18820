"""Fewer points of a long curve, such that what a person looks for in it stays: its extremes.

A screen has some thousand columns of pixels, and 100,000 points in them make a page that is slow and no clearer. Taking
every hundredth point, or the mean of a hundred, hides a spike of one step, which is just what one looks for. So the
points are cut into buckets of as many neighbours, and of each bucket the smallest and the largest value are kept, at
the very steps where they were; and the curve's first and last point. Means of the buckets, for a smoothed curve, are
beside them: smoothing extremes would show the middle between them, not the mean.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean


def extremes(values: Sequence[float], buckets: int) -> list[int]:
    """Indices, ascending, of the points to keep: at most 2 buckets + 2. NaN is no value: a bucket of nothing else keeps
    one, as the gap that it is."""
    n = len(values)
    if n <= 2 * buckets + 2:
        return list(range(n))
    kept = {0, n - 1}
    for start, end in cuts(n, buckets):
        finite = [i for i in range(start, end) if not math.isnan(values[i])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        else:
            kept.add(start)
    return sorted(kept)


def means(steps: Sequence[int], values: Sequence[float], buckets: int) -> tuple[list[float], list[float]]:
    """(mean step, mean of the finite values) of each bucket that has any."""
    found: list[tuple[float, float]] = []
    for start, end in cuts(len(values), buckets):
        finite = [i for i in range(start, end) if not math.isnan(values[i])]
        if finite:
            of_steps, of_values = ([of[i] for i in finite] for of in (steps, values))
            found.append((fmean(of_steps), fmean(of_values)))
    return [step for step, _ in found], [value for _, value in found]


def cuts(n: int, buckets: int) -> list[tuple[int, int]]:
    """(start, end) of at most `buckets` ranges that cover n points, as equal as whole numbers allow."""
    buckets = min(n, buckets)
    ends = [n * i // buckets for i in range(buckets + 1)] if buckets else []
    return list(pairwise(ends))


def rounded(value: float, digits: int = 6) -> float | None:
    """A number with as many significant digits as a screen can show; None for NaN, which JSON does not have."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
