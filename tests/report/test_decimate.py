"""Decimation: whatever the curve, its extremes stay where they were, and the points are as few as promised."""

import math

from hypothesis import given
from hypothesis import strategies as st

from titan_moe.report.charts import curve
from titan_moe.report.decimate import cuts, extremes, means, rounded
from titan_moe.report.read import Series

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300)


@given(VALUES, st.integers(1, 40))
def test_extremes_stay(values, buckets):
    kept = extremes(values, buckets)
    assert kept == sorted(set(kept)) and len(kept) <= max(2 * buckets + 2, 0)
    finite = [value for value in values if not math.isnan(value)]
    shown = [values[i] for i in kept if not math.isnan(values[i])]
    if finite:
        assert min(shown) == min(finite) and max(shown) == max(finite)
    if values:
        assert kept[0] == 0 and kept[-1] == len(values) - 1


@given(VALUES, st.integers(1, 40))
def test_every_bucket_keeps_its_own_extremes(values, buckets):
    """Not only those of the whole: a small spike on a low part of the curve stays too."""
    kept = {i: values[i] for i in extremes(values, buckets)}
    for start, end in cuts(len(values), buckets):
        finite = [value for value in values[start:end] if not math.isnan(value)]
        here = [value for i, value in kept.items() if start <= i < end]
        assert {min(finite), max(finite)} <= set(here) if finite else here


@given(st.integers(0, 500), st.integers(1, 60))
def test_cuts_cover_everything_once(n, buckets):
    assert [i for start, end in cuts(n, buckets) for i in range(start, end)] == list(range(n))
    assert len(cuts(n, buckets)) == min(n, buckets)


def test_one_step_among_a_hundred_thousand():
    series = Series()
    series.steps.extend(range(1, 100_001))
    series.values.extend([2.0] * 100_000)
    series.values[61_233] = 14.5
    found = curve(series, 1000)
    assert len(found["x"]) <= 2002
    assert (61_234, 14.5) in zip(found["x"], found["y"])
    assert len(found["my"]) == 1000 and max(found["my"]) == 2.125  # in the mean of its bucket it is all but gone


def test_means_leave_out_what_is_not_finite():
    assert means([1, 2, 3, 4], [1.0, math.nan, 3.0, 5.0], 2) == ([1.0, 3.5], [1.0, 4.0])
    assert means([1, 2], [math.nan, math.nan], 1) == ([], [])


def test_json_has_no_nan():
    assert rounded(math.nan) is None and rounded(1 / 3) == 0.333333
