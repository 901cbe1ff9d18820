"""The same run on other numbers of GPUs: what grows, what is kept, what is said where there is no such run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe import config_file, whole_file
from titan_moe.config_check import check
from titan_moe.config_file import ConfigError
from titan_moe.plan import pictures, report, scaling, scaling_chart, scaling_report
from titan_moe.plan.check import plan_problems
from titan_moe.plan.memory import predict_memory
from titan_moe.plan.published import RUNS, read, runs_of
from titan_moe.plan.scaling import Impossible, Scaled
from titan_moe.plan.step import tokens_per_s

FOLDER = Path(__file__).parents[2] / "train_configs"
SIZES = "--plan.scale=256,1024,16384"


def scaled(name: str, *overrides: str) -> dict[tuple[str, int], Scaled | Impossible]:
    config = config_file.load([str(FOLDER / name), SIZES, *overrides])
    assert plan_problems(config) == []
    return {(row.how, row.gpus): row for row in scaling.scale(config)}


@pytest.fixture(scope="module")
def reference() -> dict[tuple[str, int], Scaled | Impossible]:
    return scaled("deepseek_v3_671b.toml")


@pytest.fixture(scope="module")
def pipeline() -> dict[tuple[str, int], Scaled | Impossible]:
    return scaled("deepseek_v3_671b_b200.toml")


def test_the_given_plan_is_among_the_rows_as_it_is(pipeline):
    config = config_file.load([str(FOLDER / "deepseek_v3_671b_b200.toml")])
    plan = report.make(config, "b200")
    for how in ("weak", "strong"):
        row = pipeline[how, 256]
        assert isinstance(row, Scaled) and row.job == plan.job and row.speed == plan.speed
        assert row.efficiency == 1.0 and row.lost == ()


def test_weak_keeps_the_work_of_a_gpu_and_strong_keeps_the_batch(reference, pipeline):
    for rows in (reference, pipeline):
        base = rows["weak", 256].job
        for (how, gpus), row in rows.items():
            if isinstance(row, Impossible):
                continue
            job = row.job
            assert (job.tp, job.cp, job.pp, job.ep) == (base.tp, base.cp, base.pp, base.ep) and job.gpus == gpus
            batch = base.global_batch_size * (gpus // 256 if how == "weak" else 1)
            assert 0.9 * batch <= job.global_batch_size <= batch
            assert how == "strong" or job.global_batch_size == batch


@pytest.mark.parametrize("how", ["weak", "strong"])
def test_every_candidate_is_one_that_training_takes_and_the_best_that_fits_is_chosen(how):
    config = config_file.load([str(FOLDER / "qwen3_235b_a22b.toml"), SIZES])
    row, best = scaled("qwen3_235b_a22b.toml")[how, 1024], 0.0
    assert isinstance(row, Scaled) and row.memory.fits
    for candidate in scaling.candidates(config, how, 1024):
        assert not isinstance(candidate, str) and check(candidate, 1024) == []
        planned = report.make(candidate, "candidate")
        best = max(best, planned.speed.tokens_per_s_per_gpu if planned.memory.fits else 0.0)
    assert row.speed.tokens_per_s_per_gpu == best


def test_what_is_lost_explains_the_efficiency(reference, pipeline):
    for row in (*reference.values(), *pipeline.values()):
        if isinstance(row, Scaled):
            more = sum(share for _, share in row.lost)
            assert more >= 1 / row.efficiency - 1 - 20 * scaling.SHOWN
    bubble, seconds = dict(pipeline["strong", 16384].lost), dict(pipeline["weak", 16384].lost)
    assert max(bubble, key=bubble.__getitem__) == "bubble", "15 microbatches through 16 ranks"
    assert max(seconds, key=seconds.__getitem__) == "stragglers"


def test_where_there_is_no_such_run_it_says_why(reference):
    row = reference["strong", 16384]
    assert isinstance(row, Impossible)
    assert "16,384 data-parallel ranks are more than 15,360 sequences per step" in row.why
    assert "multi-token prediction" in row.why, "nor with context parallelism"
    odd = scaled("deepseek_v3_671b.toml", "--plan.scale=100")["weak", 100]
    assert isinstance(odd, Impossible) and "must divide data_parallel_shard_degree = 100" in odd.why


def test_fewer_gpus_too():
    row = scaled("qwen3_235b_a22b.toml", "--plan.scale=64")["weak", 64]
    assert isinstance(row, Scaled) and not row.memory.fits and row.job.global_batch_size == 2048
    assert "TOO MUCH" in "\n".join(scaling_report.text([row]))


def test_context_parallelism_where_sequences_are_fewer_than_ranks():
    row = scaled("qwen3_235b_a22b.toml")["strong", 16384]
    assert isinstance(row, Scaled) and row.job.cp > 1 and row.job.global_batch_size == 8192


# ---------------------------------------------------------------------------------------------------------------------
# Weak scaling from 256 to 1,024 GPUs, published as 98.5 % (Megatron) and about 97 % (TorchTitan, JAX)


def test_published_layouts_scale_about_as_published():
    """Every published run on 256 GPUs keeps 97 to 98.8 % at 1,024."""
    runs = [run for run in runs_of(read(RUNS)) if run.job.gpus == 256]
    assert len(runs) >= 20
    for run in runs:
        four = {"gpus": 1024, "dp_shard": 4 * run.job.dp_shard, "global_batch_size": 4 * run.job.global_batch_size}
        efficiency = tokens_per_s(replace(run.job, **four)) / tokens_per_s(run.job)
        assert 0.97 <= efficiency <= 0.988, run.cell


def test_the_reference_scales_and_experts_over_a_whole_domain_do_not(reference, pipeline):
    assert 0.97 <= reference["weak", 1024].efficiency <= 0.988
    assert 0.97 <= pipeline["weak", 1024].efficiency <= 0.988
    row = scaled("deepseek_v3_671b_gb200.toml")["weak", 1024]
    assert isinstance(row, Scaled) and row.efficiency < 0.9
    assert row.lost[0][0] == "exposed FSDP", "with EP 64, all copies of an expert are in other racks"


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def test_a_checkpoint_is_what_ranks_hold(reference):
    muon = "--optimizer.name=Muon"
    for words in (["deepseek_v3_671b.toml"], ["qwen3_235b_a22b.toml", muon], ["qwen3_235b_a22b.toml"]):
        job = scaled(*words)["weak", 256].job
        held = {entry.name: entry.size for entry in predict_memory(job).entries}
        of_all = 256 * (held["parameters, sharded"] + held["moments, sharded"])
        assert scaling.checkpoint_bytes(job) == pytest.approx(of_all, rel=0.01)
    halved = replace(job, moment_dtype="bfloat16")
    assert scaling.checkpoint_bytes(halved) == pytest.approx(scaling.checkpoint_bytes(job) * 8 / 12)


def test_saving_in_the_background_holds_up_less_and_is_whole_later():
    rows = {
        mode: scaled("qwen3_235b_a22b.toml", f"--checkpoint.async_mode={mode}")["weak", 1024].failures
        for mode in ("disabled", "async")
    }
    now, later = rows["disabled"].saving, rows["async"].saving
    assert now.written == 0 and later.written == now.held_up and later.held_up < 0.3 * now.held_up
    assert rows["async"].steps < rows["disabled"].steps and rows["async"].goodput > rows["disabled"].goodput


def test_rates_of_ones_own_cluster():
    base = scaled("qwen3_235b_a22b.toml")["weak", 1024].failures
    worse = scaled("qwen3_235b_a22b.toml", "--plan.failure_gpu_hours=8100")["weak", 1024].failures
    assert worse.saving.mtbf == pytest.approx(7.9 * 3600, rel=0.01) and worse.goodput < base.goodput
    assert worse.steps < base.steps
    slow = scaled("qwen3_235b_a22b.toml", "--plan.storage_gb_s=0.01", "--plan.restart_seconds=0")["weak", 1024].failures
    assert slow.saving.held_up > 10 * base.saving.held_up
    verified, sizes = (
        scaled("qwen3_235b_a22b.toml", f"--checkpoint.verify={how}")["weak", 1024].failures.saving.restart
        for how in ("full", "size")
    )
    assert verified - 600 == pytest.approx(2 * (sizes - 600)), "it reads everything twice"


def test_steps_are_whole_and_the_best_of_their_neighbours(reference):
    for row in reference.values():
        if isinstance(row, Scaled):
            f, step = row.failures, row.speed.step_seconds
            assert f.steps >= 1 and f.seconds == f.steps * step
            around = [n for n in (f.steps - 1, f.steps, f.steps + 1) if n * step >= f.saving.least and n]
            assert max(around, key=lambda n: f.saving.goodput(n * step)) == f.steps
            assert f.own_goodput is not None and f.own_goodput <= f.goodput


def test_a_run_that_saves_nothing_is_told_as_such():
    row = scaled("qwen3_235b_a22b.toml", "--checkpoint.enable=false")["weak", 256]
    assert isinstance(row, Scaled) and row.failures.own_goodput is None


# ---------------------------------------------------------------------------------------------------------------------
# Shown


@pytest.fixture(scope="module")
def plan() -> report.Plan:
    return report.make(config_file.load([str(FOLDER / "deepseek_v3_671b.toml"), "--plan.scale=1024,16384"]), "plan")


def test_report_and_data_say_the_same(plan):
    text, data = report.to_text(plan), json.loads(json.dumps(report.to_json(plan), allow_nan=False))
    assert [(row["how"], row["gpus"]) for row in data["scaling"]] == [
        (how, gpus) for how in ("weak", "strong") for gpus in (256, 1024, 16384)
    ]
    for row in data["scaling"]:
        if "impossible" in row:
            assert row["impossible"] in text
        else:
            assert f"{row['best_checkpoint_interval_steps']:,} steps, " in text
            assert f"{row['tokens_kept_per_day'] / 1e9:,.1f} B" in text
            assert 0 < row["goodput_as_set"] <= row["goodput"] < 1
    assert "scaling" not in report.to_json(replace(plan, scaling=()))


def test_picture_shows_these_numbers_and_is_whole_or_not_there(plan, tmp_path, monkeypatch):
    written = pictures.draw(plan, str(tmp_path))
    assert [path.name for path in written] == ["memory.png", "timeline.png", "scaling.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.png", "scaling.png", "timeline.png"]
    assert pictures.shown_in(written[2]) == scaling_chart.summary(plan)
    before = written[0].read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        pictures.draw(plan, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3 and written[0].read_bytes() == before


@pytest.mark.parametrize("sizes", ["0", "-4", "1024,0"])
def test_sizes_that_are_none(sizes):
    config = config_file.load([str(FOLDER / "deepseek_v3_671b.toml"), f"--plan.scale={sizes}"])
    assert any("must be numbers of GPUs, at least 1" in problem for problem in plan_problems(config))
