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
from pathlib import Path

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.deepseek_v3 import DeepSeekV3Model
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import GarbageCollection

from titan_moe import config_file, parallel, run_folder
from titan_moe.checkpoint import Progress, build_checkpointer
from titan_moe.checkpoint import load as load_checkpoint
from titan_moe.config import Config
from titan_moe.data import PackedDataLoader, build_dataloaders
from titan_moe.metrics import Metrics
from titan_moe.model import attention_masks, build_model, init_weights
from titan_moe.optimizer import Optimizers, apply_hyperparameters, build_lr_schedulers, build_optimizers
from titan_moe.plan import flops
from titan_moe.tokenizer import build_tokenizer

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]  # {"input": [B, L], "positions": [B, L]}, labels [B, L]


@dataclass(kw_only=True)
class Run:
    """What `build` made and the loop uses."""

    config: Config
    device: torch.device
    parallel_dims: ParallelDims
    accumulation_steps: int
    model: DeepSeekV3Model
    loss_fn: BaseLoss
    optimizers: Optimizers
    lr_schedulers: LRSchedulersContainer
    dataloader: PackedDataLoader
    validation_dataloader: PackedDataLoader | None
    checkpointer: CheckpointManager
    metrics: Metrics
    progress: Progress
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
    accumulation_steps = config_file.gradient_accumulation_steps(config, dist.get_world_size())

    # 2) run folder: rank 0 claims it, all learn the outcome
    attempt = claim_run_folder(config, folder)

    # 3) tokenizer and data, in the same global order on every mesh
    flavor = config_file.model_flavor(config)
    tokenizer = build_tokenizer(config.model.hf_assets_path, flavor.vocab_size)
    dataloader, validation_dataloader = build_dataloaders(config, tokenizer, dp_rank, dp_degree)

    # 4) model on the meta device: shapes only
    model = build_model(config)
    total, active = parallel.total_and_active_parameters(model, flavor.top_k, flavor.num_experts)
    terms = flops.per_token(flavor, config.training.seq_len, num_mtp_layers=flavor.num_mtp_layers)

    # 5) shard, checkpoint, compile
    parallel.parallelize(model, config, parallel_dims)

    # 6) memory and initial weights
    model.to_empty(device=device)
    init_weights(model, config.debug.seed)
    model.train()

    # 7) loss, optimizer, schedule
    loss_fn = parallel.build_loss(config, model)
    optimizers = build_optimizers(config, model, parallel_dims)
    lr_schedulers = build_lr_schedulers(config, optimizers)

    # 8) checkpoint: resumes, or starts from other weights, or does nothing
    progress = Progress()
    checkpointer = build_checkpointer(
        config,
        folder,
        model=model,
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        dataloader=dataloader,
        progress=progress,
    )
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    load_step = -1 if restarted else config.checkpoint.load_step  # a restart goes on where the first start had come to
    if not config.checkpoint.create_seed_checkpoint and load_checkpoint(checkpointer, load_step):
        apply_hyperparameters(config, optimizers, lr_schedulers)

    # 9) metrics; the configuration is saved only now, so that one which cannot resume this run replaces nothing
    if dist.get_rank() == 0:
        (folder / "config.toml").write_text(config_file.to_toml(config), encoding="utf-8")
    metrics = Metrics(config, folder, attempt, sum(terms.values()), writes=dist.get_rank() == 0)

    report(config, parallel_dims, accumulation_steps, folder, attempt, metrics, total, active)
    return Run(
        config=config,
        device=device,
        parallel_dims=parallel_dims,
        accumulation_steps=accumulation_steps,
        model=model,
        loss_fn=loss_fn,
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        dataloader=dataloader,
        validation_dataloader=validation_dataloader,
        checkpointer=checkpointer,
        metrics=metrics,
        progress=progress,
        spmd_context=dist_utils.get_spmd_context(parallel_dims=parallel_dims),
    )


