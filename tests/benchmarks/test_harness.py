"""Ratios, spreads, targets, tables and JSON of the benchmarks, the command line, and that the page shows the file."""

import json
import os
from itertools import count

import pytest
import torch

from benchmarks import harness, publish, roofline, run, wire
from benchmarks.harness import Options, Record, Times, interleaved, versus
from titan_moe.plan import traffic


def record(**fields) -> Record:
    return Record(**{"suite": "layer", "case": "a", "metric": "time", "value": 2.0, **fields})


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_a_ratio_above_one_is_better_whichever_way_is_better():
    assert versus(2.0, 3.0) == {"baseline": 3.0, "ratio": 1.5}
    assert versus(3.0, 2.0, more_is_better=True) == {"baseline": 2.0, "ratio": 1.5}
    assert versus(0.0, 2.0) == {"baseline": 2.0, "ratio": None}, "nothing at all is not so and so many times better"


def test_ratios_are_taken_within_a_repetition():
    """A minute in which everything takes ten times as long changes no ratio."""
    times = Times({"ours": [1.0, 10.0, 1.0], "stock": [2.0, 20.0, 3.0]})
    found = times.against("ours", "stock")
    assert found["ratio"] == 2.0 and found["against"] == "stock"
    assert (found["low"], found["high"]) == (2.0, 2.5)
    assert (found["value"], found["baseline"]) == (1000.0, 3000.0)


@pytest.mark.parametrize(
    ("target", "fields", "met"),
    [
        ("ratio >= 1.5", {"ratio": 1.5}, True),
        ("ratio >= 1.5", {"ratio": 1.49}, False),
        ("ratio >= 1.5", {}, False),
        ("value <= 12", {"value": 12.0}, True),
        ("value <= 12", {"value": 12.1}, False),
        ("roof >= 0.7", {"roof": 0.71}, True),
        ("", {}, None),
    ],
)
def test_targets(target, fields, met):
    assert record(target=target, **fields).met is met


def test_exponents():
    sizes = [128, 256, 1024]
    for p in (0.0, 1.0, 2.0):
        assert harness.exponent(sizes, [3.0 * size**p for size in sizes]) == pytest.approx(p)
    assert 1.0 < harness.exponent(sizes, [size + 0.01 * size**2 for size in sizes]) < 2.0


def test_every_variant_runs_in_every_repetition_on_inputs_of_its_own():
    clock, log = count(), []

    def variant(name: str):
        def prepare():
            log.append(f"draw {name}")
            return lambda: log.append(name)

        return prepare

    times = interleaved({n: variant(n) for n in "abc"}, 20, warm_up=1, clock=lambda: float(next(clock)))
    assert times.seconds == dict.fromkeys("abc", [1.0] * 20)
    calls = log[1::2]
    assert log[::2] == [f"draw {name}" for name in calls]
    orders = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(orders) == 21 and all(sorted(order) == list("abc") for order in orders)
    assert len(set(orders)) > 1, "always the same order"


def test_a_budget_ends_repetitions_but_three_are_made():
    assert len(interleaved({"a": lambda: list}, 100, budget_s=0.0).seconds["a"]) == 3


def test_floors(monkeypatch):
    monkeypatch.setattr(roofline, "matmul_peak", lambda *_: 100.0)
    monkeypatch.setattr(roofline, "bandwidth", lambda *_: 10.0)
    assert roofline.floor(1000, 1, torch.bfloat16) == 10.0, "FLOPs take longer"
    assert roofline.floor(1, 1000, torch.bfloat16) == 100.0, "bytes take longer"
    assert roofline.floor(0, 0, torch.bfloat16) == 0.0


def test_first_steps_and_peaks_are_those_of_the_process():
    """Whatever the size of the process that starts it."""
    from benchmarks.step import first_step, peak_mib

    script = "print('step:  1  loss', end=''); x = bytearray(64 * 2**20); print(flush=True); print('step:  2')"
    seconds, peak = first_step(["-c", script])
    assert 0 < seconds < 60
    assert 64 < peak < 200 < peak_mib(os.getpid()), "torch alone takes more"
    with pytest.raises(RuntimeError, match=r"ended with 3:\nso sad"):
        first_step(["-c", "print('so sad'); raise SystemExit(3)"])


