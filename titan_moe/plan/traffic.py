"""How many bytes each rank sends: expert parallelism by unique destinations, and FSDP, TP, CP and PP.

A transport that deduplicates sends a token once to each rank (inside an NVLink domain) or node (across) that holds at
least one of its k experts; without, it sends k copies. With E experts over R ranks, a token's expected number of
unique ranks under uniform routing is

    U = R (1 - C(E - E/R, k) / C(E, k)).

Group-limited routing (DeepSeek-V3: M groups, of which g are kept) concentrates them. A closed form exists if the groups
are picked whatever their scores (`group_limited_lower_bound`); DeepSeek picks the groups with the largest sum of their
best scores (two in V3, one in V2), which spreads a token more, so `unique_places` draws tokens by the real rule. Given
the kept groups the chosen k experts are the k best of gG scores; only the group sizes and the seed are random, so a few
thousand tokens give three digits.

Bytes count what a rank sends or receives in one direction; bandwidths that go with them are in kernels.py.
"""

import random
from functools import cache
from math import comb

from titan_moe.flavors import Flavor
from titan_moe.plan.hardware import Hardware
from titan_moe.plan.job import Job

DRAWS = 4000  # tokens of a Monte Carlo estimate: standard error of U below 0.015
PAYLOAD = {"bf16": 1.0, "fp8": 0.516}
"""Bytes of a row over its BF16 bytes: 1 byte an element, and a 4-byte scale for each 128 (8 for 256), or
1 byte for each 32"""

IMBALANCE = {"natural": 1.10, "balanced_random": 1.02, "round_robin": 1.0}
"""Rows of the busiest rank over the mean. Learned routing: forced balance ran a Qwen3-235B 1.24 times (16 k tokens) and
1.09 times (128 k) as fast as learned, of which experts and their traffic are the half"""


