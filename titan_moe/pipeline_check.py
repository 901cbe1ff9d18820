"""What has to hold between a pipeline's schedule, its layers and its microbatches.

The limits on microbatches are those of torch's schedules, which a test asks. A run's microbatches are those of a whole
optimizer step: gradient accumulation's go through the pipeline behind each other. Imports neither torch nor torchtitan.
"""

from collections.abc import Set

from titan_moe.config import Config, Parallelism
from titan_moe.flavors import Flavor
from titan_moe.mesh_check import (
    DEGREES,
    LOCAL,
    PP,
    batch,
    choices,
    degrees,
    gradient_accumulation_steps,
    microbatches_per_step,
)
from titan_moe.pipeline_layout import ONE_STAGE, V_SHAPED, default_stages

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that run the backward for inputs and the one for weights at different times"""

LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"


def check(config: Config, world_size: int, flavor: Flavor, unsound: Set[str] = frozenset()) -> list[str]:
    """What does not fit in the pipeline, as far as it can be told without the keys that are `unsound`."""
    layers = config.parallelism.pipeline_parallel_layers_per_stage
    if config.parallelism.pipeline_parallel_degree == 1:
        # The schedule is let pass: torchtitan 0.2's own files set one beside a degree of 1.
        size, found = config.parallelism.pipeline_parallel_microbatch_size, []
        if layers:
            found.append(
                f"{LAYERS} = {layers}: lays out a pipeline, but pipeline_parallel_degree = 1; leave it out, or raise it"
            )
        if size != Parallelism.pipeline_parallel_microbatch_size and MICROBATCH not in unsound:
            found.append(
                f"{MICROBATCH} = {size}: cuts a pipeline's batch, but pipeline_parallel_degree = 1; leave it out, or "
                "raise it"
            )
        return found
    if PP in unsound:
        return _layers(config, flavor) if layers else []
    known = not unsound & {*DEGREES, LOCAL, MICROBATCH}
    return [
        *(_stages(config) + _layers(config, flavor) if layers else _fewer_layers_than_stages(config, flavor)),
        *(_microbatches(config, world_size if known else None) if not unsound & {LOCAL, MICROBATCH} else []),
        *_compile(config),
        *_reshard(config),
        *_reduce(config),
    ]


def _fewer_layers_than_stages(config: Config, flavor: Flavor) -> list[str]:
    p = config.parallelism
    stages = default_stages(p.pipeline_parallel_schedule, p.pipeline_parallel_degree)
    if stages <= flavor.n_layers:
        return []
    per_rank = stages // p.pipeline_parallel_degree
    last = f", or give the last stage 0 in {LAYERS.partition('.')[2]}" if stages == flavor.n_layers + 1 else ""
    return [
        f"parallelism.pipeline_parallel_degree = {p.pipeline_parallel_degree}: {p.pipeline_parallel_schedule} makes "
        f"{p.pipeline_parallel_degree} x {per_rank} = {stages} stages, but model.n_layers = {flavor.n_layers}; choose "
        f"at most {max(flavor.n_layers // per_rank, 1)}{last}"
    ]


def _stages(config: Config) -> list[str]:
    """Whether layers are given for as many stages as the schedule has."""
    p, found = config.parallelism, []
    layers, pp, schedule = (
        p.pipeline_parallel_layers_per_stage,
        p.pipeline_parallel_degree,
        p.pipeline_parallel_schedule,
    )
    given = f"{LAYERS} = {layers}"
    stages = len(layers)
    if schedule in ONE_STAGE and stages != pp:
        found.append(
            f"{given}: has {stages} stages, but {schedule} has one per rank: pipeline_parallel_degree = {pp}; give {pp}"
        )
    elif schedule in V_SHAPED and stages != 2 * pp:
        found.append(
            f"{given}: has {stages} stages, but {schedule} has two per rank: 2 x pipeline_parallel_degree = 2 x {pp} = "
            f"{2 * pp}; give {2 * pp}"
        )
    elif schedule not in ONE_STAGE and (stages % pp or stages < 2 * pp):
        found.append(
            f"{given}: has {stages} stages, but {schedule} has two or more on every rank: a multiple of "
            f"pipeline_parallel_degree = {pp}, at least {2 * pp}"
        )
    return found


def _layers(config: Config, flavor: Flavor) -> list[str]:
    """Whether the stages together have the model's layers."""
    layers, found = config.parallelism.pipeline_parallel_layers_per_stage, []
    given = f"{LAYERS} = {layers}"
    if negative := [count for count in layers if count < 0]:
        found.append(f"{given}: {negative[0]} layers cannot be; give 0 or more")
    elif sum(layers) != flavor.n_layers:
        found.append(
            f"{given}: {' + '.join(map(str, layers))} = {sum(layers)} layers, but model.n_layers = {flavor.n_layers}; "
            "give each layer to one stage"
        )
    if empty := [str(stage) for stage in range(1, len(layers)) if layers[stage - 1] == 0]:
        found.append(
            f"{given}: stage {', '.join(empty)}, counted from 1, has no layers; only the last, which has the head, may "
            "have 0"
        )
    return found


