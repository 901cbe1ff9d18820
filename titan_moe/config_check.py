"""What has to hold between the numbers of a configuration; each problem comes with its arithmetic and the way out.

Runs before any process group exists, so it knows the world size only as a number. Imports neither torch nor torchtitan.
"""

import math
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from pathlib import PurePath

from titan_moe import (
    cuda_graph_check,
    export_check,
    flavor_check,
    flavors,
    mesh_check,
    mixture_check,
    moe_check,
    offload_check,
    optimizer_check,
    overlap_check,
    pipeline_check,
    precision_check,
    profiling_check,
    recompute_facts,
    te_ep_check,
    te_precision_check,
    te_router_check,
    titan_dispatchers_check,
    upcycle_check,
)
from titan_moe.config import Config
from titan_moe.config_keys import LEAVES
from titan_moe.mesh_check import (
    data_parallel_degree,
    gradient_accumulation_steps,
    microbatch_size,
    microbatches_per_step,
    sequences_per_step,
)

__all__ = [
    "check",
    "data_parallel_degree",
    "gradient_accumulation_steps",
    "microbatch_size",
    "microbatches_per_step",
    "model_flavor",
    "sequences_per_step",
    "unsound",
]

# What a single number must satisfy, and the keys it goes for: outside, something later crashes or, worse, does not.
RULES: list[tuple[str, Callable[[float], bool], str]] = [
    (
        "must be at least 1",
        lambda value: value >= 1,
        "model.rope_factor model.rope_beta_fast model.original_seq_len model.scores_per_group "
        "training.local_batch_size training.seq_len training.steps "
        "training.gc_freq training.dataloader.prefetch_factor training.dataloader.num_shards loss.num_chunks "
        "validation.freq validation.steps parallelism.data_parallel_replicate_degree "
        "parallelism.fsdp_prefetch_layers "
        "parallelism.expert_parallel_degree parallelism.tensor_parallel_degree parallelism.context_parallel_degree "
        "parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_microbatch_size "
        "moe.ranks_per_node moe.hop_chunks checkpoint.interval metrics.log_freq plan.gpus "
        "profiling.step profiling.profile_freq profiling.profiler_active",
    ),
    (
        "must be at least 1, and at most ten years: 315,360,000",
        lambda value: 1 <= value <= 315_360_000,
        "comm.init_timeout_seconds comm.train_timeout_seconds",
    ),
    (
        "must be at least 0",
        lambda value: value >= 0,
        "model.q_lora_rank model.mscale model.num_mtp_layers loss.mtp_coeff "
        "moe.load_balance_coeff moe.sequence_loss_coeff moe.z_loss_coeff "
        "optimizer.weight_decay lr_scheduler.warmup_steps "
        "training.dataloader.num_workers comm.hang_seconds comm.trace_buf_size "
        "debug.comm_delay_ns_per_byte plan.restart_seconds "
        "guards.max_skipped_steps guards.spike_sigma guards.corruption_check_every profiling.profiler_warmup",
    ),
    (
        "must be greater than 0",
        lambda value: value > 0,
        "model.route_scale model.norm_eps model.latent_norm_eps moe.capacity_factor optimizer.lr optimizer.eps "
        "training.max_norm plan.failure_gpu_hours plan.storage_gb_s",
    ),
    (
        'must be "exact", "worst_case" or a factor of the mean, at least 1',
        lambda value: isinstance(value, str) or value >= 1,
        "moe.recv_buffer",
    ),
    ("must be greater than 1", lambda value: value > 1, "model.rope_theta"),
    (
        "must be at least 0 and less than 1",
        lambda value: 0 <= value < 1,
        "optimizer.beta1 optimizer.beta2 optimizer.momentum",
    ),
    ("must lie in 0 .. 1", lambda value: 0 <= value <= 1, "lr_scheduler.decay_ratio lr_scheduler.min_lr_factor"),
    ("must lie in 0 .. 2**63 - 1", lambda value: 0 <= value < 2**63, "debug.seed"),
    ("must be at least -1", lambda value: value >= -1, "checkpoint.load_step"),
    ("must be -1 or at least 1", lambda value: value == -1 or value >= 1, "parallelism.data_parallel_shard_degree"),
    (
        "must be 0 (keep all) or at least 2, so that a whole one is left while the next is written",
        lambda value: value == 0 or value >= 2,
        "checkpoint.keep_latest_k",
    ),
]

