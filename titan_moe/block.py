"""The parts of a transformer block whose activations backward can make again (rebuild.py), as nodes of torchtitan's
config tree. They compute what torchtitan's do, to the bit; what they add is the name of each choice:

    norms           outputs of the four norms (the router's fp32 copy of one is marked in moe/router.py)
    mla_up_proj     the attention kernel's q, k and v, made from the latents: two GEMMs and RoPE again
    swiglu          silu(gate) and silu(gate) * up of dense layers and of the shared expert
    shared_expert   these and its gate and up: two GEMMs again

The routed experts are not among them: their SwiGLU is always made again in backward (moe/experts.py).

With tensor parallelism and sequence parallel, what attention and feed-forward take is not the norm's output but a copy
gathered from all ranks. It is kept, because making it again would be a collective.

Shape letters: B batch, L sequence, D model width, N heads, H head width, F hidden width.
"""

from dataclasses import dataclass

import titan_moe.runtime  # noqa: F401

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.config.override import derive
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.deepseek_v3.model import Attention

from titan_moe.rebuild import rebuilt


class Norm(RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return rebuilt(("norms",), super().forward, x)


class LatentAttention(Attention):
    """torchtitan's multi-head latent attention, cut between the latents and what the kernel takes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        pass

    def forward(self, x: Tensor, attention_masks, positions: Tensor | None = None) -> Tensor:
        # In torchtitan's order: op-wise recompute keeps every second product, which should be the latents.
        if self.q_lora_rank:
            q = rebuilt(("mla_up_proj",), self.wq_b, self.q_norm(self.wq_a(x)))
        else:
            q = rebuilt(("mla_up_proj",), self.wq, x)
        kv_latent, k_pe = torch.split(self.wkv_a(x), [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_BLNH, k_BLNH, v_BLNH = rebuilt(
            ("mla_up_proj",), self.kernel_inputs, q, self.kv_norm(kv_latent), k_pe, positions
        )
        out_BLNH = self.inner_attention(
            q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=self.softmax_scale
        )
        return self.wo(out_BLNH.contiguous().view(*x.shape[:2], -1))

    def kernel_inputs(self, q: Tensor, kv_latent: Tensor, k_pe: Tensor, positions: Tensor | None):
        kv = self.wkv_b(kv_latent)
        with spmd.local():  # heads are cut evenly, and each rank's are its own business
            q = self._heads(q, self.qk_head_dim)
            kv = self._heads(kv, self.qk_nope_head_dim + self.v_head_dim)
        q_nope, q_pe = torch.split(q, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_pe, k_pe = self.rope(q_pe, k_pe.unsqueeze(2), positions)
        q = torch.cat([q_nope, q_pe], dim=-1)
        with spmd.local():
            k_nope, v = torch.split(kv, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, k_nope.size(2), -1)], dim=-1)
            if spmd.is_type_checking() and not torch.compiler.is_compiling():
                for tensor in (k, v):
                    spmd.assert_type(tensor, {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)})
        return q, k, v

    @staticmethod
    def _heads(x: Tensor, width: int) -> Tensor:
        x = x.view(*x.shape[:2], -1, width)
        if spmd.is_type_checking():
            spmd.assert_type(x, {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)})
        return x


class SwiGLU(FeedForward):
    """torchtitan's feed-forward of dense layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    ACTIVATION: tuple[str, ...] = ("swiglu",)
    INPUTS: tuple[str, ...] = ()
    """What makes again the activation, and what its inputs"""

    def forward(self, x: Tensor) -> Tensor:
        gate_BLF, up_BLF = rebuilt(self.INPUTS, self.w1, x), rebuilt(self.INPUTS, self.w3, x)
        silu_BLF = rebuilt(self.ACTIVATION, F.silu, gate_BLF)
        return self.w2(rebuilt(self.ACTIVATION, torch.mul, silu_BLF, up_BLF))


class SharedExpert(SwiGLU):
    @dataclass(kw_only=True, slots=True)
    class Config(SwiGLU.Config):
        pass

    ACTIVATION = ("swiglu", "shared_expert")
    INPUTS = ("shared_expert",)


def mark(layer: TransformerBlock.Config) -> None:
    """Put these nodes in a block's config, multi-token prediction's included, sharding set or not."""
    attention = layer.attention
    layer.attention_norm = derive(layer.attention_norm, Norm.Config)
    layer.ffn_norm = derive(layer.ffn_norm, Norm.Config)
    if isinstance(attention, Attention.Config):  # grouped-query attention has no parts that are made again
        layer.attention = derive(
            attention,
            LatentAttention.Config,
            q_norm=derive(attention.q_norm, Norm.Config),
            kv_norm=derive(attention.kv_norm, Norm.Config),
        )
    if layer.feed_forward is not None:
        layer.feed_forward = derive(layer.feed_forward, SwiGLU.Config)
    if layer.moe is not None and layer.moe.shared_experts is not None:
        layer.moe.shared_experts = derive(layer.moe.shared_experts, SharedExpert.Config)
