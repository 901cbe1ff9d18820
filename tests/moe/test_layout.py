"""Index arithmetic against loops over tokens, and traffic and drops against the formulas known for them."""

import math
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_moe.moe import layout


@st.composite
def routings(draw):
    """(ids_TK, weights_TK, E); weights are few different ones, so that there are ties."""
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    skew = draw(st.sampled_from([0.0, 3.0])) * torch.arange(experts)  # the last experts get nearly everything
    ids = (torch.rand(tokens, experts, generator=generator) + skew).topk(top_k, dim=-1).indices
    weights = torch.randint(1, 4, ids.shape, generator=generator) / 4
    return ids, weights, experts


@settings(deadline=None, max_examples=150)
@given(routings(), st.one_of(st.none(), st.integers(1, 6)), st.booleans())
def test_sort_copies_equals_a_loop(routing, capacity, by_weight):
    ids_TK, weights_TK, E = routing
    own = layout.sort_copies(ids_TK, E, capacity, weights_TK if by_weight else None)
    ids, weights = ids_TK.flatten().tolist(), weights_TK.flatten().tolist()
    kept_by_expert = []
    for expert in range(E):
        copies = [n for n, i in enumerate(ids) if i == expert]
        if by_weight and capacity is not None:
            copies.sort(key=lambda n: (-weights[n], n))
        kept_by_expert.append(sorted(copies[:capacity]))
    assert own.load_E.tolist() == [ids.count(expert) for expert in range(E)]
    assert own.kept_E.tolist() == [len(copies) for copies in kept_by_expert]
    kept = [n for copies in kept_by_expert for n in copies]
    assert own.order_N.tolist()[: len(kept)] == kept
    assert sorted(own.order_N.tolist()) == list(range(len(ids)))
    if capacity is None:
        assert own.kept_N is None
    else:
        assert own.kept_N.nonzero().flatten().tolist() == sorted(kept)
    assert own.load_E.dtype == own.order_N.dtype == torch.int64


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 5))
def test_slab_rows_equals_a_loop(counts, alignment):
    counts_Se = torch.tensor(counts)
    start_e = layout.exclusive_cumsum(layout.round_up(counts_Se.sum(0), alignment))
    expected, filled = [], start_e.tolist()
    places = {}
    for expert in range(3):  # laid down by expert, then source
        for source, row in enumerate(counts):
            places[source, expert] = range(filled[expert], filled[expert] + row[expert])
            filled[expert] += row[expert]
    for source in range(len(counts)):  # arrived by source, then expert
        for expert in range(3):
            expected += places[source, expert]
    assert layout.slab_rows(counts_Se, start_e, int(counts_Se.sum())).tolist() == expected


