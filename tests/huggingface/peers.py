"""Small models of transformers with random weights, each beside the configuration here that is to be the same model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from titan_moe.config import Config, Model
from titan_moe.flavors import Flavor
from titan_moe.huggingface.load import tensors
from titan_moe.huggingface.names import weights
from titan_moe.model import build_model, init_weights

ROWS, LENGTH = 288, 40
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
MLA = {"vocab_size": ROWS, "hidden_size": 64, "num_hidden_layers": 3, "first_k_dense_replace": 1}
MLA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32}
MLA |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 96}
MLA |= {"moe_intermediate_size": 40, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3}
MLA |= {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6}
MLA |= {"num_nextn_predict_layers": 0, "max_position_embeddings": 4096}
OURS_MLA = {"vocab_size": ROWS, "dim": 64, "n_layers": 3, "n_dense_layers": 1, "n_heads": 4, "kv_lora_rank": 24}
OURS_MLA |= {"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
OURS_MLA |= {"dense_hidden_dim": 96, "moe_hidden_dim": 40, "num_experts": 8, "num_shared_experts": 1, "top_k": 3}
OURS_MLA |= {"num_expert_groups": 4, "num_limited_groups": 2, "route_norm": True, "route_scale": 2.5}
OURS_MLA |= {"norm_eps": 1e-6, "latent_norm_eps": 1e-6, "rope_factor": 1.0, "max_seq_len": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7}
KIMIS_YARN = YARN | {"rope_theta": 5e4, "factor": 32.0, "beta_fast": 1, "mscale": 1, "mscale_all_dim": 1}
KIMIS_YARN |= {"original_max_position_embeddings": 512}  # long enough for beta_fast to make a difference
OURS_YARN = {"rope_factor": 8.0, "original_seq_len": 16, "mscale": 0.7}
NO_GROUPS, OURS_NO_GROUPS = {"n_group": 1, "topk_group": 1}, {"num_expert_groups": 1, "num_limited_groups": 1}
GQA = {"vocab_size": ROWS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 24}
GQA |= {"num_key_value_heads": 2, "num_experts_per_tok": 3, "max_position_embeddings": 4096}
OURS_GQA = {"vocab_size": ROWS, "dim": 64, "n_layers": 2, "n_heads": 4, "qk_rope_head_dim": 24, "v_head_dim": 24}
OURS_GQA |= {"num_kv_heads": 2, "top_k": 3}
THETA = {"rope_type": "default", "rope_theta": 1e6}


def deepseek_v3(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[Callable[[], nn.Module], Model]:
    config = DeepseekV3Config(**MLA | theirs)
    return lambda: DeepseekV3ForCausalLM._from_config(config, **EAGER), Model(**OURS_MLA | ours)


def deepseek_v2(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[Callable[[], nn.Module], Model]:
    theirs = {**MLA, "norm_topk_prob": False, "rope_parameters": YARN, **theirs}
    ours = {**OURS_MLA, **OURS_YARN, "route_norm": False, "score_func": "softmax", **ours}
    del theirs["num_nextn_predict_layers"]
    config = DeepseekV2Config(**theirs)
    return lambda: DeepseekV2ForCausalLM._from_config(config, **EAGER), Model(**ours)


def qwen3(experts: int, norm: bool) -> tuple[Callable[[], nn.Module], Model]:
    theirs = {**GQA, "moe_intermediate_size": 32, "num_experts": experts, "norm_topk_prob": norm}
    config = Qwen3MoeConfig(**theirs, rope_parameters=THETA)
    ours = {**OURS_GQA, "moe_hidden_dim": 32, "num_experts": experts, "route_norm": norm}
    return lambda: Qwen3MoeForCausalLM._from_config(config, **EAGER), Model(name="qwen3", **ours)


def mixtral(experts: int) -> tuple[Callable[[], nn.Module], Model]:
    config = MixtralConfig(**GQA, intermediate_size=32, num_local_experts=experts, rope_parameters=THETA)
    ours = {**OURS_GQA, "moe_hidden_dim": 32, "num_experts": experts}
    return lambda: MixtralForCausalLM._from_config(config, **EAGER), Model(name="mixtral", **ours)


SHAPES: dict[str, tuple[Callable[[], nn.Module], Model]] = {
    "deepseek_v3": deepseek_v3({}, {}),
    "deepseek_v3 yarn, 12 experts, full queries": deepseek_v3(
        {"q_lora_rank": None, "n_routed_experts": 12, "rope_parameters": YARN} | NO_GROUPS,
        {"q_lora_rank": 0, "num_experts": 12} | OURS_NO_GROUPS | OURS_YARN,
    ),
    "deepseek_v3 two shared, no norm, no dense": deepseek_v3(
        {"n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        {"num_shared_experts": 2, "route_norm": False, "route_scale": 1.0, "n_dense_layers": 0},
    ),
    "deepseek_v3 as Moonlight": deepseek_v3(
        {"q_lora_rank": None, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"routed_scaling_factor": 2.446, "rms_norm_eps": 1e-2}  # far from that of the latents, to tell them apart
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
        | NO_GROUPS,
        {"q_lora_rank": 0, "num_experts": 16, "num_shared_experts": 2, "top_k": 6}
        | {"route_scale": 2.446, "norm_eps": 1e-2, "rope_theta": 5e4}
        | OURS_NO_GROUPS,
    ),
    "deepseek_v3 as Kimi-K2": deepseek_v3(
        {"n_routed_experts": 24, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827}
        | {"rope_parameters": KIMIS_YARN}
        | NO_GROUPS,
        {"num_experts": 24, "top_k": 8, "route_scale": 2.827, "mscale": 1.0, "original_seq_len": 512}
        | {"rope_theta": 5e4, "rope_factor": 32.0, "rope_beta_fast": 1.0}
        | OURS_NO_GROUPS,
    ),
    "deepseek_v2 lite": deepseek_v2(
        {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0} | NO_GROUPS,
        {"q_lora_rank": 0, "route_scale": 1.0} | OURS_NO_GROUPS,
    ),
    "deepseek_v2 groups, 16 experts": deepseek_v2(
        {"topk_method": "group_limited_greedy", "n_routed_experts": 16, "routed_scaling_factor": 16.0},
        {"scores_per_group": 1, "num_experts": 16, "route_scale": 16.0},
    ),
    "qwen3": qwen3(8, True),
    "qwen3 16 experts, no norm": qwen3(16, False),
    "mixtral": mixtral(4),
    "mixtral 12 experts": mixtral(12),
}


def marked(*few: str) -> list[Any]:
    """The shapes for parametrize; those that do not begin like one of a few are slow, as their test is."""
    return [pytest.param(s, marks=() if s.startswith(few) else pytest.mark.slow) for s in SHAPES]


def peer(shape: str, seed: int = 0) -> nn.Module:
    """transformers' model in fp32, far enough from its initialization that every weight matters, the bias included."""
    return drawn(SHAPES[shape][0](), seed)


