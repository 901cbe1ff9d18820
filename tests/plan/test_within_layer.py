"""Overlap inside a layer, placed by hand, and what the planner makes of moe.overlap."""

from types import SimpleNamespace

import pytest

from titan_moe import config_file
from titan_moe.plan import constants, overlap, profiles, schedule
from titan_moe.plan.hardware import resolve
from titan_moe.plan.job import Job
from titan_moe.plan.within_layer import place

ACROSS_NODES = [
    *("--parallelism.expert_parallel_degree=64", "--moe.dispatcher=dedup", "--training.local_batch_size=2"),
    *("--training.global_batch_size=-1", "--activation_checkpoint.mode=none"),
]
BLOCKS = {
    "attention forward": 3.0,
    "router forward": 1.0,
    "experts forward": 4.0,
    "shared forward": 2.0,
    "experts backward": 4.0,
    "experts wgrad": 4.0,
    "shared backward": 2.0,
    "shared wgrad": 2.0,
    "attention backward": 4.0,
    "attention wgrad": 4.0,
}
SENT = {"dispatch": 2.0, "combine": 2.0, "combine backward": 2.0, "dispatch backward": 2.0}


def placed(kind):
    return place(SimpleNamespace(overlap=kind), BLOCKS, SENT, "nvlink")


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        # The shared expert's 2 s and 4 s hide dispatch and its transpose; combine and its transpose stay.
        ("shared_expert", 10 + 2, 20 + 2),
        # All of it: what the first and the last transfer find beside them is the other half's, or the shared expert's.
        ("half_batch", 10, 20),
    ],
)
def test_by_hand(kind, forward, backward):
    found = {side: schedule.makespan(ops) for side, ops in placed(kind).items()}
    assert found == {"forward": forward, "backward": backward}


def test_each_half_travels_under_the_other():
    """compute: attention a b, experts a b, shared; a half of a transfer takes 1 s."""
    when = {p.name: (p.start, p.end) for p in placed("half_batch")["forward"]}
    assert when["dispatch a"] == (2, 3) and when["attention forward b"] == (2, 4)
    assert when["dispatch b"] == (4, 5) and when["experts forward a"] == (4, 6)
    assert when["combine a"] == (6, 7) and when["experts forward b"] == (6, 8)
    assert when["combine b"] == (8, 9) and when["shared forward"] == (8, 10)


def test_the_configuration_is_planned_with_it():
    """Exposed transfers of one layer: fewer seconds with the shared expert, fewest with halves."""
    exposed = {}
    for kind in ("none", "shared_expert", "half_batch"):
        config = config_file.load(["train_configs/deepseek_v3_16b.toml", *ACROSS_NODES, f"--moe.overlap={kind}"])
        job = Job.from_config(config, 64, resolve("H100"))
        assert job.overlap == kind
        time = overlap.layer_time(job, "moe", profiles.of_release(job.release)[0], constants.fitted())
        assert time.pair == pytest.approx(time.forward + time.backward)
        exposed[kind] = time.parts["exposed EP"]
    assert 0 < exposed["half_batch"] < exposed["shared_expert"] < exposed["none"]