def uniform_unique(num_experts: int, top_k: int, places: int) -> float:
    """Expected places (ranks or nodes) that hold one of a token's experts, when all choices are equally likely."""
    return places * (1 - comb(num_experts - num_experts // places, top_k) / comb(num_experts, top_k))


def group_limited_lower_bound(num_experts: int, top_k: int, groups: int, kept: int, places: int) -> float:
    """The same when `kept` of `groups` groups are picked at random, whatever their experts' scores."""
    size = num_experts // groups
    total = comb(kept * size, top_k)
    if places >= groups:
        return kept * (places / groups) * (1 - comb(kept * size - num_experts // places, top_k) / total)
    each = groups // places
    return sum(
        places
        * (comb(each, j) * comb(groups - each, kept - j) / comb(groups, kept))
        * (1 - comb(kept * size - j * size, top_k) / total)
        for j in range(min(each, kept) + 1)
    )


@cache
def _group_limited_choices(num_experts: int, top_k: int, groups: int, kept: int, judged_by: int) -> list[list[int]]:
    """The experts of `DRAWS` tokens by DeepSeek's rule: groups by the sum of their best scores, then the best k."""
    draw, size = random.Random(0), num_experts // groups
    chosen = []
    for _ in range(DRAWS):
        scores = [draw.random() for _ in range(num_experts)]
        sums = [sum(sorted(scores[g * size : (g + 1) * size])[-judged_by:]) for g in range(groups)]
        best = sorted(range(groups), key=sums.__getitem__)[-kept:]
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        chosen.append(sorted(allowed, key=scores.__getitem__)[-top_k:])
    return chosen


@cache
def group_limited_unique(
    num_experts: int, top_k: int, groups: int, kept: int, places: int, *, judged_by: int = 2
) -> float:
    """The same by DeepSeek's rule: a group is judged by the sum of its best `judged_by` scores. Monte Carlo, seeded:
    the same number each time."""
    per_place = num_experts // places
    choices = _group_limited_choices(num_experts, top_k, groups, kept, judged_by)
    return sum(len({expert // per_place for expert in chosen}) for chosen in choices) / len(choices)


def round_robin_unique(num_experts: int, top_k: int, places: int) -> float:
    """Unique places when a token gets the next `top_k` experts in turn: the benchmark trap, next to no traffic."""
    per_place = num_experts // places
    starts = range(0, num_experts, top_k)
    return sum(len({(s + i) % num_experts // per_place for i in range(top_k)}) for s in starts) / len(starts)


def unique_places(model: Flavor, routing: str, places: int) -> float:
    """Places that one token is sent to, its own included when it holds an expert: between 1 and min(k, places)."""
    if places <= 1:
        return 1.0
    if routing == "round_robin":
        return round_robin_unique(model.num_experts, model.top_k, places)
    if model.num_expert_groups > 1:
        groups, kept = model.num_expert_groups, model.num_limited_groups
        return group_limited_unique(
            model.num_experts, model.top_k, groups, kept, places, judged_by=model.scores_per_group
        )
    return uniform_unique(model.num_experts, model.top_k, places)


def ranks_per_domain(hardware: Hardware) -> int:
    """GPUs of one NVLink domain that a job uses: a rack of 72 in powers of two, 64."""
    return 1 << (hardware.nvlink_domain.bit_length() - 1)


def nodes_of_ep(job: Job) -> int:
    """NVLink domains that one expert-parallel group spans. Ranks of a group are neighbours (EP is innermost)."""
    return 1 if job.ep <= job.hardware.nvlink_domain else -(-job.ep // ranks_per_domain(job.hardware))


def ep_copies(job: Job) -> tuple[float, float]:
    """Copies of a token that one dispatch moves: (over NVLink, to ranks; across domains, to nodes incl. its own).

    The second is 0 inside one domain. These are the units of the libraries' bandwidth figures: unique ranks with the
    own one, unique nodes with the own one; for `alltoall` copies that leave the rank, and copies that leave the
    domain."""
    nodes, k = nodes_of_ep(job), job.model.top_k
    if job.ep == 1:
        return 0.0, 0.0
    if job.dispatcher == "alltoall":
        inside = k * (job.ep / nodes - 1) / job.ep
        return inside, k * (nodes - 1) / nodes
    if nodes == 1:
        return unique_places(job.model, job.routing, job.ep), 0.0
    return unique_places(job.model, job.routing, job.ep), unique_places(job.model, job.routing, nodes)


def row_bytes(job: Job, payload: str) -> float:
    """Bytes of one token on the wire."""
    return 2.0 * job.model.dim * PAYLOAD[payload]


def fsdp_gather_bytes(params: float, ranks: int, bytes_each: int) -> float:
    """Bytes that a rank receives when `params` parameters are gathered from `ranks` (the same as a reduce-scatter
    sends)."""
    return params * bytes_each * (ranks - 1) / ranks


def tp_bytes_per_layer(job: Job, moe: bool) -> float:
    """Bytes that a rank sends for tensor parallelism with sequence parallelism in one layer, forward and backward: an
    all-gather and a reduce-scatter around each split block, and in backward a second gather for wgrad. The routed
    experts are not split, so an MoE layer has two such blocks only with a shared expert."""
    if job.tp == 1:
        return 0.0
    blocks = 1 + (not moe or job.model.num_shared_experts > 0)
    full = job.tokens * job.tp * 2.0 * job.model.dim
    return blocks * 5 * full * (job.tp - 1) / job.tp


def cp_bytes_per_layer(job: Job) -> float:
    """Bytes that a rank receives for context parallelism in one layer: keys and values of the other ranks in forward,
    again in backward, and the reduce-scatter of their gradients."""
    f = job.model
    heads = f.num_kv_heads if f.attention == "gqa" else f.n_heads
    width = heads * (f.qk_nope_head_dim + f.qk_rope_head_dim + f.v_head_dim) / job.tp
    return 3 * job.tokens * job.tp * (job.cp - 1) * width * 2.0


def pp_bytes(job: Job) -> float:
    """Bytes of one microbatch's hidden states between two stages."""
    return job.tokens * 2.0 * job.model.dim
