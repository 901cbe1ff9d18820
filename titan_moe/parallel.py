"""Parallelism: calls into torchtitan, plus what makes gradient accumulation cheap.

Order matters and is torchtitan's: shardings declared in the config tree, activation checkpointing, compile, FSDP2.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from titan_moe.runtime import prepare_for_backend

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3

from titan_moe.config import Config


def parallelize(model: DeepSeekV3Model, config: Config, parallel_dims: ParallelDims) -> None:
    """Shard, checkpoint and compile the meta-device model in place, as configured."""
    checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    parallelize_deepseekv3(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(
            mixed_precision_param=config.training.mixed_precision_param,
            mixed_precision_reduce=config.training.mixed_precision_reduce,
        ),
        parallelism=ParallelismConfig(fsdp_reshard_after_forward=config.parallelism.fsdp_reshard_after_forward),
        compile_config=compile_config(config),
        ac_config=checkpointing[config.activation_checkpoint.mode],
        dump_folder="",
    )
    prepare_for_backend(model)


def build_loss(config: Config, model: DeepSeekV3Model) -> BaseLoss:
    """Cross-entropy summed over tokens and divided by the global number of valid ones, in chunks of the sequence if
    asked."""
    if config.loss.num_chunks == 1:
        return CrossEntropyLoss.Config().build(compile_config=compile_config(config))
    loss = ChunkedLossWrapper.Config(num_chunks=config.loss.num_chunks).build(compile_config=compile_config(config))
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True  # the loss applies the head itself, chunk by chunk
    return loss


def compile_config(config: Config) -> CompileConfig:
    return CompileConfig(
        enable=config.compile.enable, components=list(config.compile.components), backend=config.compile.backend
    )


@contextmanager
def gradient_sync(model: DeepSeekV3Model, enabled: bool) -> Iterator[None]:
    """Inside, backward reduces gradients over the data-parallel ranks only if `enabled`; otherwise each rank adds up
    its own, unsharded and in the reduction's dtype, until a backward with it enabled reduces the sum.

    torchtitan's chunked loss switches the head's reduction on and off around its chunks, which would reduce the head in
    every microbatch; while disabled, its switch is held.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(enabled)
    head = model.lm_head
    if enabled or not isinstance(head, FSDPModule):
        yield
        return
    head.set_requires_gradient_sync = lambda requires_gradient_sync, *, recurse=True: None
    try:
        yield
    finally:
        del head.set_requires_gradient_sync


def total_and_active_parameters(model: nn.Module, top_k: int, num_experts: int) -> tuple[int, int]:
    """Parameters stored, and parameters that one token meets (K of E experts)."""
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".routed_experts." in name)
    return total, total - routed + routed * top_k // num_experts