def test_routing_reaches_as_many_places_as_it_is_counted_to():
    """By hand: with one place all are there, with a place for each group four at most, and more than where groups are
    picked whatever their scores."""
    assert wire.unique_places(1) == pytest.approx(1.0)
    at_random = traffic.group_limited_lower_bound(wire.E, wire.K, wire.GROUPS, wire.KEPT_GROUPS, places=8)
    assert 3.4 < at_random < wire.unique_places(8) < 4.0
    ids_TK = wire.route(100, torch.Generator().manual_seed(0))
    assert all(len(set(ids.tolist())) == wire.K for ids in ids_TK)
    assert all(len(set((ids // (wire.E // wire.GROUPS)).tolist())) <= wire.KEPT_GROUPS for ids in ids_TK)


# ---------------------------------------------------------------------------------------------------------------------
# Tables and files


def test_a_table_has_only_columns_that_something_is_in():
    rows = [record(unit="ms"), record(metric="b|c", baseline=3.0, against="stock", ratio=1.5, target="ratio >= 2")]
    assert harness.table(rows).splitlines() == [
        "| case | metric | value | baseline | times better | target |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a | time | 2 ms |  |  |  |",
        "|  | b/c | 2 | 3 (stock) | 1.50 | ratio >= 2: missed |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (3.0, "3"), (1234567.0, "1,234,567"), (0.12345, "0.123"), (12.345, "12.3"), (1234.5, "1,234")]
    + [(0.00012, "1.2e-04"), (None, "")],
)
def test_numbers(value, text):
    assert harness.number(value) == text


def test_the_json_is_a_list_of_records_that_read_back(tmp_path):
    path, about = tmp_path / "results.json", {"machine": "m", "threads": "2", "versions": "v", "commit": "c"}
    rows = [record(ratio=1.5, baseline=3.0, unit="ms"), record(suite="step", case="ü", target="ratio >= 1")]
    harness.add(path, rows, about)
    lines = json.loads(path.read_text())
    assert {"suite", "case", "metric", "value", "baseline", "ratio", "unit"} <= lines[0].keys()
    assert list(harness.read(path)) == [(row, about) for row in rows]
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"], "something half-written was left"


def test_a_run_replaces_its_suites_on_its_machine_alone(tmp_path):
    path = tmp_path / "results.json"
    old, other, new = (
        {"machine": m, "threads": "2", "versions": "", "commit": c} for m, c in (("m", "1"), ("gpu", "1"), ("m", "2"))
    )
    harness.add(path, [record(), record(suite="step")], old)
    harness.add(path, [record()], other)
    harness.add(path, [record(case="b")], new)
    found = {(about["machine"], about["commit"], r.suite, r.case) for r, about in harness.read(path)}
    assert found == {("m", "1", "step", "a"), ("gpu", "1", "layer", "a"), ("m", "2", "layer", "b")}


def test_the_page_shows_targets_and_suites_by_machine(tmp_path):
    path = tmp_path / "results.json"
    harness.add(
        path,
        [record(target="ratio >= 1.5", ratio=1.2)],
        {"machine": "m", "threads": "2", "versions": "v", "commit": "c"},
    )
    harness.add(path, [record(suite="gpu")], {"machine": "H100", "threads": "2", "versions": "v", "commit": "d"})
    text = publish.tables(path)
    assert "| layer | a | time | ratio >= 1.5 | 1.20 | **missed** |" in text
    assert text.index("## m") < text.index("### layer") < text.index("## H100") < text.index("### gpu")


def test_readme_has_a_headline_where_its_marks_stand(tmp_path):
    path, page = tmp_path / "results.json", tmp_path / "README.md"
    row = record(suite="step", case="debug, 1 x 512", metric="whole step", unit="tokens/s", against="torchtitan")
    row = harness.Record(**{**vars(row), "value": 4000.0, "baseline": 2000.0, "ratio": 2.0, "low": 1.9, "high": 2.1})
    harness.add(path, [row], {"machine": "m", "threads": "2", "versions": "v", "commit": "c"})
    line = "| training step, debug model, 1 x 512 tokens | 4,000 tokens/s | torchtitan | 2,000 tokens/s | 2.00 (1.90 - 2.10) |"  # fmt: skip # noqa: E501
    assert line in publish.headline(path)
    page.write_text(f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n")
    assert publish.put(page, publish.headline(path))
    text = page.read_text()
    assert line in text and "old" not in text and text.startswith("before\n") and text.endswith("\nafter\n")
    page.write_text("no marks\n")
    assert not publish.put(page, "x") and page.read_text() == "no marks\n"


def test_the_page_is_made_of_the_file():
    page = publish.PAGE.read_text(encoding="utf-8")
    made = page.partition(publish.BEGIN)[2].partition(publish.END)[0].strip()
    assert made == publish.tables(publish.RESULTS), "python benchmarks/run.py --json benchmarks/results.json --docs"


# ---------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to do"),
        (["--suite", "layers"], "no suite layers: there are layer, step"),
        (["--docs"], "name one"),
        (["--suite", "step", "--fast"], "--fast: neither an option nor a key of train.py"),
    ],
)
def test_mistakes(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run.parse(argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_file_that_cannot_take_the_records_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    for name, more, message in (
        ("none/x.json", ["--suite=data"], "none; make that folder"),
        ("", ["--suite=data"], "is no regular file"),
        ("broken.json", ["--suite=data"], "holds no records"),
        ("gone.json", ["--docs"], "is not there"),
    ):
        with pytest.raises(SystemExit) as stop:
            run.parse([*more, "--json", str(tmp_path / name)])
        assert stop.value.code == 2 and message in capsys.readouterr().err
    assert run.parse(["--suite=data", "--json", str(tmp_path / "new.json")]).size == "full"


def test_all_suites_are_modules_with_a_first_line():
    args = run.parse(["--suite", "all", "--quick", "--model.dim=64"])
    assert args.suites == list(run.SUITES) and args.size == "quick" and args.more == ["--model.dim=64"]
    assert len(run.SUITES) == 10
    for suite in (*run.SUITES, *run.MORE_SUITES):
        assert (harness.ROOT / "benchmarks" / f"{suite}.py").read_text().startswith('"""')


def test_a_suite_that_fails_does_not_cost_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "ceilings", lambda device: [])
    monkeypatch.setattr(run, "run_apart", lambda suite, _: None if suite == "data" else [record(suite=suite)])
    path = tmp_path / "results.json"
    assert run.main(["--suite", "layer,data,step", "--quick", "--json", str(path)]) == 1
    assert "failed: data" in capsys.readouterr().err
    assert {r.suite for r, _ in harness.read(path)} == {"layer", "step", run.MACHINE}


def test_without_a_gpu_the_gpu_suite_says_so(capsys, monkeypatch):
    from benchmarks import gpu

    monkeypatch.setattr(roofline, "DEVICE", "cpu")
    assert list(gpu.measure(Options("quick"))) == []
    assert "no GPU" in capsys.readouterr().out
