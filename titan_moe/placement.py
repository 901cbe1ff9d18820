"""Where ranks lie: whether expert- and tensor-parallel groups stay in an NVLink domain, and pipeline neighbours near.

torchtitan splits ranks, counted from the outside in, into

    pipeline x data_parallel_replicate x data_parallel_shard x context x tensor    for dense layers
    pipeline x data_parallel_replicate x rest x expert                             for experts

so an expert-parallel group is `expert_parallel_degree` consecutive ranks, from a multiple of that on; a tensor-parallel
group likewise; and neighbours in the pipeline are a stage's ranks apart. tests/test_placement.py compares this file
with the meshes that torchtitan builds. torchrun numbers ranks node by node, so where they lie follows from the order of
the nodes: run_train.sh's NODE_RANK, and NVLINK_DOMAINS, which says what domain each node is in.

A layout that crosses domains is slower, never wrong, so what is found here are notes, not refusals. Imports no torch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from titan_moe.config import Config
from titan_moe.mesh_check import EP, PP, TP
from titan_moe.plan import hardware

SERVER = 8
"""GPUs of the largest server: an NVLink domain of so many, or fewer, ends at its node"""


def domains_of_ranks(config: Config, nodes: int, per_node: int, env: Mapping[str, str]) -> list[str]:
    """The NVLink domain of each rank: by NVLINK_DOMAINS in `env`, else as plan.hardware declares it, the nodes of a
    domain one after the other; empty when neither says anything. Raises ValueError for a value that cannot be."""
    if words := env.get("NVLINK_DOMAINS", "").split():
        if len(words) != nodes:
            raise ValueError(
                f"NVLINK_DOMAINS in the environment: names {len(words)} nodes, but NNODES = {nodes}; give one word per "
                "node in the order of ranks, the same for nodes that share a domain"
            )
        return [word for word in words for _ in range(per_node)]
    if not config.plan.hardware:
        return []
    try:
        size = hardware.resolve(config.plan.hardware).nvlink_domain
    except ValueError as error:
        raise ValueError(f"plan.{error}") from error
    nodes_each = 1 if size <= SERVER else max(size // per_node, 1)
    return [str(node // nodes_each) for node in range(nodes) for _ in range(per_node)]


def notes(config: Config, domains: Sequence[str], per_node: int) -> list[str]:
    """What the layout sends over slower links than it need, each with the arithmetic and the way out. `domains`: of
    each rank; `per_node`: ranks of one node. The degrees must fit that many ranks (mesh_check)."""
    p, world_size = config.parallelism, len(domains)
    found = [
        _split_groups(key, size, domains, per_node)
        for key, size in ((EP, p.expert_parallel_degree), (TP, p.tensor_parallel_degree))
    ]
    stage = world_size // p.pipeline_parallel_degree
    # At the same place of another node they share a rail: one switch between their network cards.
    if stage % per_node and any(domains[rank] != domains[rank + stage] for rank in range(world_size - stage)):
        nodes = math.ceil(world_size / per_node)
        whole = [str(d) for d in range(1, nodes + 1) if nodes % d == 0]
        found.append(
            f"{PP} = {p.pipeline_parallel_degree}: a stage has {world_size} / {p.pipeline_parallel_degree} = {stage} "
            f"ranks, which are no whole nodes of {per_node}, so pipeline neighbours on different nodes have different "
            f"places there and their traffic crosses rails; degrees with whole nodes are {', '.join(whole)}"
        )
    return [note for note in found if note]


def _split_groups(key: str, size: int, domains: Sequence[str], per_node: int) -> str:
    """What to say if not all groups of `size` consecutive ranks lie inside one domain each, else nothing."""
    starts = range(0, len(domains), size)
    split = [start for start in starts if len({*domains[start : start + size]}) > 1]
    if not split:
        return ""
    first, largest = split[0], max(Counter(domains).values())
    said = (
        f"{key} = {size}: {len(split)} of {len(starts)} groups of consecutive ranks lie in several NVLink domains "
        f"(ranks {first} to {first + size - 1} in {len({*domains[first : first + size]})}) and exchange tokens over "
        "the network between them; "
    )
    if size > largest:
        return f"{said}the largest domain has {largest} of this run's ranks: choose at most that"
    whole = f"{largest // size} x {size} = {largest // size * size}"
    segment = f" ({size // per_node} nodes: sbatch --segment={size // per_node})" if size % per_node == 0 else ""
    return (
        f"{said}domains hold whole groups if each gives the run a multiple of {size} ranks{segment}, at most {whole} "
        f"of {largest}, and its nodes follow each other"
    )
