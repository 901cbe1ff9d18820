"""The trees of torchtitan's config nodes that a flavor becomes, one function per family.

Builders, blocks and shardings are torchtitan's. Private names of its registries are used where those take no sizes:
they hold the initialization recipe. What is not torchtitan's is said at its place. model.py puts our nodes in.
"""

from dataclasses import dataclass
from typing import Any, cast

import titan_moe.runtime  # noqa: F401

import spmd_types as spmd
import torch
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_redistribute_per_axis
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_sequence_parallel_placement
from torchtitan.models.deepseek_v3 import MTPDecoder
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.mtp import roll_mtp_sequence
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from titan_moe.flavors import Flavor

GATHERED_TO_SEQUENCE_PARALLEL: tuple[Any, Any] = (
    dense_activation_placement(tp=spmd.R).per_axis_spmd_types(),
    dense_sequence_parallel_placement().per_axis_spmd_types(),
)


class Model(MTPDecoder):
    """torchtitan's decoder, whose multi-token prediction (MTP) layers can leave the head to the loss.

    In training with MTP layers it returns hidden states [main, depth 1, depth 2, ...], each after its own norm, and
    never logits. Everything else, evaluation included, computes and returns what torchtitan's model without them would.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MTPDecoder.Config):
        pass

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None, attention_masks=None):
        if self.mtp_layers is None or not self.training:
            return Decoder.forward(self, tokens, positions, attention_masks)
        assert self.tok_embeddings is not None and self.norm is not None and self._skip_lm_head
        h_BLD = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, attention_masks, positions)
        outputs = [self.norm(h_BLD)]
        for depth, layer in enumerate(self.mtp_layers, start=1):
            # The token that this depth is told: the one `depth` further on, while that is in the same document.
            tokens_BL, known_BL = roll_mtp_sequence(
                tokens, shift=depth, positions=positions, fill_value=0, return_valid_mask=True
            )
            # Embedded anew: under sequence parallelism the rows of `h` that are further on may be another rank's.
            h_BLD = layer(self.tok_embeddings(tokens_BL), h_BLD, known_BL, attention_masks, positions)
            outputs.append(h_BLD)
            # For the head, the layer's norm has gathered the sequence; the next layer wants its part again.
            h_BLD = spmd_redistribute_per_axis(h_BLD, current_spmd_mesh(), *GATHERED_TO_SEQUENCE_PARALLEL)
        return outputs


def tree(f: Flavor, seq_len: int) -> Model.Config:
    """The model, its rotary tables for sequences of `seq_len` tokens. `update_from_config`, with which torchtitan sets
    their length, is not called: it wants a whole `Trainer.Config`."""
    found = deepseek_v3_tree(f, seq_len) if f.attention == "mla" else gqa_tree(f, seq_len)
    for _, norm, *_ in found.traverse(RMSNorm.Config):
        cast(RMSNorm.Config, norm).eps = f.norm_eps
    for layer in (*found.layers, *found.mtp_layers):
        if isinstance(layer.attention, Attention.Config):
            layer.attention.q_norm.eps = layer.attention.kv_norm.eps = f.latent_norm_eps
    return found


def set_sharding(tree: Model.Config, *, enable_ep: bool) -> None:
    """Say for every node how it is sharded: torchtitan's rules, with sequence parallelism."""
    if isinstance(tree.layers[0].attention, GQAttention.Config):
        set_qwen3_sharding_config(cast(Any, tree), enable_sp=True, enable_ep=enable_ep)
    else:
        set_deepseek_v3_sharding_config(cast(Any, tree), enable_sp=True, enable_ep=enable_ep)


