"""From a batch of the data loader to what one forward of the model takes, of a whole sequence or a part of it.

With context parallelism each rank holds L / cp tokens of every sequence, and its queries meet the keys of all ranks,
gathered in the ranks' order. With "headtail" that order is not the text's: a rank holds the r-th piece from the start
and the r-th from the end of 2 cp, so that causal attention costs all ranks the same. The masks know both orders;
positions and labels travel with the tokens, which is all that rotary embedding and loss need.

Shape letters: B batch, L sequence.
"""

from typing import Any

from titan_moe.runtime import DEVICE_TYPE

import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel.api import _HeadTailLoadBalancer, cp_shard
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.deepseek_v3 import MTPDecoder

from titan_moe.attention import documents

Batch = tuple[dict[str, Tensor], Tensor]  # {"input": [B, L], "positions": [B, L]}, labels [B, L]
Inputs = tuple[Tensor, Tensor, dict[str, Any]]  # tokens, labels, keyword arguments of the model


def model_inputs(model: MTPDecoder, batch: Batch, parallel_dims: ParallelDims, load_balancer: str) -> Inputs:
    """This rank's part of a microbatch; `load_balancer` is parallelism.context_parallel_load_balancer."""
    inputs, labels_BL = batch
    tokens_BL, positions_BL = inputs["input"], inputs["positions"]
    cp_mesh = parallel_dims.get_optional_mesh("cp")
    balancer = None if load_balancer == "none" else load_balancer
    if DEVICE_TYPE == "cpu":
        rank, ranks = (0, 1) if cp_mesh is None else (cp_mesh.get_local_rank(), cp_mesh.size())
        masks, to_split = documents(positions_BL, _order(positions_BL, ranks, balancer), rank, ranks), None
    else:
        masks = to_split = model.get_attention_masks(positions=positions_BL)
    if cp_mesh is not None:
        whole = (tokens_BL, labels_BL, positions_BL)
        (tokens_BL, labels_BL, positions_BL), split = cp_shard(cp_mesh, whole, to_split, balancer)
        masks = masks if split is None else split
    kwargs = {"positions": positions_BL, "attention_masks": masks}
    annotate_input_spmd_types(parallel_dims, tokens_BL, labels_BL, kwargs)
    return tokens_BL, labels_BL, kwargs


def _order(positions_BL: Tensor, ranks: int, balancer: str | None) -> Tensor | None:
    """[L]: where in the text the tokens are that the ranks hold, rank after rank; None: where one expects them."""
    if balancer is None or ranks == 1:
        return None
    order_L = _HeadTailLoadBalancer(positions_BL.shape[1], ranks, positions_BL.device)._generate_indices()
    assert isinstance(order_L, Tensor)
    return order_L.flatten()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Without waiting for the copy."""
    inputs, labels_BL = batch
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
    return moved, labels_BL.to(device, non_blocking=True)
