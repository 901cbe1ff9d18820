"""Where every routed copy goes: counts, slabs, capacity and unique destinations, as tensor arithmetic.

A router gives each of T tokens K expert ids, so there are N = T*K *copies*, numbered token-major: copy n belongs to
token n // K. Everything below answers questions about those copies:

- How many does each expert get (`expert_counts`), and how long is its slab of rows once rounded up to the alignment
  that its GEMM wants (`round_up`)? The running sums (`exclusive_cumsum`) are where the slabs start.
- In which row of the slabs does a copy land? `slab_rows` for copies that arrive in blocks, one for each (source rank,
  expert).
- Which copies survive when an expert takes only so many (`sort_copies`, `copies_per_expert`)?
- Which ranks does a token go to at all (`destinations`)? A token with five experts on one rank needs to travel there
  once.

There is no Python loop over tokens or experts, and nothing that asks the device for a size: no `.item()`, no boolean
indexing, no `repeat_interleave` or `nonzero` of unknown length. Where a size must be known it is an argument. So a
caller whose shapes are static stays free of host syncs, and one that has made its single host sync needs no other.
Indices are int64 throughout: T*K*D passes 2^31 at ordinary sizes.

Shape letters: T tokens of this rank, K top-k, N = T*K copies, E experts, e experts of one rank, S source ranks,
M copies received, R rows of the padded slabs.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

GROWTH, GROWTH_BOUND = 1.5, 4.0
"""How a buffer grows when it overflowed: each time by this factor, in all to this multiple of the configured one"""


def round_up(n, multiple: int):
    """`n`, an int or an integer tensor, rounded up to a multiple of `multiple`."""
    return (n + multiple - 1) // multiple * multiple


def exclusive_cumsum(counts: Tensor) -> Tensor:
    """Where each block starts when blocks of these sizes follow one another; int64, the shape of `counts` (1-D)."""
    return torch.cumsum(counts, dim=0) - counts


def expert_counts(ids_N: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in int64 `ids_N`: int64 [E]. (`bincount` would sync to learn its length.)"""
    counts_E = ids_N.new_zeros(num_experts)
    return counts_E.scatter_add_(0, ids_N, torch.ones_like(ids_N))


def worst_rows(tokens: int, top_k: int, local_experts: int, alignment: int, ranks: int = 1) -> int:
    """The most padded rows that `ranks` ranks of `tokens` tokens each can send to one rank.

    A token has K different experts, so at most min(K, e) of its copies meet on a rank, and an expert gets a token once.
    Only experts that get something are padded, each by less than one alignment.
    """
    copies = ranks * tokens * min(top_k, local_experts)
    one_slab = round_up(ranks * tokens, alignment)
    return min(local_experts * one_slab, round_up(copies + (alignment - 1) * min(local_experts, copies), alignment))


def static_rows(factor: float | None, tokens: int, top_k: int, local_experts: int, alignment: int, ranks: int) -> int:
    """R of buffers that do not follow the routing: `factor` times a rank's mean of T K rows, padded slab by slab, or
    the worst case if that is less. None is the worst case."""
    worst = worst_rows(tokens, top_k, local_experts, alignment, ranks)
    if factor is None:
        return worst
    slab = round_up(math.ceil(tokens * top_k / local_experts), alignment)
    return min(round_up(times(factor, local_experts * slab), alignment), worst)


def next_factor(configured: float, factor: float) -> float:
    """The factor after `factor` when buffers of it have overflowed: 1.5 times as large, and at most 4 times the
    configured one. Raises ValueError when that has overflowed too."""
    bound = GROWTH_BOUND * configured
    if factor >= bound:
        growths = math.ceil(math.log(GROWTH_BOUND, GROWTH))
        raise ValueError(
            f"moe.recv_buffer = {configured}: buffers of {factor:g} times the mean overflowed too, after "
            f"{growths} growths, and {GROWTH_BOUND:g} x {configured} is the bound: set moe.recv_buffer to more than "
            f'{factor:g}, or to "worst_case", which holds any routing; or balance the experts (moe.load_balance_coeff)'
        )
    return min(factor * GROWTH, bound)


