"""Two halves of a microbatch in one transformer block: while one half's rows travel, the other half computes.

A block with an MoE layer waits four times for rows, twice in forward and twice in backward. Nothing else of the same
tokens can be computed meanwhile, but something of other tokens can. So the sequences of a microbatch go through the
block as two halves, one step apart (moe.overlap = "half_batch"):

    compute   attention 1 | attention 2 | experts 1  | experts 2 | shared 1 2
    link                    dispatch 1    dispatch 2   combine 1   combine 2

Backward is the mirror image, without a scheduler: autograd goes through the nodes in the reverse order of their making
(moe/exchange.py). Both halves are in one call of the block, so FSDP2 gathers its parameters once and reduces their
gradients once, and activation checkpointing repeats it as a whole.

What is a sum or a choice per token or per sequence does not change: losses, load counts, gradients. What depends on
how many tokens go together does. That is capacity, which is refused, and in low precision the scales that several rows
share: of a whole tensor (fp8_current, nvfp4), or of blocks of rows in wgrad. There each half has its own, and numbers
are rounded otherwise, no worse. GEMMs have half of the rows, and each half its own padding; weights' gradients are
added up in two parts.

The first half has one sequence more if their number is odd. Blocks without an MoE layer, and a single sequence, go
through as a whole.

Shape letters: B batch, L sequence, D model width.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.config.override import derive
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.mtp import MTPTransformerBlock

from titan_moe.attention import Documents
from titan_moe.torch_helpers import in_backward


class HalfBatchBlock(DeepSeekV3TransformerBlock):
    """torchtitan's block of DeepSeek-V3, of which that of Qwen3 is a copy."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3TransformerBlock.Config):
        pass

    def forward(self, x: Tensor, attention_masks, positions: Tensor | None = None) -> Tensor:
        if not self.moe_enabled or x.shape[0] == 1:
            return super().forward(x, attention_masks, positions)
        return by_halves(self, x, attention_masks, positions)


class HalfBatchMTPBlock(MTPTransformerBlock):
    """torchtitan's block of multi-token prediction."""

    @dataclass(kw_only=True, slots=True)
    class Config(MTPTransformerBlock.Config):
        pass

    def forward(
        self,
        mtp_input_embed: Tensor,
        prev_embed: Tensor,
        mtp_input_valid_mask: Tensor,
        attention_masks,
        positions: Tensor | None = None,
    ) -> Tensor:
        if not self.moe_enabled or prev_embed.shape[0] == 1:
            return super().forward(mtp_input_embed, prev_embed, mtp_input_valid_mask, attention_masks, positions)
        prev_embed = prev_embed * mtp_input_valid_mask.unsqueeze(-1).to(dtype=prev_embed.dtype)
        x = self.eh_proj(torch.cat([self.enorm(mtp_input_embed), self.hnorm(prev_embed)], dim=-1))
        return self.mtp_norm(by_halves(self, x, attention_masks, positions))


def halve(layer: TransformerBlock.Config) -> TransformerBlock.Config:
    """A block's config, multi-token prediction's included, as one of these."""
    return derive(
        layer, HalfBatchMTPBlock.Config if isinstance(layer, MTPTransformerBlock.Config) else HalfBatchBlock.Config
    )


def by_halves(block: Any, x_BLD: Tensor, masks: Any, positions_BL: Tensor | None) -> Tensor:
    """x + attention(x), and to that the MoE layer's output added, of a block of these."""
    B = x_BLD.shape[0]
    sizes = [B - B // 2, B // 2]
    positions = [None, None] if positions_BL is None else positions_BL.split(sizes)
    region, shared_expert = block.moe.routed_experts, block.moe.shared_experts

    residuals, normed, rows = [], [], []
    for x, mask, position in zip(x_BLD.split(sizes), halves_of(masks, sizes), positions, strict=True):
        residuals.append(x + block.attention(block.attention_norm(x), mask, position))
        normed.append(block.ffn_norm(residuals[-1]))
        if rows:
            rows[0].advance()
        rows.append(block.moe.send(normed[-1]))

    # Recompute has made all that it needs when the shared experts are through, and stops. What the experts return it
    # does not need, so it must not send that: nobody would wait for it.
    for this, other in (rows, rows[::-1]):
        region.compute(this, returns=not in_backward())
        other.advance()
    shared = []
    if shared_expert is not None:
        for x in normed:
            shared.append(shared_expert(x))
            rows[1].advance()
    outputs = [region.collect(each) for each in rows]
    if shared:
        outputs = [output + more for output, more in zip(outputs, shared, strict=True)]
    return torch.cat([residual + output for residual, output in zip(residuals, outputs, strict=True)])


_halved: WeakKeyDictionary[BlockMask, list[BlockMask]] = WeakKeyDictionary()  # all layers have the same one


def halves_of(masks: Any, sizes: list[int]) -> list[Any]:
    """The attention masks of the first sizes[0] sequences and of the other sizes[1]."""
    if masks is None:
        return [None, None]
    if isinstance(masks, Documents):
        cut = zip(masks.start_BL.split(sizes), [None] * 2 if masks.mask_B1QL is None else masks.mask_B1QL.split(sizes))
        return [masks._replace(start_BL=start_BL, mask_B1QL=mask_B1QL) for start_BL, mask_B1QL in cut]
    assert isinstance(masks, BlockMask), type(masks)
    if masks.kv_num_blocks.shape[0] == 1:
        return [masks, masks]  # the same for all sequences
    if masks not in _halved:
        first, second = masks[: sizes[0]], masks[sizes[0] :]
        first.mask_mod, second.mask_mod = masks.mask_mod, _from(masks.mask_mod, sizes[0])
        _halved[masks] = [first, second]
    return _halved[masks]


def _from(mask_mod, start: int):
    """`mask_mod` for a batch that begins with sequence `start` of the one that it was made for."""

    def shifted(b, h, q_idx, kv_idx):
        return mask_mod(b + start, h, q_idx, kv_idx)

    return shifted
