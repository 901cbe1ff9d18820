"""Exposed seconds from measured numbers: the fit of a link, the bytes, and schedules that can be worked out by hand."""

from dataclasses import replace

import pytest

from titan_moe.config import Config
from titan_moe.plan.hardware import resolve
from titan_moe.plan.job import Job
from titan_moe.plan.measured import TRANSFERS, Link, exposed_seconds, received_bytes

LINK = Link(0.0, 1.0)  # a second per byte


@pytest.fixture
def job() -> Job:
    config = Config()
    config.model.name, config.model.flavor = "deepseek_v3", "debugmodel"
    config.training.local_batch_size, config.training.seq_len = 8, 128
    config.parallelism.expert_parallel_degree, config.moe.dispatcher = 2, "alltoall"
    return Job.from_config(config, 2, resolve("H100"))


def test_a_link_is_what_its_transfers_lie_on():
    link = Link.fitted([(n, 2e-4 + n / 5e6) for n in (100, 1e4, 1e6)])
    assert link.latency == pytest.approx(2e-4) and link.bytes_per_s == pytest.approx(5e6)
    assert link.seconds(1e6) == pytest.approx(0.2002)
    noisy = Link.fitted([(100, 3e-4), (1e4, 2e-3), (1e6, 0.2)])  # a small transfer weighs as much as a large one
    assert noisy.seconds(100) == pytest.approx(3e-4, rel=0.2) and noisy.seconds(1e6) == pytest.approx(0.2, rel=0.2)


def test_bytes_are_those_of_rows_that_leave_and_of_their_weights(job):
    """T K / 2 rows of D numbers come from the other of two ranks; a weight travels with each to its expert, and its
    gradient back."""
    T, K, D = 8 * 128, job.model.top_k, job.model.dim
    rows, weights = T * K / 2 * D * 4, T * K / 2 * 4
    assert received_bytes(job, 4) == {
        "dispatch": rows + weights,
        "combine": rows,
        "combine backward": rows,
        "dispatch backward": rows + weights,
    }
    dedup = received_bytes(replace(job, dispatcher="dedup"), 4)
    assert dedup["combine"] < rows, "a token's copies for one rank travel once"


def test_nothing_is_hidden_without_overlap(job):
    received = dict.fromkeys(TRANSFERS, 3.0)
    blocks = {"attention forward": 100.0, "shared forward": 100.0}
    assert exposed_seconds(job, blocks, Link(1.0, 1.0), received) == 4 * 4.0


def test_the_shared_expert_hides_its_time_in_each_direction(job):
    job, received = replace(job, overlap="shared_expert"), dict.fromkeys(TRANSFERS, 3.0)
    blocks = {"attention forward": 7.0, "shared forward": 2.0, "experts forward": 5.0, "shared backward": 10.0}
    assert exposed_seconds(job, blocks, LINK, received) == 12.0 - 2.0 - 3.0  # no more than a transfer lasts


def test_halves_hide_each_other(job):
    """Forward: attention 4, experts 4, each transfer 4, all in halves of 2. Dispatch a lies under attention b, dispatch
    b under experts a, combine a under experts b: only combine b is left. The shared expert hides 1 of its 2. Backward
    without kernels hides nothing."""
    job, received = replace(job, overlap="half_batch"), dict.fromkeys(TRANSFERS, 4.0)
    forward = {"attention forward": 4.0, "experts forward": 4.0}
    assert exposed_seconds(job, forward, LINK, received) == 2.0 + 8.0
    assert exposed_seconds(job, {**forward, "shared forward": 1.0}, LINK, received) == 1.0 + 8.0


def test_halves_pay_the_latency_twice(job):
    received = dict.fromkeys(TRANSFERS, 0.0)
    assert exposed_seconds(replace(job, overlap="half_batch"), {}, Link(1.0, 1.0), received) == 8.0
