"""One rank of a run, built by train.py's functions on fake tensors, and its steps."""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

from titan_moe.dry_run import gpu  # isort: skip - first: it decides what titan_moe.runtime sees
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

import train
from titan_moe import checkpoint, parallel, runtime
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.corruption import CorruptionCheck
from titan_moe.cuda_graph import as_it_is
from titan_moe.dry_run import routing
from titan_moe.dry_run.collectives import AXES, Collectives
from titan_moe.dry_run.ledger import BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, PIPELINE, WORKING, Ledger
from titan_moe.dry_run.report import DryRun, job_of
from titan_moe.dry_run.watch import Watch
from titan_moe.guards import Guard
from titan_moe.inputs import Batch
from titan_moe.loss import build_loss
from titan_moe.mesh_check import data_parallel_degree, dispatched_tokens, microbatch_size, microbatches_per_step
from titan_moe.model import build_model
from titan_moe.moe.contract import Dispatcher
from titan_moe.moe.layer import moe_layers
from titan_moe.moe.replay import Replay
from titan_moe.optimizer import build_lr_schedulers, build_optimizers
from titan_moe.pipeline import Pipeline


def dry_run(config: Config, world_size: int, rank: int) -> DryRun:
    """What `rank` of `world_size` built, and what a step of it held and sent."""
    gpu.install()
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # FSDP's modules come from the meta device
    run = build(shortened(config, world_size), world_size, rank, fake)
    with fake:
        ledger, collectives = watched_step(run)
    return DryRun(
        config=config,
        job=job_of(config, world_size),
        rank=rank,
        place=place_of(run),
        microbatches=run.microbatches,
        ledger=ledger,
        collectives=collectives,
    )


def shortened(config: Config, world_size: int) -> Config:
    """`config` without compilation and offloading, with torch's experts for all that keep the same tensors, and with no
    more microbatches per step than it takes to hold what a longer step would hold: of gradient accumulation's the first
    adds to nothing and the last reduces; four times as many as it has ranks bring any pipeline to its steady state."""
    p = config.parallelism
    pp = p.pipeline_parallel_degree
    microbatches = min(microbatches_per_step(config, world_size), 2 if pp == 1 else 4 * pp)
    config = copy.deepcopy(config)
    config.compile.enable = False
    config.cuda_graph.scope = "none"
    config.activation_offload.tensors = []
    config.moe.experts = "grouped_mm"
    t = config.training
    if pp > 1:
        t.local_batch_size, t.global_batch_size = microbatches * p.pipeline_parallel_microbatch_size, -1
    else:
        t.global_batch_size = microbatches * t.local_batch_size * math.prod(data_parallel_degree(config, world_size))
    return config


def build(config: Config, world_size: int, rank: int, fake: FakeTensorMode) -> train.Run:
    """What train.build makes of `config` on one rank of a process group whose other ranks do not exist, but for data,
    checkpoints and metrics. Parameters have no initial values, not even fake ones: nothing depends on them."""
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    # Not in the fake mode: meshes are made of numbers in tensors, and what is on the meta device has no memory either.
    parallel_dims = runtime.build_meshes(config)
    model = build_model(config)
    model_parts, pipeline = parallel.parallelize(model, config, parallel_dims, gpu.DEVICE)
    with fake:
        for part in model_parts:
            part.to_empty(device=gpu.DEVICE)
            part.train()
    if pipeline is not None:
        tell_shapes(pipeline, config, parallel_dims)
    optimizers = build_optimizers(config, model_parts, parallel_dims)
    loss_fn = build_loss(config, model_parts[-1])
    if pipeline is not None:
        pipeline.loss_fn = loss_fn
    progress, lr_schedulers = checkpoint.Progress(), build_lr_schedulers(config, optimizers)
    with fake:
        guard = Guard(config, model_parts, lr_schedulers, progress, parallel_dims.tp, gpu.DEVICE)
    guard.settle = lambda: None  # type: ignore[method-assign]  # no verdict ever comes to this host
    return train.Run(
        config=config,
        device=gpu.DEVICE,
        parallel_dims=parallel_dims,
        microbatches=microbatches_per_step(config, world_size),
        model_parts=model_parts,
        pipeline=pipeline,
        loss_fn=loss_fn,
        optimizers=optimizers,
        guard=guard,
        dataloader=cast(Any, None),
        validation_dataloaders={},
        checkpointer=cast(Any, SimpleNamespace(maybe_wait_for_staging=lambda: None)),
        metrics=cast(Any, SimpleNamespace(count=lambda tokens: None)),
        telemetry=cast(Any, SimpleNamespace(phase=nullcontext, backward=nullcontext)),
        progress=progress,
        stop=cast(Any, SimpleNamespace(sum_over_ranks=sum_over_ranks)),
        launch=as_it_is,
        replay=Replay("exact", model_parts, gpu.DEVICE),  # an even load overflows nothing
        corruption=CorruptionCheck(config, model_parts, gpu.DEVICE),  # not in step 0, which is all there is
        spmd_context=dist_utils.get_spmd_context(parallel_dims=parallel_dims),
    )


