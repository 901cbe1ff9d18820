"""What dispatch and combine send: bytes counted where the collectives are called, and the routing they are given.

Shape letters: T tokens, K top-k, E experts, R ranks.
"""

from functools import cache

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist

E, K, GROUPS, KEPT_GROUPS = 64, 8, 8, 4


def route(tokens: int, generator: torch.Generator, experts: int = E) -> torch.Tensor:
    """Expert ids [T, K] by DeepSeek-V3's rule on random scores: 8 groups of experts, the 4 groups with the largest sum
    of their two best scores stay, then the 8 best experts."""
    scores = torch.rand(tokens, GROUPS, experts // GROUPS, generator=generator)
    kept = scores.topk(2, dim=-1).values.sum(-1).topk(KEPT_GROUPS, dim=-1).indices
    allowed = torch.zeros(tokens, GROUPS, 1).scatter_(1, kept[:, :, None], 1.0)
    return (scores * allowed).flatten(1).topk(K, dim=-1).indices


@cache
def unique_places(places: int) -> float:
    """On how many of `places`, ranks or nodes that share the experts evenly, a token has experts: U of the rule above,
    from 200,000 tokens."""
    ids = route(200_000, torch.Generator().manual_seed(1))
    return torch.zeros(len(ids), places).scatter_(1, ids // (E // places), 1.0).sum(1).mean().item()


class CountBytes:
    """Bytes that this rank sends to others, of floating-point rows and of all else, and how many rows; those that cross
    to another node of `per_node` ranks apart."""

    NAMES = ("payload", "rows", "across nodes", "metadata")

    def __init__(self, per_node: int = 1) -> None:
        self.per_node = per_node
        self.exchange = dist.all_to_all_single
        dist.all_to_all_single = self
        self.clear()

    def clear(self) -> None:
        self.found = dict.fromkeys(self.NAMES, 0)

    def __call__(self, output, input, output_splits=None, input_splits=None, group=None, async_op=False):
        me, ranks = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
        splits = input_splits or [len(input) // len(ranks)] * len(ranks)
        each = input.element_size() * (input[0].numel() if len(input) else 0)
        for rank, count in zip(ranks, splits):
            if rank == me:
                continue
            if input.dim() == 2 and input.is_floating_point():
                self.found["payload"] += count * each
                self.found["rows"] += count
                self.found["across nodes"] += count * each * (rank // self.per_node != me // self.per_node)
            else:
                self.found["metadata"] += count * each
        return self.exchange(output, input, output_splits, input_splits, group, async_op)
