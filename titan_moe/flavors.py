"""Model sizes as plain data, shared by `model.py` (which builds them) and the planner (which only counts).

A flavor is one point in the space of DeepSeek-V3 models: multi-head latent attention (MLA) and a mixture of experts
behind a few dense layers. The numbers of "16B", "236B" and "671B" are those of torchtitan 0.3.0 (a test compares them
field by field); "debugmodel" is ours: the same structure as 671B (query low-rank projection, sigmoid scores with bias,
expert groups, a dense first layer, a shared expert) at a size that a laptop CPU trains in a minute.

`PUBLISHED` adds models whose published runs the planner is validated on, by the names those runs have. Some have
grouped-query attention (GQA), which nothing here builds: `attention` and `num_kv_heads` only say how it counts.

Imports neither torch nor torchtitan.
"""

from dataclasses import dataclass, replace
from typing import Literal

ScoreFunction = Literal["sigmoid", "softmax"]
Attention = Literal["mla", "gqa"]


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """Every size that fixes a DeepSeek-V3 model. Lengths are in elements, counts are per model or per layer."""

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
    route_norm: bool
    route_scale: float
    mscale: float
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    max_seq_len: int = 16384
    original_seq_len: int = 4096
    num_mtp_layers: int = 0
    attention: Attention = "mla"
    num_kv_heads: int = 0  # of GQA; MLA expands its compressed keys and values to one per query head


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
        route_norm=False,
        route_scale=16.0,
        mscale=1.0,
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
    ),
}


def _gqa(*, head_dim: int, rope_theta: float, **sizes: int) -> Flavor:
    """A model of MoE layers only, with grouped-query attention (rotary over the whole head) and softmax routing."""
    no_mla = {"q_lora_rank": 0, "kv_lora_rank": 0, "qk_nope_head_dim": 0}
    no_dense = {"n_dense_layers": 0, "dense_hidden_dim": 0, "num_shared_experts": 0}
    return Flavor(
        **{**no_mla, **no_dense, **sizes},
        attention="gqa",
        qk_rope_head_dim=head_dim,
        v_head_dim=head_dim,
        score_func="softmax",
        num_expert_groups=1,
        num_limited_groups=1,
        route_norm=True,
        route_scale=1.0,
        mscale=1.0,
        rope_theta=rope_theta,
        rope_factor=1.0,
    )


PUBLISHED: dict[str, Flavor] = {
    "DeepSeek-V3 671B": FLAVORS["671B"],
    "Qwen3-235B-A22B": _gqa(
        vocab_size=151936,
        dim=4096,
        n_layers=94,
        n_heads=64,
        num_kv_heads=4,
        head_dim=128,
        moe_hidden_dim=1536,
        num_experts=128,
        top_k=8,
        rope_theta=1e6,
    ),
    "Qwen3-30B-A3B": _gqa(
        vocab_size=151936,
        dim=2048,
        n_layers=48,
        n_heads=32,
        num_kv_heads=4,
        head_dim=128,
        moe_hidden_dim=768,
        num_experts=128,
        top_k=8,
        rope_theta=1e6,
    ),
    "Mixtral-8x7B": _gqa(
        vocab_size=32000,
        dim=4096,
        n_layers=32,
        n_heads=32,
        num_kv_heads=8,
        head_dim=128,
        moe_hidden_dim=14336,
        num_experts=8,
        top_k=2,
        rope_theta=1e6,
    ),
    "Mixtral-8x22B": _gqa(
        vocab_size=32768,
        dim=6144,
        n_layers=56,
        n_heads=48,
        num_kv_heads=8,
        head_dim=128,
        moe_hidden_dim=16384,
        num_experts=8,
        top_k=2,
        rope_theta=1e6,
    ),
}
"""Sizes from the models' config.json on Hugging Face (Qwen/Qwen3-*, mistralai/Mixtral-*-v0.1)"""


def resolve(name: str, overrides: dict[str, object]) -> Flavor:
    """The flavor `name` with the fields in `overrides` that are not None replaced."""
    return replace(FLAVORS[name], **{k: v for k, v in overrides.items() if v is not None})  # type: ignore[arg-type]


def problems(flavor: Flavor) -> list[str]:
    """What makes the flavor impossible to build, each with its arithmetic; empty when it is sound."""
    f, found = flavor, []
    for field in ("vocab_size", "dim", "n_layers", "n_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        if getattr(f, field) < 1:
            found.append(f"model.{field} = {getattr(f, field)}: must be at least 1")
    if f.qk_rope_head_dim < 2 or f.qk_rope_head_dim % 2:
        found.append(f"model.qk_rope_head_dim = {f.qk_rope_head_dim}: rotary pairs need an even number, at least 2")
    if not 0 <= f.n_dense_layers < max(f.n_layers, 1):
        found.append(
            f"model.n_dense_layers = {f.n_dense_layers}: must lie in 0 .. n_layers - 1 = {f.n_layers - 1} "
            "(this trainer is for mixtures of experts: at least one layer must be one)"
        )
    for field in ("dense_hidden_dim", "moe_hidden_dim", "num_experts", "num_shared_experts", "num_expert_groups"):
        if getattr(f, field) < 1:
            found.append(f"model.{field} = {getattr(f, field)}: must be at least 1")
    if found:
        return found
    if not 1 <= f.top_k <= f.num_experts:
        found.append(f"model.top_k = {f.top_k}: must lie in 1 .. num_experts = {f.num_experts}")
    if f.num_expert_groups > 1:
        experts_per_group, rest = divmod(f.num_experts, f.num_expert_groups)
        if rest:
            found.append(
                f"model.num_expert_groups = {f.num_expert_groups}: must divide num_experts = {f.num_experts}; "
                "1 turns group-limited routing off"
            )
        elif experts_per_group < 2:
            found.append(
                f"model.num_expert_groups = {f.num_expert_groups}: leaves {f.num_experts} / {f.num_expert_groups} = "
                f"{experts_per_group} expert per group, but a group is scored by its two best; 1 turns groups off"
            )
        if not 1 <= f.num_limited_groups <= f.num_expert_groups:
            found.append(
                f"model.num_limited_groups = {f.num_limited_groups}: must lie in 1 .. num_expert_groups = "
                f"{f.num_expert_groups}"
            )
        elif not rest and f.top_k > f.num_limited_groups * experts_per_group:
            found.append(
                f"model.top_k = {f.top_k}: more than the {f.num_limited_groups} x {experts_per_group} = "
                f"{f.num_limited_groups * experts_per_group} experts of the kept groups"
            )
    return found
