"""Transformer Engine's router kernel against its double, which the tests without a GPU rely on.

Shape letters: T tokens, E experts, K top-k.
"""

import titan_moe.runtime  # noqa: F401

import pytest
import torch

from tests.te.test_real import double
from titan_moe.flavors import FLAVORS
from titan_moe.moe import te_router  # noqa: F401 - registers the op

pytestmark = pytest.mark.gpu

T = 1000


@pytest.mark.parametrize("flavor", ["16B", "671B"])
def test_the_kernel_chooses_as_its_double(tex, flavor):
    """Softmax without groups, and sigmoid with groups and a bias."""
    f = FLAVORS[flavor]
    E, K = f.num_experts, f.top_k
    groups, limited = (f.num_expert_groups, f.num_limited_groups) if f.num_expert_groups > 1 else (None, None)
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(T, E, generator=generator)
    bias_E = torch.randn(E, generator=generator) * 0.1 if f.score_func == "sigmoid" else None
    expected_TE, _ = double("transformer_engine/pytorch/router.py").fused_topk_with_score_function(
        logits_TE,
        K,
        use_pre_softmax=f.score_func == "softmax" and not f.route_norm,
        num_groups=groups,
        group_topk=limited,
        scaling_factor=f.route_scale,
        score_function=f.score_func,
        expert_bias=bias_E,
        topk_indices=torch.empty(T, K, dtype=torch.int64),
    )
    weights_TK, ids_TK = torch.ops.titan_moe.te_route(
        logits_TE.cuda(),
        None if bias_E is None else bias_E.cuda(),
        K,
        groups,
        limited,
        f.score_func,
        f.route_norm,
        f.route_scale,
    )
    chosen_TE = torch.zeros(T, E).scatter(1, ids_TK.cpu(), weights_TK.cpu())
    torch.testing.assert_close(chosen_TE, expected_TE, rtol=1e-4, atol=1e-6)
