"""A plan as an op returns it: a list of tensors, and the sizes that the host must know of it.

Shape letters: T tokens of this rank, K top-k, E experts, e experts of one rank, R rows of the padded slabs.
"""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from titan_moe.moe import layout
from titan_moe.moe.contract import Hop, RowPlan
from titan_moe.moe.rows import CopyMap, RowMap

TOLD = 4
"""Where `pack` puts what it was told"""


class Sizes(NamedTuple):
    """What the host has to know about one hop: how many rows, and how many routing weights, come from and go to each
    rank."""

    rows: tuple[list[int], list[int]]
    copies: tuple[list[int], list[int]]


def read_sizes(host: Tensor, ranks: int, hops: int) -> tuple[list[Sizes], int]:
    """The sizes of each hop and R, from the int64 tensor [4 ranks hops + 1] on the CPU that they travel in."""
    *numbers, R = host.tolist()
    splits = [numbers[i : i + ranks] for i in range(0, len(numbers), ranks)]
    return [Sizes((splits[i], splits[i + 1]), (splits[i + 2], splits[i + 3])) for i in range(0, 4 * hops, 4)], R


def pack(own: layout.Copies, ids_TK: Tensor, padded_e: Tensor, told: Tensor, maps: list[RowMap | CopyMap]):
    """A plan as the list of tensors that an op may return: no two may share memory. `told` is the sizes on the host, of
    a plan with exact ones, or whether a fixed buffer overflowed, on the device."""
    kept_TK = ids_TK.new_empty(0, dtype=torch.bool) if own.kept_N is None else own.kept_N.view_as(ids_TK)
    dropped = (own.load_E - own.kept_E).sum()
    tensors = [own.load_E, padded_e, dropped, kept_TK, told, *(tensor for each in maps for tensor in each)]
    seen: set[int] = set()
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()._cdata
        tensors[i] = tensor.clone() if storage in seen else tensor.contiguous()
        seen.add(storage)
    return tensors


def unpack(tensors: list[Tensor], tokens: int, sizes: list[Sizes], empty_slots: bool = False) -> RowPlan:
    """The plan that `pack` took apart, with its sizes; without what it was told."""
    load_E, padded_e, dropped, kept_TK, _, *rest = tensors
    maps = [(RowMap(*rest[i : i + 3]), CopyMap(*rest[i + 3 : i + 5])) for i in range(0, len(rest), 5)]
    return RowPlan(
        load_E,
        padded_e,
        dropped,
        kept_TK if kept_TK.dim() == 2 else None,
        tokens,
        *maps[-1],
        [Hop(*each, *size, empty_slots) for each, size in zip(maps, sizes)],
    )


def unpack_exact(tensors: list[Tensor], tokens: int, ranks: int, hops: int, chunks: int = 1) -> RowPlan:
    """A plan with exact sizes, of so many hops for each chunk. They are on the host already: reading them is not
    another sync."""
    plan = unpack(tensors, tokens, read_sizes(tensors[TOLD], ranks, hops * chunks)[0])
    plan.chunks = chunks
    return plan


def refuse_fake(op: torch._ops.OpOverload) -> NoReturn:
    """The sizes of these plans depend on the routing, so there is nothing a fake kernel could return."""
    raise DynamicOutputShapeException(op)
