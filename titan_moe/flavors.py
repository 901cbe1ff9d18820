"""Model sizes as plain data, shared by `model.py` (which builds them) and the planner (which only counts).

A family (`model.name`) is a structure, a flavor (`model.flavor`) one point in it:

- deepseek_v3: multi-head latent attention (MLA); a mixture of experts with a shared one, behind a few dense layers. The
  numbers of "16B" (DeepSeek-V2-Lite), "236B" (V2), "671B" (V3) and "Moonlight-16B-A3B" are those of torchtitan 0.3.0
  but for epsilons and V2's group scores, which are those of the published models. "Kimi-K2" is as published.
  "debugmodel" is ours: the same structure as 671B (query low-rank projection, sigmoid scores with bias, expert groups,
  a dense first layer, a shared expert) at a size that a laptop CPU trains in a minute.
- qwen3: grouped-query attention (GQA) with a norm on each query and key head; experts in every layer, softmax scores,
  nothing shared.
- mixtral: the same without these norms, with few and wide experts.

Tests compare the big ones with torchtitan, field by field, and count their parameters.

Imports neither torch nor torchtitan.
"""

from dataclasses import dataclass, replace
from typing import Literal

ScoreFunction = Literal["sigmoid", "softmax"]
Attention = Literal["mla", "gqa"]
Family = Literal["deepseek_v3", "qwen3", "mixtral"]


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """Every size that fixes a model. Lengths are in elements, counts are per model or per layer."""

    vocab_size: int
    dim: int
    n_layers: int
    n_dense_layers: int
    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_hidden_dim: int
    moe_hidden_dim: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    score_func: ScoreFunction
    num_expert_groups: int
    num_limited_groups: int
    scores_per_group: int = 2
    route_norm: bool
    route_scale: float
    mscale: float
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    rope_beta_fast: float = 32.0
    max_seq_len: int = 16384
    original_seq_len: int = 4096
    num_mtp_layers: int = 0
    norm_eps: float = 1e-5  # torchtitan's for DeepSeek-V3; DeepSeek's own models have 1e-6
    latent_norm_eps: float = 1e-6  # of MLA's latents; whatever norm_eps is, in all published models
    attention: Attention = "mla"
    num_kv_heads: int = 0  # of GQA; MLA expands its compressed keys and values to one per query head
    qk_norm: bool = False  # of GQA


FLAVORS: dict[str, Flavor] = {
    "debugmodel": Flavor(
        vocab_size=288,
        dim=256,
        n_layers=4,
        n_dense_layers=1,
        n_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        dense_hidden_dim=768,
        moe_hidden_dim=256,
        num_experts=8,
        num_shared_experts=1,
        top_k=3,
        score_func="sigmoid",
        num_expert_groups=4,
        num_limited_groups=2,
        route_norm=True,
        route_scale=2.5,
        mscale=1.0,
        rope_factor=1.0,
        latent_norm_eps=1e-5,
    ),
    "16B": Flavor(
        vocab_size=102400,
        dim=2048,
        n_layers=27,
        n_dense_layers=1,
        n_heads=16,
        q_lora_rank=0,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        dense_hidden_dim=10944,
        moe_hidden_dim=1408,
        num_experts=64,
        num_shared_experts=2,
        top_k=6,
        score_func="softmax",
        num_expert_groups=1,
        num_limited_groups=1,
        route_norm=False,
        route_scale=1.0,
        mscale=0.70,
        norm_eps=1e-6,
    ),
    "236B": Flavor(
        vocab_size=102400,
        dim=5120,
        n_layers=60,
        n_dense_layers=1,
        n_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        dense_hidden_dim=12288,
        moe_hidden_dim=1536,
        num_experts=160,
        num_shared_experts=2,
        top_k=6,
        score_func="softmax",
        num_expert_groups=8,
        num_limited_groups=3,
        scores_per_group=1,
        route_norm=False,
        route_scale=16.0,
        mscale=1.0,
        norm_eps=1e-6,
    ),
    "671B": Flavor(
        vocab_size=129280,
        dim=7168,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        dense_hidden_dim=18432,
        moe_hidden_dim=2048,
        num_experts=256,
        num_shared_experts=1,
        top_k=8,
        score_func="sigmoid",
        num_expert_groups=8,
        num_limited_groups=4,
        route_norm=True,
        route_scale=2.5,
        mscale=1.0,
        norm_eps=1e-6,
    ),
}

