"""How the processes are split into a mesh, as numbers: what follows from the degrees, and what has to hold between them
and the model, the batch and the sequence.

    processes = data_parallel_replicate x data_parallel_shard x context x tensor x pipeline

Experts take no ranks of their own: expert_parallel_degree ranks of data_parallel_shard x context x tensor share them,
and the rest of these shard each expert (FSDP2). Only data-parallel ranks have sequences of their own; context ranks
hold parts of one, tensor ranks parts of heads and hidden widths, pipeline ranks layers (pipeline_check.py).

Runs before any process group exists. Imports neither torch nor torchtitan.
"""

import math
from collections.abc import Set

from titan_moe.config import Config
from titan_moe.flavors import Flavor

EP, TP = "parallelism.expert_parallel_degree", "parallelism.tensor_parallel_degree"
CP, PP = "parallelism.context_parallel_degree", "parallelism.pipeline_parallel_degree"
REPLICATE, SHARD = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
LOCAL, SEQ_LEN = "training.local_batch_size", "training.seq_len"
DEGREES = {REPLICATE, SHARD, CP, TP, PP}
"""What the number of processes is the product of"""

FLEX_BLOCK = 128
"""Positions of one block of FlexAttention's mask, which context parallelism hands out in whole blocks"""


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def data_parallel_degree(config: Config, world_size: int) -> tuple[int, int]:
    """(replicate, shard): copies of the model, and ranks that one copy is sharded over, with -1 resolved."""
    p = config.parallelism
    replicate, shard = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    others = p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree
    return replicate, world_size // (replicate * others) if shard == -1 else shard


def gradient_accumulation_steps(config: Config, world_size: int) -> int:
    """How often local_batch_size sequences go through the model per optimizer step."""
    if config.training.global_batch_size == -1:
        return 1
    replicate, shard = data_parallel_degree(config, world_size)
    return config.training.global_batch_size // (config.training.local_batch_size * replicate * shard)


def microbatch_size(config: Config) -> int:
    """Sequences of one forward and backward: of a stage's with a pipeline."""
    p, t = config.parallelism, config.training
    return t.local_batch_size if p.pipeline_parallel_degree == 1 else p.pipeline_parallel_microbatch_size


def region_tokens(config: Config) -> int:
    """Tokens of one microbatch in the MoE region of one rank. Of the ranks of a microbatch, context ranks split its
    tokens; tensor ranks too with EP, and else the hidden width."""
    p = config.parallelism
    split_by = p.context_parallel_degree * (p.tensor_parallel_degree if p.expert_parallel_degree > 1 else 1)
    return microbatch_size(config) * config.training.seq_len // split_by


def dispatched_tokens(config: Config) -> int:
    """The most tokens of one rank that are dispatched together: of a microbatch, or of half of its sequences."""
    size = microbatch_size(config)
    return region_tokens(config) // size * (-(-size // 2) if config.moe.overlap == "half_batch" else size)


def microbatches_per_step(config: Config, world_size: int) -> int:
    """Microbatches of one optimizer step on one rank: gradient accumulation's, each cut into the pipeline's."""
    accumulation = gradient_accumulation_steps(config, world_size)
    return accumulation * config.training.local_batch_size // microbatch_size(config)


def sequences_per_step(config: Config, world_size: int) -> int:
    """Sequences of one optimizer step, over all ranks and microbatches."""
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    replicate, shard = data_parallel_degree(config, world_size)
    return config.training.local_batch_size * replicate * shard


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check(config: Config, world_size: int, flavor: Flavor, unsound: Set[str] = frozenset()) -> list[str]:
    """What does not fit when `world_size` processes train `config`, as far as it can be told without the keys that are
    `unsound`: not even single numbers that could be."""
    counted = world_size >= 1 and not unsound & DEGREES
    found = degrees(config, world_size) if counted else []
    fits = counted and not found
    if EP not in unsound:
        found += _experts(config, world_size if fits else None, flavor)
    if not unsound & {TP, EP}:
        found += _tensor(config, flavor)
    if not unsound & {CP, TP, SEQ_LEN}:
        found += _sequence(config)
    found += _multi_token_prediction(config, flavor)
    if fits and EP not in unsound:
        found += _expert_shards(config, world_size, flavor)
    if fits and LOCAL not in unsound:
        found += batch(config, world_size)
    return found