_RULES = [(rule, holds, path, attrgetter(path)) for rule, holds, paths in RULES for path in paths.split()]
_FLOATS = [(path, attrgetter(path)) for path, hint in LEAVES.items() if "float" in str(hint)]

NEEDS_GPU: dict[str, tuple[str, tuple[str, ...]]] = {
    "checkpoint.async_mode": ("async", ("async_with_pinned_mem",)),
    "cuda_graph.scope": ("none", ("full",)),
    "moe.dispatcher": ("auto", titan_dispatchers_check.IN_ONE_CALL),
    "moe.experts": ("auto", ("te", "te_fused")),
    "moe.router": ("torch", ("te",)),
    "moe.te_ep_payload": ("bf16", ("mxfp8",)),
    "precision.backend": ("auto", ("te",)),
}
"""Values that only a GPU can do, behind the one to choose elsewhere"""


FOLDERS = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)
"""Inside the run folder"""


def check(config: Config, world_size: int, *, accelerator: bool = False) -> list[str]:
    """Everything that does not fit together when `world_size` processes train `config`; empty when all does.
    `accelerator`: they are known to have one each."""
    numbers = _numbers(config)
    try:
        flavor = model_flavor(config)
    except ValueError as error:  # a flavor of another family: nothing can be calculated
        return [*numbers.values(), str(error), *_files(config)]
    found = [*numbers.values(), *flavor_check.problems(flavor), *_files(config)]
    unsound = numbers.keys()  # one of them keeps only those checks from making sense that calculate with it
    found += mesh_check.check(config, world_size, flavor, unsound)
    if accelerator and not unsound & {mesh_check.CP, mesh_check.SEQ_LEN}:
        found += mesh_check.check_accelerator(config)
    found += pipeline_check.check(config, world_size, flavor, unsound)
    found += moe_check.check(config)
    found += overlap_check.check(config, flavor, unsound, accelerator=accelerator)
    found += titan_dispatchers_check.check(config, flavor)
    found += te_router_check.check(config, flavor)
    found += te_ep_check.check(config, flavor, unsound)
    found += precision_check.check(config, flavor, unsound)
    found += te_precision_check.check(config)
    found += optimizer_check.check(config)
    found += export_check.check(config, flavor)
    found += upcycle_check.check(config, flavor)
    found += profiling_check.check(config, world_size, unsound)
    found += cuda_graph_check.check(config)
    found += _recompute(config, flavor)
    found += offload_check.check(config)
    found += _corruption(config)
    found += _lengths(config, flavor.max_seq_len)
    if config.comm.mode == "fake_backend":  # a dry run checks what it stands for
        found.append(
            'comm.mode = "fake_backend": is no training but a dry run of one rank in one process; leave it out of the '
            "file and give it to run_train.sh, as --comm.mode=fake_backend, or call python -m titan_moe.dry_run"
        )
    return found


def unsound(config: Config) -> list[str]:
    """Of what `check` finds, that which is about single numbers and the model's sizes: nothing follows from these."""
    try:
        sizes = flavor_check.problems(model_flavor(config))
    except ValueError as error:
        sizes = [str(error)]
    return [*_numbers(config).values(), *sizes]


def model_flavor(config: Config) -> flavors.Flavor:
    """The model's sizes: those of model.flavor, with what the [model] section replaces. Raises ValueError for a flavor
    that model.name does not have."""
    sizes = {field.name: getattr(config.model, field.name, None) for field in fields(flavors.Flavor)}
    return flavors.resolve(config.model.name, config.model.flavor, sizes)


