"""Sizes and parameter counts of all families, what one may not have, and how it begins. huggingface/test_matrix.py
compares them with transformers' models."""

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torchtitan.models.qwen3 import model_registry

from titan_moe.config import Config, Model
from titan_moe.config_check import check, model_flavor
from titan_moe.flavors import FAMILIES, QWEN3
from titan_moe.model import build_model, init_weights
from titan_moe.parallel import total_and_active_parameters
from titan_moe.plan import parameters


@pytest.mark.parametrize("name", ["30B-A3B", "235B-A22B"])
def test_qwen3s_sizes_are_those_of_torchtitan(name):
    theirs, f = model_registry(name).model, QWEN3[name]
    attention, moe = theirs.layers[0].attention, theirs.layers[0].moe
    assert (theirs.vocab_size, theirs.dim, len(theirs.layers)) == (f.vocab_size, f.dim, f.n_layers)
    heads = (attention.n_heads, attention.n_kv_heads, attention.head_dim)
    assert heads == (f.n_heads, f.num_kv_heads, f.qk_rope_head_dim) and attention.qk_norm is not None and f.qk_norm
    assert (moe.num_experts, moe.router.top_k) == (f.num_experts, f.top_k)
    assert moe.routed_experts.inner_experts.hidden_dim == f.moe_hidden_dim
    assert (moe.router.score_func, moe.router.route_norm) == (f.score_func, f.route_norm)
    assert attention.rope.max_seq_len == f.max_seq_len
    # torchtitan's 235B has the base of a later release of it (Qwen3-235B-A22B-*-2507).
    assert f.rope_theta == 1e6 and attention.rope.theta in (1e6, 5e6)


# Totals: numbers of parameters that the safetensors of these models on Hugging Face come to, without MTP module and
# router biases (of Kimi-K2, whose authors say 1.04T, 60 x 384; Moonlight's files have 26 x 64 biases and 27 x 64
# numbers more, as many as rotary tables would). Active ones, with embedding and head,
# rounded: DeepSeek-V2's 21B, V3's 37B, Kimi-K2's 32B, Qwen3's 3.3B and 22B, Mixtral's 12.9B and 39B are their authors';
# V2-Lite's 2.4B and Moonlight's 2.24B leave embeddings out.
PUBLISHED = [
    ("deepseek_v3", "16B", "deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224, 2.66e9),
    ("deepseek_v3", "236B", "deepseek-ai/DeepSeek-V2", 235_741_434_880, 21.4e9),
    ("deepseek_v3", "671B", "deepseek-ai/DeepSeek-V3", 671_026_404_352, 37.6e9),
    ("deepseek_v3", "Moonlight-16B-A3B", "moonshotai/Moonlight-16B-A3B", 15_960_108_544, 2.91e9),
    ("deepseek_v3", "Kimi-K2", "moonshotai/Kimi-K2-Instruct", 1_026_408_232_448 - 60 * 384, 32.9e9),
    ("qwen3", "30B-A3B", "Qwen/Qwen3-30B-A3B", 30_532_122_624, 3.35e9),
    ("qwen3", "235B-A22B", "Qwen/Qwen3-235B-A22B", 235_093_634_560, 22.2e9),
    ("mixtral", "8x7B", "mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, 12.9e9),
    ("mixtral", "8x22B", "mistralai/Mixtral-8x22B-v0.1", 140_630_071_296, 39.2e9),
]


@pytest.mark.parametrize(("family", "name", "source", "total", "active"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(family, name, source, total, active):
    config = Config(model=Model(name=family, flavor=name))
    flavor = model_flavor(config)
    counted = total_and_active_parameters(build_model(config), flavor.top_k, flavor.num_experts)
    assert counted == (parameters.total(flavor), parameters.total(flavor, active=True))
    assert counted[0] == total, source
    assert counted[1] == pytest.approx(active, rel=3e-3), source


def test_initial_weights_follow_the_recipe():
    config = Config(model=Model(name="qwen3"))
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, seed=0)
    attention, experts = model.layers["1"].attention, model.layers["1"].moe.routed_experts.inner_experts
    for weight, std in ((attention.qkv_linear.wk.weight, 0.02), (attention.wo.weight, 0.02 / 8**0.5)):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert experts.w2_EDF.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert torch.equal(attention.q_norm.weight, torch.ones(64))
    # Keys and values have weights of their own, though they are built from one config.
    assert not torch.equal(attention.qkv_linear.wk.weight, attention.qkv_linear.wv.weight)


def problems(**settings) -> list[str]:
    return check(Config(model=Model(**settings)), 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "qwen3", "flavor": "671B"}, 'is no size of model.name = "qwen3"; choose one of debugmodel, 30B-A3B'),
        ({"name": "qwen3", "num_mtp_layers": 1}, "model.num_mtp_layers = 1: the families qwen3 and mixtral do not"),
        ({"name": "mixtral", "num_shared_experts": 1}, "model.num_shared_experts = 1: the families qwen3 and mixtral"),
        ({"name": "mixtral", "kv_lora_rank": 4}, "model.kv_lora_rank = 4: the families qwen3 and mixtral"),
        ({"name": "qwen3", "v_head_dim": 32}, "model.v_head_dim = 32: must equal model.qk_rope_head_dim = 64"),
        ({"name": "qwen3", "num_kv_heads": 3}, "model.num_kv_heads = 3: must be at least 1 and divide model.n_heads"),
        ({"num_kv_heads": 2}, "model.num_kv_heads = 2: latent attention has none; leave it out"),
    ],
)
def test_what_a_family_does_not_have_is_named(settings, expected):
    (problem,) = problems(**settings)
    assert expected in problem


def test_parts_and_degrees_that_a_family_does_not_have_are_named():
    config = Config(model=Model(name="qwen3"))
    config.activation_checkpoint.mode, config.activation_checkpoint.recompute = "none", ["norms", "mla_up_proj"]
    config.parallelism.tensor_parallel_degree = 4
    heads, parts = check(config, 4)
    assert "must divide model.num_kv_heads = 2" in heads and heads.endswith("choose one of 1, 2")
    assert 'recompute = ["norms", "mla_up_proj"]: this model has no mla_up_proj' in parts


def test_every_flavor_is_sound():
    for family, flavors in FAMILIES.items():
        for name in flavors:
            assert problems(name=family, flavor=name) == []
