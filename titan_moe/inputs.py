"""From a batch of the data loader to what one forward of the model takes, on a whole sequence or a part of it.

With context parallelism each rank holds L / cp tokens of every sequence, and its queries meet the keys of all ranks,
gathered in the ranks' order. So the mask has rows in the order of this rank's tokens and columns in the order of all.
With "headtail" that order is not the text's: a rank holds the r-th piece from the start and the r-th from the end of
2 cp, so that causal attention costs all ranks the same. Positions and labels travel with the tokens, which is all that
rotary embedding and loss need.

Shape letters: B batch, L sequence.
"""

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel.api import _HeadTailLoadBalancer, cp_shard
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.deepseek_v3 import DeepSeekV3Model

from titan_moe.model import attention_masks

Batch = tuple[dict[str, Tensor], Tensor]  # {"input": [B, L], "positions": [B, L]}, labels [B, L]


def model_inputs(
    model: DeepSeekV3Model, batch: Batch, parallel_dims: ParallelDims, load_balancer: str
) -> tuple[Tensor, Tensor, dict]:
    """(tokens, labels, keyword arguments) of this rank for one forward; `load_balancer` is the one of
    parallelism.context_parallel_load_balancer."""
    inputs, labels_BL = batch
    tokens_BL, positions_BL = inputs["input"], inputs["positions"]
    masks = attention_masks(model, positions_BL)
    if parallel_dims.cp_enabled:
        balancer = None if load_balancer == "none" else load_balancer
        mesh = parallel_dims.get_mesh("cp")
        dense = isinstance(masks, Tensor)
        if dense:
            masks = _split_dense_mask(masks, mesh.get_local_rank(), mesh.size(), balancer)
        (tokens_BL, labels_BL, positions_BL), block_mask = cp_shard(
            mesh, (tokens_BL, labels_BL, positions_BL), None if dense else masks, balancer
        )
        masks = masks if dense else block_mask
    kwargs = {"positions": positions_BL, "attention_masks": masks}
    annotate_input_spmd_types(parallel_dims, tokens_BL, labels_BL, kwargs)
    return tokens_BL, labels_BL, kwargs


def _split_dense_mask(mask_B1LL: Tensor, rank: int, ranks: int, balancer: str | None) -> Tensor:
    """Rows of this rank's queries, columns of all ranks' keys, both in the ranks' order."""
    length = mask_B1LL.shape[-1]
    order_L = torch.arange(length, device=mask_B1LL.device)
    if balancer is not None:
        order_L = _HeadTailLoadBalancer(length, ranks, mask_B1LL.device)._generate_indices().flatten()
        assert isinstance(order_L, Tensor)
    rows = order_L.chunk(ranks)[rank]
    return mask_B1LL[:, :, rows][..., order_L]