def check_accelerator(config: Config) -> list[str]:
    """What FlexAttention does not do, which attends on everything but a CPU."""
    cp, seq_len = config.parallelism.context_parallel_degree, config.training.seq_len
    if cp == 1 or seq_len % (cp * FLEX_BLOCK) == 0:
        return []
    return [
        f"training.seq_len = {seq_len}: must be a multiple of context_parallel_degree x {FLEX_BLOCK} = {cp} x "
        f"{FLEX_BLOCK} = {cp * FLEX_BLOCK} on an accelerator, whose FlexAttention masks whole blocks; "
        f"{_multiples(seq_len, cp * FLEX_BLOCK)}"
    ]


def degrees(config: Config, world_size: int) -> list[str]:
    """Whether the degrees multiply to the number of processes."""
    p = config.parallelism
    replicate, shard = data_parallel_degree(config, world_size)
    processes = f"{world_size} processes (nodes x processes per node)"
    names = ("context_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree")
    model = {name: getattr(p, name) for name in names if getattr(p, name) > 1}
    others = {"data_parallel_replicate_degree": replicate} if replicate > 1 or not model else {}
    others |= model
    left, rest = divmod(world_size, math.prod(others.values()))
    if p.data_parallel_shard_degree == -1 and rest:
        remedy = (
            choices(world_size)
            if len(others) == 1
            else f"lower one of them, or start a multiple of {math.prod(others.values())}"
        )
        return [f"parallelism.{_product(others)}: must divide the {processes}; {remedy}"]
    whole = {"data_parallel_replicate_degree": replicate, "it": shard, **model}
    total = math.prod(whole.values())
    if total == world_size:
        return []
    remedy = "choose -1 for all that are left" if left and not rest else "lower a degree"
    return [
        f"parallelism.data_parallel_shard_degree = {shard}: {_product(whole)}, but there are {processes}; start "
        f"{total}, or {remedy}"
    ]


def _experts(config: Config, world_size: int | None, flavor: Flavor) -> list[str]:
    """Whether the experts, and the ranks if they are known, can be shared out among the expert-parallel ranks."""
    p, ep = config.parallelism, config.parallelism.expert_parallel_degree
    wholes = {f"model.num_experts = {flavor.num_experts}": flavor.num_experts}
    if world_size is not None:
        ranks = {"data_parallel_shard_degree": data_parallel_degree(config, world_size)[1]}
        names = ("context_parallel_degree", "tensor_parallel_degree")
        ranks |= {name: getattr(p, name) for name in names if getattr(p, name) > 1}
        wholes = {_product(ranks): math.prod(ranks.values()), **wholes}
    undivided = [text for text, whole in wholes.items() if whole % ep]
    if not undivided:
        return []
    return [
        f"parallelism.expert_parallel_degree = {ep}: must divide {' and '.join(undivided)}; "
        f"{choices(math.gcd(*wholes.values()))}"
    ]


def _expert_shards(config: Config, world_size: int, flavor: Flavor) -> list[str]:
    """With more ranks than experts torchtitan lets FSDP2 cut an expert's matrices, where it wants equal pieces. Which
    ranks torchtitan counts is its own: without expert parallelism all but the pipeline's."""
    p = config.parallelism
    replicate, shard = data_parallel_degree(config, world_size)
    cp, tp, ep = p.context_parallel_degree, p.tensor_parallel_degree, p.expert_parallel_degree
    if shard * cp * tp % ep:
        return []  # _experts says so
    if ep == 1:
        ranks, pieces, hidden = replicate * shard * cp * tp, shard * cp, flavor.moe_hidden_dim // tp
    else:
        ranks, pieces, hidden = shard * cp * tp, shard * cp * tp // ep, flavor.moe_hidden_dim
    sizes = {f"model.moe_hidden_dim{f' / {tp}' if ep == 1 < tp else ''} = {hidden}": hidden}
    sizes |= {f"model.dim = {flavor.dim}": flavor.dim}
    undivided = [text for text, size in sizes.items() if size % pieces]
    if ranks <= flavor.num_experts or not undivided:
        return []
    return [
        f"parallelism.data_parallel_shard_degree = {shard}: FSDP would cut each expert into {pieces} pieces, because "
        f"{ranks} ranks are more than model.num_experts = {flavor.num_experts}, but {pieces} does not divide "
        f"{' and '.join(undivided)}; choose other degrees: more of expert_parallel_degree leaves fewer pieces"
    ]