def _microbatches(config: Config, world_size: int | None) -> list[str]:
    """What torch's schedules want of the number of microbatches; that is not known without a world size."""
    p, local = config.parallelism, config.training.local_batch_size
    size, schedule, pp = p.pipeline_parallel_microbatch_size, p.pipeline_parallel_schedule, p.pipeline_parallel_degree
    if local % size:
        return [
            f"parallelism.pipeline_parallel_microbatch_size = {size}: must divide training.local_batch_size = {local}; "
            f"{choices(local)}"
        ]
    if world_size is None or degrees(config, world_size) or batch(config, world_size):
        return []  # the number of microbatches is not known yet; mesh_check.py says why
    accumulation = gradient_accumulation_steps(config, world_size)
    count = microbatches_per_step(config, world_size)
    has = (
        f"but a step has local_batch_size / microbatch_size x accumulation = {local} / {size} x {accumulation} = "
        f"{count}; "
    )
    stages = default_stages(schedule, pp)
    if schedule in ("1F1B", "DualPipeV") and count < stages:
        return [
            f'parallelism.pipeline_parallel_schedule = "{schedule}": needs at least a microbatch per stage, {stages}, '
            f"{has}raise training.global_batch_size or local_batch_size, or lower pipeline_parallel_microbatch_size"
        ]
    rounds = max(1, count // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        return [
            f'parallelism.pipeline_parallel_schedule = "{schedule}": runs microbatches in equal rounds of at least '
            f"pipeline_parallel_degree = {pp}, {has}{rounds} rounds do not divide them; choose {rounds * pp} or "
            f"{(rounds + 1) * pp} by training.global_batch_size, local_batch_size or pipeline_parallel_microbatch_size"
        ]
    return []


def _compile(config: Config) -> list[str]:
    """Compiled layers have freed, in the first half of backward, what the second half needs. The loss has not: its
    gradients are computed with it (loss.py)."""
    schedule, c = config.parallelism.pipeline_parallel_schedule, config.compile
    if schedule not in SPLIT_BACKWARD or not (c.enable and "model" in c.components):
        return []
    return [
        f"compile.components = {c.components}: {schedule} runs backward in two halves, which torch cannot do with a "
        'compiled model; choose ["loss"], or parallelism.pipeline_parallel_schedule = "1F1B" or "Interleaved1F1B"'
    ]


def _reshard(config: Config) -> list[str]:
    """A split backward looks for paths to a stage's parameters before FSDP has gathered them: to the shards there are
    none, and their gradients would be lost without a word."""
    p = config.parallelism
    if p.pipeline_parallel_schedule not in SPLIT_BACKWARD or p.fsdp_reshard_after_forward != "always":
        return []
    return [
        f'parallelism.fsdp_reshard_after_forward = "always": {p.pipeline_parallel_schedule} runs backward in two '
        'halves, which loses gradients of parameters that were freed after forward; choose "default" or "never", or '
        'pipeline_parallel_schedule = "1F1B" or "Interleaved1F1B"'
    ]


def _reduce(config: Config) -> list[str]:
    p = config.parallelism
    if not p.fsdp_reduce_every_microbatch:
        return []
    return [
        "parallelism.fsdp_reduce_every_microbatch = true: with pipeline_parallel_degree = "
        f"{p.pipeline_parallel_degree} the schedule decides, which reduces once per step; leave it out"
    ]
