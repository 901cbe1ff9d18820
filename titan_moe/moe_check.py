"""The backends of the MoE region: what they can do together. See config_check.py. No torch."""

from titan_moe.config import Config
from titan_moe.config_print import literal
from titan_moe.mesh_check import choices


def check(config: Config) -> list[str]:
    """What does not fit together in the [moe] section, and between it and the expert-parallel degree."""
    found = []
    moe, ep = config.moe, config.parallelism.expert_parallel_degree
    if moe.dispatcher == "local" and ep > 1:
        found.append(
            f'moe.dispatcher = "local": keeps every token on its rank, but parallelism.expert_parallel_degree = {ep} '
            'spreads the experts over as many; choose "auto", "alltoall" or "dedup", or expert_parallel_degree = 1'
        )
    if moe.dispatcher not in ("auto", "local") and ep == 1:
        found.append(
            f'moe.dispatcher = "{moe.dispatcher}": exchanges tokens between ranks, but expert_parallel_degree = 1; '
            'choose "auto" or "local", or a higher expert_parallel_degree'
        )
    per_node = moe.ranks_per_node
    if per_node is not None and per_node >= 1 and ep > 1 and ep % per_node:
        found.append(
            f"moe.ranks_per_node = {per_node}: must divide parallelism.expert_parallel_degree = {ep}; {choices(ep)}"
        )
    if per_node is not None and (moe.dispatcher not in ("auto", "dedup") or ep == 1):
        found.append(
            f"moe.ranks_per_node = {per_node}: only the dispatcher dedup sends by node, and only with an "
            'expert_parallel_degree above 1; leave it out, or set moe.dispatcher = "dedup"'
        )
    if per_node is None and moe.hop_chunks > 1:
        found.append(
            f"moe.hop_chunks = {moe.hop_chunks}: pipelines the two hops of tokens that are sent by node, and without "
            "moe.ranks_per_node they take one; set that, or leave moe.hop_chunks at 1"
        )
    if per_node is not None and moe.recv_buffer != "exact":
        found.append(
            f"moe.recv_buffer = {literal(moe.recv_buffer)}: a fixed size is for tokens that go straight to their "
            f'ranks, and moe.ranks_per_node = {per_node} sends them by node; leave that out, or choose "exact"'
        )
    return found
