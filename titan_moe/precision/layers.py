"""Which layers a recipe holds for: the linear layers of a model by name, with their sizes, and the layers left alone.

A linear layer has the name that it has in its block: "attention.wq_a", "feed_forward.w1" (of dense layers),
"shared_experts.w1". `precision.linears` names them whole, by the group in front of the dot, or by the part behind it,
and then of every group. Two more are single: "lm_head", the output head, and "eh_proj", which joins hidden state and
embedding in a multi-token prediction (MTP) layer. The routed experts have a key of their own, and the router's gate no
name at all: its logits are fp32, because on ties a rounding decides which expert a token meets.

Layers are numbered from 0. MTP layers come behind the others, as in DeepSeek-V3's checkpoints: "last 1" is the last
layer of the model proper, its n_layers-th, and the first MTP layer has the number n_layers.

Imports no torch.
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from titan_moe.config import Config
from titan_moe.flavors import Flavor
from titan_moe.precision.recipes import RECIPES, Recipe

GROUPS = ("attention", "feed_forward", "shared_experts")
SINGLE = ("eh_proj", "lm_head")
ENDS = re.compile(r"(first|last) +([0-9]+)")
RANGE = re.compile(r"([0-9]+)(?: *- *([0-9]+))?")


class Linear(NamedTuple):
    """One kind of linear layer, y = x w^T."""

    name: str
    takes: str
    """What its input x is made by; those that take the same take one tensor"""
    inputs: int
    outputs: int
    cut: Literal["inputs", "outputs"] | None
    """Which of them tensor parallelism cuts"""


def linears(f: Flavor) -> dict[str, Linear]:
    """Those of a model, by name."""
    qk, hidden = f.qk_nope_head_dim + f.qk_rope_head_dim, f.num_shared_experts * f.moe_hidden_dim
    norm, qkv = "attention_norm", f.n_heads * qk
    if f.attention == "gqa":
        found = [
            Linear("attention.wq", norm, f.dim, qkv, "outputs"),
            Linear("attention.wkv", norm, f.dim, f.num_kv_heads * qk, "outputs"),
        ]
    else:
        keys_and_values = f.n_heads * (f.qk_nope_head_dim + f.v_head_dim)
        found = [
            Linear("attention.wkv_a", norm, f.dim, f.kv_lora_rank + f.qk_rope_head_dim, None),
            Linear("attention.wkv_b", "kv_norm", f.kv_lora_rank, keys_and_values, "outputs"),
        ]
        if f.q_lora_rank:
            found.append(Linear("attention.wq_a", norm, f.dim, f.q_lora_rank, None))
            found.append(Linear("attention.wq_b", "q_norm", f.q_lora_rank, qkv, "outputs"))
        else:
            found.append(Linear("attention.wq", norm, f.dim, qkv, "outputs"))
    found.append(Linear("attention.wo", "kernel", f.n_heads * f.v_head_dim, f.dim, "inputs"))
    for group, width in {"feed_forward": f.dense_hidden_dim * (f.n_dense_layers > 0), "shared_experts": hidden}.items():
        if width:
            found += [Linear(f"{group}.{name}", "ffn_norm", f.dim, width, "outputs") for name in ("w1", "w3")]
            found.append(Linear(f"{group}.w2", "swiglu", width, f.dim, "inputs"))
    if f.num_mtp_layers:
        found.append(Linear("eh_proj", "cat", 2 * f.dim, f.dim, None))
    found.append(Linear("lm_head", "norm", f.dim, f.vocab_size, None))
    return {linear.name: linear for linear in found}


def named(names: Collection[str], there: Collection[str]) -> tuple[set[str], dict[str, str]]:
    """(the linear layers of `there` that `names` stand for, and of each name that stands for none the reason).

    A group that this model does not have stands for nothing, which is no mistake: the default names all three.
    """
    found: set[str] = set()
    mistakes: dict[str, str] = {}
    known = {*there, *GROUPS, *(name.rpartition(".")[2] for name in there)}
    for name in names:
        meant = {other for other in there if name in (other, *other.split("."))}
        found |= meant
        if not meant and name not in GROUPS:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            short = ", ".join(sorted(word for word in known if "." not in word))
            mistakes[name] = f"did you mean {near[0]!r}?" if near else f"choose from {short}"
    return found, mistakes


def kept_layers(text: str, n_layers: int, num_mtp_layers: int) -> frozenset[int]:
    """The layers that `precision.keep_high_precision_layers` names. Raises ValueError for words that name none, and for
    layers that the model does not have."""
    found: set[int] = set()
    total = n_layers + num_mtp_layers
    for part in filter(None, (part.strip() for part in text.split(","))):
        if ends := ENDS.fullmatch(part):
            end, count = ends[1], int(ends[2])
            if count > n_layers:
                raise ValueError(f'"{part}": the model has {n_layers} layers')
            found |= set(range(count) if end == "first" else range(n_layers - count, n_layers))
        elif numbers := RANGE.fullmatch(part):
            first = int(numbers[1])
            last = int(numbers[2] or first)
            if last < first:
                raise ValueError(f'"{part}": ends before it begins; write {last}-{first}')
            if last >= total:
                mtp = f", of which {n_layers} and up are for multi-token prediction" if num_mtp_layers else ""
                raise ValueError(f'"{part}": layers have the numbers 0 .. {total - 1}{mtp}')
            found |= set(range(first, last + 1))
        else:
            raise ValueError(f'"{part}": names no layers; write "first 1", "last 2", a number or a range such as 5-7')
    return frozenset(found)


def quantized_layers(f: Flavor, names: Collection[str], experts: bool, kept: Collection[int]) -> set[int]:
    """The layers that hold one of the linear layers `names`, or routed experts, in low precision."""

    def has(layer: int) -> bool:
        dense = layer < f.n_dense_layers
        here = {"attention": True, "feed_forward": dense, "shared_experts": not dense, "eh_proj": layer >= f.n_layers}
        return (experts and not dense) or any(here.get(name.split(".")[0]) for name in names)

    return {layer for layer in range(f.n_layers + f.num_mtp_layers) if layer not in kept and has(layer)}


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a configuration puts into low precision."""

    recipe: Recipe
    linears: frozenset[str]
    experts: bool
    kept: frozenset[int]
    """Layers in high precision"""
    kept_inputs: frozenset[str]
    """Linear layers whose input is kept for backward as it is, by others too"""

    def holds_for(self, layer: int) -> bool:
        return layer not in self.kept


def quantizes(config: Config) -> bool:
    return config.precision.recipe in RECIPES


def chosen(config: Config, flavor: Flavor) -> Chosen | None:
    """None if the GEMMs are in high precision. For a configuration without problems."""
    p = config.precision
    if p.recipe not in RECIPES:
        return None
    found, _ = named(p.linears, linears(flavor))
    kept = kept_layers(p.keep_high_precision_layers, flavor.n_layers, flavor.num_mtp_layers)
    # Attention kernels keep what they return. On one expert-parallel rank the routed experts keep the layer's tokens.
    degrees = config.parallelism
    tokens_kept = degrees.expert_parallel_degree == degrees.tensor_parallel_degree == 1
    inputs = {"attention.wo", *(("shared_experts.w1", "shared_experts.w3") if tokens_kept else ())}
    return Chosen(
        recipe=RECIPES[p.recipe],
        linears=frozenset(found),
        experts=p.experts,
        kept=kept,
        kept_inputs=frozenset(inputs),
    )
