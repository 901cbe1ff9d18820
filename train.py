"""One training run, from top to bottom. Edit it: that is what it is for.

    ./run_train.sh train_configs/debug_model.toml --training.steps=20

`main` reads the configuration, `build` sets everything up in numbered steps, `train` is the loop, `train_step` one
optimizer step with each of its phases in sight. torchtitan's components do the work they exist for; `titan_moe/` holds
the rest, one idea per file.

Shape letters: B batch, L sequence, D model width.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.cudagraph import cudagraph_teardown
from torchtitan.models.deepseek_v3 import MTPDecoder
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import GarbageCollection

from titan_moe import checkpoint, config_file, offload_blocks, parallel, random_state, run_folder, startup
from titan_moe.checkpoint_manager import VerifiedCheckpoints
from titan_moe.config import Config
from titan_moe.corruption import CorruptionCheck
from titan_moe.cuda_graph import Launch, launcher
from titan_moe.data import PackedDataLoader, build_dataloaders
from titan_moe.guards import Guard
from titan_moe.huggingface import export
from titan_moe.inputs import Batch, Inputs, model_inputs, to_device
from titan_moe.loss import Loss, build_loss
from titan_moe.mesh_check import microbatches_per_step
from titan_moe.metrics import Metrics
from titan_moe.mistakes import readable
from titan_moe.model import build_model, init_weights
from titan_moe.moe.replay import Replay
from titan_moe.optimizer import Optimizers, apply_hyperparameters, build_lr_schedulers, build_optimizers
from titan_moe.phases import Phases
from titan_moe.pipeline import Pipeline
from titan_moe.plan import flops
from titan_moe.preflight import list_sources
from titan_moe.sources.record import save as save_record
from titan_moe.stop import Stop
from titan_moe.telemetry import Telemetry
from titan_moe.tokenizer import build_tokenizer
from titan_moe.validation import validate


@dataclass(kw_only=True)
class Run:
    """What `build` made and the loop uses."""

    config: Config
    device: torch.device
    parallel_dims: ParallelDims
    microbatches: int
    model_parts: list[MTPDecoder]  # this rank's pipeline stages; one, the whole model, without a pipeline
    pipeline: Pipeline | None
    loss_fn: Loss
    launch: Launch
    replay: Replay
    corruption: CorruptionCheck
    optimizers: Optimizers
    guard: Guard
    dataloader: PackedDataLoader
    validation_dataloaders: dict[str, PackedDataLoader]  # by the names of the sets
    checkpointer: VerifiedCheckpoints
    metrics: Metrics
    telemetry: Telemetry
    progress: checkpoint.Progress
    stop: Stop
    spmd_context: dist_utils.SpmdContext


# ---------------------------------------------------------------------------------------------------------------------
# Set-up


def build(config: Config) -> Run:
    # 1) process group, meshes, seeds
    folder = run_folder.choose(config, os.environ)
    device = runtime.init_process_group(config, folder)
    parallel_dims = runtime.build_meshes(config)
    runtime.set_seed(config, parallel_dims, device)
    dp_rank, dp_degree = runtime.batch_coordinates(parallel_dims)
    microbatches = microbatches_per_step(config, dist.get_world_size())

    # 2) tokenizer; the files of the data, which rank 0 lists; the run folder, which it claims: all learn the outcome
    flavor = config_file.model_flavor(config)
    tokenizer = build_tokenizer(config.model.hf_assets_path, flavor.vocab_size)
    listing = runtime.on_rank_0(lambda: list_sources(config, tokenizer, folder))
    attempt = startup.claim_run_folder(config, folder, listing)

    # 3) data, in the same global order on every mesh
    dataloader, validation_dataloaders = build_dataloaders(config, listing, tokenizer, dp_rank, dp_degree)

    # 4) model on the meta device: shapes only
    model = build_model(config)
    export.rehearse(config, model)
    total, active = parallel.total_and_active_parameters(model, flavor.top_k, flavor.num_experts)
    terms = flops.per_token(flavor, config.training.seq_len, num_mtp_layers=flavor.num_mtp_layers)

    # 5) cut into pipeline stages; shard, checkpoint and compile each
    model_parts, pipeline = parallel.parallelize(model, config, parallel_dims, device)

    # 6) memory and initial weights
    startup.require_memory(config, device)
    for part in model_parts:
        part.to_empty(device=device)
        init_weights(part, config.debug.seed)
        part.train()

    # 7) loss, optimizer, schedule
    phases = Phases()
    loss_fn = phases.around(build_loss(config, model_parts[-1]), "loss")
    if pipeline is not None:
        pipeline.loss_fn = loss_fn
    optimizers = build_optimizers(config, model_parts, parallel_dims)
    lr_schedulers = build_lr_schedulers(config, optimizers)

    # 8) checkpoint: resumes, or starts from other weights, or does nothing
    progress = checkpoint.Progress()
    guard = Guard(config, model_parts, lr_schedulers, progress, parallel_dims.tp, device)
    checkpointer = checkpoint.build_checkpointer(
        config,
        folder,
        model_parts=model_parts,
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        dataloader=dataloader,
        states={"progress": progress, "guard": guard},
    )
    if not config.checkpoint.create_seed_checkpoint and checkpoint.load(checkpointer, startup.load_step(config)):
        apply_hyperparameters(config, optimizers, lr_schedulers)

    # 9) metrics; the configuration is saved only now, so that one which cannot resume this run replaces nothing
    if dist.get_rank() == 0:
        (folder / "config.toml").write_text(config_file.to_toml(config), encoding="utf-8")
        save_record(listing, folder)
    metrics = Metrics(config, folder, attempt, sum(terms.values()), phases, writes=dist.get_rank() == 0)
    sources = [
        lambda: optimizers.balancer.health.statistics(progress.step / config.training.steps),
        lambda: offload_blocks.statistics(model_parts, metrics.steps),
        partial(dataloader.statistics, parallel_dims.get_optional_mesh("batch"), device),
    ]
    replay = Replay(config.moe.recv_buffer, model_parts, device)

    startup.report(config, parallel_dims, folder, attempt, metrics, total, active)
    return Run(
        config=config,
        device=device,
        parallel_dims=parallel_dims,
        microbatches=microbatches,
        model_parts=model_parts,
        pipeline=pipeline,
        loss_fn=loss_fn,
        launch=launcher(config, model_parts, replay, phases),
        replay=replay,
        corruption=CorruptionCheck(config, model_parts, device),
        optimizers=optimizers,
        guard=guard,
        dataloader=dataloader,
        validation_dataloaders=validation_dataloaders,
        checkpointer=checkpointer,
        metrics=metrics,
        telemetry=Telemetry(config, folder, phases, model_parts, pipeline, device, sources),
        progress=progress,
        stop=Stop(config, folder, device, checkpointer),
        spmd_context=dist_utils.get_spmd_context(parallel_dims=parallel_dims),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(run: Run) -> None:
    config, progress, steps = run.config, run.progress, run.config.training.steps
    if config.checkpoint.create_seed_checkpoint:
        run.checkpointer.save(0)
        run.checkpointer.maybe_wait_for_saving()
        return
    if progress.step >= steps:
        logger.info(f"Step {progress.step} of {steps} is done: nothing to train. Raise training.steps to go on.")
        return
    logger.info(f"Training starts at step {progress.step + 1}")
    first_step = progress.step + 1
    gc = GarbageCollection(gc_freq=config.training.gc_freq)
    batches = iter(run.dataloader)
    while progress.step < steps and not run.stop.done:
        progress.step += 1
        step, last, stops = progress.step, progress.step == steps, run.stop.agreed()
        gc.run(step)
        random_state.seed_step(config.debug.seed, step)

        validates = bool(run.validation_dataloaders) and (last or step % config.validation.freq == 0)
        saves = config.checkpoint.enable and step % config.checkpoint.interval == 0
        # Logging reads the guard's verdict, and may stop the run for it: before such a step could be saved.
        logs = validates or saves or last or stops or step == first_step or step % config.metrics.log_freq == 0

        with run.telemetry.step(step, logs=logs):
            train_step(run, batches, validates=validates, logs=logs)

        # Once in a while: save a checkpoint (all ranks participate).
        with run.telemetry.phase("checkpoint"):
            run.stop.save(step, last=last, stops=stops)

        if step == first_step:  # lazy initialization is over, so a collective that hangs from here on is a fault
            runtime.set_timeouts(run.parallel_dims, config.comm.train_timeout_seconds)


def train_step(run: Run, batches: Iterator[Batch], *, validates: bool, logs: bool) -> None:
    config, parallel_dims, phase = run.config, run.parallel_dims, run.telemetry.phase

    # Data of the whole step, so that every microbatch's loss is divided by the same number of tokens.
    with phase("data"):
        microbatches = [to_device(next(batches), run.device) for _ in range(run.microbatches)]
    local_tokens = sum(labels_BL.numel() for _, labels_BL in microbatches)
    local_valid = torch.stack([(labels_BL != IGNORE_INDEX).sum() for _, labels_BL in microbatches]).sum()
    batch_mesh = parallel_dims.get_optional_mesh("batch")
    global_valid = run.stop.sum_over_ranks(local_valid) // parallel_dims.non_data_parallel_size  # who share their data
    inputs = [inputs_of(run, batch) for batch in microbatches]

    # Once in a while, if asked to: does this machine compute the same twice?
    compute = partial(run.launch, partial(forward_backward, run), global_valid)
    run.corruption.check(run.progress.step, compute, inputs)

    # Forward and backward, again if a layer had too little room for its tokens. The parts of this rank's share of the
    # global mean: the loss, and that of MTP.
    with run.guard.watching():
        parts = run.replay.until_it_fits(partial(compute, inputs), f"step {run.progress.step}", run.guard.discard)

    # Optimizer, after clipping by the norm over all parameters, each counted once on every mesh.
    with phase("clip"):
        grad_norm = dist_utils.clip_grad_norm_(
            [parameter for part in run.model_parts for parameter in part.parameters()],
            config.training.max_norm,
            foreach=True,
            pp_mesh=parallel_dims.get_optional_mesh("pp"),
            ep_enabled=parallel_dims.ep_enabled,
        )
    with phase("optimizer"):
        run.checkpointer.maybe_wait_for_staging()
        skip = run.guard.judge(parts["loss"], grad_norm)  # on the device; the host hears of it in the next step
        lr = run.optimizers.optimizers[0].param_groups[0]["lr"]
        run.optimizers.step(skip=skip)
        run.optimizers.zero_grad()
    run.metrics.count(local_tokens / parallel_dims.non_data_parallel_size)  # its share of the tokens it helps with
    run.progress.tokens_seen += local_tokens * (1 if batch_mesh is None else batch_mesh.size())

    # Once in a while: tell (all ranks participate; rank 0 writes).
    if logs:
        run.guard.settle()
        parts = {name: parallel.sum_of_sequence(parallel_dims, part) for name, part in parts.items()}
        max_loss = dist_utils.dist_max(parts["loss"] * global_valid / local_valid.clamp(min=1), batch_mesh)
        means = {name: dist_utils.dist_sum(part, batch_mesh) for name, part in parts.items()}
        # Only now: reading the loss has waited for the step to end on the device.
        validation_loss = validate(run, evaluate) if validates else None
        run.metrics.log(
            run.progress.step,
            max_loss=max_loss,
            grad_norm=float(grad_norm),
            lr=lr,
            **means,
            **run.telemetry.statistics(),
            skipped_steps=run.guard.skipped,
            overflow_replays=run.replay.repeats,
            tokens_seen=run.progress.tokens_seen,
            validation_loss=validation_loss,
        )


def forward_backward(run: Run, microbatches: list[Inputs], valid_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a step's loss: cross-entropy summed over its tokens, divided by `valid_tokens`, those of all ranks.
    Returns this rank's share of what is told about it."""
    if run.pipeline is not None:
        with run.spmd_context():
            return {"loss": run.pipeline.step(microbatches, valid_tokens)}
    parts: dict[str, torch.Tensor] = {}
    for i, inputs in enumerate(microbatches, start=1):
        parallel.gradient_sync(run.model_parts[0], run.config, last=i == len(microbatches))
        with run.spmd_context():
            loss, more = forward(run, inputs, valid_tokens)
            with run.telemetry.backward():
                loss.backward()
        parts = {name: part + parts.get(name, 0) for name, part in more.items()}
    return parts