def _numbers(config: Config) -> dict[str, str]:
    """What is wrong with single numbers, by their path."""
    found = {}
    for rule, holds, path, value_of in _RULES:
        value = value_of(config)
        if value is not None and not holds(value):
            found[path] = f"{path} = {value}: {rule}"
    for path, value_of in _FLOATS:
        value = value_of(config)
        if isinstance(value, float) and not math.isfinite(value):
            found[path] = f"{path} = {value}: must be finite"
    return found


def _recompute(config: Config, flavor: flavors.Flavor) -> list[str]:
    compiles, chosen = config.compile.enable and "model" in config.compile.components, config.activation_checkpoint
    problem = recompute_facts.problem(chosen.mode, chosen.recompute, compiles)
    problem = problem or recompute_facts.absent(flavor, chosen.recompute)
    return [problem] if problem else []


def _corruption(config: Config) -> list[str]:
    every, found = config.guards.corruption_check_every, []
    if every > 0 and not config.debug.deterministic:
        found.append(
            f"guards.corruption_check_every = {every}: compares what is computed twice bit for bit, so each operation "
            "must repeat; set debug.deterministic = true, or leave the check out"
        )
    if every > 0 and config.moe.dispatcher == "te_ep":
        found.append(
            f"guards.corruption_check_every = {every}: compares what is computed twice bit for bit, which "
            'moe.dispatcher = "te_ep" does not promise to repeat; choose another, or leave the check out'
        )
    return found


def _lengths(config: Config, max_seq_len: int) -> list[str]:
    found = []
    seq_len = config.training.seq_len
    if seq_len > max_seq_len:
        found.append(
            f"training.seq_len = {seq_len}: longer than the rotary table, model.max_seq_len = {max_seq_len}; shorten "
            "the one or lengthen the other"
        )
    total_steps, steps = config.lr_scheduler.total_steps, config.training.steps
    if total_steps is not None and total_steps < steps:
        found.append(
            f"lr_scheduler.total_steps = {total_steps}: must be at least training.steps = {steps}, because past its "
            "end the learning rate goes on falling, below zero; leave it out to span the training"
        )
    validation = config.validation
    if validation.enable and not validation.dataset and not 0 < validation.holdout < 1:
        found.append(
            f"validation.holdout = {validation.holdout}: must be greater than 0 and less than 1; or name documents of "
            "their own with validation.dataset"
        )
    return found


def _files(config: Config) -> list[str]:
    found = []
    if not config.training.dataset and not config.training.mixture:
        found.append('training.dataset = "": must name a dataset, for example "python_stdlib"')
    found += mixture_check.check(config.training.mixture)
    found += mixture_check.check_sets(config.validation.sets)
    for path in FOLDERS:
        folder = attrgetter(path)(config)
        parts = PurePath(folder.strip()).parts
        if not parts or parts[0] == "/" or ".." in parts:
            found.append(
                f'{path} = "{folder}": must be the name of a folder inside the run folder, which job.dump_folder moves'
            )
    checkpoint = config.checkpoint
    for path in ("job.dump_folder", "checkpoint.folder"):
        if "://" in (place := attrgetter(path)(config)):
            found.append(
                f'{path} = "{place}": must be a folder of a mounted file system, not a URL: a checkpoint is completed '
                "by renaming a folder"
            )
    if checkpoint.initial_load_path and not checkpoint.enable:
        found.append("checkpoint.initial_load_path: loads nothing without checkpoint.enable = true; set it")
    if checkpoint.load_step >= 0 and not checkpoint.enable:
        found.append("checkpoint.load_step: loads nothing without checkpoint.enable = true; set it")
    if checkpoint.create_seed_checkpoint and not checkpoint.enable:
        found.append("checkpoint.create_seed_checkpoint = true: saves nothing without checkpoint.enable = true; set it")
    if checkpoint.create_seed_checkpoint and checkpoint.load_only:
        found.append("checkpoint.create_seed_checkpoint = true: load_only = true forbids to save it; choose one")
    if checkpoint.create_seed_checkpoint and checkpoint.initial_load_path:
        found.append(
            "checkpoint.create_seed_checkpoint = true: saves the weights that debug.seed draws, and would not read "
            "initial_load_path; leave one of them out"
        )
    return found
