"""Parameters of a model by part, counted from its sizes; what of them one GPU holds is memory.py's matter.

DeepSeek-V3: attention has 187.1 M per layer, an expert 44.04 M, the model 671.03 B, and 682.6 B with its MTP layer.
Imports no torch.
"""

from typing import Literal

from titan_moe.flavors import Flavor

Kind = Literal["dense", "moe", "mtp"]

REPLICATED_BY_TP = {"norms", "router", "latent projections", "MTP projection"}
"""Parts that every tensor-parallel rank holds whole; the others are cut by heads or by hidden width"""
KEPT_BY_ADAMW = ("norms", "router")
"""Parts of a layer that AdamW keeps beside Muon, with two moments"""


def of_layer(flavor: Flavor, kind: Kind) -> dict[str, int]:
    """Parameters of one layer by part. "routed experts" are all of them together."""
    f = flavor
    qk = f.qk_nope_head_dim + f.qk_rope_head_dim
    heads = f.n_heads * f.v_head_dim * f.dim
    if f.attention == "gqa":
        latent, norms = 0, 2 * f.dim + 2 * qk * f.qk_norm
        heads += f.dim * (f.n_heads * qk + f.num_kv_heads * (qk + f.v_head_dim))
    else:
        latent, norms = f.dim * (f.q_lora_rank + f.kv_lora_rank + f.qk_rope_head_dim), 2 * f.dim
        norms += f.q_lora_rank + f.kv_lora_rank
        heads += (f.q_lora_rank or f.dim) * f.n_heads * qk
        heads += f.kv_lora_rank * f.n_heads * (f.qk_nope_head_dim + f.v_head_dim)
    parts = {"attention": heads, "latent projections": latent, "norms": norms}
    if kind == "dense":
        return parts | {"dense MLP": 3 * f.dim * f.dense_hidden_dim}
    parts |= {
        "router": f.dim * f.num_experts,
        "shared experts": 3 * f.dim * f.moe_hidden_dim * f.num_shared_experts,
        "routed experts": 3 * f.dim * f.moe_hidden_dim * f.num_experts,
    }
    if kind == "mtp":
        parts["norms"] += 3 * f.dim
        parts["MTP projection"] = 2 * f.dim**2
    return parts


def of_embedding(flavor: Flavor) -> int:
    return flavor.vocab_size * flavor.dim


def of_head(flavor: Flavor) -> int:
    """The output head and the norm before it."""
    return (flavor.vocab_size + 1) * flavor.dim


def total(flavor: Flavor, *, active: bool = False) -> int:
    """All parameters, MTP layers included; `active`: only those that one token meets (top_k of the routed experts)."""
    count = of_embedding(flavor) + of_head(flavor)
    for kind, number in _layers(flavor).items():
        parts = of_layer(flavor, kind)
        if active and kind != "dense":
            parts["routed experts"] = parts["routed experts"] * flavor.top_k // flavor.num_experts
        count += number * sum(parts.values())
    return count


def of_muon(flavor: Flavor) -> int:
    """Those of `total` that have one momentum where Muon trains: matrices of layers but the router's."""
    parts = ((number, of_layer(flavor, kind)) for kind, number in _layers(flavor).items())
    return sum(number * sum(n for part, n in each.items() if part not in KEPT_BY_ADAMW) for number, each in parts)


def _layers(flavor: Flavor) -> dict[Kind, int]:
    """How many there are of each kind."""
    return {
        "dense": flavor.n_dense_layers,
        "moe": flavor.n_layers - flavor.n_dense_layers,
        "mtp": flavor.num_mtp_layers,
    }
