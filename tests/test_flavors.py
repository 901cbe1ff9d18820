"""Model sizes: the big ones are torchtitan's, number by number, and the [model] section can replace each of them."""

from dataclasses import asdict
from typing import Any, get_args, get_type_hints

import pytest

from titan_moe.config import Config, Model
from titan_moe.config_file import model_flavor
from titan_moe.flavor_check import problems
from titan_moe.flavors import FAMILIES, FLAVORS, PUBLISHED, Flavor, resolve

OF_THE_FAMILY = ("attention", "qk_norm")
"""Fields that model.name decides"""


def sizes_of(config: Any) -> dict[str, object]:
    """The sizes in a torchtitan DeepSeek-V3 model config."""
    first, last = config.layers[0], config.layers[-1]
    attention, moe, rope = first.attention, last.moe, first.attention.rope
    experts, router = moe.routed_experts.inner_experts, moe.router
    return {
        "vocab_size": config.vocab_size,
        "dim": config.dim,
        "n_layers": len(config.layers),
        "n_dense_layers": sum(layer.moe is None for layer in config.layers),
        "n_heads": attention.n_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "dense_hidden_dim": first.feed_forward.w1.out_features,
        "moe_hidden_dim": experts.hidden_dim,
        "num_experts": moe.num_experts,
        "num_shared_experts": moe.shared_experts.w1.out_features / experts.hidden_dim,
        "top_k": router.top_k,
        "score_func": router.score_func,
        "num_expert_groups": router.num_expert_groups or 1,  # torchtitan's None: no groups
        "num_limited_groups": router.num_limited_groups or 1,
        "route_norm": router.route_norm,
        "route_scale": router.route_scale,
        "mscale": attention.mscale,
        "rope_theta": rope.theta,
        "rope_factor": rope.rope_factor,
        "rope_beta_fast": rope.beta_fast,
        "max_seq_len": rope.max_seq_len,
        "original_seq_len": rope.original_seq_len,
    }


@pytest.mark.parametrize("name", ["16B", "236B", "671B", "Moonlight-16B-A3B", "Kimi-K2"])
def test_sizes_are_those_of_torchtitan(name: str) -> None:
    import torch

    if not torch.cuda.is_available():
        torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan asks while it is imported
    from torchtitan.models import deepseek_v3, kimi_k2_7

    if name in ("Moonlight-16B-A3B", "Kimi-K2"):
        theirs = {"Moonlight-16B-A3B": "moonlight-16B-A3B", "Kimi-K2": "Kimi-K2.5"}[name]
        sizes = sizes_of(kimi_k2_7.model_registry(theirs).model)
    else:
        sizes = sizes_of(deepseek_v3.model_registry(name).model)
    if name == "Kimi-K2":  # whose context K2.5 extends further
        longer = {field: sizes.pop(field) for field in ("rope_factor", "rope_beta_fast", "max_seq_len")}
        assert longer == {"rope_factor": 64.0, "rope_beta_fast": 32.0, "max_seq_len": 262144}
    ours = asdict(FLAVORS[name])
    assert {field: ours[field] for field in sizes} == sizes
    # As published; torchtitan has one epsilon, 1e-5, for all models and norms, and the group scores of DeepSeek-V3.
    assert ours["norm_eps"] == (1e-5 if name == "Moonlight-16B-A3B" else 1e-6) and ours["latent_norm_eps"] == 1e-6
    assert ours["scores_per_group"] == (1 if name == "236B" else 2)
    assert (ours["num_mtp_layers"], ours["num_kv_heads"]) == (0, 0)


def test_every_size_can_be_replaced_in_the_model_section() -> None:
    """[model] has an optional field for each of Flavor's, of the same type, and no other optional field."""
    model, flavor = get_type_hints(Model), get_type_hints(Flavor)
    flavor = {name: hint for name, hint in flavor.items() if name not in OF_THE_FAMILY}
    assert {name: hint for name, hint in model.items() if type(None) in get_args(hint)} == {
        name: hint | None for name, hint in flavor.items()
    }
    assert [name for name in model if name in flavor] == list(flavor)


def test_every_flavor_can_be_chosen_and_is_sound() -> None:
    assert set(get_args(get_type_hints(Model)["flavor"])) == {name for names in FAMILIES.values() for name in names}
    for family, names in FAMILIES.items():
        for name, flavor in names.items():
            assert problems(flavor) == [] and resolve(family, name, {"dim": None}) == flavor
    assert not PUBLISHED.keys() & set(FLAVORS), "the names that published runs have cannot be chosen for training"


def test_overrides_replace_single_sizes() -> None:
    config = Config(model=Model(flavor="16B", n_layers=2, route_norm=True))
    assert asdict(model_flavor(config)) == asdict(FLAVORS["16B"]) | {"n_layers": 2, "route_norm": True}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"n_dense_layers": 4}, "model.n_dense_layers = 4: must lie in 0 .. n_layers - 1 = 3"),
        ({"qk_rope_head_dim": 33}, "rotary pairs need an even number"),
        ({"num_expert_groups": 3}, "must divide num_experts = 8"),
        ({"num_expert_groups": 8, "num_limited_groups": 3}, "8 / 8 = 1 expert per group"),
        ({"num_limited_groups": 5}, "must lie in 1 .. num_expert_groups = 4"),
        ({"top_k": 5}, "more than the 2 x 2 = 4 experts of the kept groups"),
        ({"num_shared_experts": 0}, "model.num_shared_experts = 0: must be at least 1"),
    ],
)
def test_impossible_sizes_are_named(overrides: dict[str, object], expected: str) -> None:
    (problem,) = problems(resolve("deepseek_v3", "debugmodel", overrides))
    assert expected in problem
