"""What one layer keeps for backward, tensor by tensor, for one microbatch on one rank.

Two trainers are counted, because published runs are of the other one:

- `megatron_layer`: Megatron-Core, as its layer of DeepSeek-V3 was measured (4,096 tokens, BF16, balanced): 2,236 MiB.
- `titan_layer`: this repository's model, eager. A test counts the same storages in real CPU runs. Where it keeps more,
  it is because a view keeps the whole tensor alive (values are a view of expanded keys and values), because the router
  casts its input to fp32, and because unfused SwiGLU keeps its steps; where less, because grouped GEMMs keep neither
  activation nor output and, on one expert-parallel rank, not even their input.

An item that a recompute or offload choice removes from the GPU names that choice. `kept` says what remains.

Letters: T tokens (of this rank), D model width, H heads, F expert hidden width, E experts, K top-k, R rows received.
Sizes in bytes; BF16 is 2 bytes per element. Imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from titan_moe.flavors import Flavor
from titan_moe.plan import remembered
from titan_moe.plan.job import Job
from titan_moe.plan.parameters import Kind
from titan_moe.plan.traffic import unique_places

LOW_PRECISION_BYTES = 0.516 * 2
"""Bytes per element of an FP8 or MXFP8 tensor with its scales, 0.516 of BF16 (one scale byte for 32 elements)"""


MATMULS = ("query latent", "query product", "key/value latent", "key/value product", "attention projection")
"""A layer's matrix products in the order they run, before those of its feed-forward: gate, up, down. Op-wise selective
recompute keeps the result of every second one, so the order decides how much"""
GQA_MATMULS = ("query product", "key product", "value product", "attention projection")
"""The same with grouped-query attention"""


class Item(NamedTuple):
    name: str
    size: float
    """Bytes"""
    recompute: str = ""
    """The recompute choice that drops it (`Job.recompute`)"""
    offload: str = ""
    """The tensor's name for offloading (`Job.offload`)"""
    moves: float = 1.0
    """Share of it that offloading moves: a view that leaves frees all the memory that it kept"""
    selective: bool = False
    """Kept by op-wise selective recompute (torchtitan's SelectiveAC and the ops of moe/dispatch.py)"""
    whole: bool = False
    """Kept even when the whole layer is recomputed: its input, the router's choice, the plan, the rows received"""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What of a layer's tensors depends on the kernels that compute it."""

    norm_is_fused: bool = True
    """False on a CPU: the norm is made of steps in fp32, whose input and result are kept, and its input is not"""
    values_are_padded: bool = False
    """True on a CPU: attention pads values to the width of queries, and keeps a mask (attention.DenseAttention)"""
    row_alignment: int = 128
    """Rows that an expert's slab is padded to"""


GPU = Kernels()
CPU = Kernels(norm_is_fused=False, values_are_padded=True, row_alignment=16)


READ = (
    *("model", "sharding", "precision", "micro_batch_size", "seq_len", "tp", "cp", "ep", "recompute_mode", "recompute"),
    *("redispatch", "dispatcher", "ranks_per_node", "routing", "early_weighting"),
)
"""What of a job decides what a layer's tensors are. A test changes everything else"""


@remembered.by(READ)
def layer(job: Job, kind: Kind, kernels: Kernels = GPU) -> tuple[Item, ...]:
    """The tensors of one layer of a job, nothing recomputed."""
    return tuple(megatron_layer(job, kind) if job.sharding == "zero1" else titan_layer(job, kind, kernels))


def kept(job: Job, items: Iterable[Item]) -> list[Item]:
    """What of `items` stays on the GPU from forward to backward under the job's recompute and offload choices."""
    return [item for item in _not_made_again(job, items) if item.offload not in job.offload]


def moved(job: Job, items: Iterable[Item]) -> float:
    """Bytes of `items` that go to the host in forward, and come back in backward, under these choices."""
    return sum(item.size * item.moves for item in _not_made_again(job, items) if item.offload in job.offload)


def _not_made_again(job: Job, items: Iterable[Item]) -> list[Item]:
    stays = {"none": lambda item: True, "selective": lambda item: item.selective or item.whole, "full": _is_whole}
    items = [item for item in items if stays[job.recompute_mode](item)]
    return [item for item in items if item.recompute not in job.recompute]


def _is_whole(item: Item) -> bool:
    return item.whole


def expert_rows(job: Job, alignment: int = 128) -> float:
    """R: rows of one microbatch in the slabs of one rank's experts, at an even load; half an alignment is padding."""
    return job.tokens * job.model.top_k + job.model.num_experts / job.ep * alignment / 2


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-Core


