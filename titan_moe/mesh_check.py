"""How the processes are split into a mesh, as numbers: what is derived from the degrees, and what has to hold between
them.

Runs before any process group exists. Imports neither torch nor torchtitan.
"""

import math

from titan_moe.config import Config


def data_parallel_degree(config: Config, world_size: int) -> tuple[int, int]:
    """(replicate, shard): copies of the model, and ranks that one copy is sharded over, with -1 resolved. Only these
    ranks have sequences of their own: context, tensor and pipeline ranks share theirs."""
    p = config.parallelism
    replicate, shard = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    return replicate, world_size // (replicate * model_parallel_degree(config)) if shard == -1 else shard


def model_parallel_degree(config: Config) -> int:
    """Ranks that work on the same sequences together: context x tensor x pipeline."""
    p = config.parallelism
    return p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree


def gradient_accumulation_steps(config: Config, world_size: int) -> int:
    """Forward and backward passes per optimizer step."""
    if config.training.global_batch_size == -1:
        return 1
    replicate, shard = data_parallel_degree(config, world_size)
    return config.training.global_batch_size // (config.training.local_batch_size * replicate * shard)


def pipeline_microbatches(config: Config) -> int:
    """Microbatches that one forward and backward of a rank is cut into for its pipeline; 1 without a pipeline."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return 1
    return config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size


def sequences_per_step(config: Config, world_size: int) -> int:
    """Sequences of one optimizer step, over all ranks and microbatches."""
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    replicate, shard = data_parallel_degree(config, world_size)
    return config.training.local_batch_size * replicate * shard


def check(config: Config, world_size: int, num_experts: int) -> list[str]:
    replicate, shard = data_parallel_degree(config, world_size)
    processes = f"{world_size} processes (nodes x processes per node)"
    if config.parallelism.data_parallel_shard_degree == -1 and world_size % replicate:
        return [
            f"parallelism.data_parallel_replicate_degree = {replicate}: must divide the {processes}; "
            f"{choices(world_size)}"
        ]
    if replicate * shard != world_size:
        return [
            f"parallelism.data_parallel_shard_degree = {shard}: data_parallel_replicate_degree x it = {replicate} x "
            f"{shard} = {replicate * shard}, but there are {processes}; start {replicate * shard}, or choose -1 for "
            "all that are left"
        ]
    found = []
    ep = config.parallelism.expert_parallel_degree
    wholes = {"data_parallel_shard_degree": shard, "model.num_experts": num_experts}
    if undivided := [f"{name} = {whole}" for name, whole in wholes.items() if whole % ep]:
        found.append(
            f"parallelism.expert_parallel_degree = {ep}: must divide {' and '.join(undivided)}; "
            f"{choices(math.gcd(shard, num_experts))}"
        )
    local, batch = config.training.local_batch_size, config.training.global_batch_size
    smallest = local * replicate * shard
    if batch != -1 and (batch < 1 or batch % smallest):
        above = max(batch // smallest + 1, 1) * smallest
        below = f"{above - smallest} or " if above > smallest else ""
        found.append(
            f"training.global_batch_size = {batch}: must be a multiple of local_batch_size x data-parallel degree = "
            f"{local} x {replicate * shard} = {smallest}; choose {below}{above}, or -1 for the smallest"
        )
    return found


def choices(whole: int) -> str:
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    return f"choose one of {', '.join(map(str, sorted({*small, *(whole // d for d in small)})))}"
