"""The MoE layer, as training builds it, against transformers' DeepSeek-V3 block on the same weights in fp32.

torchtitan's stock layer, the peer of test_layer.py, has its router in common with ours. This block has nothing.

Shape letters: B batch, L sequence, D model width, K top-k, E experts, F expert hidden width.
"""

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from titan_moe.config import Config, Model
from titan_moe.config import MoE as MoESection
from titan_moe.model import model_config
from titan_moe.moe.layer import FusedMoE
from titan_moe.moe.names import GATE, UP, to_stock_names

# E, K, groups, groups kept, shared experts, D, F, weights of a token divided by their sum
SHAPES = {
    "debug": (8, 3, 4, 2, 1, 64, 48, True),
    "one-expert": (8, 1, 1, 1, 1, 40, 24, False),
    "one-group": (16, 2, 1, 1, 2, 72, 56, True),
    "limited": (16, 4, 4, 2, 2, 104, 40, True),
    "unnormed": (16, 4, 8, 3, 1, 88, 24, False),
}
ROUTE_SCALE = 2.5
WEIGHTS = {  # transformers' name: ours; gate and up of the experts are merged there, and interleaved here
    "gate.weight": "router.gate.weight",
    "gate.e_score_correction_bias": "expert_bias_E",
    "experts.down_proj": "routed_experts.inner_experts.w2_EDF",
    "shared_experts.gate_proj.weight": "shared_experts.w1.weight",
    "shared_experts.down_proj.weight": "shared_experts.w2.weight",
    "shared_experts.up_proj.weight": "shared_experts.w3.weight",
}
GATE_UP = "experts.gate_up_proj"
INNER = "routed_experts.inner_experts."


def peer_block(shape: str) -> DeepseekV3MoE:
    E, K, groups, kept, shared, D, F, norm = SHAPES[shape]
    config = DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=F,
        n_routed_experts=E,
        n_shared_experts=shared,
        num_experts_per_tok=K,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=norm,
        routed_scaling_factor=ROUTE_SCALE,
        experts_implementation="eager",
    )
    peer = DeepseekV3MoE(config)
    for tensor in peer.state_dict().values():
        nn.init.normal_(tensor, std=0.3)
    return peer


def our_layer(shape: str, experts: str, weighting: str) -> FusedMoE:
    """The first MoE layer of a model, as training builds it."""
    E, K, groups, kept, shared, D, F, norm = SHAPES[shape]
    model = Model(
        dim=D,
        moe_hidden_dim=F,
        num_experts=E,
        num_shared_experts=shared,
        top_k=K,
        num_expert_groups=groups,
        num_limited_groups=kept,
        route_norm=norm,
        route_scale=ROUTE_SCALE,
    )
    moe = MoESection(dispatcher="local", experts=experts, weighting=weighting, load_balance_coeff=1e-3)
    config = model_config(Config(model=model, moe=moe)).layers[1].moe
    assert isinstance(config, FusedMoE.Config)
    return config.build()


def by_our_names(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors, weights or gradients, under the names of our state dict."""
    gate, up = named[GATE_UP].chunk(2, dim=1)
    return {INNER + GATE: gate, INNER + UP: up} | {WEIGHTS[name]: t for name, t in named.items() if name != GATE_UP}


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    """By torchtitan's names, with w13 taken apart, where the layer is ours."""
    return to_stock_names({name: p.grad for name, p in layer.named_parameters() if p.grad is not None})


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("weighting", ["early", "late"])
@pytest.mark.parametrize("experts", ["loop", "grouped_mm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers_deepseek_v3(shape, experts, weighting):
    torch.manual_seed(0)
    peer, ours = peer_block(shape), our_layer(shape, experts, weighting)
    ours.load_state_dict(by_our_names(peer.state_dict()))
    x_BLD = torch.randn(2, 37, SHAPES[shape][5])
    grad_BLD = torch.randn_like(x_BLD)

    inputs = [x_BLD.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((peer, ours), inputs)]
    for out in outputs:
        out.backward(grad_BLD)

    _, _, peer_ids = peer.gate(x_BLD)
    _, ids_BLK, _ = ours.router(x_BLD, ours.expert_bias_E)
    assert torch.equal(peer_ids.sort(-1).values, ids_BLK.flatten(0, 1).sort(-1).values)
    _, unbiased_BLK, _ = ours.router(x_BLD, None)
    assert not torch.equal(unbiased_BLK.sort(-1).values, ids_BLK.sort(-1).values), "the bias decides nothing"

    assert error(outputs[1], outputs[0]) < 1e-5
    assert error(inputs[1].grad, inputs[0].grad) < 1e-5
    expected, got = by_our_names(gradients(peer)), gradients(ours)
    assert got.keys() == expected.keys() and len(got) == 7
    errors = {name: error(got[name], expected[name]) for name in got}
    assert all(value < 1e-5 for value in errors.values()), errors
