"""What becomes of each key of a torchtitan 0.2 file: one table that reading a file follows and the docs are made of.

A key that has the same name and meaning here needs nothing (`SAME`). Of the others, what only changes what is shown or
how fast it goes is ignored, with a note unless its value asks for nothing anyway; what would change the training is
refused, with the way out; older spellings are refused with the new one. `CHANGED` has all of these by key, and
`SECTION.*` stands for the other keys of a section. `titan02_docs.py` writes the docs from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from titan_moe.config_keys import LEAVES, shown


@dataclass(frozen=True)
class Renamed:
    """The same value under another key; refused, so that the file says what happens."""

    to: str


@dataclass(frozen=True)
class Ignored:
    """Makes no difference to what is trained."""

    why: str
    quiet: tuple[Any, ...] = ()  # values that ask for nothing


@dataclass(frozen=True)
class Refused:
    """Would train something else without it."""

    why: str
    unless: tuple[Any, ...] = ()  # values that ask for nothing
    only: tuple[Any, ...] = ()  # of a key that exists here too: the values that mean something else


@dataclass(frozen=True)
class Translated:
    """Another key says the same in other words; None says what that key's default says."""

    to: str
    values: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class Differs:
    """The same key with a value that means something else here: taken as it is, and said of a file from torchtitan."""

    why: str
    values: tuple[Any, ...]


Change = Renamed | Ignored | Refused | Translated | Differs

_SAME = """
    job.description model.name model.hf_assets_path
    optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay
    optimizer.implementation lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio
    lr_scheduler.decay_type lr_scheduler.min_lr_factor training.local_batch_size training.global_batch_size
    training.seq_len training.max_norm training.steps training.dtype training.mixed_precision_param
    training.mixed_precision_reduce training.gc_freq training.dataloader.num_workers training.dataloader.prefetch_factor
    parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree
    parallelism.fsdp_reshard_after_forward parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree
    parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_microbatch_size
    parallelism.context_parallel_degree parallelism.context_parallel_load_balancer parallelism.expert_parallel_degree
    checkpoint.enable checkpoint.folder checkpoint.interval checkpoint.initial_load_path
    checkpoint.initial_load_model_only checkpoint.last_save_model_only checkpoint.export_dtype checkpoint.async_mode
    checkpoint.keep_latest_k checkpoint.load_step checkpoint.create_seed_checkpoint checkpoint.load_only
    compile.enable compile.components compile.backend
    profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq profiling.profiler_active
    profiling.profiler_warmup profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder
    metrics.log_freq metrics.enable_tensorboard metrics.enable_wandb metrics.disable_color_printing
    metrics.save_tb_folder
    comm.init_timeout_seconds comm.train_timeout_seconds comm.trace_buf_size comm.mode
    validation.enable validation.freq debug.seed debug.deterministic
"""

SAME = _SAME.split()
"""Keys of 0.2.2 that need nothing"""

PRINT = Ignored(
    "./run_train.sh CONFIG.toml --print_config prints the configuration and stops; a run keeps it as config.toml",
    (False,),
)
NO_FLOAT8 = Ignored("does something only with model.converters, which this trainer has not")
FROM_HF = Refused(
    "a Hugging Face folder is known by its files; name it with checkpoint.initial_load_path, and leave this out",
    (False,),
)
FROM_FP8 = Ignored("the folder's config.json says whether its weights are quantized", (False,))
TO_HF = Differs("writes the last checkpoint as always, and beside it a Hugging Face folder, hf/step-N", (True,))
OWN_MODULE = Refused("user modules are not imported; edit train.py or titan_moe/ instead", ("",))
NO_FAULT_TOLERANCE = Refused("torchft is not supported; MAX_RESTARTS of run_train.sh restarts a failed job", (False,))
BY_OPERATION = Ignored('"selective" always chooses by operation, and as torchtitan 0.3 does', ("op", True, False))
C4 = Refused(
    'is built into torchtitan only; name your own files, a data set of the hub as "hf:owner/name:split", or '
    '"python_stdlib" to try the trainer out',
    only=("c4", "c4_test", "c4_validation"),
)

