"""What NCCL EP (moe.dispatcher = "te_ep") can be asked for, as numbers and sentences. See config_check.py. No torch.

The limits are those of Transformer Engine 2.20.2 and of the NCCL EP in its wheel. Where they are broken the library
stops in a kernel, or in a check that names none of our keys; so they are checked here, before there is a process group,
and again by the dispatcher, for those who build it themselves.
"""

from collections.abc import Set

from titan_moe import pipeline_check
from titan_moe.config import Config
from titan_moe.flavors import Flavor
from titan_moe.mesh_check import CP, EP, LOCAL, SEQ_LEN, TP, microbatch_size, microbatches_per_step, region_tokens

MAX_TOKENS = 8192  # of one rank in one dispatch: a constant of its kernels
MAX_TOP_K = 32


def limits(
    *, num_experts: int, top_k: int, dim: int, alignment: int, max_tokens: int, ranks: int, node_ranks: int
) -> list[str]:
    """What its kernels cannot do, for E experts on `ranks` ranks, of which `node_ranks` share a node."""
    found = []
    if ranks < 2:
        found.append("NCCL EP exchanges rows between ranks and takes no group of one; use the dispatcher local")
    local = num_experts // ranks
    if local * node_ranks % 4:
        found.append(
            f"the expert-parallel ranks of a node hold {local} x {node_ranks} = {local * node_ranks} experts of a "
            "layer, and NCCL EP copies what belongs to them in groups of 4; choose num_experts, or ranks of a node, so "
            "that it is a multiple of 4"
        )
    if not 1 <= top_k <= MAX_TOP_K:
        found.append(f"top_k = {top_k}: NCCL EP sends a token to 1 to {MAX_TOP_K} experts")
    if dim * 2 % 16:
        found.append(
            f"dim = {dim}: a bfloat16 row has {dim} x 2 = {dim * 2} bytes, and NCCL EP moves multiples of 16: choose a "
            "multiple of 8"
        )
    if alignment & (alignment - 1):
        found.append(f"alignment = {alignment}, but NCCL EP pads slabs to a power of two")
    if max_tokens > MAX_TOKENS:
        found.append(f"NCCL EP takes at most {MAX_TOKENS:,} tokens of a rank at once, not {max_tokens:,}")
    return found


def payload_limits(*, dim: int, alignment: int, tokens: int) -> list[str]:
    """What keeps rows from travelling as MXFP8."""
    found, start = [], 'moe.te_ep_payload = "mxfp8": '
    if dim % 512:
        found.append(
            f"{start}the scales of a row, a byte for 32 numbers, travel in pieces of 16, so rows have multiples of 512 "
            f"numbers, but dim = {dim} = {dim // 512} x 512 + {dim % 512}"
        )
    if alignment % 128:
        found.append(f"{start}slabs must be multiples of 128 rows, not of {alignment}")
    if tokens % 32:
        found.append(
            f"{start}Transformer Engine quantizes multiples of 32 rows, but a rank has {tokens} tokens = "
            f"{tokens // 32} x 32 + {tokens % 32}; choose training.seq_len so that they are"
        )
    return found


def in_flight(config: Config, world_size: int) -> int:
    """Microbatches, at most, that a layer has planned and not yet been through backward with: each needs an EpBuffer of
    its own."""
    if config.moe.dispatcher != "te_ep":
        return 1
    p = config.parallelism
    count = microbatches_per_step(config, world_size)
    return buffers_per_layer(p.pipeline_parallel_schedule, p.pipeline_parallel_degree, count)


def buffers_per_layer(schedule: str, pp: int, microbatches: int) -> int:
    """The same, of torch's schedules for `pp` ranks, which a test asks."""
    if pp == 1:
        return 1
    if schedule == "1F1B":
        return min(microbatches, pp)
    # With two stages and more per rank a stage begins the next round of microbatches before the backward of the last
    # one is over.
    round_of = microbatches // max(1, microbatches // pp)
    return min(microbatches, 2 * round_of)


def check(config: Config, flavor: Flavor, unsound: Set[str] = frozenset()) -> list[str]:
    """What te_ep cannot do of this configuration, as far as it can be told without the keys that are `unsound`."""
    if config.moe.dispatcher != "te_ep":
        if config.moe.te_ep_payload == "bf16":
            return []
        return [
            f'moe.te_ep_payload = "{config.moe.te_ep_payload}": is of moe.dispatcher = "te_ep", not of '
            f'"{config.moe.dispatcher}"; leave it out, or choose that dispatcher'
        ]
    found = []
    if config.training.mixed_precision_param != "bfloat16":
        found.append(
            'moe.dispatcher = "te_ep": NCCL EP moves bfloat16 rows, but training.mixed_precision_param = '
            f'"{config.training.mixed_precision_param}"; set that to "bfloat16", or choose the dispatcher "dedup"'
        )
    if config.moe.capacity_factor is not None:
        found.append(
            f"moe.capacity_factor = {config.moe.capacity_factor}: te_ep drops no copies, because what NCCL EP does "
            "with a copy that goes to no expert is not documented; leave it out, or choose the dispatcher "
            '"dedup" or "alltoall"'
        )
    ep = config.parallelism.expert_parallel_degree
    if EP not in unsound and ep > 1 and flavor.num_experts % ep == 0:
        broken = limits(
            num_experts=flavor.num_experts,
            top_k=flavor.top_k,
            dim=flavor.dim,
            alignment=1,  # not a matter of configuration
            max_tokens=0,  # below, with the arithmetic
            ranks=ep,
            node_ranks=ep,  # how many share a node is not known yet
        )
        found += [f'moe.dispatcher = "te_ep": {sentence}' for sentence in broken]
    if config.moe.te_ep_payload == "mxfp8":
        found += payload_limits(dim=flavor.dim, alignment=128, tokens=0)
    if not unsound & {EP, CP, TP, LOCAL, SEQ_LEN, pipeline_check.MICROBATCH}:
        found += _tokens(config)
    return found


def _tokens(config: Config) -> list[str]:
    tokens, p = region_tokens(config), config.parallelism
    if config.moe.te_ep_payload == "mxfp8" and (said := payload_limits(dim=512, alignment=128, tokens=tokens)):
        return said
    ranks = p.expert_parallel_degree
    if ranks > 1 and tokens * ranks % 4:
        return [
            f'moe.dispatcher = "te_ep": NCCL EP reads its maps in pieces of 4, but {tokens} tokens of a rank and '
            f"microbatch x expert_parallel_degree {ranks} = {tokens * ranks}; choose training.seq_len so that it is a "
            'multiple of 4, or the dispatcher "dedup"'
        ]
    if tokens <= MAX_TOKENS:
        return []
    size, seq_len = microbatch_size(config), config.training.seq_len
    pipelined = p.pipeline_parallel_degree > 1
    key = pipeline_check.MICROBATCH if pipelined else LOCAL
    split = " x ".join(
        f"{name} {degree}"
        for name, degree in (
            ("context_parallel_degree", p.context_parallel_degree),
            ("tensor_parallel_degree", p.tensor_parallel_degree),
        )
        if degree > 1
    )
    fitting = size * MAX_TOKENS // tokens
    remedy = f"lower it to {fitting}" if fitting else "raise parallelism.context_parallel_degree"
    return [
        f'{key} = {size}: moe.dispatcher = "te_ep" takes at most {MAX_TOKENS:,} tokens per rank and microbatch, but '
        f"there are {size} x seq_len {seq_len}{f' / ({split})' if split else ''} = {tokens:,}; {remedy}, or choose the "
        'dispatcher "dedup"'
    ]
