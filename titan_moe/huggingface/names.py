"""The weights of a model, each under our name and under Hugging Face's. One list serves import, export and checks.

Our names are those of checkpoints, which are torchtitan's: `w1_EFD` and `w3_EFD`, never `w13_EF2D`. Where we have one
stack of experts, Hugging Face has one matrix per expert: its name has a place for the number. Everything else is the
same tensor under two names: torchtitan's linear layers are [out, in] too, and its rotary pairs are neighbours as those
of DeepSeek's files are (transformers' `rope_interleave`), so nothing is transposed or permuted.

The modules of multi-token prediction (MTP) are DeepSeek-V3's layers 61 and up. Published files give each of them a copy
of the embedding and of the head, which all of them share with the main model: copies are written, and not read.

Imports no torch: the check before torchrun uses it too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from titan_moe.flavors import Flavor

EXPERTS = "moe.routed_experts.inner_experts"
BIAS, CORRECTION = "expert_bias_E", "e_score_correction_bias"
"""Of the router, as we and they call it"""


class Size(NamedTuple):
    """Of one dimension, and which fields of [model] it comes from."""

    value: int
    of: str


@dataclass(frozen=True, slots=True)
class Weight:
    ours: str
    theirs: str
    """With {} for the number of an expert, where `experts` is not 0"""

    sizes: tuple[Size, ...]
    """Of one tensor of theirs"""

    experts: int = 0
    copies: tuple[str, ...] = ()
    """Other names that published files have the same tensor under"""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size.value for size in self.sizes)

    @property
    def our_shape(self) -> tuple[int, ...]:
        return (self.experts, *self.shape) if self.experts else self.shape

    def names(self) -> list[str]:
        """Theirs, in the order of the experts."""
        return [self.theirs.format(e) for e in range(self.experts)] if self.experts else [self.theirs]

    def explained(self) -> str:
        return f"[{', '.join(f'{size.value} ({size.of})' for size in self.sizes)}]"


def weights(f: Flavor, bias: bool) -> list[Weight]:
    """All weights of a model, in the order of its layers. `bias`: its routers have a correction bias."""
    width, rows = Size(f.dim, "dim"), Size(f.vocab_size, "vocab_size")
    mtp = [f"model.layers.{f.n_layers + i}" for i in range(f.num_mtp_layers)]
    found = [
        Weight(
            "tok_embeddings.weight",
            "model.embed_tokens.weight",
            (rows, width),
            copies=tuple(f"{layer}.embed_tokens.weight" for layer in mtp),
        )
    ]
    for i in range(f.n_layers):
        found += _layer(f, f"layers.{i}", f"model.layers.{i}", moe=i >= f.n_dense_layers, bias=bias)
    for i, theirs in enumerate(mtp):
        ours = f"mtp_layers.{i}"
        found += _layer(f, ours, theirs, moe=True, bias=bias)
        for name, other in (("enorm", "enorm"), ("hnorm", "hnorm"), ("mtp_norm", "shared_head.norm")):
            found.append(Weight(f"{ours}.{name}.weight", f"{theirs}.{other}.weight", (width,)))
        sizes = (width, Size(2 * f.dim, "2 x dim"))
        found.append(Weight(f"{ours}.eh_proj.weight", f"{theirs}.eh_proj.weight", sizes))
    found.append(Weight("norm.weight", "model.norm.weight", (width,)))
    heads = tuple(f"{layer}.shared_head.head.weight" for layer in mtp)
    found.append(Weight("lm_head.weight", "lm_head.weight", (rows, width), copies=heads))
    return found


DENSE = {"w1_EFD": "gate_proj", "w3_EFD": "up_proj", "w2_EDF": "down_proj"}
"""Our stacks of expert weights: the matrix of a dense feed-forward that each expert begins as"""


def weights_from_dense(f: Flavor, tied: bool) -> list[Weight]:
    """Where the weights of a model of GQA layers come from in a dense model ("upcycling", arXiv 2212.05055): all
    experts of a layer from its one feed-forward. Routers come from nowhere, and keep their initial values. `tied`: the
    dense model's head is its embedding."""
    found = []
    for weight in weights(f, bias=False):
        if weight.experts:
            layer, matrix = weight.ours.split(".")[1], DENSE[weight.ours.rpartition(".")[2]]
            found.append(replace(weight, theirs=f"model.layers.{layer}.mlp.{matrix}.weight"))
        elif tied and weight.ours == "tok_embeddings.weight":
            found.append(replace(weight, copies=("lm_head.weight",)))
        elif tied and weight.ours == "lm_head.weight":
            found.append(replace(weight, theirs="model.embed_tokens.weight"))
        elif ".moe.router." not in weight.ours:
            found.append(weight)
    return found


