"""The fastest jobs of a space (space.py) that fit into memory, by branch and bound, without looking at most of it.

Nodes are taken in the order of the throughput that they can reach at best; what is left when that falls `BAND` below
the best job found is not looked at. On the way a node is dropped

    memory     when what it needs at least is more than there is;
    dominated  when a job that was found is at least as fast as it can get, and needs no more than it can go down to.

Neither can lose a job that is on the front of throughput and memory, because bounds hold for all below a node: a test
compares with every job of a small space. The search is one pass in one process, and the same each time. Imports no
torch.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from titan_moe.plan.space import LEVELS, Node, Space

BAND = 0.05
"""The front of throughput and memory goes down to so much less than the best: half of what a prediction may be off"""
EXACT = len(LEVELS) - 1
ROUNDING = 1e-9
"""A bound adds up the same terms in another order, and may come out so much below what it bounds"""


@dataclass(kw_only=True)
class Found:
    """What a search found."""

    front: list[Node]
    """Jobs that fit, of which none is faster and needs no more memory than another; fastest first"""
    nearest: Node | None = None
    """If none fits, the one that needs least memory (`least`)"""
    counts: Counter[str] = field(default_factory=Counter)
    """Nodes looked at by level, and dropped by reason"""


def search(space: Space, limit: float, band: float = BAND, known: Node | None = None) -> Found:
    """The front of the jobs that need at most `limit` bytes. `known`: a job of the space, which gives the search
    something to compare with from the start."""
    counts: Counter[str] = Counter()
    front: list[Node] = [known] if known is not None and known.memory <= limit else []
    ties, heap = count(), []

    def worth(rate: float, needs: float) -> bool:
        """Whether a node with these bounds may hold a job of the front."""
        rate *= 1 + ROUNDING
        if needs > limit:
            counts["memory"] += 1
        elif front and rate < (1 - band) * front[0].rate:
            counts["slow"] += 1
        elif any(point.rate >= rate and point.memory <= needs for point in front):
            counts["dominated"] += 1
        else:
            return True
        return False

    def push(nodes: Iterator[Node]) -> None:
        for node in nodes:
            counts[LEVELS[node.level]] += 1
            if worth(node.rate, node.memory):
                heapq.heappush(heap, (-node.rate, -node.level, next(ties), node))

    push(space.roots())
    while heap:
        node = heapq.heappop(heap)[-1]
        if not worth(node.rate, node.memory):
            continue
        if node.level < EXACT:
            push(space.children(node, worth))
        elif not any(p.rate >= node.rate and p.memory <= node.memory for p in front) and space.allowed(node):
            front = [p for p in front if not (node.rate >= p.rate and node.memory <= p.memory)] + [node]
            front.sort(key=lambda p: -p.rate)
    front = [point for point in front if point.rate >= (1 - band) * front[0].rate]
    return Found(front=front, counts=counts)


def _everything(rate: float, needs: float) -> bool:
    return True


def least(space: Space) -> Node | None:
    """The job that needs the least memory, the fastest of those; None if there is none at all."""
    ties, heap = count(), []

    def push(nodes: Iterator[Node]) -> None:
        for node in nodes:
            heapq.heappush(heap, (node.memory, -node.level, -node.rate, next(ties), node))

    push(space.roots())
    while heap:
        node = heapq.heappop(heap)[-1]
        if node.level < EXACT:
            push(space.children(node, _everything))
        elif space.allowed(node):
            return node
    return None


def every(space: Space) -> Iterator[Node]:
    """Every job of a space, without bounds: for tests."""
    stack = list(space.roots())
    while stack:
        node = stack.pop()
        if node.level < EXACT:
            stack += space.children(node, _everything)
        elif space.allowed(node):
            yield node
