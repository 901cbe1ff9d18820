"""Before the first step: who trains in the run folder, and what this run is."""

import os
from pathlib import Path

import titan_moe.runtime as runtime
from titan_moe.runtime import DEVICE_TYPE

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_moe import run_folder
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.config_print import literal
from titan_moe.device_memory import DeviceMemory
from titan_moe.flavors import Flavor
from titan_moe.machine_check import Machine, occupied
from titan_moe.mesh_check import dispatched_tokens, microbatch_size, microbatches_per_step, region_tokens
from titan_moe.metrics import Metrics
from titan_moe.moe.balance import balanced_random_ids
from titan_moe.moe.choices import choose_dispatcher, choose_experts, experts_sync_problem, slab_alignment
from titan_moe.moe.layout import destinations, static_rows
from titan_moe.offload_check import offloaded_bytes
from titan_moe.pipeline_layout import pipeline_layout
from titan_moe.precision.layers import chosen
from titan_moe.precision.report import precision_report
from titan_moe.recompute_facts import saved_bytes
from titan_moe.sources.record import Listing


def claim_run_folder(config: Config, folder: Path, listing: Listing) -> int:
    """Have rank 0 take the run folder and say in its run.json who trains there, on what; returns the attempt's number.
    From then on a watchdog watches all ranks."""

    def claim() -> int:
        record = {**run_folder.provenance(), "description": config.job.description, "world": dist.get_world_size()}
        record["device"] = DeviceMemory().device_name
        record |= {"cores": run_folder.cores(), "threads": torch.get_num_threads()}
        record["data"] = listing.summary()
        return run_folder.claim(folder, os.environ["RUN_ID"], config.checkpoint.enable, record)

    attempt = runtime.on_rank_0(claim)
    runtime.start_watchdog(config, folder)
    return attempt


