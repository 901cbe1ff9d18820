"""Attention on a CPU: causal, inside documents, on whole sequences or with keys gathered from other ranks.

FlexAttention has no backward on a CPU. torch's CPU kernel for scaled dot-product attention takes a dense mask,
[queries, keys]. For a sequence of 32,768 tokens that is 2 GB in bf16, kept for backward in every layer, and half of the
work goes into keys that come later, most of the rest into other documents. So queries are taken in blocks, each with
only the keys from where the document of its first query begins up to its last query. For packed documents that are
short against the sequence the cost is linear in its length. Where all of a sequence is one document, the kernel is told
to be causal and takes no mask: it leaves out later keys by itself, in tiles smaller than these blocks, and needs 0.6
times as long. Not for very long ones: inside a call it adds up the gradients of bf16 keys and values in bf16.

With context parallelism a rank has a part of the queries and, gathered, all keys, both in the order of the ranks
(inputs.py). Keys are put back in the text's order, in which a block's keys are a range.

Shape letters: B batch, Q queries of this rank, L keys (the whole sequence), N heads (fewer of keys and values with
grouped-query attention), H head width.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import titan_moe.runtime  # noqa: F401

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.protocols.module import Module

from titan_moe.offload import offloaded
from titan_moe.rebuild import rebuilt

QUERY_BLOCK = 1024

# Relative error of the gradients of bf16 keys and values, causal against blocks: 4.7e-3 against 3.9e-3 at 2,048 tokens,
# 6.4e-3 against 4.1e-3 at 4,096, 8.7e-3 against 4.1e-3 at 8,192. In fp32 both are 5e-7.
CAUSAL_UP_TO_LENGTH = 4096

# Forward and backward in bf16, padded over plain: 1.8 times as long at 128 tokens, equal at 256, 0.4 times at 1,024.
PAD_FROM_LENGTH = 256


class Documents(NamedTuple):
    """What attends to what, in a few vectors."""

    start_BL: Tensor  # where in the sequence each token's document begins, in the order of the text
    index_Q: Tensor  # where in the sequence each query of this rank is
    order_L: Tensor | None  # of the keys: sorts them into the order of the text; None: they are in it
    mask_B1QL: Tensor | None  # the whole mask, made once for all layers, if there is but one block of queries
    causal: bool  # else: whether every sequence is one document, and all of it here, in order


def documents(positions_BL: Tensor, order_L: Tensor | None = None, rank: int = 0, ranks: int = 1) -> Documents:
    """Of sequences whose positions_BL count from 0 in each document. With `ranks` context ranks, of which this is
    `rank`, order_L are the tokens in the order of the ranks."""
    index_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    start_BL = (index_L - positions_BL).clamp(min=0)
    index_Q = (index_L if order_L is None else order_L).chunk(ranks)[rank]
    mask_B1QL, causal = None, False
    if len(index_Q) <= QUERY_BLOCK:
        mask_B1QL = mask(start_BL, index_Q, index_L)
    elif ranks == 1 and order_L is None and len(index_Q) <= CAUSAL_UP_TO_LENGTH:
        causal = not start_BL.any().item()
    return Documents(start_BL, index_Q, None if order_L is None else order_L.argsort(), mask_B1QL, causal)


def mask(start_BL: Tensor, index_q: Tensor, index_k: Tensor) -> Tensor:
    """[B, 1, q, k]: whether query index_q attends to key index_k: not a later one, nor one of an earlier document."""
    return ((index_k <= index_q[:, None]) & (index_k >= start_BL[:, index_q, None])).unsqueeze(1)


class DenseAttention(Module):
    """Attention with a dense mask per block of queries.

    MLA's value heads are narrower than its query heads, which sends CPU attention down its plain path: logits of the
    whole sequence. Values padded with zeros to the query's width take the tiled one, and the padding, being zero, is
    cut off the output again. It pays from PAD_FROM_LENGTH on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Documents,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        start_BL, index_Q, order_L, mask_B1QL, causal = attention_masks
        if order_L is not None:
            k_BLNH, v_BLNH = (rebuilt(("mla_up_proj",), torch.index_select, x, 1, order_L) for x in (k_BLNH, v_BLNH))
        v_width = v_BLNH.shape[-1]
        if v_width < q_BLNH.shape[-1] and q_BLNH.shape[1] >= PAD_FROM_LENGTH:
            v_BLNH = rebuilt(("mla_up_proj",), F.pad, v_BLNH, (0, q_BLNH.shape[-1] - v_width))
            v_BLNH = offloaded("attn_v", v_BLNH)
        q_BNQH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa)
        if mask_B1QL is not None or causal:
            out_BNQH = attend(q_BNQH, k_BNLH, v_BNLH, attn_mask=mask_B1QL, is_causal=causal)
            return out_BNQH[..., :v_width].transpose(1, 2)
        blocks = []
        for block in query_blocks(index_Q):
            index_q = index_Q[block]
            first, end = int(start_BL[:, index_q[0]].min()), int(index_q[-1]) + 1
            mask_B1qk = mask(start_BL, index_q, torch.arange(first, end))
            q_BNqH, k_BNkH, v_BNkH = q_BNQH[:, :, block], k_BNLH[:, :, first:end], v_BNLH[:, :, first:end]
            blocks.append(offloaded("attn_out", attend(q_BNqH, k_BNkH, v_BNkH, attn_mask=mask_B1qk)))
        return torch.cat(blocks, dim=2)[..., :v_width].transpose(1, 2)


def query_blocks(index_Q: Tensor) -> list[slice]:
    """Blocks of queries that follow each other in the text."""
    jumps = (index_Q.diff() != 1).nonzero().flatten() + 1
    ends = [*jumps.tolist(), len(index_Q)]
    blocks, start = [], 0
    for end in ends:
        blocks += [slice(s, min(s + QUERY_BLOCK, end)) for s in range(start, end, QUERY_BLOCK)]
        start = end
    return blocks