# Moonshot AI's models: the structure of DeepSeek-V3, without groups. Sizes from their config.json on Hugging Face:
# moonshotai/Moonlight-16B-A3B, moonshotai/Kimi-K2-Instruct.
FLAVORS["Moonlight-16B-A3B"] = replace(
    FLAVORS["16B"],
    vocab_size=163840,
    dense_hidden_dim=11264,
    score_func="sigmoid",
    route_norm=True,
    route_scale=2.446,
    mscale=1.0,
    rope_theta=50000.0,
    rope_factor=1.0,
    max_seq_len=8192,
    norm_eps=1e-5,
)
FLAVORS["Kimi-K2"] = replace(
    FLAVORS["671B"],
    vocab_size=163840,
    n_dense_layers=1,
    n_heads=64,
    num_experts=384,
    num_expert_groups=1,
    num_limited_groups=1,
    route_scale=2.827,
    rope_theta=50000.0,
    rope_factor=32.0,
    rope_beta_fast=1.0,
    max_seq_len=131072,
)


def _gqa(*, head_dim: int, qk_norm: bool, max_seq_len: int, **sizes: int) -> Flavor:
    """A model of MoE layers only, with grouped-query attention (rotary over the whole head) and softmax routing."""
    no_mla = {"q_lora_rank": 0, "kv_lora_rank": 0, "qk_nope_head_dim": 0}
    no_dense = {"n_dense_layers": 0, "dense_hidden_dim": 0, "num_shared_experts": 0}
    return Flavor(
        **{**no_mla, **no_dense, **sizes},
        attention="gqa",
        qk_norm=qk_norm,
        norm_eps=1e-6 if qk_norm else 1e-5,
        qk_rope_head_dim=head_dim,
        v_head_dim=head_dim,
        score_func="softmax",
        num_expert_groups=1,
        num_limited_groups=1,
        route_norm=True,
        route_scale=1.0,
        mscale=1.0,
        rope_theta=1e6,
        rope_factor=1.0,
        max_seq_len=max_seq_len,
        original_seq_len=max_seq_len,
    )


# Sizes from the models' config.json on Hugging Face: Qwen/Qwen3-*, mistralai/Mixtral-*-v0.1.
QWEN3: dict[str, Flavor] = {
    "debugmodel": _gqa(
        vocab_size=288,
        dim=256,
        n_layers=4,
        n_heads=4,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=True,
        moe_hidden_dim=256,
        num_experts=8,
        top_k=3,
        max_seq_len=4096,
    ),
    "30B-A3B": _gqa(
        vocab_size=151936,
        dim=2048,
        n_layers=48,
        n_heads=32,
        num_kv_heads=4,
        head_dim=128,
        qk_norm=True,
        moe_hidden_dim=768,
        num_experts=128,
        top_k=8,
        max_seq_len=40960,
    ),
}
QWEN3["235B-A22B"] = replace(QWEN3["30B-A3B"], dim=4096, n_layers=94, n_heads=64, moe_hidden_dim=1536)

MIXTRAL: dict[str, Flavor] = {
    "debugmodel": _gqa(
        vocab_size=288,
        dim=256,
        n_layers=4,
        n_heads=4,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=False,
        moe_hidden_dim=768,
        num_experts=4,
        top_k=2,
        max_seq_len=4096,
    ),
    "8x7B": _gqa(
        vocab_size=32000,
        dim=4096,
        n_layers=32,
        n_heads=32,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=False,
        moe_hidden_dim=14336,
        num_experts=8,
        top_k=2,
        max_seq_len=32768,
    ),
}
MIXTRAL["8x22B"] = replace(
    MIXTRAL["8x7B"],
    vocab_size=32768,
    dim=6144,
    n_layers=56,
    n_heads=48,
    moe_hidden_dim=16384,
    max_seq_len=65536,
    original_seq_len=65536,
)

FAMILIES: dict[Family, dict[str, Flavor]] = {"deepseek_v3": FLAVORS, "qwen3": QWEN3, "mixtral": MIXTRAL}

PUBLISHED: dict[str, Flavor] = {
    "DeepSeek-V3 671B": FLAVORS["671B"],
    "Qwen3-235B-A22B": QWEN3["235B-A22B"],
    "Qwen3-30B-A3B": QWEN3["30B-A3B"],
    "Mixtral-8x7B": MIXTRAL["8x7B"],
    "Mixtral-8x22B": MIXTRAL["8x22B"],
}
"""Models whose published runs the planner is validated on, by the names those runs have"""


def resolve(family: Family, name: str, overrides: dict[str, object]) -> Flavor:
    """The family's flavor `name` with the fields in `overrides` that are not None replaced. Raises ValueError for a
    flavor of another family."""
    if name not in FAMILIES[family]:
        raise ValueError(
            f'model.flavor = "{name}": is no size of model.name = "{family}"; choose one of '
            f"{', '.join(FAMILIES[family])}"
        )
    return replace(FAMILIES[family][name], **{k: v for k, v in overrides.items() if v is not None})  # type: ignore[arg-type]