def report(
    config: Config,
    parallel_dims: ParallelDims,
    accumulation_steps: int,
    folder: Path,
    attempt: int,
    metrics: Metrics,
    total: int,
    active: int,
) -> None:
    """What this run is, before its first step: folder, device, model size, types, the MoE region, tokens per step."""
    _, dp_degree = runtime.batch_coordinates(parallel_dims)
    t = config.training
    tokens_per_step = t.local_batch_size * t.seq_len * dp_degree * accumulation_steps
    peak = "unknown" if metrics.peak_flops is None else f"{metrics.peak_flops / 1e12:,.0f} bf16 TFLOP/s"
    logger.info(f"Run folder {folder}, attempt {attempt}; device {metrics.memory.device_name}, peak {peak}")
    logger.info(f"Model {config.model.name} {config.model.flavor}: {total:,} parameters, {active:,} active per token")
    logger.info(f"Parameters {t.dtype}, compute {t.mixed_precision_param}, reduction {t.mixed_precision_reduce}")
    for line in parallel.moe_report(config, parallel_dims):
        logger.info(line)
    logger.info(
        f"Tokens per step: {t.local_batch_size} sequences x {t.seq_len} tokens x {dp_degree} data-parallel ranks x "
        f"{accumulation_steps} microbatches = {tokens_per_step:,}, {tokens_per_step * t.steps:,} in {t.steps} steps"
    )


def claim_run_folder(config: Config, folder: Path) -> int:
    """Rank 0 takes the run folder; every rank gets the attempt's number, or the refusal."""
    outcome: list[int | ValueError | None] = [None]
    if dist.get_rank() == 0:
        try:
            record = {**run_folder.provenance(), "description": config.job.description, "world": dist.get_world_size()}
            outcome[0] = run_folder.claim(folder, os.environ["RUN_ID"], config.checkpoint.enable, record)
        except ValueError as refusal:
            outcome[0] = refusal
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    assert outcome[0] is not None
    return outcome[0]


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(run: Run) -> None:
    config, progress, steps = run.config, run.progress, run.config.training.steps
    if config.checkpoint.create_seed_checkpoint:
        run.checkpointer.save(0)
        return
    if progress.step >= steps:
        logger.info(f"Step {progress.step} of {steps} is done: nothing to train. Raise training.steps to go on.")
        return
    logger.info(f"Training starts at step {progress.step + 1}")
    first_step = progress.step + 1
    gc = GarbageCollection(gc_freq=config.training.gc_freq)
    batches = iter(run.dataloader)
    while progress.step < steps:
        progress.step += 1
        step, last = progress.step, progress.step == steps
        gc.run(step)

        validates = run.validation_dataloader is not None and (last or step % config.validation.freq == 0)
        saves = config.checkpoint.enable and step % config.checkpoint.interval == 0
        # Logging reads the loss, and stops the run if that is not finite: before such a step could be saved.
        logs = validates or saves or last or step == first_step or step % config.metrics.log_freq == 0

        train_step(run, batches, validates=validates, logs=logs)

        # Once in a while: save a checkpoint (all ranks participate).
        with run.metrics.outside_training():
            run.checkpointer.save(step, last_step=last)

        if step == first_step:  # lazy initialization is over, so a collective that hangs from here on is a fault
            runtime.set_timeouts(run.parallel_dims, config.comm.train_timeout_seconds)