def load_step(config: Config) -> int:
    """Of the checkpoint to resume from, -1 for the newest: a restart goes on where the first start had come to."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return -1 if restarted else config.checkpoint.load_step


def require_memory(config: Config, device: torch.device) -> None:
    """Before anything is allocated on a GPU: raises ValueError if it has too little memory left, because other programs
    run there, or nobody asked before torchrun. On CPUs ranks cannot tell what the others will take; launch.py can."""
    if DEVICE_TYPE == "cpu":
        return
    module = torch.get_device_module(DEVICE_TYPE)
    left, _ = module.mem_get_info(device)
    machine = Machine(name=f"{device}, {module.get_device_name(device)},", memory=left, gpu=True)
    if problem := occupied(config, dist.get_world_size(), machine):
        raise ValueError(problem)


def report(
    config: Config,
    parallel_dims: ParallelDims,
    folder: Path,
    attempt: int,
    metrics: Metrics,
    total: int,
    active: int,
) -> None:
    """What this run is, before its first step: folder, device, model size, types, the MoE region, tokens per step."""
    _, dp_degree = runtime.batch_coordinates(parallel_dims)
    t = config.training
    batch, microbatches = microbatch_size(config), microbatches_per_step(config, dist.get_world_size())
    tokens_per_step = batch * t.seq_len * dp_degree * microbatches
    logger.info(f"Run folder {folder}, attempt {attempt}; device {metrics.memory.device_name}, peak {peak(metrics)}")
    logger.info(f"Model {config.model.name} {config.model.flavor}: {total:,} parameters, {active:,} active per token")
    logger.info(f"Parameters {t.dtype}, compute {t.mixed_precision_param}, reduction {t.mixed_precision_reduce}")
    if (
        t.mixed_precision_param == "bfloat16"
        and DEVICE_TYPE == "cpu"
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        logger.warning(
            "This CPU has no instructions for bfloat16 and computes in it about ten times as slowly as in float32; "
            'training.mixed_precision_param = "float32" is faster'
        )
    if parallel_dims.pp_enabled:
        logger.info(pipeline_layout(config, model_flavor(config)).report())
    memory = [recompute_report(config), *offload_report(config)]
    for line in [*moe_report(config, parallel_dims), *precision_report(config), *memory]:
        logger.info(line)
    logger.info(
        f"Tokens per step: {batch} sequences x {t.seq_len} tokens x {dp_degree} data-parallel ranks x "
        f"{microbatches} microbatches = {tokens_per_step:,}, {tokens_per_step * t.steps:,} in {t.steps} steps"
    )


def peak(metrics: Metrics) -> str:
    """What MFU is a share of."""
    if metrics.peak_flops is None:
        return "unknown"
    return f"{metrics.peak_flops / 1e12:,.0f} {metrics.precision} TFLOP/s"


def moe_report(config: Config, parallel_dims: ParallelDims) -> list[str]:
    """What the start-up report says about the MoE region: the choices, each with its reason."""
    flavor, m, ep = model_flavor(config), config.moe, parallel_dims.ep
    dtype = getattr(torch, config.training.mixed_precision_param)
    dispatcher, why = choose_dispatcher(m.dispatcher, ep)
    tokens = region_tokens(config)
    hidden = flavor.moe_hidden_dim // (1 if ep > 1 else parallel_dims.tp)
    local_experts = flavor.num_experts // ep
    low_precision = chosen(config, flavor)
    recipe = low_precision.recipe.name if low_precision is not None and low_precision.experts else None
    sizes = (flavor.dim, hidden, local_experts)
    experts, reason = choose_experts(m.experts, DEVICE_TYPE, dtype, *sizes, recipe, config.precision.backend)
    lines = [f"MoE: dispatcher {dispatcher} ({why}); experts {experts} ({reason}), weighting {m.weighting}"]
    if m.capacity_factor is not None:
        lines.append(f"MoE: capacity factor {m.capacity_factor} drops by {m.drop_policy}; dropped copies are reported")
    rows, load = tokens * flavor.top_k, " at an even load"
    if ep > 1 and m.recv_buffer != "exact":
        factor = None if isinstance(m.recv_buffer, str) else m.recv_buffer
        alignment = slab_alignment(experts, recipe)
        together = dispatched_tokens(config)
        room, load = static_rows(factor, together, flavor.top_k, local_experts, alignment, ep), ""
        parts = 2 if m.overlap == "half_batch" else 1
        rows = room * parts
        lines.append(
            f"MoE: a rank has room for {room:,} rows per layer and {'half ' * (parts - 1)}microbatch, "
            f"{room / (together * flavor.top_k):.2f} times the mean, whatever arrives (moe.recv_buffer = "
            f"{literal(m.recv_buffer)})"
        )
        if waits := experts_sync_problem(experts, DEVICE_TYPE, dtype, flavor.dim, hidden, recipe):
            lines.append(f"MoE: the host waits for the device once per layer all the same: {waits}")
    if m.overlap != "none":
        beside = {
            "shared_expert": "the shared expert runs while tokens are on their way to their experts",
            "half_batch": "half of a microbatch's sequences compute while the other half's tokens are on their way",
        }[m.overlap]
        lines.append(f'MoE: {beside} (moe.overlap = "{m.overlap}")')
    if delay := config.debug.comm_delay_ns_per_byte:
        lines.append(f"MoE: transfers take {delay} ns more per byte received (debug.comm_delay_ns_per_byte)")
    if m.force_balance != "none":
        ids_TK = forced_ids(m.force_balance, tokens, flavor)
        ranks = destinations(ids_TK // (flavor.num_experts // ep), ep).sum(1).double().mean().item()
        lines.append(
            f"MoE: routing is forced ({m.force_balance}), the model does not learn to route; a token goes to "
            f"{ranks:.3f} different ranks of {ep} in the mean"
        )
    if ep > 1 and config.activation_checkpoint.mode != "none":
        kept = rows * flavor.dim * dtype.itemsize / 2**20
        what = "sent again in backward" if m.redispatch else "kept for backward"
        lines.append(
            f"MoE: received rows are {what}: up to {kept:,.1f} MiB per layer and microbatch{load}, against "
            f"{tokens * flavor.dim * dtype.itemsize / 2**20:,.1f} MiB of block input (moe.redispatch)"
        )
    return lines


def forced_ids(how: str, tokens: int, flavor: Flavor) -> torch.Tensor:
    """Expert ids [T, K] as the forced router chooses them; "balanced_random" draws new ones each time."""
    if how == "round_robin":
        return torch.arange(tokens * flavor.top_k).view(tokens, flavor.top_k) % flavor.num_experts
    groups, kept = flavor.num_expert_groups, flavor.num_limited_groups
    return balanced_random_ids(tokens, flavor.top_k, flavor.num_experts, groups, kept, device="cpu")


def recompute_report(config: Config) -> str:
    """What the start-up report says about activation checkpointing."""
    chosen, flavor, p = config.activation_checkpoint, model_flavor(config), config.parallelism
    if chosen.mode != "none" or not chosen.recompute:
        return f"Activation checkpointing: {chosen.mode}"
    tokens = microbatch_size(config) * config.training.seq_len // p.context_parallel_degree
    itemsize = getattr(torch, config.training.mixed_precision_param).itemsize

    def saved(*parts: str, moe: bool = True) -> str:
        saves = saved_bytes(flavor, tokens, itemsize, parts, moe=moe, tensor=p.tensor_parallel_degree)
        return f"{saves / 2**20:,.1f} MiB"

    each = ", ".join(f"{part} {saved(part)}" for part in chosen.recompute)
    return (
        f"Activation checkpointing: made again in backward, of each MoE layer and microbatch: {each}; together "
        f"{saved(*chosen.recompute)}, of a dense layer {saved(*chosen.recompute, moe=False)}"
    )


def offload_report(config: Config) -> list[str]:
    """What the start-up report says about activations in host memory; nothing if there are none."""
    if not config.activation_offload.tensors:
        return []
    itemsize = getattr(torch, config.training.mixed_precision_param).itemsize
    moe, dense = (offloaded_bytes(config, model_flavor(config), itemsize, moe=moe) for moe in (True, False))
    each = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in moe.items())
    return [
        f"Activation offload: to host memory, of each MoE layer and microbatch: {each}; together up to "
        f"{sum(moe.values()) / 2**20:,.1f} MiB, of a dense layer {sum(dense.values()) / 2**20:,.1f} MiB"
    ]