@settings(deadline=None, max_examples=100)
@given(routings(), st.one_of(st.none(), st.integers(1, 4)))
def test_destinations_equal_a_loop(routing, capacity):
    ids_TK, _, E = routing
    kept_N = layout.sort_copies(ids_TK, E, capacity).kept_N
    goes_TP = layout.destinations(ids_TK // 2, E // 2 + 1, kept_N)
    kept_TK = torch.ones_like(ids_TK, dtype=torch.bool) if kept_N is None else kept_N.view_as(ids_TK)
    for token, (ids, kept) in enumerate(zip(ids_TK.tolist(), kept_TK.tolist())):
        places = {i // 2 for i, k in zip(ids, kept) if k}
        assert set(goes_TP[token].nonzero().flatten().tolist()) == places


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.sampled_from([1, 3, 4, 16]))
def test_no_routing_needs_more_than_the_worst_case(data, ranks, local_experts, tokens, alignment):
    top_k = data.draw(st.integers(1, ranks * local_experts))
    ids = [
        torch.tensor(data.draw(st.permutations(range(ranks * local_experts))))[:top_k] for _ in range(ranks * tokens)
    ]
    counts_E = layout.expert_counts(torch.cat([*ids, torch.empty(0, dtype=torch.int64)]), ranks * local_experts)
    rows = layout.round_up(counts_E, alignment).view(ranks, -1).sum(1).max().item()
    assert rows <= layout.worst_rows(tokens, top_k, local_experts, alignment, ranks)


@pytest.mark.parametrize(
    ("tokens", "top_k", "local_experts", "ranks"), [(4096, 8, 4, 64), (5, 8, 32, 8), (100, 2, 1, 4)]
)
def test_worst_case_is_transformer_engines(tokens, top_k, local_experts, ranks):
    def ceil128(n):
        return -(-n // 128) * 128

    copies = ranks * tokens * min(top_k, local_experts)
    expected = min(local_experts * ceil128(ranks * tokens), ceil128(copies + 127 * min(local_experts, copies)))
    assert layout.worst_rows(tokens, top_k, local_experts, 128, ranks) == expected


def test_worst_case_is_met():
    """All tokens of all ranks to the same expert, which is alone on its rank."""
    assert layout.worst_rows(tokens=10, top_k=1, local_experts=1, alignment=16, ranks=3) == 32
    assert layout.worst_rows(tokens=0, top_k=2, local_experts=4, alignment=16) == 0


def test_capacity_counts_the_factor_as_it_is_written():
    assert math.ceil(1.1 * 400 * 8 / 64) == 56  # 1.1 is a little more in binary
    assert layout.copies_per_expert(1.1, tokens=400, top_k=8, num_experts=64) == 55
    assert layout.copies_per_expert(1.25, tokens=7, top_k=3, num_experts=8) == 4
    assert layout.copies_per_expert(0.01, tokens=1, top_k=1, num_experts=8) == 1
    assert layout.copies_per_expert(1.0, tokens=0, top_k=1, num_experts=8) == 0


def test_indices_beyond_int32():
    """2^17 tokens x 8 x 7168 is past 2^31: what is multiplied by a width must be int64 already."""
    ids_TK = torch.arange(8).expand(2**17, 8)
    own = layout.sort_copies(ids_TK, 8, None)
    assert (own.order_N.max() + 1) * 7168 == 2**17 * 8 * 7168 > 2**31


def group_limited(tokens, E, groups, kept, k, by_best_two):
    """Expert ids [T, k] on random scores, of which `kept` groups are allowed: those with the largest sum of their two
    best scores (DeepSeek's rule), or random ones."""
    scores = torch.rand(tokens, groups, E // groups)
    rank = scores.topk(2, dim=-1).values.sum(-1) if by_best_two else torch.rand(tokens, groups)
    allowed = torch.zeros(tokens, groups, 1).scatter_(1, rank.topk(kept, dim=-1).indices[:, :, None], 1.0)
    return (scores * allowed).flatten(1).topk(k, dim=-1).indices


def mean_and_error(ids_TK, experts_per_place, places):
    unique_T = layout.destinations(ids_TK // experts_per_place, places).sum(1).double()
    return unique_T.mean().item(), unique_T.std().item() / math.sqrt(len(unique_T))


@pytest.mark.parametrize(("E", "k", "ranks"), [(256, 8, 8), (256, 8, 64), (64, 8, 4), (64, 6, 16), (8, 2, 2)])
def test_unique_ranks_of_uniform_routing(E, k, ranks):
    torch.manual_seed(E + ranks)
    mean, error = mean_and_error(torch.rand(20_000, E).topk(k, dim=-1).indices, E // ranks, ranks)
    expected = ranks * (1 - comb(E - E // ranks, k) / comb(E, k))
    assert abs(mean - expected) <= 4 * error


def group_limited_formula(E, k, ranks, groups, kept):
    size = E // groups
    if ranks >= groups:
        return kept * (ranks / groups) * (1 - comb(kept * size - E // ranks, k) / comb(kept * size, k))
    each = groups // ranks
    total = 0.0
    for j in range(min(each, kept) + 1):
        chance = comb(each, j) * comb(groups - each, kept - j) / comb(groups, kept)
        total += ranks * chance * (1 - comb(kept * size - j * size, k) / comb(kept * size, k))
    return total


@pytest.mark.parametrize(("E", "ranks"), [(256, 2), (256, 8), (256, 32), (64, 4)])
def test_unique_ranks_of_group_limited_routing(E, ranks):
    """The formula assumes groups picked whatever their scores; DeepSeek's rule picks those with two good experts and so
    spreads a token more."""
    torch.manual_seed(E + ranks)
    expected = group_limited_formula(E, 8, ranks, groups=8, kept=4)
    mean, error = mean_and_error(group_limited(20_000, E, 8, 4, 8, by_best_two=False), E // ranks, ranks)
    assert abs(mean - expected) <= 4 * error
    mean, error = mean_and_error(group_limited(20_000, E, 8, 4, 8, by_best_two=True), E // ranks, ranks)
    assert mean > expected + 4 * error


@pytest.mark.parametrize(("ranks", "expected"), [(8, 3.954), (16, 5.730), (32, 6.854), (64, 7.492)])
def test_unique_ranks_by_deepseeks_rule(ranks, expected):
    """Known for DeepSeek-V3 (256 experts, 8 groups, 4 kept, K 8) to three digits."""
    torch.manual_seed(ranks)
    mean, error = mean_and_error(group_limited(20_000, 256, 8, 4, 8, by_best_two=True), 256 // ranks, ranks)
    assert abs(mean - expected) <= 4 * error + 5e-4


@pytest.mark.parametrize("by_weight", [False, True])
@pytest.mark.parametrize(("E", "k", "mu"), [(16, 4, 256), (64, 8, 128)])
def test_drops_of_uniform_routing(E, k, mu, by_weight):
    """With capacity equal to the mean load mu, half of the loads' spread is cut off: the share dropped is
    sqrt((1 - k/E) / (2 pi mu))."""
    torch.manual_seed(E)
    shares = []
    for _ in range(24):
        ids_TK = torch.rand(mu * E // k, E).topk(k, dim=-1).indices
        own = layout.sort_copies(ids_TK, E, mu, torch.rand(ids_TK.shape) if by_weight else None)
        shares.append(1 - own.kept_E.sum().item() / ids_TK.numel())
    shares = torch.tensor(shares, dtype=torch.float64)
    expected = math.sqrt((1 - k / E) / (2 * math.pi * mu))
    # The loads are not quite normal: the formula is good to about 1 / mu of itself.
    assert abs(shares.mean() - expected) <= 4 * shares.std() / math.sqrt(len(shares)) + expected / mu