def train_step(run: Run, batches: Iterator[Batch], *, validates: bool, logs: bool) -> None:
    config, parallel_dims, metrics = run.config, run.parallel_dims, run.metrics
    lr = run.optimizers.optimizers[0].param_groups[0]["lr"]

    # Data of the whole step, so that every microbatch's loss is divided by the same number of tokens.
    with metrics.waiting_for_data():
        microbatches = [to_device(next(batches), run.device) for _ in range(run.accumulation_steps)]
    local_tokens = sum(labels_BL.numel() for _, labels_BL in microbatches)
    local_valid = torch.stack([(labels_BL != IGNORE_INDEX).sum() for _, labels_BL in microbatches]).sum()
    batch_mesh = parallel_dims.get_optional_mesh("batch")
    global_valid = dist_utils.dist_sum_tensor(local_valid, batch_mesh)

    # Forward and backward; only the last microbatch's backward reduces gradients over ranks.
    loss_sum = torch.zeros((), device=run.device)  # this rank's share of the global mean
    for i, (inputs, labels_BL) in enumerate(microbatches, start=1):
        with run.spmd_context(), parallel.gradient_sync(run.model, enabled=i == run.accumulation_steps):
            loss = forward(run, inputs, labels_BL, global_valid)
            loss.backward()
        loss_sum += loss.detach()

    # Optimizer, after clipping by the norm over all parameters, each counted once on every mesh.
    grad_norm = dist_utils.clip_grad_norm_(
        list(run.model.parameters()), config.training.max_norm, foreach=True, ep_enabled=parallel_dims.ep_enabled
    )
    run.checkpointer.maybe_wait_for_staging()
    run.optimizers.step()
    run.lr_schedulers.step()
    run.optimizers.zero_grad()
    metrics.count(local_tokens)
    run.progress.tokens_seen += local_tokens * (1 if batch_mesh is None else batch_mesh.size())

    # Once in a while: tell (all ranks participate; rank 0 writes).
    if logs:
        loss_mesh = parallel_dims.get_optional_mesh("loss")
        mean_on_rank = loss_sum * global_valid / local_valid.clamp(min=1)
        loss, max_loss = dist_utils.dist_sum(loss_sum, loss_mesh), dist_utils.dist_max(mean_on_rank, loss_mesh)
        with metrics.outside_training():  # only now: reading the loss has waited for the step to end on the device
            validation_loss = validate(run) if validates else None
        metrics.log(
            run.progress.step,
            loss=loss,
            max_loss=max_loss,
            grad_norm=float(grad_norm),
            lr=lr,
            **run.optimizers.balancer.statistics(),
            tokens_seen=run.progress.tokens_seen,
            validation_loss=validation_loss,
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    inputs, labels_BL = batch
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
    return moved, labels_BL.to(device, non_blocking=True)


def forward(run: Run, inputs: dict[str, torch.Tensor], labels_BL: torch.Tensor, valid_tokens=None) -> torch.Tensor:
    """The summed cross-entropy of one microbatch of this rank, divided by `valid_tokens` if given."""
    tokens_BL, positions_BL = inputs["input"], inputs["positions"]
    masks = attention_masks(run.model, positions_BL)
    annotate_input_spmd_types(run.parallel_dims, tokens_BL, labels_BL, {"positions": positions_BL})
    # Hidden states [B, L, D], which the chunked loss puts the head on; logits when loss.num_chunks = 1.
    output = run.model(tokens_BL, positions=positions_BL, attention_masks=masks)
    loss, _ = run.loss_fn(output, labels_BL, valid_tokens)
    return loss


@torch.no_grad()
def validate(run: Run) -> float:
    """Mean loss per token over the held-out documents: the same samples each time, on every mesh."""
    assert run.validation_dataloader is not None
    run.model.eval()  # the router counts its load in training mode only
    batches = iter(run.validation_dataloader)
    loss_sum = torch.zeros((), device=run.device)
    valid = torch.zeros((), dtype=torch.int64, device=run.device)
    for _ in range(run.config.validation.steps * run.accumulation_steps):
        inputs, labels_BL = to_device(next(batches), run.device)
        with run.spmd_context():
            loss_sum += forward(run, inputs, labels_BL)
        valid += (labels_BL != IGNORE_INDEX).sum()
    run.model.train()
    loss_mesh, batch_mesh = run.parallel_dims.get_optional_mesh("loss"), run.parallel_dims.get_optional_mesh("batch")
    return dist_utils.dist_sum(loss_sum, loss_mesh) / dist_utils.dist_sum(valid, batch_mesh)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


@record  # torchrun shows the error of whichever rank failed first
def main(argv: list[str]) -> None:
    runtime.default_environment(argv)
    init_logger()
    if os.environ["RANK"] != "0" and os.environ["LOCAL_RANK"] not in os.environ.get("LOG_RANK", "").split(","):
        logger.setLevel("WARNING")  # the console belongs to rank 0 and to ranks that were asked for; others only warn
    config = config_file.load(argv)
    config_file.raise_on_problems(config, int(os.environ["WORLD_SIZE"]))
    if config.job.print_config:
        logger.info(f"Configuration:\n{config_file.to_toml(config)}")
    run = build(config)
    try:
        train(run)
    finally:
        run.checkpointer.close()
        run.metrics.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except config_file.ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
