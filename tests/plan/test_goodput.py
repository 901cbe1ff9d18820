"""What failures cost: against a simulation that knows no formula, and the optimum against a search."""

import math
import random
from dataclasses import replace

import pytest

from titan_moe.plan.goodput import FAILURE_GPU_HOURS, HOUR, Saving, daly, young

DAY_LONG = Saving(mtbf=10_000.0, held_up=60.0, written=0.0, restart=300.0)


def simulated(saving: Saving, work: float, starts: int, seed: int) -> tuple[float, float]:
    """(goodput, its standard error), event by event: a start restores what was whole, works, saves, writes, and fails
    at a random time, in a restart too."""
    chance, kept, lived = random.Random(seed), [], []
    for _ in range(starts):
        fails, now, done, whole = chance.expovariate(1 / saving.mtbf), saving.restart, 0.0, 0.0
        under_way: list[tuple[float, float]] = []  # (when it is whole, work in it)
        while now < fails:
            now += work
            done += work
            now += saving.held_up
            under_way.append((now + saving.written, done))
        for at, content in under_way:
            if at <= fails:
                whole = content
        kept.append(whole)
        lived.append(fails)
    mean = sum(kept) / sum(lived)
    residuals = [work - mean * life for work, life in zip(kept, lived)]
    return mean, math.sqrt(sum(r * r for r in residuals)) / sum(lived)


@pytest.mark.parametrize(
    "saving",
    [
        DAY_LONG,
        replace(DAY_LONG, written=500.0),  # in the background: a failure soon after goes one further back
        replace(DAY_LONG, restart=8_000.0),  # most restarts fail too
        replace(DAY_LONG, held_up=2_000.0),  # a save takes a fifth of the time between failures
    ],
)
@pytest.mark.parametrize("times", [0.4, 1.0, 3.0])
def test_goodput_is_what_a_simulation_finds(saving, times):
    work = max(times * saving.best(), saving.least)
    goodput, error = simulated(saving, work, starts=4_000, seed=17)
    assert error < 0.03 * goodput
    assert saving.goodput(work) == pytest.approx(goodput, abs=4 * error)


def test_the_best_interval_is_the_best_in_the_simulation_too():
    best = DAY_LONG.best()
    at_best, error = simulated(DAY_LONG, best, starts=8_000, seed=3)
    for times in (0.3, 3.0):
        other, other_error = simulated(DAY_LONG, times * best, starts=8_000, seed=4)
        assert at_best - other > 3 * math.hypot(error, other_error)


@pytest.mark.parametrize("share", [1e-6, 1e-3, 0.1, 0.5, 1.0, 3.0])
def test_the_best_interval_is_where_a_search_finds_it(share):
    saving = Saving(mtbf=5e4, held_up=share * 5e4, written=0.0, restart=100.0)
    around = [5e4 * 1.01 ** (i / 4) for i in range(-4_000, 400)]
    found = max(around, key=saving.goodput)
    assert saving.best() == pytest.approx(found, rel=0.01)
    assert saving.goodput(saving.best()) >= saving.goodput(found)


def test_young_and_daly_are_its_limits():
    for share, of_young, of_daly in ((1e-6, 1e-3, 1e-6), (1e-3, 0.02, 1e-4), (0.1, 0.2, 1e-2)):
        best = Saving(mtbf=1.0, held_up=share, written=0.0, restart=0.0).best()
        assert young(share, 1.0) == pytest.approx(best, rel=of_young)
        assert daly(share, 1.0) == pytest.approx(best, rel=of_daly)


def test_a_save_is_whole_before_the_next_one_begins():
    saving = Saving(mtbf=1e6, held_up=1.0, written=5_000.0, restart=0.0)
    assert saving.best() == saving.least == 4_999.0


def test_extremes():
    assert DAY_LONG.goodput(1e9) == 0.0, "longer than anything lives"
    hopeless = Saving(mtbf=10.0, held_up=6_000.0, written=0.0, restart=1e5)
    assert 0 < hopeless.best() <= 10.0 and hopeless.goodput(hopeless.best()) == 0.0
    free = Saving(mtbf=1e5, held_up=1e-9, written=0.0, restart=0.0)
    assert free.goodput(free.best()) == pytest.approx(1.0, abs=1e-6)


def test_llama_3_kept_more_than_nine_tenths():
    """16,384 GPUs, 405 B parameters with two moments over 2 TB/s, a restart of ten minutes: "higher than 90 %" (arXiv
    2407.21783, 3.3.4)."""
    write = 405e9 * 12 / 2e12
    saving = Saving(mtbf=FAILURE_GPU_HOURS * HOUR / 16_384, held_up=write, written=0.0, restart=600.0 + write)
    assert saving.mtbf / HOUR == pytest.approx(3.1, abs=0.05)
    assert 0.9 < saving.goodput(saving.best()) < 0.95
