"""Whether a model of these sizes can be built. See config_check.py. Imports neither torch nor torchtitan."""

from titan_moe.flavors import Flavor

MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim")
LAYER_SIZES = ("dense_hidden_dim", "num_shared_experts")
"""What deepseek_v3 has at least one of, and the families with GQA none"""


def problems(flavor: Flavor) -> list[str]:
    """What makes the flavor impossible to build, each with its arithmetic; empty when it is sound."""
    f, mla = flavor, flavor.attention == "mla"
    found = []
    for field in ("vocab_size", "dim", "n_layers", "n_heads", *(MLA_SIZES if mla else ()), "v_head_dim"):
        if getattr(f, field) < 1:
            found.append(f"model.{field} = {getattr(f, field)}: must be at least 1")
    if f.qk_rope_head_dim < 2 or f.qk_rope_head_dim % 2:
        found.append(f"model.qk_rope_head_dim = {f.qk_rope_head_dim}: rotary pairs need an even number, at least 2")
    found += _mla_problems(f) if mla else _gqa_problems(f)
    for field in (*(LAYER_SIZES if mla else ()), "moe_hidden_dim", "num_experts", "num_expert_groups"):
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
        elif experts_per_group < f.scores_per_group:
            found.append(
                f"model.num_expert_groups = {f.num_expert_groups}: leaves {f.num_experts} / {f.num_expert_groups} = "
                f"{experts_per_group} expert{'s' * (experts_per_group > 1)} per group, but a group is judged by its "
                f"best model.scores_per_group = {f.scores_per_group}; 1 turns groups off"
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


def _mla_problems(f: Flavor) -> list[str]:
    found = []
    if f.num_kv_heads:
        found.append(f"model.num_kv_heads = {f.num_kv_heads}: latent attention has none; leave it out")
    if not 0 <= f.n_dense_layers < max(f.n_layers, 1):
        found.append(
            f"model.n_dense_layers = {f.n_dense_layers}: must lie in 0 .. n_layers - 1 = {f.n_layers - 1} "
            "(this trainer is for mixtures of experts: at least one layer must be one)"
        )
    return found


def _gqa_problems(f: Flavor) -> list[str]:
    """Also what would be ignored: nothing in these families reads it."""
    absent: dict[str, float] = dict.fromkeys((*MLA_SIZES, *LAYER_SIZES, "q_lora_rank", "n_dense_layers"), 0)
    absent |= {"num_mtp_layers": 0, "mscale": 1.0, "rope_factor": 1.0, "rope_beta_fast": 32.0, "latent_norm_eps": 1e-6}
    found = [
        f"model.{field} = {getattr(f, field)}: the families qwen3 and mixtral do not have it; leave it out"
        for field, value in absent.items()
        if getattr(f, field) != value
    ]
    if f.v_head_dim != f.qk_rope_head_dim:
        found.append(
            f"model.v_head_dim = {f.v_head_dim}: must equal model.qk_rope_head_dim = {f.qk_rope_head_dim}, because "
            "heads of queries, keys and values are as wide, and rotated whole; set both"
        )
    if f.num_kv_heads < 1 or f.n_heads % f.num_kv_heads:
        found.append(
            f"model.num_kv_heads = {f.num_kv_heads}: must be at least 1 and divide model.n_heads = {f.n_heads}, whose "
            "heads share them evenly"
        )
    return found