def sum_over_ranks(count: Tensor) -> Tensor:
    """As stop.Stop's, which nobody here can ask to stop."""
    dist.all_reduce(sums := torch.stack([count, torch.zeros_like(count)]))
    return sums[0]


def place_of(run: train.Run) -> dict[str, int]:
    """This rank's place along each mesh axis that has more than one."""
    meshes = run.parallel_dims.get_all_one_dimensional_meshes()
    return {axis: meshes[axis].get_local_rank() for axis in AXES if axis in meshes and meshes[axis].size() > 1}


def tell_shapes(pipeline: Pipeline, config: Config, parallel_dims: ParallelDims) -> None:
    """Give the stages the shapes that they would learn from each other, which fake collectives do not carry."""
    batch, seq_len = microbatch_size(config), config.training.seq_len // parallel_dims.cp
    tokens_BL = torch.zeros(batch, seq_len, dtype=torch.int64)
    dtype = getattr(torch, config.training.mixed_precision_param)
    width = model_flavor(config).dim
    between_BLD = torch.zeros(batch, seq_len // parallel_dims.tp, width, dtype=dtype, requires_grad=True)
    last_BLD = torch.zeros(batch, seq_len, width, dtype=dtype, requires_grad=True)
    for stage in pipeline.stages:
        given, made = (tokens_BL if stage.is_first else between_BLD), (last_BLD if stage.is_last else between_BLD)
        stage._user_meta = _StageMeta(inputs=extract_tensor_metas((given,)), outputs=extract_tensor_metas((made,)))


def step(run: train.Run) -> None:
    """One optimizer step of train.py."""
    batches = [batch_of(run) for _ in range(run.microbatches)]
    train.train_step(run, iter(batches), validates=False, logs=False)


def batch_of(run: train.Run) -> Batch:
    shape = microbatch_size(run.config), run.config.training.seq_len
    tokens_BL, positions_BL, labels_BL = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    return {"input": tokens_BL, "positions": positions_BL}, labels_BL


def watched_step(run: train.Run) -> tuple[Ledger, Collectives]:
    """One step, what it held and what it sent, after one that is not watched: it makes what is made once and kept, the
    optimizer's state for one."""
    ledger, collectives = Ledger(), Collectives(run.parallel_dims)
    watch = Watch(ledger, collectives)
    plan_evenly(run, nullcontext)
    step(run)
    label_states(run, ledger)
    label_received(run, ledger)
    plan_evenly(run, lambda: watch)
    run.loss_fn = assuming(WORKING, run.loss_fn, ledger)  # the head's gradients are made in forward already
    if run.pipeline is not None:
        run.pipeline.loss_fn = run.loss_fn
    with ledger.seeing_resizes(), watch:
        step(run)
    return ledger, collectives


def plan_evenly(run: train.Run, watching: Callable[[], AbstractContextManager]) -> None:
    """See routing.py. A rank without MoE layers, or with all experts, has nothing to plan for."""
    dispatchers = [moe.routed_experts.dispatcher for part in run.model_parts for moe in moe_layers(part).values()]
    if run.parallel_dims.ep == 1 or not dispatchers:
        return
    config = run.config
    forced = "natural" if config.moe.force_balance == "none" else config.moe.force_balance
    sizes = routing.even_sizes(
        model_flavor(config), dispatched_tokens(config), cast(Dispatcher, dispatchers[0]), forced
    )
    routing.plan_evenly(sizes, watching)


def label_states(run: train.Run, ledger: Ledger) -> None:
    for part in run.model_parts:
        for parameter in part.parameters():
            ledger.label(parameter, PARAMETERS)
            # FSDP calls it when a sharded gradient is ready.
            parameter.register_post_accumulate_grad_hook(lambda p: ledger.label(p.grad, GRADIENTS))
        for buffer in part.buffers():
            ledger.label(buffer, BUFFERS)
    for optimizer in run.optimizers.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                ledger.label(value, OPTIMIZER)


def label_received(run: train.Run, ledger: Ledger) -> None:
    """Gradients that a pipeline's stages receive, which no backward has made. The hidden states become activations."""
    for stage in run.pipeline.stages if run.pipeline else ():
        stage.get_bwd_recv_ops = labelling(stage.get_bwd_recv_ops, ledger)  # type: ignore[method-assign]


def labelling(receive: Callable[[int], list[dist.P2POp]], ledger: Ledger) -> Callable[[int], list[dist.P2POp]]:
    def receive_and_label(microbatch: int) -> list[dist.P2POp]:
        ops = receive(microbatch)
        for op in ops:
            ledger.label(op.tensor, PIPELINE)
        return ops

    return receive_and_label


def assuming(kind: str, function: Callable[..., Any], ledger: Ledger) -> Any:
    def labelled(*args, **kwargs):
        with ledger.assuming(kind):
            return function(*args, **kwargs)

    return labelled
