"""From a flavor to torchtitan's model, with our nodes put in; nothing else builds models.

torchtitan's model is a tree of config nodes; `build_model` takes the family's tree (families.py), with the sharding of
every node, replaces some of them and builds the modules on the meta device:

| torchtitan's node          | ours                       | why                                                    |
|----------------------------|----------------------------|--------------------------------------------------------|
| FlexAttention (CPU only)   | DenseAttention             | FlexAttention has no backward on a CPU                 |
| MoE, RoutedExperts and     | moe.layer: FusedMoE,       | the MoE region: plan, dispatch, experts, combine; load |
| GroupedExperts, router     | FusedRoutedExperts, ...    | counts, auxiliary losses, fp32 router logits           |
| MTPDecoder                 | families.Model             | MTP layers too leave the head to the loss              |
| Attention, norms,          | block: LatentAttention,    | names for what backward can make again instead of      |
| FeedForward                | Norm, SwiGLU, SharedExpert | keeping it                                             |
| TransformerBlock           | half_batch: HalfBatchBlock | two halves of a microbatch that hide each other's      |
|                            |                            | transfers, if asked for                                |
| Linear                     | precision.linear:          | GEMMs in low precision, of the layers that a recipe    |
|                            | QuantizedLinear            | holds for                                              |

`init_weights` gives every parameter the same values on every mesh: see its docstring.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from titan_moe.runtime import DEVICE_TYPE

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.deepseek_v3 import MTPDecoder
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import set_default_dtype

from titan_moe import families
from titan_moe.attention import DenseAttention
from titan_moe.block import mark
from titan_moe.config import Config
from titan_moe.config_check import model_flavor, sequences_per_step
from titan_moe.families import Model
from titan_moe.half_batch import halve
from titan_moe.mesh_check import dispatched_tokens
from titan_moe.moe.choices import choose_experts
from titan_moe.moe.layer import fuse
from titan_moe.moe.names import FUSED, GATE, UP, split_w13
from titan_moe.precision.backend import backend_of_linears
from titan_moe.precision.layers import chosen
from titan_moe.precision.linear import quantize_linears
from titan_moe.te_ep_check import in_flight

# Rows drawn with one seed. A rank draws whole blocks, so a smaller one wastes less at the edge of its slice and a
# larger one seeds less often; it is part of what the initial weights are, so it must never change.
INIT_BLOCK_ELEMENTS = 2**20


def model_config(config: Config) -> Model.Config:
    """torchtitan's config tree for this model, our nodes and the sharding of every node in it."""
    tree = families.tree(model_flavor(config), config.training.seq_len)
    layers = [*tree.layers, *tree.mtp_layers]
    low_precision = chosen(config, model_flavor(config))
    for layer in layers:
        if DEVICE_TYPE == "cpu":
            layer.attention.inner_attention = DenseAttention.Config()
    families.set_sharding(tree, enable_ep=config.parallelism.expert_parallel_degree > 1)
    for i, layer in enumerate(layers):
        recipe = low_precision if low_precision is not None and low_precision.holds_for(i) else None
        if layer.moe is not None:
            layer.moe.load_balance_coeff = config.moe.load_balance_coeff or None
            of_experts = recipe.recipe.name if recipe is not None and recipe.experts else None
            layer.moe = fuse(layer.moe, **moe_settings(config, of_experts))
        mark(layer)
        if recipe is not None:
            quantize_linears(layer, recipe, backend_of_linears(config, model_flavor(config), recipe)[0])
    if config.moe.overlap == "half_batch":
        tree.layers, tree.mtp_layers = [[halve(layer) for layer in part] for part in (tree.layers, tree.mtp_layers)]
    return tree


def moe_settings(config: Config, recipe: str | None = None) -> dict[str, Any]:
    """The [moe] section as `fuse` wants it, for a layer whose experts `recipe` quantizes."""
    m, f = config.moe, model_flavor(config)
    dtype = getattr(torch, config.training.mixed_precision_param)
    local_experts = f.num_experts // config.parallelism.expert_parallel_degree
    # A layer that is left in high precision has experts that can be.
    wanted = "te" if m.experts == "te_fused" and recipe is None else m.experts
    sizes = (f.dim, f.moe_hidden_dim, local_experts)
    experts, _ = choose_experts(wanted, DEVICE_TYPE, dtype, *sizes, recipe, config.precision.backend)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "dispatcher": m.dispatcher,
        "experts": experts,
        "recipe": recipe,
        "weighting": m.weighting,
        "ranks_per_node": m.ranks_per_node,
        "hop_chunks": m.hop_chunks,
        "capacity_factor": m.capacity_factor,
        "drop_policy": m.drop_policy,
        "recv_buffer": m.recv_buffer,
        "max_tokens": dispatched_tokens(config),
        "overlap_shared": m.overlap == "shared_expert",
        "router": m.router,
        "scores_per_group": f.scores_per_group,
        "in_flight": in_flight(config, world_size),
        "te_ep_payload": m.te_ep_payload,
        "force_balance": m.force_balance,
        "sequence_loss_coeff": m.sequence_loss_coeff,
        "z_loss_coeff": m.z_loss_coeff,
        "sequences_per_step": sequences_per_step(config, world_size),
    }


