"""What keeps a dry run from being one. Imports no torch: a mistake is told at once."""

import re
from collections.abc import Mapping

from titan_moe.config import Config
from titan_moe.launch import count
from titan_moe.mesh_check import microbatch_size
from titan_moe.titan_dispatchers_check import IN_ONE_CALL


def place(env: Mapping[str, str], planned: int | None, problems: list[str]) -> tuple[int, int]:
    """(processes, rank) that the environment asks for; adds to `problems` what is wrong with it. Without NGPU there are
    as many processes as the file is `planned` for: what this machine has does not matter."""
    nodes = count(env, "NNODES", problems)
    each = count(env, "NGPU", problems)
    if not env.get("NGPU") and planned is not None and planned >= nodes > 0 and planned % nodes == 0:
        each = planned // nodes
    world_size, text = nodes * each, env.get("RANK") or "0"
    if not re.fullmatch("[0-9]{1,9}", text) or (world_size and int(text) >= world_size):
        problems.append(
            f"RANK = {text!r} in the environment: which rank to look at; choose one of 0 to NNODES x NGPU - 1 = "
            f"{nodes} x {each} - 1 = {world_size - 1}"
        )
        return world_size, 0
    return world_size, int(text)


def problems(config: Config) -> list[str]:
    """What a dry run cannot show, beyond what training refuses."""
    found = []
    compute = config.training.mixed_precision_param
    if config.moe.experts == "loop" or compute == "float32":
        setting = f'training.mixed_precision_param = "{compute}"' if compute == "float32" else 'moe.experts = "loop"'
        found.append(
            f"{setting}: on a GPU the experts would be a loop over the tokens of each, which a dry run does not know; "
            'use "bfloat16" with experts "auto" or "grouped_mm"'
        )
    if config.moe.dispatcher in IN_ONE_CALL:
        found.append(
            f'moe.dispatcher = "{config.moe.dispatcher}": its buffers are a library\'s, which a dry run does not see; '
            'use "dedup", which moves the same rows'
        )
    if config.moe.overlap == "half_batch" and (size := microbatch_size(config)) % 2:
        found.append(
            f'moe.overlap = "half_batch" with {size} sequences in a microbatch: its halves are not of one size, and a '
            "dry run routes all that is dispatched alike; use an even number"
        )
    if config.precision.backend == "te":
        found.append(
            'precision.backend = "te": quantizes by kernels of a library, which a dry run does not see; use "auto", '
            "which emulates them here and keeps as much for backward"
        )
    if config.checkpoint.create_seed_checkpoint:
        found.append("checkpoint.create_seed_checkpoint = true: a dry run has no weights to save; leave it out")
    return found


def left_out(config: Config) -> list[str]:
    """What the configuration asks for and a dry run does not do."""
    asked = {
        "data": True,
        "validation": config.validation.enable,
        "checkpoints": config.checkpoint.enable,
        "torch.compile (what is counted is eager)": config.compile.enable,
        "CUDA graphs (what is counted is one step as Python goes)": config.cuda_graph.scope != "none",
        "activation offload (what is counted stays on the device)": bool(config.activation_offload.tensors),
    }
    return [name for name, wanted in asked.items() if wanted]