def _layer(f: Flavor, ours: str, theirs: str, *, moe: bool, bias: bool) -> Iterator[Weight]:
    width = Size(f.dim, "dim")
    yield Weight(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", (width,))
    yield Weight(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", (width,))
    attention = _latent_attention(f) if f.attention == "mla" else _grouped_query_attention(f)
    for name, other, sizes in attention:
        yield Weight(f"{ours}.attention.{name}.weight", f"{theirs}.self_attn.{other}.weight", sizes)
    if not moe:
        hidden = Size(f.dense_hidden_dim, "dense_hidden_dim")
        yield from _feed_forward(f"{ours}.feed_forward", f"{theirs}.mlp", width, hidden)
        return
    mixtral = f.attention == "gqa" and not f.qk_norm
    block = f"{theirs}.block_sparse_moe" if mixtral else f"{theirs}.mlp"
    experts, hidden = Size(f.num_experts, "num_experts"), Size(f.moe_hidden_dim, "moe_hidden_dim")
    yield Weight(f"{ours}.moe.router.gate.weight", f"{block}.gate.weight", (experts, width))
    if bias:
        yield Weight(f"{ours}.moe.{BIAS}", f"{block}.gate.{CORRECTION}", (experts,))
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, other, sizes in (
        ("w1_EFD", gate, (hidden, width)),
        ("w3_EFD", up, (hidden, width)),
        ("w2_EDF", down, (width, hidden)),
    ):
        yield Weight(f"{ours}.{EXPERTS}.{name}", f"{block}.experts.{{}}.{other}.weight", sizes, experts=f.num_experts)
    if f.num_shared_experts:
        shared = Size(f.num_shared_experts * f.moe_hidden_dim, "num_shared_experts x moe_hidden_dim")
        yield from _feed_forward(f"{ours}.moe.shared_experts", f"{block}.shared_experts", width, shared)


def _feed_forward(ours: str, theirs: str, width: Size, hidden: Size) -> Iterator[Weight]:
    yield Weight(f"{ours}.w1.weight", f"{theirs}.gate_proj.weight", (hidden, width))
    yield Weight(f"{ours}.w3.weight", f"{theirs}.up_proj.weight", (hidden, width))
    yield Weight(f"{ours}.w2.weight", f"{theirs}.down_proj.weight", (width, hidden))


def _latent_attention(f: Flavor) -> list[tuple[str, str, tuple[Size, ...]]]:
    width, latent = Size(f.dim, "dim"), Size(f.kv_lora_rank, "kv_lora_rank")
    qk, v = "(qk_nope_head_dim + qk_rope_head_dim)", "(qk_nope_head_dim + v_head_dim)"
    queries = Size(f.n_heads * (f.qk_nope_head_dim + f.qk_rope_head_dim), f"n_heads x {qk}")
    keys_values = Size(f.n_heads * (f.qk_nope_head_dim + f.v_head_dim), f"n_heads x {v}")
    kv_a = Size(f.kv_lora_rank + f.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim")
    found: list[tuple[str, str, tuple[Size, ...]]] = []
    if f.q_lora_rank:
        rank = Size(f.q_lora_rank, "q_lora_rank")
        found += [("wq_a", "q_a_proj", (rank, width)), ("q_norm", "q_a_layernorm", (rank,))]
        found += [("wq_b", "q_b_proj", (queries, rank))]
    else:
        found += [("wq", "q_proj", (queries, width))]
    return [
        *found,
        ("wkv_a", "kv_a_proj_with_mqa", (kv_a, width)),
        ("kv_norm", "kv_a_layernorm", (latent,)),
        ("wkv_b", "kv_b_proj", (keys_values, latent)),
        ("wo", "o_proj", (width, Size(f.n_heads * f.v_head_dim, "n_heads x v_head_dim"))),
    ]


def _grouped_query_attention(f: Flavor) -> list[tuple[str, str, tuple[Size, ...]]]:
    width, head = Size(f.dim, "dim"), Size(f.qk_rope_head_dim, "qk_rope_head_dim")
    queries = Size(f.n_heads * head.value, "n_heads x qk_rope_head_dim")
    keys = Size(f.num_kv_heads * head.value, "num_kv_heads x qk_rope_head_dim")
    norms = [("q_norm", "q_norm", (head,)), ("k_norm", "k_norm", (head,))] if f.qk_norm else []
    return [
        ("qkv_linear.wq", "q_proj", (queries, width)),
        ("qkv_linear.wk", "k_proj", (keys, width)),
        ("qkv_linear.wv", "v_proj", (keys, width)),
        ("wo", "o_proj", (width, queries)),
        *norms,
    ]