CHANGED: dict[str, Change] = {
    # job, metrics
    "job.dump_folder": Differs(
        "is the folder of this one run, and another run in it is refused; without the key every run gets a new folder "
        "under ./outputs",
        ("./outputs", "outputs", "./outputs/"),
    ),
    "job.print_config": PRINT,
    "job.print_args": PRINT,
    "job.save_config_file": Ignored("every run keeps its configuration as config.toml in its folder", ("",)),
    "job.custom_config_module": OWN_MODULE,
    "metrics.save_for_all_ranks": Ignored("rank 0 writes what was reduced over all ranks", (False,)),
    # model
    "model.flavor": Differs(
        "is another model here than in torchtitan 0.2: the 671B model in small, which a laptop trains in a minute",
        ("debugmodel",),
    ),
    "model.tokenizer_path": Renamed("model.hf_assets_path"),
    "model.converters": Refused("there are no model converters; weights and compute are bfloat16 or float32", ([],)),
    "model.print_after_conversion": Ignored("there are no model converters", (False,)),
    # optimizer, lr_scheduler
    "optimizer.name": Refused('"AdamW" with optimizer.weight_decay = 0 is the same', only=("Adam",)),
    "optimizer.early_step_in_backward": Refused("there is no optimizer step in backward; leave it out", (False,)),
    "lr_scheduler.lr_min": Renamed("lr_scheduler.min_lr_factor"),
    # training
    "training.dataset": C4,
    "training.dataset_path": Renamed("training.dataset"),
    "training.batch_size": Renamed("training.local_batch_size"),
    "training.enable_cpu_offload": Refused("parameters and optimizer state stay on the device; leave it out", (False,)),
    "training.gc_debug": Ignored("the garbage collector runs every training.gc_freq steps and says nothing", (False,)),
    "training.dataloader.persistent_workers": Ignored("workers live as long as the run", (False, True)),
    "training.dataloader.pin_memory": Ignored("decided by the device", (False, True)),
    "training.compile": Renamed("compile.enable"),
    "training.seed": Renamed("debug.seed"),
    "training.deterministic": Renamed("debug.deterministic"),
    # parallelism
    "parallelism.disable_loss_parallel": Ignored("the loss is computed in chunks; see [loss]", (False,)),
    "parallelism.enable_async_tensor_parallel": Ignored("tensor-parallel transfers are not overlapped", (False,)),
    "parallelism.expert_tensor_parallel_degree": Refused(
        "experts are spread over expert-parallel ranks only; leave it out", (1,)
    ),
    "parallelism.module_fqns_per_model_part": Refused(
        "stages are given as numbers of layers; write parallelism.pipeline_parallel_layers_per_stage", ([],)
    ),
    "parallelism.pipeline_parallel_layers_per_stage": Refused(
        "is the list of the layers of each stage here, first to last, as in [2, 3]; leave it out to have them balanced",
        only=(int,),
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": Ignored("stages are balanced by FLOPs", (1,)),
    "parallelism.pipeline_parallel_last_stage_less_layers": Ignored("stages are balanced by FLOPs", (1,)),
    "parallelism.pipeline_parallel_schedule_csv": Refused(
        "schedules are not read from files; write parallelism.pipeline_parallel_schedule", ("",)
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Ignored("decided by the schedule", (True,)),
    "parallelism.context_parallel_rotate_method": Ignored("decided by the attention", ("allgather",)),
    "parallelism.expert_parallel_comm_backend": Translated(
        "moe.dispatcher", (("standard", None), ("deepep", "deepep"), ("hybridep", "hybridep"))
    ),
    # checkpoint
    "checkpoint.enable_checkpoint": Renamed("checkpoint.enable"),
    "checkpoint.last_save_model_weights_only": Renamed("checkpoint.last_save_model_only"),
    "checkpoint.initial_load_in_hf": FROM_HF,
    "checkpoint.initial_load_in_hf_quantized": FROM_FP8,
    "checkpoint.last_save_in_hf": TO_HF,
    "checkpoint.exclude_from_loading": Refused(
        "a checkpoint is loaded whole, or with checkpoint.initial_load_model_only its weights; leave it out", ([],)
    ),
    "checkpoint.enable_first_step_checkpoint": Ignored(
        "the first checkpoint comes after checkpoint.interval steps", (False,)
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": Ignored("only for torchft", (True, False)),
    # activation_checkpoint
    "activation_checkpoint.mode": Refused(
        'the compiler does not choose what is recomputed here: write "selective" or "full"', only=("memory_budget",)
    ),
    "activation_checkpoint.selective_ac_option": BY_OPERATION,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": BY_OPERATION,
    "activation_checkpoint.early_stop": Ignored("as torchtitan 0.3 has it", (False, True)),
    "activation_checkpoint.memory_budget": Ignored('only for mode "memory_budget", which is not here', (0.5,)),
    "activation_checkpoint.visualize_memory_budget_pareto": Ignored('only for mode "memory_budget"', (False,)),
    "activation_checkpoint.preserve_rng_state": Ignored("nothing in these models is random", (True, False)),
    "activation_checkpoint.determinism_check": Ignored("routing is planned once, never recomputed", ("default",)),
    "activation_checkpoint.debug": Ignored("no debug output of recomputation", (False,)),
    # quantize
    "quantize.linear.float8.*": NO_FLOAT8,
    "quantize.linear.mx.*": NO_FLOAT8,
    "quantize.grouped_mm.float8.*": NO_FLOAT8,
    "quantize.grouped_mm.mx.*": NO_FLOAT8,
    "float8.*": NO_FLOAT8,
    # comm, memory_estimation, fault_tolerance, experimental
    "comm.save_traces_folder": Ignored("NCCL's own variables say where its flight recorder writes", ("comm_traces",)),
    "comm.save_traces_file_prefix": Ignored("NCCL's own variables say where its flight recorder writes", ("rank_",)),
    "memory_estimation.enable": Refused(
        "memory is estimated by --plan and by a dry run, --comm.mode=fake_backend; leave it out", (False,)
    ),
    "memory_estimation.disable_fake_mode": Ignored("only for the memory estimation", (False, True)),
    "fault_tolerance.enable": NO_FAULT_TOLERANCE,
    "fault_tolerance.*": Ignored("only for torchft", ("gloo", 10000, 0, 1)),
    "experimental.custom_import": OWN_MODULE,
    "experimental.custom_args_module": OWN_MODULE,
    # validation
    "validation.dataset": C4,
    "validation.dataset_path": Renamed("validation.dataset"),
    "validation.steps": Refused(
        "asks for the whole data set, where ranks may disagree on its end; give a number of batches, for example 10",
        only=(-1,),
    ),
    "validation.local_batch_size": Ignored("a validation batch is as large as a training batch"),
    "validation.seq_len": Ignored("a validation sequence is as long as a training sequence"),
    "validation.dataloader.*": Ignored("validation reads as [training.dataloader] says"),
    # debug
    "debug.deterministic_warn_only": Ignored("debug.deterministic refuses what does not repeat", (False,)),
    "debug.moe_force_load_balance": Translated("moe.force_balance", ((False, None), (True, "round_robin"))),
    "training.debug_moe_force_load_balance": Translated("moe.force_balance", ((False, None), (True, "round_robin"))),
}

FORMER = {"plan.precision": Renamed("precision.recipe"), "profile.step": Renamed("profiling.step")}
"""Keys that this trainer had before, or was said to have, and 0.2 never"""

DEFAULTS = {
    "job.dump_folder": "./outputs",
    "model.name": "llama3",
    "model.hf_assets_path": "./tests/assets/tokenizer",
    "training.dataset": "c4_test",
    "checkpoint.last_save_model_only": True,
    "validation.dataset": "c4_validation",
    "validation.steps": -1,
}
"""What a 0.2.2 file means that leaves these keys out, where that is not what it means here"""


def change(key: str) -> Change | None:
    """What is special about a key of a 0.2 file, or of an old one of this trainer; None for one that is the same, or of
    neither."""
    if key in CHANGED or key in FORMER:
        return CHANGED.get(key) or FORMER[key]
    section = key.rpartition(".")[0]
    return CHANGED.get(f"{section}.*")


def has_section(section: str) -> bool:
    """Whether 0.2 has keys in the section or below it."""
    return any(key.startswith(f"{section}.") for key in CHANGED)


def is_foreign(key: str) -> bool:
    """Whether only files from torchtitan have the key."""
    return key not in LEAVES and change(key) is not None


def leads_to(key: str) -> str:
    """The key that a 0.2 key has become, or the key itself."""
    found = change(key)
    return found.to if isinstance(found, Renamed | Translated) else key


def refusal(key: str, value: Any) -> str | None:
    """Why a key with this value cannot be taken; None when it can."""
    match change(key):
        case Renamed(to):
            return f"{key} was renamed to {to}"
        case Refused(why, unless, only):
            if _among(value, only) if only else not _among(value, unless):
                return f"{key} = {shown(value)}: {why}"
        case Translated(to, values):
            if not _among(value, olds := [old for old, _ in values]):
                return f"{key} = {shown(value)}: is {to} here; choose from {', '.join(map(repr, olds))}, or write {to}"
    return None


def note(key: str, value: Any) -> str | None:
    """What to tell about a key that is ignored or means something else here; None when there is nothing to tell."""
    match change(key):
        case Ignored(why, quiet) if not _among(value, quiet) and not key.startswith(("quantize.", "float8.")):
            return f"{key} = {shown(value)} is ignored: {why}"
        case Differs(why, values) if _among(value, values):
            return f"{key} = {shown(value)}: {why}"
    return None


def translation(key: str, value: Any) -> tuple[str, Any] | None:
    """The key and value that say the same here; None when nothing needs to be said."""
    match change(key):
        case Translated(to, values):
            new = next(new for old, new in values if _among(value, [old]))
            return None if new is None else (to, new)
    return None


def _among(value: Any, values: Iterable[Any]) -> bool:
    """Whether the value is one of these, or of one of these types."""
    # The type too, because True is 1 to ==.
    return any(type(value) is other or (type(value) is type(other) and value == other) for other in values)