def forward(
    run: Run, inputs: Inputs, valid_tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the loss of one microbatch of this rank, its parts to be told), over `valid_tokens` if given: see Loss."""
    tokens_BL, labels_BL, kwargs = inputs
    # Hidden states [B, L, D], which the loss puts the head on; a list of them with MTP layers.
    output = run.model_parts[0](tokens_BL, **kwargs)
    return run.loss_fn(output, labels_BL, valid_tokens, positions=kwargs["positions"])


def inputs_of(run: Run, batch: Batch) -> Inputs:
    """This rank's part of the tokens, their labels, and the model's keyword arguments: positions, masks."""
    balancer = run.config.parallelism.context_parallel_load_balancer
    return model_inputs(run.model_parts[0], batch, run.parallel_dims, balancer)


def evaluate(run: Run, microbatches: list[Batch]) -> torch.Tensor:
    """This rank's share of the cross-entropy of held-out microbatches, summed over their tokens."""
    with run.spmd_context():
        if run.pipeline is not None:
            return run.pipeline.evaluate([inputs_of(run, batch) for batch in microbatches])
        return torch.stack([forward(run, inputs_of(run, batch))[0] for batch in microbatches]).sum()


# ---------------------------------------------------------------------------------------------------------------------
# The command line


@record  # torchrun shows the error of whichever rank failed first
@readable  # a user's mistake without a traceback
def main(argv: list[str]) -> None:
    runtime.default_environment(argv)
    init_logger()
    if os.environ["RANK"] != "0" and os.environ["LOCAL_RANK"] not in os.environ.get("LOG_RANK", "").split(","):
        logger.setLevel("WARNING")  # the console belongs to rank 0 and to ranks that were asked for; others only warn
    config = config_file.load(argv, world_size := int(os.environ["WORLD_SIZE"]))
    config_file.raise_on_problems(config, world_size, accelerator=runtime.DEVICE_TYPE != "cpu")
    run = build(config)
    try:
        train(run)
    finally:
        cudagraph_teardown()
        run.checkpointer.close()
        run.metrics.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        runtime.leave_process_group()