def _tensor(config: Config, flavor: Flavor) -> list[str]:
    """Every tensor rank needs an equal piece: FSDP2 takes a parameter's whole size to be the piece's times the
    degree, and torchtitan views a rank's heads as n_heads / tp."""
    tp = config.parallelism.tensor_parallel_degree
    wholes = {"n_heads": flavor.n_heads, "vocab_size": flavor.vocab_size}
    if flavor.num_kv_heads:
        wholes["num_kv_heads"] = flavor.num_kv_heads
    if flavor.n_dense_layers:
        wholes["dense_hidden_dim"] = flavor.dense_hidden_dim
    wholes["moe_hidden_dim x num_shared_experts"] = flavor.moe_hidden_dim * flavor.num_shared_experts
    if config.parallelism.expert_parallel_degree == 1:  # otherwise experts stay whole and share tokens out
        wholes["moe_hidden_dim"] = flavor.moe_hidden_dim
    undivided = [f"model.{name} = {whole}" for name, whole in wholes.items() if whole % tp]
    if not undivided:
        return []
    return [
        f"parallelism.tensor_parallel_degree = {tp}: must divide {' and '.join(undivided)}; "
        f"{choices(math.gcd(*wholes.values()))}"
    ]


def _sequence(config: Config) -> list[str]:
    """Whether context ranks, and tensor ranks within them, get equal pieces of a sequence."""
    p, seq_len = config.parallelism, config.training.seq_len
    cp, tp = p.context_parallel_degree, p.tensor_parallel_degree
    pieces = {}
    if cp > 1 and p.context_parallel_load_balancer == "headtail":
        pieces["2 (headtail)"] = 2
    if cp > 1:
        pieces["context_parallel_degree"] = cp
    if tp > 1:
        pieces["tensor_parallel_degree"] = tp
    total = math.prod(pieces.values())
    if seq_len % total == 0:
        return []
    return [f"training.seq_len = {seq_len}: must be a multiple of {_product(pieces)}; {_multiples(seq_len, total)}"]


def _multi_token_prediction(config: Config, flavor: Flavor) -> list[str]:
    p, layers, found = config.parallelism, flavor.num_mtp_layers, []
    if layers > 0 and p.pipeline_parallel_degree > 1:
        found.append(
            f"model.num_mtp_layers = {layers}: multi-token prediction needs the embedding where the last layer is, "
            f"which torchtitan 0.3.0 does not do across parallelism.pipeline_parallel_degree = "
            f"{p.pipeline_parallel_degree} ranks; choose num_mtp_layers = 0, or pipeline_parallel_degree = 1"
        )
    if layers > 0 and p.context_parallel_degree > 1:
        found.append(
            f"model.num_mtp_layers = {layers}: multi-token prediction shifts whole sequences, which torchtitan 0.3.0 "
            f"does not do across parallelism.context_parallel_degree = {p.context_parallel_degree} ranks; choose "
            "num_mtp_layers = 0, or context_parallel_degree = 1"
        )
    if 1 <= config.training.seq_len <= layers:
        found.append(
            f"model.num_mtp_layers = {layers}: must be less than training.seq_len = {config.training.seq_len}, because "
            "the last of them predicts that many tokens further ahead"
        )
    return found


def batch(config: Config, world_size: int) -> list[str]:
    """Whether the sequences of a step can be dealt out evenly."""
    replicate, shard = data_parallel_degree(config, world_size)
    local, whole = config.training.local_batch_size, config.training.global_batch_size
    smallest = local * replicate * shard
    if whole == -1 or (whole >= 1 and whole % smallest == 0):
        return []
    return [
        f"training.global_batch_size = {whole}: must be a multiple of local_batch_size x data-parallel degree = "
        f"{local} x {replicate * shard} = {smallest}; {_multiples(whole, smallest)}, or -1 for the smallest"
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Words


def choices(whole: int) -> str:
    """The divisors to choose from."""
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    return f"choose one of {', '.join(map(str, sorted({*small, *(whole // d for d in small)})))}"


def _multiples(value: int, divisor: int) -> str:
    """The multiples next to `value`."""
    above = max(value // divisor + 1, 1) * divisor
    return f"choose {f'{above - divisor} or ' if above > divisor else ''}{above}"


def _product(factors: dict[str, int]) -> str:
    """For example "tensor_parallel_degree x pipeline_parallel_degree = 2 x 4 = 8"."""
    names = " x ".join(factors)
    if len(factors) == 1:
        return f"{names} = {next(iter(factors.values()))}"
    return f"{names} = {' x '.join(map(str, factors.values()))} = {math.prod(factors.values())}"