def deepseek_v3_tree(f: Flavor, seq_len: int) -> Model.Config:
    rope = ComplexRoPE.Config(
        dim=f.qk_rope_head_dim,
        max_seq_len=seq_len,
        theta=f.rope_theta,
        scaling="yarn",
        rope_factor=f.rope_factor,
        beta_fast=f.rope_beta_fast,
        beta_slow=1.0,
        original_seq_len=f.original_seq_len,
    )
    limited = f.num_expert_groups > 1
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=f.n_layers,
        n_dense_layers=f.n_dense_layers,
        dim=f.dim,
        n_heads=f.n_heads,
        q_lora_rank=f.q_lora_rank,
        kv_lora_rank=f.kv_lora_rank,
        qk_nope_head_dim=f.qk_nope_head_dim,
        qk_rope_head_dim=f.qk_rope_head_dim,
        v_head_dim=f.v_head_dim,
        mscale=f.mscale,
        dense_hidden_dim=f.dense_hidden_dim,
        moe_hidden_dim=f.moe_hidden_dim,
        num_experts=f.num_experts,
        num_shared_experts=f.num_shared_experts,
        router_top_k=f.top_k,
        router_score_func=f.score_func,
        router_num_expert_groups=f.num_expert_groups if limited else None,
        router_num_limited_groups=f.num_limited_groups if limited else None,
        router_route_scale=f.route_scale,
        router_route_norm=f.route_norm,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=rope,
    )
    mtp_layers = deepseek_v3._build_mtp_layers(
        cast(DeepSeekV3TransformerBlock.Config, layers[-1]), dim=f.dim, num_mtp_layers=f.num_mtp_layers
    )
    for layer in mtp_layers:
        # torchtitan leaves these to torch's own initialization, which depends on the mesh.
        layer.eh_proj.param_init = deepseek_v3._LINEAR_INIT
        for norm in (layer.enorm, layer.hnorm, layer.mtp_norm):
            norm.param_init = deepseek_v3._NORM_INIT
    return Model.Config(
        vocab_size=f.vocab_size,
        dim=f.dim,
        tok_embeddings=Embedding.Config(
            num_embeddings=f.vocab_size, embedding_dim=f.dim, param_init=deepseek_v3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=f.dim, param_init=deepseek_v3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=f.dim, out_features=f.vocab_size, param_init=deepseek_v3._output_linear_init(f.dim)
        ),
        layers=layers,
        mtp_layers=mtp_layers,
    )


def gqa_tree(f: Flavor, seq_len: int) -> Model.Config:
    """torchtitan's Qwen3 MoE; Mixtral is the same without the norms on query and key heads.

    Mixtral takes the softmax over the chosen logits alone. That is what softmax over all of them, divided by the sum of
    the chosen scores (`route_norm`), comes to.

    Query, key and value projections are three parameters, not torchtitan's fused one, whose initializer draws from the
    rank's own stream, and whose optimizer state checkpoints under another name than its weight.
    """
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=f.n_layers,
        dim=f.dim,
        n_heads=f.n_heads,
        n_kv_heads=f.num_kv_heads,
        head_dim=f.qk_rope_head_dim,
        moe_hidden_dim=f.moe_hidden_dim,
        num_experts=f.num_experts,
        top_k=f.top_k,
        fuse_qkv=False,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=f.qk_rope_head_dim, max_seq_len=seq_len, theta=f.rope_theta),
    )
    for layer in layers:
        assert layer.moe is not None and isinstance(layer.attention, GQAttention.Config)
        router = layer.moe.router
        router.score_func, router.route_norm, router.route_scale = f.score_func, f.route_norm, f.route_scale
        if f.num_expert_groups > 1:
            router.num_expert_groups, router.num_limited_groups = f.num_expert_groups, f.num_limited_groups
        if not f.qk_norm:
            layer.attention.qk_norm = None
    return Model.Config(
        vocab_size=f.vocab_size,
        dim=f.dim,
        tok_embeddings=Embedding.Config(
            num_embeddings=f.vocab_size, embedding_dim=f.dim, param_init=qwen3._EMBEDDING_INIT
        ),
        norm=qwen3._qwen3_norm(f.dim),
        lm_head=Linear.Config(in_features=f.dim, out_features=f.vocab_size, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