def copies_per_expert(capacity_factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """C = ceil(f T K / E), the copies that one rank may send to one expert. The factor counts as the decimal it was
    written as: in binary 1.1 * 400 * 8 / 64 is a little more than 55, and its ceiling 56."""
    return times(capacity_factor, Fraction(tokens * top_k, num_experts))


def times(factor: float, number: Fraction | int) -> int:
    """The factor, as the decimal it was written as, times a number, rounded up."""
    return math.ceil(Fraction(str(factor)) * number)


class Copies(NamedTuple):
    """This rank's copies, sorted by expert.

    load_E: int64 [E], copies the router gave each expert, dropped ones included.
    kept_E: int64 [E], copies that are sent; the same tensor when nothing can be dropped.
    order_N: int64 [N], the copies by (expert, token); dropped ones come last.
    kept_N: bool [N], or None when nothing can be dropped.
    """

    load_E: Tensor
    kept_E: Tensor
    order_N: Tensor
    kept_N: Tensor | None


def sort_copies(ids_TK: Tensor, num_experts: int, capacity: int | None, weights_TK: Tensor | None = None) -> Copies:
    """Sort this rank's copies by expert and drop those beyond `capacity` of an expert.

    With `weights_TK` the copies of lowest weight are dropped, among equal weights the later tokens'; without, the
    copies of the last tokens.
    """
    ids_N = ids_TK.reshape(-1)
    load_E = expert_counts(ids_N, num_experts)
    if capacity is None:
        return Copies(load_E, load_E, torch.argsort(ids_N, stable=True), None)
    if weights_TK is None:
        order_N = torch.argsort(ids_N, stable=True)
    else:  # two stable sorts: by weight, then by expert
        order_N = torch.argsort(weights_TK.reshape(-1), descending=True, stable=True)
        order_N = order_N[torch.argsort(ids_N[order_N], stable=True)]
    place_N = torch.arange(ids_N.shape[0], device=ids_N.device) - exclusive_cumsum(load_E)[ids_N[order_N]]
    kept_N = torch.empty_like(ids_N, dtype=torch.bool).scatter_(0, order_N, place_N < capacity)
    return _sort_kept(ids_N, load_E, kept_N)


def _sort_kept(ids_N: Tensor, load_E: Tensor, kept_N: Tensor) -> Copies:
    # A dropped copy goes to an expert beyond the last one, so that it sorts behind all that are kept.
    E = load_E.shape[0]
    expert_N = torch.where(kept_N, ids_N, E)
    return Copies(load_E, expert_counts(expert_N, E + 1)[:E], torch.argsort(expert_N, stable=True), kept_N)


def chunk_tokens(tokens: int, chunks: int) -> list[int]:
    """Tokens of each chunk, as many as `Tensor.tensor_split` gives it."""
    return [tokens // chunks + (i < tokens % chunks) for i in range(chunks)]


def split_copies(own: Copies, ids: Sequence[Tensor]) -> list[Copies]:
    """`own` of each of the parts that `ids_TK` has been split into. What is dropped was decided for all of them."""
    E = own.load_E.shape[0]
    if own.kept_N is None:
        return [sort_copies(part_TK, E, None) for part_TK in ids]
    parts = [part_TK.reshape(-1) for part_TK in ids]
    kept = own.kept_N.split([part_N.shape[0] for part_N in parts])
    return [_sort_kept(part_N, expert_counts(part_N, E), kept_N) for part_N, kept_N in zip(parts, kept)]


def slab_rows(counts_Se: Tensor, start_e: Tensor, copies: int) -> Tensor:
    """The slab row of each received copy, int64 [M].

    The copies arrived by (source, expert, token), `counts_Se` of them in each block and `copies` = M in all; they are
    laid down by (expert, source, token), the slab of expert e from row `start_e[e]` on. All int64.
    """
    counts_B = counts_Se.reshape(-1)
    before_Se = torch.cumsum(counts_Se, dim=0) - counts_Se  # rows of the same expert from earlier sources
    shift_B = (start_e + before_Se).reshape(-1) - exclusive_cumsum(counts_B)
    arrival_M = torch.arange(copies, device=counts_Se.device)
    return arrival_M + torch.repeat_interleave(shift_B, counts_B, output_size=copies)


def destinations(place_TK: Tensor, places: int, kept_N: Tensor | None = None) -> Tensor:
    """Whether any (kept) copy of a token goes to a place: bool [T, places]. `place_TK` says where each copy goes: its
    rank, or its node. Row sums are the unique destinations of a token."""
    if kept_N is not None:  # dropped copies go to a place that is cut off again
        place_TK = torch.where(kept_N.view_as(place_TK), place_TK, places)
    goes_TP = place_TK.new_zeros((place_TK.shape[0], places + 1), dtype=torch.bool)
    return goes_TP.scatter_(1, place_TK, True)[:, :places]