def megatron_layer(job: Job, kind: Kind) -> list[Item]:
    f, tokens = job.model, job.tokens
    wide = 2.0 * tokens  # bytes of one BF16 number per token
    # The inputs of low-precision GEMMs are kept as they were quantized. Attention's output is also kept by attention.
    gemm = wide if job.precision == "bf16" else LOW_PRECISION_BYTES * tokens
    low = job.precision != "bf16"
    items = [
        Item("layer input", wide * f.dim, whole=True),
        Item("attention norm", gemm * f.dim, "norms"),
        *_megatron_attention(f, wide, gemm),
        Item("attention output", wide * f.n_heads * f.v_head_dim, offload="attn_out"),
        *([Item("attention output, quantized", gemm * f.n_heads * f.v_head_dim)] if low else []),
        Item("log-sum-exp", 4.0 * tokens * f.n_heads),
        Item("residual", wide * f.dim),
        Item("feed-forward norm", gemm * f.dim, "norms"),
    ]
    if kind == "dense":
        return [
            *items,
            Item("dense gate and up", wide * 2 * f.dense_hidden_dim, "mlp"),
            Item("dense activation", gemm * f.dense_hidden_dim, "mlp"),
        ]
    shared, copies = f.num_shared_experts * f.moe_hidden_dim, f.top_k
    if kind == "mtp":
        items.append(Item("MTP projection input", wide * 2 * f.dim))
    combined = [] if job.early_weighting else [Item("expert output", wide * copies * f.dim)]
    return [
        *items,
        Item("shared gate and up", wide * 2 * shared, "shared_expert"),
        Item("shared activation", gemm * shared, _first(job, "swiglu", "shared_expert")),
        Item("router", 2.0 * tokens * f.num_experts),
        Item("row map", 8.0 * tokens * f.num_experts),
        Item("expert input", gemm * copies * f.dim, offload="moe_expert_input"),
        Item("expert gate and up", wide * 2 * copies * f.moe_hidden_dim),
        Item("expert activation", gemm * copies * f.moe_hidden_dim, "swiglu"),
        *combined,
    ]


def _megatron_attention(f: Flavor, wide: float, gemm: float) -> list[Item]:
    qk, width = f.qk_nope_head_dim + f.qk_rope_head_dim, f.n_heads
    if f.attention == "gqa":
        # Query and key before their norm and rotation, and after.
        return [
            Item("query, key, value", wide * (width * qk + 2 * f.num_kv_heads * qk), "mla_up_proj"),
            Item("query, key after rotation", wide * (width + f.num_kv_heads) * qk),
        ]
    latent = (f.q_lora_rank, f.kv_lora_rank + f.qk_rope_head_dim)
    return [
        Item("query latent and its norm", (wide + gemm) * latent[0]),
        Item("key/value latent and its norm", wide * latent[1] + gemm * f.kv_lora_rank),
        Item("query", wide * width * qk, "mla_up_proj", "attn_q"),
        Item("key", wide * width * qk, "mla_up_proj", "attn_k"),
        Item("value", wide * width * f.v_head_dim, "mla_up_proj", "attn_v"),
    ]


def _first(job: Job, *choices: str) -> str:
    """The first of the recompute choices that the job makes; the first of all if it makes none."""
    return next((choice for choice in choices if choice in job.recompute), choices[0])


# ---------------------------------------------------------------------------------------------------------------------
# This trainer


def titan_layer(job: Job, kind: Kind, kernels: Kernels = GPU) -> list[Item]:
    f, tokens = job.model, job.tokens
    wide = 2.0 * tokens
    selective = job.recompute_mode == "selective"
    # A fused norm keeps its input; one made of steps keeps copies, and only recompute keeps the input.
    norm_input = kernels.norm_is_fused or selective
    input_size = wide * f.dim if norm_input or job.recompute_mode == "full" else 0.0
    return [
        # What is before a multi-token prediction layer keeps that one's input.
        Item("layer input", input_size, offload="" if kind == "mtp" else "layer_input", whole=True),
        *_norm("attention norm", f.dim, job, kernels, gathered=job.tp),
        *(_titan_gqa(job, wide, kernels) if f.attention == "gqa" else _titan_attention(job, wide, kernels, norm_input)),
        *_products(job, wide),
        Item("residual", wide * f.dim if kernels.norm_is_fused else 0.0),
        *_norm("feed-forward norm", f.dim, job, kernels, gathered=job.tp if kind == "dense" else 1),
        *(
            _swiglu(job, "dense", f.dense_hidden_dim, wide, "swiglu")
            if kind == "dense"
            else _titan_moe(job, wide, kernels)
        ),
        *([Item("MTP projection input", wide * 2 * f.dim)] if kind == "mtp" else []),
    ]


