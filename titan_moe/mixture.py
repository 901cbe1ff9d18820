"""Which source each sample of a shard comes from, and which pieces each shard has.

Weights are shares of the tokens, which is to say of the samples: all have L. A shard takes its samples in blocks of N.
In block b of shard s, N points (j + (o + 1/2) / S) / N, j < N, o = (s + b) mod S, fall into the sources' intervals of
[0, 1), and each source gives as many samples as points fell into its own; only their order in the block is drawn anew,
from a hash. One block of all S shards, and S blocks of one shard, have S x N equally spaced points, so over so many
samples the mixture is as the weights say, to one sample; and how many samples of a source come before sample k of a
shard is a matter of arithmetic: there is nothing to store, and any rank can begin anywhere.

A source is dealt to as many shards as it has pieces for: the largest divisor S_i of S that leaves none without a piece.
Where S_i < S, S / S_i logical shards take turns at the samples of one.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import numpy as np

from titan_moe.mixture_check import block_size
from titan_moe.packing import Encoder, Sample, ShardStream, State, permutation
from titan_moe.sources.listing import Source
from titan_moe.sources.piece import Piece
from titan_moe.tokenizer import Tokenizer


def count_shards(num_shards: int, num_pieces: int) -> int:
    """S: `num_shards`, or with fewer pieces the largest power of two that leaves no shard without a piece."""
    assert num_shards > 0 and num_pieces > 0
    return num_shards if num_pieces >= num_shards else 1 << (num_pieces.bit_length() - 1)


def shards_of_source(num_shards: int, num_pieces: int) -> int:
    """S_i: the largest divisor of `num_shards` that is at most the number of pieces."""
    return next(d for d in range(min(num_shards, num_pieces), 0, -1) if num_shards % d == 0)


def deal(pieces: Sequence[Piece], num_shards: int, seed: object) -> list[list[Piece]]:
    """The pieces of each shard: in a seeded permutation, each to the shard with the fewest bytes so far."""
    shards: list[list[Piece]] = [[] for _ in range(num_shards)]
    lightest = [(0, s) for s in range(num_shards)]  # a heap of (bytes, shard)
    for i in permutation(len(pieces), "deal", seed):
        size, s = lightest[0]
        heapq.heapreplace(lightest, (size + pieces[i].size, s))
        shards[s].append(pieces[i])
    return shards


class Schedule:
    """The mixture of one shard: `place(k)` is (source, how many samples of it came before) for the shard's sample k."""

    def __init__(self, weights: Sequence[float], shard: int, num_shards: int, seed: object) -> None:
        self.shard, self.seed = shard, seed
        shares = [Fraction(weight) for weight in weights]  # exact, so that no machine rounds otherwise
        self.block_size = block_size(weights)
        points = num_shards * self.block_size
        # Point t is at (t + 1/2) / points; a source has those below the end of its interval, and not below its start.
        self._ends = [ceil(sum(shares[: i + 1]) / sum(shares) * points - Fraction(1, 2)) for i in range(len(shares))]
        # For each of S blocks in a row, how many of each source's samples come before it; and in all S.
        offsets = (shard + np.arange(num_shards))[:, None] % num_shards
        below = -((offsets - np.array([0, *self._ends])) // num_shards)  # points t < end with t mod S = offset
        self._before = np.zeros((num_shards + 1, len(shares)), np.int64)
        self._before[1:] = np.cumsum(np.diff(below, axis=1), axis=0)
        self._block, self._order = -1, np.empty(0, np.int64)  # the newest block, and its sources in order

    def place(self, k: int) -> tuple[int, int]:
        if len(self._ends) == 1:
            return 0, k
        block, j = divmod(k, self.block_size)
        cycle, turn = divmod(block, len(self._before) - 1)
        if block != self._block:
            self._block = block
            points = np.arange(self.block_size) * (len(self._before) - 1) + (self.shard + turn) % (
                len(self._before) - 1
            )
            sources = np.searchsorted(self._ends, points, side="right")
            self._order = sources[permutation(self.block_size, "mixture", self.seed, self.shard, block)]
        source = int(self._order[j])
        before = cycle * self._before[-1, source] + self._before[turn, source]
        return source, int(before) + int((self._order[:j] == source).sum())


class Mixture:
    """What all shards have in common: the sources, dealt out."""

    def __init__(self, sources: Sequence[Source], tokenizer: Tokenizer, num_shards: int, seed: int) -> None:
        self.seed, self.weights = seed, [source.weight for source in sources]
        self.num_shards = max(count_shards(num_shards, len(source.pieces)) for source in sources)
        self.encoders = [Encoder(source, tokenizer) for source in sources]
        self.seeds = [seed if i == 0 else f"{seed}.{i}" for i in range(len(sources))]  # alone, as in a mixture of one
        self.pieces = [
            deal(source.pieces, shards_of_source(self.num_shards, len(source.pieces)), source_seed)
            for source, source_seed in zip(sources, self.seeds, strict=True)
        ]


class Shard:
    """One logical shard: a stream of every source, mixed."""

    def __init__(self, mixture: Mixture, shard: int, seq_len: int, states: Sequence[State]) -> None:
        self.schedule = Schedule(mixture.weights, shard, mixture.num_shards, mixture.seed)
        self.streams, self.turns = [], []
        for dealt, encoder, seed, state in zip(mixture.pieces, mixture.encoders, mixture.seeds, states, strict=True):
            turn, own = divmod(shard, len(dealt))
            self.streams.append(ShardStream(dealt[own], encoder, seq_len, seed, own, state))
            self.turns.append((mixture.num_shards // len(dealt), turn))

    def sample(self, k: int) -> Sample:
        i, n = self.schedule.place(k)
        step, turn = self.turns[i]
        return self.streams[i].sample(n * step + turn)

    @property
    def states(self) -> list[State]:
        return [stream.state for stream in self.streams]
