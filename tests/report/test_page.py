"""The page: everything in it, nothing from outside, nothing of a run that becomes markup; phases, loads and the plan as
an independent calculation has them."""

import base64
import hashlib
import json
import math
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path

import titan_moe.runtime  # noqa: F401

import pytest

from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.config_print import to_toml
from titan_moe.phase_names import NAMES
from titan_moe.plan import report
from titan_moe.report import charts, heat, page, phases
from titan_moe.report.against_plan import compare
from titan_moe.report.page import make
from titan_moe.report.read import Loads, Series, read
from titan_moe.report.summary import numbers

from .folders import line, loads, write
from .folders import phases as phases_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028{{data}}'\"&amp;"


class Seen(HTMLParser):
    """Tags with attributes, and the text outside scripts and styles; the text of scripts apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = [("", {})]
        self.text, self.scripts = "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data):
        if self.tags[-1][0] == "script" and self.scripts and not self.scripts[-1]:
            self.scripts[-1] = data
        elif self.cdata_elem is None:
            self.text += data

    def data(self):
        return json.loads(self.scripts[0])


def test_hostile_text_stays_text(tmp_path):
    lines = [
        line(
            1, **{HOSTILE: 1.0, f"phase/{HOSTILE}": 0.1, f"moe_load.{HOSTILE}": [1, 1], f"moe_max/mean.{HOSTILE}": 1.0}
        )
    ]
    folder = write(tmp_path / "<b>run<b>", lines, description=HOSTILE, argv=[HOSTILE], **{HOSTILE: HOSTILE})
    config = Config()
    config.job.description = HOSTILE
    (folder / "config.toml").write_text(to_toml(config) + f"\n[{json.dumps(HOSTILE)}]\nkey = 1\n")
    for runs in ([folder], [folder, folder]):
        page = make([read(each) for each in runs])
        seen = Seen(page)
        assert [tag for tag, _ in seen.tags if tag in ("script", "img", "b") and "alert" in str(_)] == []
        assert len(seen.scripts) == 2 and not any(tag == "img" for tag, _ in seen.tags)
        assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)
        assert HOSTILE in seen.text and "\u2028" not in seen.scripts[0]
        assert seen.data()["runs"][0]["phases"]["names"] == [HOSTILE]
        assert HOSTILE in [chart["title"] for chart in seen.data()["charts"]]


def test_only_its_own_scripts_may_run(tmp_path):
    seen = Seen(make([read(write(tmp_path / "run", [line(1)]))]))
    policy = next(a["content"] for tag, a in seen.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(seen.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    assert not any("src" in attributes for _, attributes in seen.tags)
    assert [a["href"] for _, a in seen.tags if "href" in a] == ["data:,"]
    assert "Permission is hereby granted" in seen.scripts[1]  # uPlot's license goes with it


def test_validation_sets_are_curves_and_tiles(tmp_path):
    sets = {"validation_loss/code": 2.0, "validation_perplexity/code": math.exp(2.0)}
    run = read(write(tmp_path / "run", [line(1), line(2, validation_loss=3.0, **sets)]))
    charts = {chart["title"]: chart for chart in Seen(make([run])).data()["charts"]}
    assert [curve["label"] for curve in charts["Loss"]["curves"]] == ["training", "validation", "code"]
    assert [curve["points"] for curve in charts["Loss"]["curves"]] == [False, True, True]
    (perplexity,) = charts["Validation perplexity"]["curves"]
    assert (perplexity["label"], perplexity["x"], perplexity["y"]) == ("code", [2], [7.38906])
    assert not any(title.startswith("validation_") for title in charts)
    tile = next(number for number in numbers(run) if number.label == "loss on code")
    assert (tile.text, tile.note) == ("2.0000", "perplexity 7.3891")
    assert "Validation perplexity" not in Seen(make([read(write(tmp_path / "other", [line(1)]))])).text


def test_no_nan_in_the_data(tmp_path):
    lines = [line(1), line(2, loss=None, grad_norm=math.nan)]
    data = Seen(make([read(write(tmp_path / "run", lines))])).data()  # json.loads takes NaN, so look for it
    assert "NaN" not in json.dumps(data) and next(c for c in data["charts"] if c["title"] == "Loss")


@pytest.mark.slow
def test_a_hundred_thousand_steps_fit_into_five_megabytes(tmp_path):
    """Three runs of a large model with everything logged; the one-step spike is in the data."""
    run = read(write(tmp_path / "run", [line(1, **loads([1] * 256), **phases_of(experts=1.0, attention=0.5))]))
    steps = range(1, 100_001)
    noise = [(step * 2654435761 % 2**32) / 2**32 for step in steps]
    for series in [*run.series.values(), *(run.series.setdefault(f"other {i}", Series()) for i in range(30))]:
        series.steps, series.values = array("q", steps), array("d", noise)
    run.series["grad_norm"].values[54_320] = 999.5
    run.steps = run.series["loss"].steps
    each = Loads(run.steps[::200], run.loads["layers.1"].counts * 500)
    run.loads = {f"layers.{i}": each for i in range(58)}
    page = make([run, run, run])
    assert 2e6 < len(page.encode()) < 5e6
    chart = next(chart for chart in Seen(page).data()["charts"] if chart["title"] == "Gradient norm")
    assert (54_321, 999.5) in zip(chart["curves"][0]["x"], chart["curves"][0]["y"])


def test_many_curves_share_the_points(tmp_path):
    """Fewer of each when there are many, and all of them when there are few."""
    run = read(write(tmp_path / "run", [line(step) for step in range(1, 3001)]))
    run.series |= {f"other {i}": run.series["step_s"] for i in range(charts.OTHERS)}
    points = []
    for runs in ([run], [run] * 8):
        chosen, _ = charts.charts(runs)
        sent = [curve for chart in charts.payload(runs, chosen) for curve in chart["curves"]]
        points.append((max(len(each["x"]) for each in sent), sum(len(e["x"]) + len(e.get("mx", [])) for e in sent)))
    assert 1900 < points[0][0] <= 2002 and points[1][0] < 600
    assert all(total < 1.1 * charts.POINTS for _, total in points)


def test_a_long_description_is_cut(tmp_path):
    page = make([read(write(tmp_path / "run", [line(1)], description="x" * 10**7, argv=["y" * 10**7]))])
    assert len(page) < 1e6 and "10,000,000 characters" in page


def test_configurations_side_by_side(tmp_path):
    configs = [Config(), Config()]
    configs[1].optimizer.lr = 0.5
    runs = [read(write(tmp_path / str(i), [line(1)], config)) for i, config in enumerate(configs)]
    rows = re.findall(r'<tr class="(\w+)"><th scope="row">([a-z_.0-9]+)</th>', make(runs))
    assert [key for kind, key in rows if kind == "differs"] == ["optimizer.lr"]
    assert [key for kind, key in rows if kind == "same"] == [key for key in runs[0].config if key != "optimizer.lr"]
    alone = make(runs[1:])
    assert '<tr class="differs"><th scope="row">optimizer.lr</th><td>0.5</td><td>' in alone


def test_the_page_follows_only_while_it_is_watched(tmp_path):
    run = read(write(tmp_path / "run", [line(1)]))
    assert Seen(make([run])).data()["refresh"] is None and Seen(make([run], 5.0)).data()["refresh"] == 5.0


# ---------------------------------------------------------------------------------------------------------------------
# Phases and loads


def test_phases(tmp_path):
    lines = [
        line(step, **phases_of(experts=0.3 * step), **{"phase/optimizer": 0.1, "phase/step": 9.0}) for step in (1, 2, 3)
    ]
    run = read(write(tmp_path / "run", lines))
    experts, optimizer = phases.table(run)
    assert (
        (experts.name, experts.rank) == ("experts", 3) and experts.forward is not None and experts.slowest is not None
    )
    assert (
        math.isclose(experts.seconds, 0.9) and math.isclose(experts.forward, 0.3) and math.isclose(experts.slowest, 1.8)
    )
    assert (optimizer.name, optimizer.seconds, optimizer.forward, optimizer.rank) == ("optimizer", 0.1, None, None)
    found = phases.bars(run, most=2)
    assert found.ends == [2, 3] and list(found.seconds) == ["experts", "optimizer"]
    assert [round(value, 9) for value in found.seconds["experts"]] == [0.45, 0.9]


def test_when_a_run_started_is_told_as_people_write_it(tmp_path):
    seen = Seen(make([read(write(tmp_path / "run", [line(1)], updated="2026-12-01T05:30:34+00:00"))]))
    assert "a test · deepseek_v3 debugmodel · 2 ranks · CPU · started 2026-12-01 05:30:34 UTC" in seen.text


def test_a_phase_once_in_a_while_is_told_as_a_mean(tmp_path):
    """Validation of 8 s in one of four lines, which are of 10 steps but the first; a checkpoint that is never due; a
    trace, of which only one line knows."""
    told = {1: 1e-6, 11: 1e-6, 21: 0.8, 31: 1e-6}
    lines = [
        line(step, **phases_of(experts=0.5), **{"phase/validation": seconds, "phase_max/validation": 2 * seconds})
        | {"phase/checkpoint": 1e-5}
        | ({"phase/profile": 3.1} if step == 11 else {})
        for step, seconds in told.items()
    ]
    found = {phase.name: phase for phase in phases.table(read(write(tmp_path / "run", lines)))}
    assert list(found) == ["experts", "profile", "validation"]
    assert found["validation"].seconds == pytest.approx(8 / 31, rel=1e-4)
    assert found["validation"].slowest == pytest.approx(16 / 31, rel=1e-4)
    assert found["profile"].seconds == pytest.approx(1.0) and found["experts"].seconds == 0.5


def test_every_phase_has_a_color_of_its_own():
    """Two that share one cannot be told apart in a bar."""
    script = (Path(page.__file__).parent / "web" / "phases.js").read_text()
    colors = dict(re.findall(r'(\w+): "(#\w{6})"', script.split("// what only the planner knows")[0]))
    assert {name.split(".")[0] for name in NAMES} == colors.keys() and len(set(colors.values())) == len(colors)


def test_loads_become_bytes(tmp_path):
    """Merged columns are the sum of their lines; nothing at all is told from little."""
    counts = [[8, 0, 4, 4], [8, 0, 4, 4], [1, 1, 1, 1]]
    run = read(write(tmp_path / "run", [line(step + 1, **loads(each)) for step, each in enumerate(counts)]))
    grid = heat.grids(run, 10**6)["layers.2"]
    assert grid.ends == [1, 2, 3] and [row[2] for row in grid.cells] == [128] * 4
    assert [heat.ratio_of(row[0]) for row in grid.cells] == pytest.approx([2, 0, 1, 1], rel=0.011)
    merged = heat._grid(run, "layers.2", 1)
    totals = [sum(column) for column in zip(*counts)]
    ratios = [4 * total / sum(totals) for total in totals]
    assert [heat.ratio_of(row[0]) for row in merged.cells] == pytest.approx(ratios, rel=0.011)
    assert list(heat.grids(run, 10**6)) == ["layers.1", "layers.2", "mtp_layers.0"]


def test_the_overview_keeps_the_worst_step(tmp_path):
    lines = [line(step, **{"moe_max/mean.layers.1": 8.0 if step == 333 else 1.0}) for step in range(1, 1001)]
    grid = heat.overview(read(write(tmp_path / "run", lines)))
    assert grid is not None and len(grid.ends) == heat.COLUMNS
    assert [heat.ratio_of(byte) for byte in grid.cells[0] if byte != 128] == pytest.approx([8], rel=0.011)


def test_every_byte_of_the_scale_means_what_it_says():
    for byte in range(256):
        assert heat.byte_of(heat.ratio_of(byte)) == byte
    assert heat.byte_of(1e9) == 255 and heat.byte_of(1e-9) == 1 and heat.byte_of(0) == heat.byte_of(math.nan) == 0


# ---------------------------------------------------------------------------------------------------------------------
# The plan

PLANNED = str(Path(__file__).parents[1] / "plan" / "deepseek_v3_671b.toml")


def test_measured_beside_the_plan(tmp_path):
    """The same prediction as --plan prints, for the GPUs that run.json names rather than those of the file."""
    config = config_file.load([PLANNED, "--plan.gpus=512"])
    expected = report.make(config, "the same").speed
    config.plan.gpus = 256
    metrics = [line(step, tps=1234.0, mfu=25.0, **phases_of(experts=2.0)) for step in (1, 2)]
    found = compare(read(write(tmp_path / "run", metrics, config, world=512)))
    rows = {row.quantity: row for row in found.rows}
    assert found.why_not == "" and rows["tokens/s per GPU"].measured == 1234.0
    assert rows["tokens/s per GPU"].predicted == pytest.approx(expected.tokens_per_s_per_gpu)
    assert rows["MFU"].predicted == pytest.approx(100 * expected.mfu) and rows["MFU"].measured == 25.0
    assert rows["experts in a step"].predicted == pytest.approx(expected.parts["grouped_gemm"])
    assert rows["experts in a step"].measured == pytest.approx(2.0)
    assert rows["exposed expert communication"].measured is None
    page = make([read(tmp_path / "run")])
    assert "512 x GB300" in page and "1,234" in page and "predicted: " in page


def test_the_device_of_the_run_is_planned_for(tmp_path):
    """Without plan.hardware."""
    config = config_file.load([PLANNED])
    config.plan.hardware = ""
    run = read(write(tmp_path / "run", [line(1)], config, world=512, device="NVIDIA GB300"))
    assert "512 x GB300" in compare(run).job


@pytest.mark.parametrize(
    ("device", "hardware", "why"),
    [
        ("CPU", "", "plan.hardware is not set, and the run's device, CPU, is not one that the planner knows"),
        (None, "", "run.json does not say what device"),
        ("CPU", "Abacus", 'hardware "Abacus": is not known'),
        ("CPU", "H100", 'training.mixed_precision_param = "float32": has no rates in the planner'),
    ],
)
def test_why_there_is_no_prediction(tmp_path, device, hardware, why):
    config = Config()
    config.plan.hardware, config.training.mixed_precision_param = hardware, "float32"
    found = compare(read(write(tmp_path / "run", [line(1)], config, device=device)))
    assert why in found.why_not and found.rows == []
    assert "No prediction: " in make([read(tmp_path / "run")])


def test_a_planner_that_fails_costs_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_moe.plan.step.predict", lambda job: 1 / 0)
    folder = write(tmp_path / "run", [line(1)], config_file.load([PLANNED]), world=512)
    assert "ZeroDivisionError" in compare(read(folder)).why_not
