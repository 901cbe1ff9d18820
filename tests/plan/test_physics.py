"""Causes, not only totals: measured what-ifs, and that wrong models do not pass."""

import time
from dataclasses import fields, replace

import pytest

from titan_moe.plan import bands, constants, fit, profiles, whatif
from titan_moe.plan.constants import Constants
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.improve import improvements
from titan_moe.plan.job import Job
from titan_moe.plan.published import RUNS, read, runs_of
from titan_moe.plan.step import predict, tokens_per_s
from titan_moe.plan.validate import validate


@pytest.fixture(scope="module")
def runs():
    return runs_of(read(RUNS))


def job_on(runs, hardware, **fields_) -> Job:
    """The first published job on this hardware with these fields."""
    return next(
        run.job
        for run in runs
        if run.job.hardware.name == hardware and all(getattr(run.job, name) == v for name, v in fields_.items())
    )


# ---------------------------------------------------------------------------------------------------------------------
# What-ifs


def test_ladder():
    rungs = whatif.ladder()
    assert len(rungs) == 13
    assert whatif.ladder_signs(rungs) >= 11
    assert not [rung for rung in rungs if not rung.holds]


def test_overlap_of_expert_parallel_communication():
    assert whatif.a2a_overlap().predicted == pytest.approx(-0.15, abs=0.04)


def test_a_larger_global_batch():
    assert whatif.global_batch().predicted == pytest.approx(0.013, abs=0.015)


def test_h800_trace():
    assert not [check for check in whatif.h800_trace() if not check.holds]


def missed(c: Constants) -> list[str]:
    """The gates that a model with these constants misses."""
    names = [check.name for check in whatif.checks(c) if not check.holds]
    summary = validate(read(RUNS), c).summary()
    totals = {"mean": summary.mean > 0.06, "largest": summary.largest > 0.15, "bias": abs(summary.bias) > 0.03}
    return names + [name for name, beyond in totals.items() if beyond]


def test_the_fitted_model_misses_none():
    assert missed(constants.fitted()) == []


@pytest.mark.parametrize("cause", ["communication", "host"])
def test_a_model_without_a_cause_misses_gates(cause):
    """Fitted again without communication, or without the host, other constants take their place in the totals."""
    c = constants.without_cause(cause)
    for name, off in fit.WITHOUT[cause].items():
        assert getattr(c, name) == off
    assert len(missed(c)) >= 3, missed(c)


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["communication", "host"])
def test_the_wrong_models_are_really_fitted(cause, runs):
    again = fit.fit(runs, fixed=fit.WITHOUT[cause])
    kept = constants.without_cause(cause)
    fixed = fit.WITHOUT[cause]
    for name in (field.name for field in fields(Constants) if field.name not in fixed):
        assert again[name] == pytest.approx(getattr(kept, name), rel=0.1)