def with_a_layer_more() -> nn.Module:
    """Shape "deepseek_v3" with one layer more, which there is that of multi-token prediction."""
    return drawn(deepseek_v3({"num_hidden_layers": 4}, {})[0](), seed=0)


def drawn(model: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = model.float()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(value, std=0.3)
        elif "inv_freq" not in name:
            nn.init.normal_(value, mean=float("norm" in name), std=0.1)
    return model.eval()


def configuration(shape: str, folder: Path | str = "") -> Config:
    config = Config(model=replace(SHAPES[shape][1]))
    config.training.seq_len, config.training.mixed_precision_param = LENGTH, "float32"
    config.moe.experts = "loop"
    config.checkpoint.enable, config.checkpoint.initial_load_path = True, str(folder)
    if not shape.startswith("deepseek_v3"):
        config.moe.load_balance_coeff = 0.0
    return config


def ours(config: Config) -> nn.Module:
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, seed=1)
    return model


def ids(batch: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randint(0, ROWS, (batch, LENGTH)), torch.arange(LENGTH).expand(batch, LENGTH)


def fingerprint(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value, _ in tensors([model])}


def files(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the folder."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def by_our_names(named: dict[str, Tensor], flavor: Flavor) -> dict[str, Tensor]:
    """transformers' tensors as its models have them, with stacks of experts like ours but gate and up in one, under the
    names of our checkpoints; without the router's bias."""
    found = {}
    for weight in weights(flavor, bias=False):
        theirs = weight.theirs.replace("block_sparse_moe", "mlp")
        stack, _, matrix = theirs.partition(".{}.")
        if not matrix:
            found[weight.ours] = named[theirs]
        elif matrix in ("w2.weight", "down_proj.weight"):
            found[weight.ours] = named[f"{stack}.down_proj"]
        else:
            gate, up = named[f"{stack}.gate_up_proj"].chunk(2, dim=1)
            found[weight.ours] = gate if matrix in ("w1.weight", "gate_proj.weight") else up
    return found