def build_model(config: Config) -> Model:
    """The model on the meta device: shapes and dtypes, no memory."""
    with torch.device("meta"), set_default_dtype(getattr(torch, config.training.dtype)):
        model = model_config(config).build()
    model.verify_module_protocol()
    return model


def init_weights(model: MTPDecoder, seed: int) -> None:
    """Give every parameter its initial values, the same ones whatever the mesh.

    Each parameter is drawn in blocks of rows (an expert's rows are its own blocks), each block from a seed made of (run
    seed, parameter name, expert, block), and a rank keeps its slice. So a rank draws only blocks that its slice
    touches, one at a time, and no value depends on how the parameter is cut. torchtitan's own way draws from one stream
    per rank, which on a CPU mesh gives every rank the same numbers: with EP = 2, experts 4-7 would equal experts 0-3.

    The values do depend on the kind of device: they are drawn where the parameter lives.
    """
    for fqn, module in model.named_modules():
        if isinstance(module, Module) and module._param_init is not None:
            prefix = canonical_fqn(fqn)
            # A new dict per module: torchtitan shares one between all modules of a kind.
            draw = {
                name: partial(_init_slice, initializer=init, seed=seed, name=f"{prefix}.{name}")
                for name, init in module._param_init.items()
            }
            if FUSED in draw:
                draw[FUSED] = partial(_init_w13, halves=[draw[GATE], draw[UP]])
            module._param_init = draw
    with torch.no_grad():
        model.init_weights()


def _init_w13(w13_EF2D: torch.Tensor, *, halves: list[partial]) -> None:
    """Gate and up of the fused parameter, each as the weight that it is in torchtitan and in checkpoints."""
    local_EF2D, (*offset_EF, _, offset_D) = local_slice(w13_EF2D)
    _, hidden, _, width = w13_EF2D.shape
    for init, half in zip(halves, split_w13(local_EF2D).values()):
        _draw(half, (*offset_EF, offset_D), (hidden, width), **init.keywords)


def _init_slice(param: torch.Tensor, *, initializer: Callable, seed: int, name: str) -> None:
    """Fill this rank's slice of `param` with what `initializer` draws for the whole of it."""
    if initializer in (nn.init.zeros_, nn.init.ones_):
        initializer(param)
        return
    assert 2 <= param.ndim <= 3, f"{tuple(param.shape)}: no rule for a random parameter of {param.ndim} dimensions"
    _draw(*local_slice(param), param.shape[-2:], initializer=initializer, seed=seed, name=name)


def _draw(
    local: torch.Tensor,
    offset: tuple[int, ...],
    whole: tuple[int, ...],
    *,
    initializer: Callable,
    seed: int,
    name: str,
) -> None:
    """Fill `local`, which begins at `offset` in the parameter called `name`; `whole` is (rows, width) of all of it, or
    of each expert."""
    if local.numel() == 0:
        return
    rows, width = whole
    block_rows = max(1, INIT_BLOCK_ELEMENTS // width)
    *expert_offset, row_offset, column_offset = offset
    local_ERC = local if local.ndim == 3 else local[None]
    first_expert = expert_offset[0] if expert_offset else 0
    last_row = row_offset + local.shape[-2]
    for e, local_RC in enumerate(local_ERC, start=first_expert):
        for block in range(row_offset // block_rows, math.ceil(last_row / block_rows)):
            start, end = block * block_rows, min((block + 1) * block_rows, rows)
            digest = hashlib.blake2b(f"{seed}/{name}/{e}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator(local.device).manual_seed(int.from_bytes(digest, "little") >> 1)
            drawn = torch.empty(end - start, width, device=local.device)  # fp32 also for bf16 parameters
            initializer(drawn, generator=generator)
            lo, hi = max(start, row_offset), min(end, last_row)
            columns = slice(column_offset, column_offset + local.shape[-1])
            local_RC[lo - row_offset : hi - row_offset].copy_(drawn[lo - start : hi - start, columns])


def local_slice(param: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's part of `param` as a plain tensor, and where it begins in the whole along each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(param, DTensor):
        return param, (0,) * param.ndim
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    local = param.to_local()
    assert tuple(local.shape) == tuple(shape), f"local shard {tuple(local.shape)} is not {tuple(shape)}"
    return local, offset