@pytest.mark.slow
def test_the_fit_reproduces(runs):
    again, frozen = fit.fit(runs), constants.fitted()
    for name, value in again.items():
        assert value == pytest.approx(getattr(frozen, name), rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# What must hold of any step


def test_parts_add_up_to_the_step(runs):
    for run in runs:
        found = predict(run.job)
        assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
        assert min(found.parts.values()) >= -1e-9
        assert found.tokens_per_s_per_gpu == pytest.approx(tokens_per_s(run.job))
        assert run.job.tokens_per_step / found.step_seconds / run.job.gpus == pytest.approx(found.tokens_per_s_per_gpu)
        assert 0 < found.mfu < 0.7 and found.band[0] < found.tokens_per_s_per_gpu < found.band[1]
        assert found.tflops_full > found.tflops_causal


def test_the_timeline_is_one_layer_on_its_lanes(runs):
    for overlap in ("none", "1f1b_delayed_wgrad"):
        job = replace(job_on(runs, "GB200", ep=32), overlap=overlap)
        timeline = predict(job).timeline
        assert {lane for lane, *_ in timeline} == {"compute", "nvlink"}
        assert min(start for _, _, start, _ in timeline) == 0.0
        assert {"attention forward", "dispatch", "combine backward"} <= {name for _, name, _, _ in timeline}
    across = replace(job, hardware=HARDWARE["B200"])
    assert "network" in {lane for lane, *_ in predict(across).timeline}


FASTER = {
    "graphs": {"graphs": "attention"},
    "no recompute": {"recompute": frozenset()},
    "fewer waits": {"sync_free": True},
    "overlap": {"overlap": "1f1b_delayed_wgrad"},
    "deduplicating": {"dispatcher": "hybridep"},
    "larger microbatch": {"micro_batch_size": 2},
}


@pytest.mark.parametrize("change", FASTER)
def test_changes_that_save_work_save_time(runs, change):
    job = replace(job_on(runs, "B200", dispatcher="alltoall", pp=16), recompute=frozenset({"mla_up_proj"}))
    assert tokens_per_s(replace(job, **FASTER[change])) > tokens_per_s(job)


def test_round_robin_flatters_deduplicating_transports(runs):
    job = job_on(runs, "GB200", ep=32)
    forced, fair = (predict(replace(job, routing=r)).parts["exposed EP"] for r in ("round_robin", "balanced_random"))
    assert 3 < fair / forced < 8


def test_learned_routing_costs(runs):
    job = job_on(runs, "GB200", ep=32)
    assert 0.9 < tokens_per_s(replace(job, routing="natural")) / tokens_per_s(job) < 0.99


def test_weak_scaling(runs):
    """256 to 1,024 GPUs kept 97 to 98.5 %."""
    job = job_on(runs, "GB300", overlap="1f1b_delayed_wgrad")
    large = replace(job, gpus=1024, dp_shard=4 * job.dp_shard, global_batch_size=4 * job.global_batch_size)
    assert 0.96 < tokens_per_s(large) / tokens_per_s(job) < 1.0


def test_later_releases_launch_faster(runs):
    job = job_on(runs, "GB300", release="26.02")
    gain = tokens_per_s(replace(job, release="26.04")) / tokens_per_s(job) - 1
    assert 0.005 < gain < 0.10


def test_fsdp_hides_behind_enough_tokens(runs):
    qwen = job_on(runs, "H100", model_name="Qwen3-30B-A3B")
    job = replace(qwen, sharding="fsdp", release="titan", dispatcher="dedup", gpus=64, dp_shard=64, ep=8)
    exposed = [
        predict(replace(job, micro_batch_size=n, global_batch_size=64 * n)).parts["exposed FSDP"] for n in (1, 2, 8)
    ]
    assert exposed[0] > exposed[1] > exposed[2] == 0.0


def test_offloaded_activations_leave_beside_kernels_if_the_link_is_fast_enough(runs):
    job = replace(job_on(runs, "GB200", ep=32), offload=frozenset({"moe_expert_input"}))
    assert predict(job).parts["exposed offload"] == 0.0
    slow = replace(job, hardware=replace(job.hardware, host_gb_s=25))
    assert predict(slow).parts["exposed offload"] > 0.0


def test_tensor_and_context_parallelism_cost_traffic(runs):
    job = job_on(runs, "H100", tp=2)
    split = replace(job, cp=2, dp_shard=job.dp_shard // 2, seq_len=2 * job.seq_len)
    parts = predict(split).parts
    assert parts["exposed TP"] > 0 and parts["attention"] > parts["exposed CP"] > 0


def test_nvfp4_gains_little_on_an_moe(runs):
    job = job_on(runs, "GB300", release="26.04", precision="mxfp8")
    assert 0.0 < tokens_per_s(replace(job, precision="nvfp4")) / tokens_per_s(job) - 1 < 0.10


def test_improvements_are_sorted_and_real(runs):
    job = job_on(runs, "B200", dispatcher="alltoall", pp=16)
    found = improvements(job)
    assert len(found) == 3
    assert [each.gain for each in found] == sorted((each.gain for each in found), reverse=True)
    for each in found:
        assert tokens_per_s(each.job) / tokens_per_s(job) - 1 == pytest.approx(each.gain)


def test_every_release_predicts(runs):
    job = job_on(runs, "GB300", release="26.04")
    for name in profiles.RELEASES:
        assert tokens_per_s(replace(job, release=name)) > 0


def test_a_prediction_is_quick(runs):
    start = time.process_time()
    job = job_on(runs, "GB300", overlap="1f1b_delayed_wgrad")
    predict(job)
    improvements(job)
    assert time.process_time() - start < 2.5


@pytest.mark.slow
def test_fit_recovers_constants_it_made(runs):
    """A step of the solver, on data that the model made itself: the misfit must fall."""
    truth = replace(constants.priors(), host_us=constants.priors().host_us * 1.3)
    made = [replace(run, measured=tokens_per_s(run.job, c=truth)) for run in runs[:6]]
    known = constants.described()
    start = {one.name: one.prior for one in known}
    before = sum(r * r for r in fit.residuals(start, made, known)[:6])
    after = sum(r * r for r in fit.residuals(fit.fit(made, rounds=1), made, known)[:6])
    assert after < before


def test_solve():
    assert fit.solve([[0.0, 2.0], [3.0, 1.0]], [4.0, 5.0]) == pytest.approx([1.0, 2.0])


def test_band_is_the_80_percent_quantile():
    assert bands.half_width([0.01 * i for i in range(-5, 6)][:10]) == pytest.approx(0.04, abs=1e-3)
