"""Parallelism: calls into torchtitan, plus what makes gradient accumulation and recompute cheap.

Order matters and is torchtitan's: shardings declared in the config tree, activation checkpointing, FSDP2, compile.
"""

from titan_moe.runtime import DEVICE_TYPE, prepare_for_backend

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3

from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.flavors import Flavor
from titan_moe.moe.balance import balanced_random_ids
from titan_moe.moe.layer import choose_dispatcher, choose_experts
from titan_moe.moe.layout import destinations
from titan_moe.recompute import checkpointing

NORMS_AND_ATTENTION = ["attention_norm", "attention", "ffn_norm"]
MTP_PARTS = ["enorm", "hnorm", "eh_proj", "mtp_norm"]


def parallelize(model: DeepSeekV3Model, config: Config, parallel_dims: ParallelDims) -> None:
    """Shard, checkpoint and compile the meta-device model in place, as configured."""
    parallelize_deepseekv3(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(
            mixed_precision_param=config.training.mixed_precision_param,
            mixed_precision_reduce=config.training.mixed_precision_reduce,
        ),
        parallelism=ParallelismConfig(fsdp_reshard_after_forward=config.parallelism.fsdp_reshard_after_forward),
        compile_config=CompileConfig(enable=False),  # below: torchtitan's wants whole blocks as one graph
        ac_config=checkpointing(config),
        dump_folder="",
    )
    prepare_for_backend(model)
    if config.compile.enable and "model" in config.compile.components:
        compile_layers(model, config.compile.backend)


def compile_layers(model: DeepSeekV3Model, backend: str) -> None:
    """torch.compile of dense layers whole, of MoE layers everything but router and region: a layer with a graph break
    inside activation checkpointing would stay eager altogether."""
    blocks = [(block, NORMS_AND_ATTENTION) for block in model.layers.values()]
    blocks += [(block, [*NORMS_AND_ATTENTION, *MTP_PARTS]) for block in model.mtp_layers or ()]
    for block, names in blocks:
        parts: list[nn.Module] = [block]
        if block.moe_enabled:
            parts = [block.get_submodule(name) for name in [*names, "moe.shared_experts"]]
        for part in parts:
            part.compile(backend=backend)


def gradient_sync(model: DeepSeekV3Model, enabled: bool) -> None:
    """From now on backward reduces gradients over the data-parallel ranks only if `enabled`; otherwise each rank adds
    up its own, unsharded and in the reduction's dtype, until a backward with it enabled reduces the sum."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(enabled)


def moe_report(config: Config, parallel_dims: ParallelDims) -> list[str]:
    """What the start-up report says about the MoE region: the choices, each with its reason."""
    flavor, m, ep = model_flavor(config), config.moe, parallel_dims.ep
    dtype = getattr(torch, config.training.mixed_precision_param)
    dispatcher, why = choose_dispatcher(m.dispatcher, ep)
    experts, reason = choose_experts(m.experts, DEVICE_TYPE, dtype, flavor.dim, flavor.moe_hidden_dim)
    lines = [f"MoE: dispatcher {dispatcher} ({why}); experts {experts} ({reason}), weighting {m.weighting}"]
    if m.capacity_factor is not None:
        lines.append(f"MoE: capacity factor {m.capacity_factor} drops by {m.drop_policy}; dropped copies are reported")
    if m.force_balance != "none":
        tokens = config.training.local_batch_size * config.training.seq_len
        ids_TK = forced_ids(m.force_balance, tokens, flavor)
        ranks = destinations(ids_TK // (flavor.num_experts // ep), ep).sum(1).double().mean().item()
        lines.append(
            f"MoE: routing is forced ({m.force_balance}), the model does not learn to route; a token goes to "
            f"{ranks:.3f} different ranks of {ep} in the mean"
        )
    if ep > 1 and config.activation_checkpoint.mode != "none":
        copies = config.training.local_batch_size * config.training.seq_len * flavor.top_k
        kept = copies * flavor.dim * dtype.itemsize / 2**20
        what = "sent again in backward" if m.redispatch else "kept for backward"
        lines.append(
            f"MoE: received rows are {what}: up to {kept:,.1f} MiB per layer and microbatch at an even load, against "
            f"{kept / flavor.top_k:,.1f} MiB of block input (moe.redispatch)"
        )
    return lines


def forced_ids(how: str, tokens: int, flavor: Flavor) -> torch.Tensor:
    """Expert ids [T, K] as the forced router chooses them; "balanced_random" draws new ones each time."""
    if how == "round_robin":
        return torch.arange(tokens * flavor.top_k).view(tokens, flavor.top_k) % flavor.num_experts
    groups, kept = flavor.num_expert_groups, flavor.num_limited_groups
    return balanced_random_ids(tokens, flavor.top_k, flavor.num_experts, groups, kept, device="cpu")


def total_and_active_parameters(model: nn.Module, top_k: int, num_experts: int) -> tuple[int, int]:
    """Parameters stored, and parameters that one token meets (K of E experts)."""
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".routed_experts." in name)
    return total, total - routed + routed * top_k // num_experts
