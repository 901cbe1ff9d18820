"""What a plan says: the report's numbers are the prediction's, its JSON says the same, and advice fits the GPU."""

import json
from dataclasses import replace

import pytest

from titan_moe import config_file
from titan_moe.config_file import ConfigError
from titan_moe.plan import improve, pictures, report
from titan_moe.plan.memory import GIB, predict_memory

CONFIG = "tests/plan/deepseek_v3_671b.toml"


def make(*overrides: str) -> report.Plan:
    return report.make(config_file.load([CONFIG, *overrides]), CONFIG)


@pytest.fixture(scope="module")
def plan() -> report.Plan:
    return make()


def test_the_answer_comes_first(plan):
    text = report.to_text(plan)
    assert "671.0 B parameters" in text and "256 x GB300, bf16; FSDP 256, EP 64" in text
    assert f"Speed    {plan.speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU" in text
    assert f"{plan.speed.tflops_causal:,.0f} TFLOPS per GPU with causal attention" in text
    assert f"MFU {plan.speed.mfu:.1%} of 2,500 bf16 TFLOPS" in text
    assert f"exposed communication {plan.speed.exposed_comm:,.2f} s" in text and plan.speed.limit in text
    assert f"Memory   fits: {plan.memory.needed / GIB:,.1f} of 257.0 GiB" in text
    assert max(len(line) for line in text.splitlines()) <= 160
    speed, memory = text.index("Speed  "), text.index("Memory  ")
    assert text.index("Plan  ") < speed < memory < text.index("Step time") < text.index("Memory per GPU")


def test_tables_add_up(plan):
    text = report.to_text(plan)
    for title, total in (("Step time", plan.speed.step_seconds), ("Memory per GPU", plan.memory.needed / GIB)):
        rows = [line.split() for line in text.split(title)[1].split("\n\n")[0].splitlines()[1:]]
        assert rows[-1][0] == "total" and float(rows[-1][1].replace(",", "")) == pytest.approx(total, abs=0.01)
        assert sum(float(row[-1].rstrip("%")) for row in rows[:-1]) == pytest.approx(100, abs=1)


def test_json_is_the_report_as_data(plan):
    data = json.loads(json.dumps(report.to_json(plan), allow_nan=False))
    assert data["fits"] is True and data["gpus"] == 256 and data["layout"]["ep"] == 64
    assert data["tokens_per_s_per_gpu"] == plan.speed.tokens_per_s_per_gpu
    low, high = data["tokens_per_s_per_gpu_80_percent"]
    assert low < data["tokens_per_s_per_gpu"] < high
    assert sum(data["step_parts_seconds"].values()) == pytest.approx(data["step_seconds"])
    memory = data["memory"]
    assert sum(e["size"] for e in memory["entries"]) + memory["margin_bytes"] == pytest.approx(memory["needed_bytes"])
    assert memory["free_bytes"] == memory["capacity_bytes"] - memory["needed_bytes"]
    assert data["mfu"] * data["peak_tflops"] == pytest.approx(data["tflops_per_gpu_causal"])


def test_a_run_that_does_not_fit_says_by_how_much():
    plan = make("--parallelism.expert_parallel_degree=8", "--plan.hardware=H100")
    assert not plan.memory.fits
    missing = (plan.memory.needed - 80e9) / GIB
    assert f"DOES NOT FIT: {plan.memory.needed / GIB:,.1f} of 74.5 GiB, {missing:,.1f} GiB too much" in report.to_text(
        plan
    )
    assert report.to_json(plan)["fits"] is False


def test_advice_fits_and_what_does_not_is_named(monkeypatch, plan):
    """The advice is what helps most among what fits; one that helps more but does not fit is told apart."""
    assert plan.improvements and all(predict_memory(each.job).fits for each in plan.improvements)
    gains = [each.gain for each in plan.improvements]
    assert gains == sorted(gains, reverse=True) and len(gains) <= 3
    huge = replace(plan.job, micro_batch_size=16)
    assert not predict_memory(huge).fits
    dream = improve.Improvement(change="16 sequences per microbatch", job=huge, tokens_per_s_per_gpu=9e3, gain=2.0)
    monkeypatch.setattr(report.improve, "improvements", lambda *_: [dream, *plan.improvements])
    dreaming = report.of_job(plan.job)
    assert dreaming.improvements == plan.improvements and dreaming.out_of_reach == dream
    more = -predict_memory(huge).free / GIB
    assert f"+200.0%  16 sequences per microbatch, if there were {more:,.1f} GiB more" in report.to_text(dreaming)


def test_pipelines_show_their_stages():
    overrides = ["--parallelism.pipeline_parallel_degree=4", "--parallelism.expert_parallel_degree=16"]
    try:
        plan = make(*overrides, "--parallelism.pipeline_parallel_layers_per_stage=16,15,15,15")
    except ConfigError as error:  # pragma: no cover - until pipelines train
        pytest.skip(str(error))
    text = report.to_text(plan)
    assert "layers per stage: 16 15 15 15" in text and "pipeline rank" in text
    assert len(plan.memory.allocated_by_rank) == 4


def test_pictures_show_the_plan(tmp_path, plan):
    from PIL import Image

    written = pictures.draw(plan, str(tmp_path / "new" / "folder"))
    assert [path.name for path in written] == ["memory.png", "timeline.png"]
    for path in written:
        with Image.open(path) as image:
            assert image.size[0] == 2400 and image.size[1] > 500
            colors = {color for _, color in image.convert("RGB").getcolors(2**24)}
            assert {(255, 255, 255), (0x3B, 0x6F, 0xB6)} <= colors


def test_pictures_that_cannot_be_written_are_a_mistake_of_the_configuration(tmp_path, plan):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"plan\.png = "):
        pictures.draw(plan, str(tmp_path / "file" / "folder"))
