"""The planner against published runs: how far off it may be, and what a file of runs may look like."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from titan_moe.plan import bands, constants
from titan_moe.plan.published import RUNS, read
from titan_moe.plan.step import predict
from titan_moe.plan.validate import main, report, validate


@pytest.fixture(scope="module")
def found():
    return validate(read(RUNS))


@pytest.fixture
def changed(tmp_path):
    """Write the published runs with changes to their rows, and read them back."""

    def write(change):
        rows = list(csv.DictReader(RUNS.read_text().splitlines()))
        rows = [row for row in map(change, rows) if row is not None]
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        path = tmp_path / "runs.csv"
        path.write_text(text.getvalue())
        return path

    return write


def only(model, hardware):
    return lambda row: row if (row["model"], row["hardware"]) == (model, hardware) else None


# ---------------------------------------------------------------------------------------------------------------------
# How far off


def test_every_row_with_a_layout_is_scored(found):
    assert len(found.scored) == 27
    reasons = {row.line: why for row, why in found.unscored}
    assert reasons.pop(19) == "no layout: tp is not given"
    assert list(reasons) == list(range(30, 40)), "published without a layout, or checked in whatif.py"
    assert all(why.startswith(("no layout: ", "excluded: ")) for why in reasons.values())


@pytest.mark.parametrize(
    ("which", "mean", "largest"),
    [("error", 0.06, 0.15), ("tables_only_error", 0.12, 0.35), ("left_out_error", 0.09, 0.20)],
)
def test_throughput(found, which, mean, largest):
    summary = found.summary(which)
    assert summary.mean <= mean and summary.largest <= largest


def test_bias(found):
    assert abs(found.summary().bias) <= 0.03


def test_band_holds_for_four_in_five_left_out_runs(found):
    low, high = constants.band()
    assert -0.15 <= low < 0 < high <= 0.15
    inside = [low <= 1 / (1 + each.left_out_error) - 1 <= high for each in found.scored]
    assert sum(inside) >= 0.8 * len(inside)


def test_bands_by_group_hold_for_four_in_five_left_out_runs_of_the_group(found):
    known, errors = constants.bands(), [(each.run.job, 1 / (1 + each.left_out_error) - 1) for each in found.scored]
    grouped = bands.by_group(errors)
    assert set(known) == set(grouped), "python -m titan_moe.plan.fit writes them"
    for name, of_group in grouped.items():
        assert known[name]["runs"] == len(of_group)
        assert known[name]["half"] == pytest.approx(bands.half_width(of_group), abs=0.0011)
    assert sum(len(errors) for name, errors in grouped.items() if name.startswith("model")) == len(found.scored)


def test_a_prediction_has_the_widest_band_of_its_groups_that_have_enough_runs(found):
    def band(model, hardware):
        return bands.of(next(e.run.job for e in found.scored if e.run.cell == f"{model} on {hardware}"))

    known = constants.bands()
    (low, high), whose = band("DeepSeek-V3 671B", "GB300")
    assert -low == high == known["hardware: GB300"]["half"] > constants.band()[1]
    assert whose == "the 8 published runs with hardware: GB300"
    (_, high), _ = band("Qwen3-30B-A3B", "H100")  # few runs of this model, GPU or precision
    assert high == max(known[name]["half"] for name in ("launches: no CUDA graphs", "communication: not overlapped"))
    job = next(each.run.job for each in found.scored)
    strange = replace(job, hardware=replace(job.hardware, name="NEXT"), model=replace(job.model, dim=1))
    assert "NEXT" not in bands.of(strange)[1]
    prediction = predict(job)
    rate = prediction.tokens_per_s_per_gpu
    assert prediction.band == (rate * (1 + bands.of(job)[0][0]), rate * (1 + bands.of(job)[0][1]))


def test_where_no_group_has_enough_runs_the_band_is_that_of_all(found, monkeypatch):
    monkeypatch.setattr(constants, "bands", dict)
    assert bands.of(found.scored[0].run.job) == (constants.band(), "all published runs")


def test_no_published_run_is_suspect(found):
    assert not [each for each in found.scored if each.suspect]


def test_constants_stay_in_their_ranges_and_have_sources():
    described = constants.described()
    assert len(described) <= 12
    for one in described:
        assert one.low < one.prior < one.high and one.low <= one.value <= one.high
        assert len(one.source) > 20 and one.unit


def test_every_cell_has_constants_of_its_own(found):
    for each in found.scored:
        assert constants.without_cell(each.run.cell) != constants.fitted()


# ---------------------------------------------------------------------------------------------------------------------
# Frozen: what was measured plays no part


def test_measurements_and_sources_change_no_prediction(found, changed):
    def change(row):
        measured = {key: "1234" for key in ("tokens_per_s_per_gpu", "tflops_per_gpu") if row[key] != "-"}
        trust = row["config_confidence"] if row["config_confidence"].startswith("excluded") else "recipe"
        return {**row, **measured, "source": "somebody else", "config_confidence": trust}

    after = validate(read(changed(change)))
    assert [each.predicted for each in after.scored] == [each.predicted for each in found.scored]


def test_a_wrong_row_is_suspect(changed):
    def change(row):
        is_it = row["tokens_per_s_per_gpu"] == "6338"
        return {**row, "tokens_per_s_per_gpu": "9500"} if is_it else row

    found = validate(read(changed(change)))
    assert [each.run.measured for each in found.scored if each.suspect] == [9500]
    assert "suspect: line 3, DeepSeek-V3 671B on GB300" in report(found)


# ---------------------------------------------------------------------------------------------------------------------
# What a file may look like


def test_unknown_hardware_and_models_are_listed(changed):
    def change(row):
        return {**row, "hardware": "H9000"} if row["hardware"] == "H800" else {**row, "model": "GPT-9"}

    found = validate(read(changed(change)))
    assert not found.scored and len(found.unscored) == 38
    assert 'hardware "H9000": is not known' in found.unscored[0][1]
    assert 'model "GPT-9": its sizes are not known' in found.unscored[1][1]
    assert "no runs to score" in report(found)


def test_impossible_layouts_are_listed_with_the_reason(changed):
    found = validate(read(changed(lambda row: {**row, "ep": "7"} if row["hardware"] == "H800" else None)))
    assert found.unscored[0][1] == "ep = 7: must divide the 256 experts"


def test_unknown_releases_are_taken_for_a_near_one(changed):
    found = validate(read(changed(lambda row: {**row, "release": "26.08"} if row["hardware"] == "GB300" else None)))
    assert "release '26.08' is not known: taken for 26.06" in report(found)


def test_columns_may_be_missing_or_new(tmp_path):
    path = tmp_path / "few.csv"
    path.write_text(
        "model,hardware,gpus,precision,global_batch_size,seq_len,tp,pp,ep,tokens_per_s_per_gpu,colour\n"
        "Qwen3-30B-A3B,H100,16,BF16,1024,4096,1,1,16,10600,red\n\n"
        "Qwen3-30B-A3B,H100,16,BF16,1024,4096,1,1,16,-,blue\n"
    )
    found = validate(read(path))
    assert [each.run.measured for each in found.scored] == [10600]
    assert "nothing measured; predicted" in found.unscored[0][1]


@pytest.mark.parametrize("text", ["", "\ufeff", "model,hardware,gpus,global_batch_size,seq_len,tp,pp,ep\n"])
def test_empty_files(tmp_path, text, capsys):
    path = tmp_path / "empty.csv"
    path.write_text(text)
    assert main([str(path)]) == 0 and "no runs to score" in capsys.readouterr().out
    assert main([str(path), "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["rows"] == [] and parsed["mean_abs_error"] is None and parsed["max_abs_error"] is None


@pytest.mark.parametrize(
    ("column", "value"), [("tokens_per_s_per_gpu", "fast"), ("gpus", "2x"), ("seq_len", "inf"), ("tp", "-2")]
)
def test_bad_numbers_name_line_and_column(changed, capsys, column, value):
    path = changed(lambda row: {**row, column: value} if row["model"] == "Mixtral-8x7B" else row)
    with pytest.raises(ValueError, match=f"line 29, column {column} = '{value}'"):
        read(path)
    assert main([str(path)]) == 1
    assert f"column {column}" in capsys.readouterr().err


def test_files_of_another_format_are_refused(tmp_path, capsys):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert main([str(path)]) == 1
    assert "lacks the columns model, hardware, gpus" in capsys.readouterr().err
    path.write_text("model,hardware,gpus,global_batch_size,seq_len,tp,pp,ep\nx,y,1,2,3,4,5,6,7\n")
    assert main([str(path)]) == 1
    assert "line 2: more values than the 8 columns" in capsys.readouterr().err
    assert main([str(tmp_path / "none.csv")]) == 1
    assert "cannot be read" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


def test_json_has_numbers_as_numbers(changed, capsys):
    assert main([str(changed(only("Mixtral-8x7B", "H100"))), "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    (row,) = parsed["rows"]
    assert row["model"] == "Mixtral-8x7B" and row["gpus"] == 64 and row["tokens_per_s_per_gpu"] == "-"
    assert row["measured"] == pytest.approx(468e12 / 79.7e9, rel=0.002)
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert parsed["mean_abs_error"] == parsed["max_abs_error"] == abs(row["error"])


def test_the_report_shows_what_was_fitted_and_how_well(found):
    text = report(found)
    known = ("tables only", "cell left out", "80 % band", "gemm_fp8", "ladder: 1", "H800 trace", "bias")
    for words in (*known, *constants.bands()):
        assert words in text
    assert text.count("DeepSeek-V3 671B  GB300") == 6


def test_it_imports_neither_torch_nor_numpy():
    code = (
        "import sys, titan_moe.plan.validate, titan_moe.plan.improve; "
        "assert not {'torch', 'torchtitan', 'numpy', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
