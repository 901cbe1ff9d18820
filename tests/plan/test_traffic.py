"""Unique destinations against the public table of DeepSeek-V3 (256 experts, 8 groups of which 4 kept, K 8)."""

from dataclasses import replace

import pytest

from titan_moe.flavors import FLAVORS, PUBLISHED
from titan_moe.plan import collectives, constants, overlap, profiles, traffic
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.published import RUNS, read, runs_of

V3 = FLAVORS["671B"]
TOKENS = 4096


@pytest.mark.parametrize(("ranks", "expected"), [(8, 5.295), (16, 6.523), (32, 7.267), (64, 7.676)])
def test_uniform_routing(ranks, expected):
    assert traffic.uniform_unique(256, 8, ranks) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("ranks", "expected"), [(8, 3.954), (16, 5.730), (32, 6.854), (64, 7.492)])
def test_group_limited_routing_by_the_two_best_scores(ranks, expected):
    found = traffic.unique_places(V3, "balanced_random", ranks)
    assert found == pytest.approx(expected, abs=0.02)
    assert traffic.group_limited_lower_bound(256, 8, 8, 4, ranks) < found < traffic.uniform_unique(256, 8, ranks)


@pytest.mark.parametrize("judged_by", [1, 2])
@pytest.mark.parametrize("ranks", [8, 16])
def test_the_draw_follows_the_routers_rule(judged_by, ranks):
    """DeepSeek-V2, whose groups are judged by their best score alone, and what it would be by the best two."""
    import titan_moe.runtime  # noqa: F401

    import torch

    from titan_moe.moe.router import Router

    model = replace(FLAVORS["236B"], scores_per_group=judged_by)
    scores_BLE = torch.rand(1, 40_000, model.num_experts, generator=torch.Generator().manual_seed(0))
    limited_BLE = Router._get_node_limited_routing_scores(model, scores_BLE)  # type: ignore[arg-type]
    rank_BLK = limited_BLE.topk(model.top_k, dim=-1).indices // (model.num_experts // ranks)
    met_BLR = torch.zeros(1, 40_000, ranks).scatter(-1, rank_BLK, 1.0)
    assert traffic.unique_places(model, "natural", ranks) == pytest.approx(met_BLR.sum(-1).mean().item(), abs=0.02)


@pytest.mark.parametrize(("ep", "uniform", "limited"), [(16, 1.993, 1.966), (32, 3.614, 3.115), (64, 5.295, 3.954)])
def test_unique_nodes_of_8(ep, uniform, limited):
    assert traffic.uniform_unique(256, 8, ep // 8) == pytest.approx(uniform, abs=5e-4)
    assert traffic.unique_places(V3, "natural", ep // 8) == pytest.approx(limited, abs=0.02)


@pytest.mark.parametrize(("ranks", "expected"), [(8, 1), (32, 1), (64, 2)])
def test_round_robin_hides_the_traffic(ranks, expected):
    assert traffic.unique_places(V3, "round_robin", ranks) == expected


@pytest.mark.parametrize(("ranks", "dedup", "ungrouped", "none"), [(8, 203, 272, 411), (32, 390, 413, 455)])
def test_remote_megabytes(ranks, dedup, ungrouped, none):
    """BF16 bytes of one dispatch of 4,096 tokens that leave the rank."""
    away = (ranks - 1) / ranks * TOKENS * 2 * 7168 / 1e6
    assert traffic.unique_places(V3, "natural", ranks) * away == pytest.approx(dedup, rel=0.005)
    assert traffic.uniform_unique(256, 8, ranks) * away == pytest.approx(ungrouped, rel=0.005)
    assert 8 * away == pytest.approx(none, rel=0.005)


def gb200(**changes) -> Job:
    jobs = (run.job for run in runs_of(read(RUNS)))
    job = next(job for job in jobs if job.hardware.name == "GB200" and job.ep == 32 and job.pp == 8)
    return replace(job, **changes)


def test_inside_a_domain_ranks_count_and_across_domains_nodes():
    job = gb200()
    assert traffic.nodes_of_ep(job) == 1
    assert traffic.ep_copies(job) == (pytest.approx(6.854, abs=0.02), 0.0)
    split = replace(job, hardware=HARDWARE["B200"])
    assert traffic.nodes_of_ep(split) == 4
    assert traffic.ep_copies(split)[1] == pytest.approx(3.115, abs=0.02)


def test_alltoall_sends_every_copy_that_leaves():
    near, far = traffic.ep_copies(gb200(dispatcher="alltoall"))
    assert near + far == pytest.approx(8 * 31 / 32)
    near, far = traffic.ep_copies(gb200(dispatcher="alltoall", hardware=HARDWARE["B200"]))
    assert near + far == pytest.approx(8 * 31 / 32) and far == pytest.approx(6)


def test_no_expert_parallelism_moves_nothing():
    job = gb200(ep=1, dispatcher="local")
    assert traffic.ep_copies(job) == (0.0, 0.0)


def test_fp8_payload_is_0_516_of_bf16():
    assert traffic.row_bytes(gb200(), "fp8") / traffic.row_bytes(gb200(), "bf16") == 0.516


def test_rows_as_mxfp8_take_half_the_time_on_their_way_to_experts():
    """And gradients on theirs; the other two transfers stay in BF16. Seconds have a part that is not bandwidth."""
    plain, half = (gb200(dispatcher="te_ep", mxfp8_payload=payload) for payload in (False, True))
    before, after = (overlap.transfers(job, profiles.RELEASES["titan"], constants.priors()) for job in (plain, half))
    for name in ("dispatch", "combine backward"):
        assert 0.5 < after[name] / before[name] < 0.6
    for name in ("combine", "dispatch backward"):
        assert after[name] == before[name]


def test_one_copy_of_4096_tokens_is_58_7_megabytes():
    assert traffic.row_bytes(gb200(), "bf16") * TOKENS == pytest.approx(58.7e6, rel=1e-3)
    assert traffic.pp_bytes(gb200()) == pytest.approx(58.7e6, rel=1e-3)


def test_tensor_parallel_bytes():
    """Attention and shared expert are split: gather and scatter each way, and a second gather for wgrad."""
    job = gb200()
    assert traffic.tp_bytes_per_layer(job, True) == 0
    split = replace(job, tp=2, dp_shard=job.dp_shard // 2)
    full = 4096 * 2 * 7168
    assert traffic.tp_bytes_per_layer(split, True) == 2 * 5 * full / 2
    qwen = replace(split, model=PUBLISHED["Qwen3-235B-A22B"], stages=split.stages)
    assert traffic.tp_bytes_per_layer(qwen, True) == 5 * 4096 * 2 * 4096 / 2


def test_context_parallel_bytes_are_the_other_ranks_keys_and_values():
    job = replace(gb200(), cp=2, dp_shard=gb200().dp_shard // 2)
    assert traffic.cp_bytes_per_layer(job) == 3 * 2048 * 128 * (192 + 128) * 2


def test_sharded_collectives_cross_domains_once_per_domain():
    """Inside a domain first: what crosses is one share of the domain's ranks."""
    job = gb200()
    inside = collectives.sharded_seconds(job, 64e9, 64, 1)
    both = collectives.sharded_seconds(job, 64e9, 128, 1)
    alone = collectives.sharded_seconds(job, 64e9, 2, 64)
    assert inside < both < inside + alone / 32
