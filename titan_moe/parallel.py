"""Parallelism: calls into torchtitan.

Order matters and is torchtitan's: the model is cut into pipeline stages; then, for each, come the shardings declared in
the config tree, activation checkpointing, FSDP2, compile.
"""

from functools import partial
from typing import cast

from titan_moe.runtime import prepare_for_backend, titan_parallelism

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.deepseek_v3 import MTPDecoder, parallelize_deepseekv3

from titan_moe import fsdp_traffic, in_flight
from titan_moe.config import Config
from titan_moe.config_check import microbatches_per_step
from titan_moe.offload import Offloader
from titan_moe.offload_blocks import attach, build_offloader
from titan_moe.pipeline import Pipeline
from titan_moe.recompute import checkpointing

NORMS_AND_ATTENTION = ["attention_norm", "attention", "ffn_norm"]
MTP_PARTS = ["enorm", "hnorm", "eh_proj", "mtp_norm"]


def parallelize(
    model: MTPDecoder, config: Config, parallel_dims: ParallelDims, device: torch.device
) -> tuple[list[MTPDecoder], Pipeline | None]:
    """Cut the meta-device model into this rank's pipeline stages, and shard, checkpoint and compile each. Without a
    pipeline the model itself is the one part."""
    in_flight.seconds_per_byte = config.debug.comm_delay_ns_per_byte * 1e-9
    offloader = build_offloader(config, device)
    shard = partial(parallelize_part, config=config, parallel_dims=parallel_dims, offloader=offloader)
    if not parallel_dims.pp_enabled:
        shard(model)
        return [model], None
    microbatches = microbatches_per_step(config, dist.get_world_size())
    pipeline = Pipeline(model, config, parallel_dims, device, microbatches=microbatches, parallelize=shard)
    return pipeline.parts, pipeline


def parallelize_part(
    model: MTPDecoder, config: Config, parallel_dims: ParallelDims, offloader: Offloader | None = None
) -> None:
    """Shard, checkpoint and compile one part of the meta-device model in place, as configured."""
    parallelize_deepseekv3(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(
            mixed_precision_param=config.training.mixed_precision_param,
            mixed_precision_reduce=config.training.mixed_precision_reduce,
        ),
        parallelism=titan_parallelism(config),
        compile_config=CompileConfig(enable=False),  # below: torchtitan's wants whole blocks as one graph
        ac_config=checkpointing(config),
        dump_folder="",
    )
    if config.parallelism.fsdp_prefetch_layers != 1:
        prefetch(model, config.parallelism.fsdp_prefetch_layers)
    if offloader is not None:
        attach(offloader, model)
    prepare_for_backend(model)
    ep_mesh = parallel_dims.get_optional_mesh("ep")
    fsdp_traffic.prepare(model, None if ep_mesh is None else ep_mesh.get_group())
    if config.compile.enable and "model" in config.compile.components:
        compile_layers(model, config.compile.backend)


def prefetch(model: MTPDecoder, count: int) -> None:
    """Gather the parameters of the `count` layers that come next, in forward and in backward, while one computes.

    torchtitan does so for one layer where EP is on, whose host syncs keep FSDP2 from running ahead by itself, and
    leaves it to FSDP2 elsewhere. As there, embedding and head are links of the chain.
    """
    layers = [[layer] for layer in (*model.layers.values(), *(model.mtp_layers or ()))]
    embedding = [] if model.tok_embeddings is None else [[model.tok_embeddings]]
    head = [] if model.norm is None or model.lm_head is None else [[model.norm, model.lm_head]]
    chain = cast(list[list[FSDPModule]], [*embedding, *layers, *head])
    for i, link in enumerate(chain):
        ahead, behind = chain[i + 1 : i + 1 + count], chain[max(i - count, 0) : i][::-1]
        link[-1].set_modules_to_forward_prefetch([module for link in ahead for module in link])
        link[-1].set_modules_to_backward_prefetch([module for link in behind for module in link])


def compile_layers(model: MTPDecoder, backend: str) -> None:
    """torch.compile of dense layers whole, of MoE layers everything but router and region: a layer with a graph break
    inside activation checkpointing would stay eager altogether.

    The parts of all layers share the code of torchtitan's modules, which dynamo counts its variants by: one for each
    kind of part, with and without gradients, and more where activation checkpointing repeats it. Past its default of 8
    it would leave what comes next eager, with a warning.
    """
    from torch._dynamo import config as dynamo  # takes a second to import

    dynamo.recompile_limit = 64
    blocks = [(block, NORMS_AND_ATTENTION) for block in model.layers.values()]
    blocks += [(block, [*NORMS_AND_ATTENTION, *MTP_PARTS]) for block in model.mtp_layers or ()]
    for block, names in blocks:
        parts: list[nn.Module] = [block]
        if block.moe_enabled:
            parts = [block.get_submodule(name) for name in [*names, "moe.shared_experts"]]
        for part in parts:
            part.compile(backend=backend)


def gradient_sync(model: MTPDecoder, config: Config, *, last: bool) -> None:
    """What the next backward does with its gradients; `last`: it is the step's last microbatch.

    The last reduces over all data-parallel ranks. Before it each rank adds up its own gradients, unsharded and in the
    reduction's dtype; or they are reduced to the shards there too, and only summed over replicas (HSDP) in the end.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or config.parallelism.fsdp_reduce_every_microbatch)
    model.set_requires_all_reduce(last)


def total_and_active_parameters(model: nn.Module, top_k: int, num_experts: int) -> tuple[int, int]:
    """Parameters stored, and parameters that one token meets (K of E experts)."""
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".routed_experts." in name)
    return total, total - routed + routed * top_k // num_experts


def sum_of_sequence(parallel_dims: ParallelDims, value: torch.Tensor) -> torch.Tensor:
    """The sum of `value` over the ranks that share this rank's sequences: context ranks and pipeline stages."""
    cp_mesh, pp_mesh = parallel_dims.get_optional_mesh("cp"), parallel_dims.get_optional_mesh("pp")
    return dist_utils.dist_sum_tensor(value, cp_mesh, None if pp_mesh is None else pp_mesh.get_group())
