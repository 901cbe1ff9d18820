"""Every benchmark suite at its smallest, on a CPU: that it runs, and that its counts and comparisons are what they must
be. Times of such sizes mean nothing, and are not looked at."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness, run
from benchmarks.harness import Record


class Found(dict[str, list[Record]]):
    """Records by suite; asking for those of a suite that failed fails with its error, and costs the others nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__((path.stem, [r for r, _ in harness.read(path)]) for path in folder.glob("*.json"))
        self.errors = {path.stem: path.read_text() for path in folder.glob("*.txt")}
        self.traces = folder / "traces"

    def __missing__(self, suite: str) -> list[Record]:
        raise AssertionError(f"{suite}: {self.errors.get(suite, 'nothing was written')}")


def measured(folder: Path, suites: tuple[str, ...]) -> Found:
    """All in one process: importing takes longer than most of them."""
    script = Path(__file__).with_name("smallest.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *suites], cwd=harness.ROOT, env=environment, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return Found(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    return measured(tmp_path_factory.mktemp("suites"), (*run.SUITES, "baseline"))


def of(records: list[Record], metric: str, case: str = "", against: str | None = None) -> list[Record]:
    rows = [r for r in records if r.metric == metric and case in r.case and against in (None, r.against)]
    assert rows, f"no {metric} of {case} against {against}"
    return rows


def check(suite: str, records: list[Record]) -> None:
    """What holds of every suite's records."""
    assert records and all(r.suite == suite and r.case and r.metric for r in records)
    for r in records:
        numbers = (r.value, r.baseline, r.ratio, r.low, r.high, r.roof)
        assert all(number is None or math.isfinite(number) for number in numbers), r
        assert (r.baseline is None) == (not r.against), r
        assert r.ratio is None or r.baseline is not None, r
        assert r.low is None or r.low <= r.high, r
    keys = [(r.case, r.metric, r.against) for r in records]
    assert len(set(keys)) == len(keys), "two rows of one name"
    assert harness.table(records).count("\n") == len(records) + 1


@pytest.mark.parametrize("suite", run.SUITES)
def test_records(found, suite):
    check(suite, found[suite])


def test_layer(found):
    records = found["layer"]
    peers = {r.against for r in of(records, "forward + backward")}
    assert peers == {"torchtitan", "plain loop", "transformers, eager", "transformers, grouped_mm"}
    for r in of(records, "kept for backward"):
        assert r.ratio > 1, "ours keeps more"
    syncs = {r.against: r for r in of(records, "host syncs")}
    assert syncs["torchtitan"].value == 0, "the code that a GPU runs"
    assert syncs["plain loop"].baseline >= 4, "a `where` for each expert"
    phases = {r.metric: r.value for r in records if r.case.endswith("phases")}
    assert phases.keys() >= {"plan", "dispatch", "experts", "combine", "backward"}
    (total,) = of(records, "launches", against="torchtitan")
    assert total.value == sum(value for metric, value in phases.items() if metric.startswith("launches, "))


def test_step(found):
    records = found["step"]
    gains = [r.ratio for r in records if "over the row above" in r.metric]
    (whole,) = of(records, "whole step")
    assert len(gains) == 3 and whole.unit == "tokens/s"
    assert whole.value > 0 and whole.baseline > 0
    phases = {r.metric for r in records if r.case.endswith("phases")}
    assert {"attention", "experts"} <= phases


def test_the_baseline_computes_what_we_do(found):
    """Same data, same weights, same loss, but for roundings to bf16 in other places: at the first step, and after
    updates, in which a missing gradient or another learning rate would show."""
    losses = {case: [] for case in ("torchtitan", "+ attention", "+ MoE", "ours")}
    for r in found["baseline"]:
        losses[r.case].append(r.value)
    assert losses["ours"][2] != losses["ours"][0]
    for case, values in losses.items():
        assert values == pytest.approx(losses["ours"], rel=3e-4), case


def test_dispatch(found):
    records = found["dispatch"]
    (floor,) = of(records, "payload / floor")
    assert 0.9 < floor.value < 1.1, "few tokens, but near"
    (fixed,) = of(records, "rows each way", "dedup, worst case")
    assert fixed.value == 1.0, "a row for the other rank's every token"
    (copies,) = of(records, "rows each way", "2 ranks, D 16, alltoall, worst case")
    assert copies.value == 8.0


def test_data(found):
    assert {r.case for r in found["data"]} >= {"bytes, text", "bytes, .jsonl", "bytes, .parquet", "bytes, token ids"}


def test_checkpoint(found):
    assert {r.against for r in of(found["checkpoint"], "blocked")} == {"torchtitan"}


def test_precision(found):
    errors = {r.case.partition(":")[0]: r.value for r in of(found["precision"], "error of the gradient")}
    assert errors["bf16"] < 2 < errors["mxfp8"] < errors["nvfp4"] < 100, "per cent"


def test_offload(found):
    (all_five,) = of(found["offload"], "MoE layer keeps", "offload all five")
    (moved,) = of(found["offload"], "MoE layer moves", "offload all five")
    assert all_five.baseline - all_five.value >= moved.value > 0
    (norms,) = of(found["offload"], "MoE layer keeps", "recompute norms")
    assert norms.ratio > 1


def test_overlap(found):
    records = found["overlap"]
    under = {r.case: r.value for r in of(records, "under shared")}
    none, shared = (f"2 ranks, 10 ns/byte, overlap {mode}" for mode in ("none", "shared_expert"))
    assert under.keys() == {none, shared}
    assert under[none] == 0 < under[shared] <= 100, "transfers are under way while the shared expert runs, or are not"
    traced = [json.loads(line) for line in (found.traces / "overlap.jsonl").read_text().splitlines()]
    assert {interval["mode"] for interval in traced} == {"none", "shared_expert"}
    assert all(interval["start"] <= interval["end"] for interval in traced)


def test_scaling(found):
    records = found["scaling"]
    assert any("region" in r.metric and r.target == "value <= 1.1" for r in records)
    (metadata,) = of(records, "metadata of a rank, 2 ranks", "dedup")
    assert metadata.value > 0


def test_gpu_on_a_cpu(found):
    records = found["gpu"]
    cases = {r.case for r in records}
    assert any(case.startswith("experts of debugmodel") and case.endswith("grouped_mm") for case in cases)
    assert {"step, torchtitan", "step, ours", "step, ours, again", "step, mxfp8"} <= cases
    assert "step, CUDA graph" not in cases, "a CPU has none"


@pytest.mark.slow
def test_suites_outside_of_all(tmp_path):
    found = measured(tmp_path, run.MORE_SUITES)
    for suite in run.MORE_SUITES:
        check(suite, found[suite])
    dropped = {r.case: r.value for r in of(found["capacity"], "dropped")}
    assert dropped["dropless"] == 0 < dropped["factor 1.0, probs"]
    (explained,) = of(found["phases"], "explained")
    assert 50 < explained.value <= 100