def _norm(name: str, width: int, job: Job, kernels: Kernels, gathered: int = 1) -> list[Item]:
    """A norm's result, gathered over tensor-parallel ranks where what follows needs the whole sequence. A gathered one
    is kept, whatever recompute says: it would have to be gathered again."""
    recompute = "norms" if job.tp == 1 or "latent" in name else ""
    steps = (
        [] if kernels.norm_is_fused else [Item(f"{name}, fp32 steps", 4.0 * job.tokens * (2 * width + 1), recompute)]
    )
    return [Item(name, 2.0 * job.tokens * width * gathered, recompute), *steps]


def _titan_attention(job: Job, wide: float, kernels: Kernels, norm_input: bool) -> list[Item]:
    f, tokens = job.model, job.tokens
    wide, head = wide * job.tp, wide * f.n_heads  # latents are whole on each tensor-parallel rank, heads are cut
    qk, kv_latent = f.qk_nope_head_dim + f.qk_rope_head_dim, f.kv_lora_rank + f.qk_rope_head_dim
    saved = saved_products(job)
    # A view of the values keeps the expanded keys beside them; padding makes a tensor of its own. Context parallelism
    # gathers keys and values of the whole sequence.
    values, own = (qk, qk) if kernels.values_are_padded else (f.qk_nope_head_dim + f.v_head_dim, f.v_head_dim)
    items = [
        Item("query latent", wide * f.q_lora_rank if norm_input else 0.0, selective="query latent" in saved),
        *(_norm("query latent norm", f.q_lora_rank, job, kernels, gathered=job.tp) if f.q_lora_rank else []),
        Item("key/value latent", wide * kv_latent if norm_input else 0.0, selective="key/value latent" in saved),
        *_norm("key/value latent norm", f.kv_lora_rank, job, kernels, gathered=job.tp),
        Item("rotation", 4.0 * tokens * job.tp * f.qk_rope_head_dim),
        Item("query", head * qk, "mla_up_proj", "attn_q"),
        Item("key", head * qk * job.cp, "mla_up_proj", "attn_k"),
        Item("value", head * values * job.cp, "mla_up_proj", "attn_v", moves=own / values),
        Item("log-sum-exp", 4.0 * tokens * f.n_heads, selective=not kernels.values_are_padded),
        Item("attention output", head * f.v_head_dim, offload="attn_out", selective=not kernels.values_are_padded),
    ]
    if kernels.values_are_padded:
        mask = 2.0 * tokens * job.seq_len
        padded = Item("attention output, padded", head * qk, offload="attn_out")
        return [*items, padded, Item("attention mask", mask)]
    return items


def _titan_gqa(job: Job, wide: float, kernels: Kernels) -> list[Item]:
    """Grouped-query attention: norms of query and key heads (Qwen3) keep what they take, not what they give, which is
    rotated in fp32. The kernel itself shares key and value heads out among the query heads."""
    f, head = job.model, job.model.v_head_dim
    tokens, wide = job.tokens * job.tp, wide * job.tp
    query, key, norms = wide * f.n_heads * head / job.tp, wide * f.num_kv_heads * head / job.tp, []
    if f.qk_norm and kernels.norm_is_fused:
        norms = [Item("query and key product", query + key)]
    elif f.qk_norm:
        norms = [Item("head norms, fp32 steps", 4.0 * tokens * (f.n_heads + f.num_kv_heads) * (2 * head + 1) / job.tp)]
    return [
        *norms,
        Item("rotation", 8.0 * tokens * head),
        Item("query", query, offload="attn_q"),
        Item("key", key * job.cp, offload="attn_k"),
        Item("value", key * job.cp, offload="attn_v"),
        Item("log-sum-exp", 4.0 * job.tokens * f.n_heads, selective=not kernels.values_are_padded),
        Item("attention output", query, offload="attn_out", selective=not kernels.values_are_padded),
        *([Item("attention mask", 2.0 * job.tokens * job.seq_len)] if kernels.values_are_padded else []),
    ]


def saved_products(job: Job) -> set[str]:
    """The matrix products whose results op-wise selective recompute keeps: the first, the third, ..."""
    f = job.model
    latent = [name for name in MATMULS if f.q_lora_rank or name != "query latent"]
    attention = latent if f.attention == "mla" else [*GQA_MATMULS]
    return {*[*attention, "gate", "up", "down"][::2]}


