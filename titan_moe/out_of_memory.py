"""What to change when a run has run out of memory: each change is tried on the planner's memory model.

The planner says before a run whether it fits (machine_check.py), but its activations and the allocator's fragments are
predictions. Imports no torch: an error is known by its name and its words.
"""

import copy
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.config_keys import get
from titan_moe.config_print import literal
from titan_moe.machine_check import GIB, Machine, needed_bytes, plan_command

WORDS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Of CUDA and cuBLAS, of torch's allocator on CPUs, of its shared memory, and of the system"""
WORTH = 0.01  # of what is needed; smaller gains are not shown


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(word in str(error) for word in WORDS)


def advice(argv: Sequence[str], world_size: int, gpu: bool) -> str:
    """What to change in the run that `argv` asks for, with what it would then need of each process."""
    try:
        config = config_file.load(list(argv), world_size)
        machine = Machine(name="", memory=float("inf"), gpu=gpu)
        needs, found = needed_bytes(config, world_size, machine), less(config, world_size, machine)
    except ValueError as error:  # an edited train.py may train what the planner has no words for
        return f"Out of memory on rank {os.environ.get('RANK', '0')}; the planner cannot say what to change: {error}"
    lines = [
        f"Out of memory on rank {os.environ.get('RANK', '0')}. The planner expects {needs / GIB:,.1f} GiB per process; "
        f"what would lower that most:",
        *(f"    {each.change}: {each.bytes / GIB:,.1f} GiB" for each in found[:5]),
        f"  other layouts, degrees and GPUs: {plan_command(config, shlex.join(argv), world_size)}",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Less:
    change: str
    bytes: float
    """Of a process, then"""


def less(config: Config, world_size: int, machine: Machine) -> list[Less]:
    """Single changes that would need less memory of a process and keep the global batch, best first."""
    accelerator, needs = machine.gpu, needed_bytes(config, world_size, machine)
    found = []
    for key, value in changes(config):
        changed = copy.deepcopy(config)
        section, _, name = key.rpartition(".")
        setattr(get(changed, section), name, value)
        if check(changed, world_size, accelerator=accelerator):
            continue
        then = needed_bytes(changed, world_size, machine)
        if needs - then > WORTH * needs:
            found.append(Less(f"{key} = {literal(value)}", then))
    return sorted(found, key=lambda each: each.bytes)


def changes(config: Config) -> Iterator[tuple[str, object]]:
    """Keys with values that may need less memory than theirs."""
    mode = config.activation_checkpoint.mode
    if mode == "none":
        yield "activation_checkpoint.mode", "selective"
        yield "activation_checkpoint.recompute", ["mla_up_proj", "swiglu", "norms", "shared_expert"]
        yield "activation_checkpoint.recompute", ["swiglu", "norms", "shared_expert"]  # no mla in other families
    if mode != "full":
        yield "activation_checkpoint.mode", "full"
    for name in ("moe_expert_input", "attn_out", "layer_input"):
        if name not in config.activation_offload.tensors:
            yield "activation_offload.tensors", [*config.activation_offload.tensors, name]
    if config.training.local_batch_size % 2 == 0:
        yield "training.local_batch_size", config.training.local_batch_size // 2
    if config.parallelism.fsdp_reshard_after_forward != "always":
        yield "parallelism.fsdp_reshard_after_forward", "always"
    if not config.parallelism.fsdp_reduce_every_microbatch:
        yield "parallelism.fsdp_reduce_every_microbatch", True
    if not config.moe.redispatch:
        yield "moe.redispatch", True
    if config.moe.recv_buffer == "worst_case":
        yield "moe.recv_buffer", 2.0
    yield "parallelism.expert_parallel_degree", 2 * config.parallelism.expert_parallel_degree
    yield "loss.num_chunks", 2 * config.loss.num_chunks