def _products(job: Job, wide: float) -> list[Item]:
    """Results that only selective recompute keeps: otherwise what is made of them is kept, or nothing."""
    f = job.model
    query = f.n_heads * (f.qk_nope_head_dim + f.qk_rope_head_dim)
    widths = {"query product": query, "attention projection": f.dim}
    if f.attention == "mla":
        widths |= {"key/value product": f.n_heads * (f.qk_nope_head_dim + f.v_head_dim), "down": f.dim}
    else:  # without a feed-forward beside the experts
        widths |= {"value product": f.num_kv_heads * f.v_head_dim}
    if job.recompute_mode != "selective":
        return []
    saved = saved_products(job)
    return [Item(name, wide * width, selective=True) for name, width in widths.items() if name in saved]


def _swiglu(job: Job, name: str, hidden: int, wide: float, recompute: str) -> list[Item]:
    """An unfused SwiGLU: two products, of which op-wise recompute keeps one, the activated one, and their product.
    `recompute` is the choice that drops the last two."""
    saved = saved_products(job)
    drops_all = "shared_expert" if name == "shared" else ""
    return [
        Item(f"{name} gate", wide * hidden, drops_all, selective="gate" in saved),
        Item(f"{name} up", wide * hidden, drops_all, selective="up" in saved),
        Item(f"{name} activated gate", wide * hidden, recompute),
        Item(f"{name} activation", wide * hidden, recompute),
    ]


def _titan_moe(job: Job, wide: float, kernels: Kernels) -> list[Item]:
    f, tokens = job.model, job.tokens
    groups = f.scores_per_group * f.num_expert_groups + f.num_limited_groups if f.num_expert_groups > 1 else 0
    return [
        Item("router input, fp32", 4.0 * tokens * f.dim, "norms" if job.tp == 1 else ""),  # a copy of the norm's result
        Item("router weight, fp32", 4.0 * f.dim * f.num_experts),
        Item("router scores", 4.0 * tokens * (f.num_experts + f.top_k + 1)),
        Item("router choice", 8.0 * tokens * f.top_k, whole=True),
        # The best of each group, the groups, and their scores, which recompute keeps so that ties fall alike.
        Item("router groups", 12.0 * tokens * groups if job.recompute_mode != "none" else 0.0, whole=True),
        *_swiglu(job, "shared", f.num_shared_experts * f.moe_hidden_dim, wide, _first(job, "swiglu", "shared_expert")),
        *_routed(job, kernels),
    ]


def _routed(job: Job, kernels: Kernels) -> list[Item]:
    """The region from plan to experts. On one rank slabs are gathered again in backward. Between ranks the slabs are
    kept, or with recompute what came over the wire and filled them, unless it is to be sent again (moe.redispatch)."""
    f, tokens, copies = job.model, job.tokens, job.tokens * job.model.top_k
    if job.ep == 1:
        rows = float(local_rows(job, kernels))
        indices, received = 2 * rows + copies + tokens, []
    else:
        rows, wire = expert_rows(job, kernels.row_alignment), wire_rows(job)
        indices, again = 2 * rows + 5 * copies + 3 * wire + tokens, job.recompute_mode != "none"
        crossed = 0.0 if job.ranks_per_node is None else node_rows(job)
        received = [
            # Recompute hands rows on again, to get at what the last hop received, which it finds kept: so this too is.
            Item(
                "rows of the first hop",
                2.0 * crossed * f.dim if again else 0.0,
                offload="moe_expert_input",
                whole=not job.redispatch,
            ),
            Item("expert input", 0.0 if again else 2.0 * rows * f.dim, offload="moe_expert_input"),
            Item(
                "received rows", 2.0 * wire * f.dim if again else 0.0, "", "moe_expert_input", whole=not job.redispatch
            ),
        ]
    return [
        Item("plan", 8.0 * indices, whole=True),
        *received,
        Item("expert weights", 4.0 * rows),
        Item("expert gate and up", 2.0 * rows * 2 * f.moe_hidden_dim),
    ]


def wire_rows(job: Job) -> float:
    """Rows that one rank sends, and receives, in one dispatch: one for each (token, destination rank), or each copy."""
    copies = job.model.top_k if job.dispatcher == "alltoall" else unique_places(job.model, job.routing, job.ep)
    return job.tokens * copies


def node_rows(job: Job) -> float:
    """Rows that one rank sends, and receives, in the first of two hops: one for each (token, destination node)."""
    assert job.ranks_per_node is not None
    return job.tokens * unique_places(job.model, job.routing, job.ep // job.ranks_per_node)


def local_rows(job: Job, kernels: Kernels = GPU) -> int:
    """R of the dispatcher `local`, whose shapes must not depend on the routing: room for every expert's padding."""
    f = job.model
    return job.tokens * f.top_k + f.num_experts * kernels.row_alignment
