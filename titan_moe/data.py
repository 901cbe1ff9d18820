"""From sources to batches: packed, in one global order that no mesh changes, resumable at every step on any mesh.

The order is fixed by the data, the weights, `seed`, `seq_len` and the number of shards, and by nothing else:

1. Every source's pieces, in a seeded permutation, are dealt out to S logical shards, each to the one with the fewest
   bytes so far: shards are consumed alike, so only in equal ones does every document come up equally often.
2. A shard is an endless stream of samples; which source gives each is in `mixture.py`, how a source's documents become
   samples in `packing.py`.
3. Global sample g is sample g // S of shard g mod S.

Data-parallel rank r of R takes the samples g with g mod R = r. Its batches of B are the next B of them, so that R ranks
and A microbatches together consume the next R*A*B global samples in every optimizer step, whatever R, A and B are: the
loss of a step does not depend on the mesh. The shards of those g are s with s mod G = r mod G, G = gcd(R, S), so when R
divides S every shard is read by one rank; otherwise R / G ranks read the same shard and skip each other's samples.

    S = 4, R = 2, B = 2          rank 0: shards 0, 2          rank 1: shards 1, 3
    step 0: g = 0 1 2 3          0 and 2                      1 and 3
    step 1: g = 4 5 6 7          4 and 6                      5 and 7

Any M = S / G samples of a rank in a row are one of each of its shards, in an order that repeats. So W workers divide
the shards among them: each makes its shards' samples of a run of W*B, and the training process puts the parts in order.

A checkpoint holds `next_sample`, the first global sample that the training loop has not consumed (whatever workers have
prefetched), and where each source's stream of each shard stands. A stream that stands too early can skip forward, so
any rank of any mesh can go on from `next_sample` with any state that is not past it. These are plain tensors, one key
per shard and source, which torch.distributed.checkpoint hands to whoever asks for the key.

Shapes: B batch (of one rank), L sequence; S is the number of shards, not a dimension.
"""

import itertools
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_moe.config import Config
from titan_moe.config_check import microbatch_size
from titan_moe.mistakes import is_mistake
from titan_moe.mixture import Mixture, Shard
from titan_moe.packing import State
from titan_moe.sources.listing import Source
from titan_moe.sources.piece import hashed_bytes
from titan_moe.sources.record import Listing
from titan_moe.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class PackedDataset(IterableDataset):
    """One rank's share of the global order. Every iteration starts from `start_sample` and `start_states`."""

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        seq_len: int,
        num_shards: int,
        seed: int,
        dp_rank: int,
        dp_degree: int,
        local_batch_size: int,
    ):
        self.sources, self.seq_len = sources, seq_len
        self.dp_rank, self.dp_degree, self.local_batch_size = dp_rank, dp_degree, local_batch_size
        self.mixture = Mixture(sources, tokenizer, num_shards, seed)
        self.num_shards = self.mixture.num_shards
        common = math.gcd(dp_degree, self.num_shards)
        self.shards = range(dp_rank % common, self.num_shards, common)
        self.start_sample = 0
        self.start_states = {s: [State()] * len(sources) for s in self.shards}
        # What the numbers of a state refer to: how documents become samples, and, one by one, the sources.
        settings = (seq_len, seed, self.num_shards, *(source.weight for source in sources if len(sources) > 1))
        self.identity = {"settings": settings, "tokenizer": tokenizer.identity} | {
            f"source.{i}": source.fingerprint for i, source in enumerate(sources)
        }

    def samples_from(self, first: int, count: int) -> list[int]:
        """The global samples of this rank from its own number `first` on, counted from `start_sample`."""
        R = self.dp_degree
        start = self.start_sample + (self.dp_rank - self.start_sample) % R  # the next that is r mod R
        return [start + (first + i) * R for i in range(count)]

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...] | str]:
        """The parts of all runs; from a worker, a user's mistake comes as a value, its message: torch would raise it in
        code of its own with the worker's traceback for a message, and nobody could tell whose fault it was."""
        info = get_worker_info()
        if info is None:
            yield from self._parts(0, 1)
            return
        try:
            yield from self._parts(info.id, info.num_workers)
        except ValueError as error:
            if not is_mistake(error):
                raise
            yield str(error)

    def _parts(self, worker: int, workers: int) -> Iterator[tuple[np.ndarray, ...]]:
        """(input_BL, positions_BL, labels_BL, states) of a batch; or, in a worker, of its part of a run. The states are
        those of a sample's shard right after that sample."""
        shards: dict[int, Shard] = {}
        for run in self.runs(workers):
            columns: list[list] = [[], [], [], []]
            for g in (g for g, owner in run if owner == worker):
                s = g % self.num_shards
                if s not in shards:
                    shards[s] = Shard(self.mixture, s, self.seq_len, self.start_states[s])
                sample = shards[s].sample(g // self.num_shards)
                for column, value in zip(columns, (*sample, shards[s].states), strict=True):
                    column.append(value)
            yield tuple(np.array(column) for column in columns)

    def runs(self, workers: int) -> Iterator[list[tuple[int, int]]]:
        """This rank's samples, in runs that the workers make together: (global sample, worker). One worker makes all
        samples of a shard."""
        M, B = len(self.shards), self.local_batch_size
        size = min(workers * B, M) if workers > 1 else B
        period = M if workers > 1 else B
        for first in itertools.count(0, period):
            for begin in range(0, period, size):
                samples = self.samples_from(first + begin, min(size, period - begin))
                yield [(g, (begin + i) % workers) for i, g in enumerate(samples)]


class PackedDataLoader(StatefulDataLoader):
    """Endless batches ({"input": int64 [B, L], "positions": int64 [B, L]}, labels int64 [B, L]) of one rank.

    Its state is where the consumer of the batches stands. StatefulDataLoader's own state, pickled ones of all workers,
    is not used: only as many workers on as many ranks can load it. `iter()` starts from the state last loaded, or from
    the beginning; only the newest iterator may be used.
    """

    def __init__(self, dataset: PackedDataset, **kwargs):
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 calls it
        # A generator of its own: the default one would lose a number to every iter(), and training would see it.
        super().__init__(dataset, batch_size=None, generator=torch.Generator(), snapshot_every_n_steps=None, **kwargs)
        self._data, self._iteration, self._skipped_shown = dataset, 0, 0
        self._counts_skipped = any(source.on_error == "skip" for source in dataset.sources)
        self._rewind()

    def _rewind(self) -> None:
        self._next_sample, self._iteration = self._data.start_sample, self._iteration + 1
        self._states = {s: torch.tensor(states) for s, states in self._data.start_states.items()}

    def __iter__(self) -> Iterator[Batch]:  # pyrefly: ignore[bad-override]  # torch's own class is promised there
        self._rewind()
        return self._batches(self._get_iterator(), self._iteration)

    def _batches(self, iterator: Iterator, iteration: int) -> Iterator[Batch]:
        # `iterator` lives here alone: when the consumer drops this generator, its workers end.
        data, rows = self._data, self._rows(iterator)
        B, R, pin = data.local_batch_size, data.dp_degree, torch.cuda.is_available()
        for first in itertools.count(0, B):
            input_BL, positions_BL, labels_BL, states = zip(*itertools.islice(rows, B), strict=True)
            assert iteration == self._iteration, "a newer iter() or load_state_dict() took the place of this iterator"
            for g, state in zip(data.samples_from(first, B), states, strict=True):
                self._states[g % data.num_shards] = state
            self._next_sample = data.start_sample + (first + B) * R
            self._show_skipped()
            tensors = [torch.stack(tensor) for tensor in (input_BL, positions_BL, labels_BL)]
            input_BL, positions_BL, labels_BL = (tensor.pin_memory() if pin else tensor for tensor in tensors)
            yield {"input": input_BL, "positions": positions_BL}, labels_BL

    def _rows(self, iterator: Iterator) -> Iterator[tuple[torch.Tensor, ...]]:
        """One sample at a time, in order: (input_L, positions_L, labels_L, states)."""
        workers = max(self.num_workers, 1)
        for run in self._data.runs(workers):
            parts = []
            for _ in range(workers):
                part = self._from_worker(iterator)
                if isinstance(part, str):
                    raise ValueError(part)
                parts.append(zip(*part, strict=True))
            for _, worker in run:
                yield next(parts[worker])

    def _from_worker(self, iterator: Iterator) -> Any:
        try:
            return next(iterator)
        except (ConnectionError, EOFError) as error:
            if self.num_workers == 0:
                raise
            # torch names a worker that was killed, but not one that was while it handed over a batch.
            raise RuntimeError("A DataLoader worker exited unexpectedly: killed, or short of memory") from error

    @property
    def skipped(self) -> int:
        """Documents of this rank's shards that on_error = "skip" has left out, every epoch's."""
        return int(self._skipped_by_stream().sum())

    def _skipped_by_stream(self) -> torch.Tensor:
        """Of each stream of each source. Shards that take turns at one all hold its count, up to where each stands."""
        shards, states = torch.tensor([*self._states]), torch.stack([*self._states.values()])
        counts = [
            torch.zeros(len(dealt), dtype=torch.int64).scatter_reduce(0, shards % len(dealt), states[:, i, -1], "amax")
            for i, dealt in enumerate(self._data.mixture.pieces)
        ]
        return torch.cat(counts)

    def statistics(self, mesh: DeviceMesh | None, device: torch.device) -> dict[str, int]:
        """For the log (all ranks of the batch mesh participate): what on_error = "skip" left out on all of them."""
        if not self._counts_skipped:
            return {}
        counts = self._skipped_by_stream().to(device)
        if mesh is not None:
            dist.all_reduce(counts, dist.ReduceOp.MAX, mesh.get_group())  # ranks can read the same stream
        return {"skipped_documents": int(counts.sum())}

    def _show_skipped(self) -> None:
        if self._counts_skipped and (skipped := self.skipped) >= max(2 * self._skipped_shown, 1):
            self._skipped_shown = skipped
            logger.warning(f"Broken documents left out so far on data-parallel rank {self._data.dp_rank}: {skipped:,}")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Fresh tensors, which DCP may write into; together the ranks have the shards 0 to S - 1 on any mesh."""
        states = {f"shard.{s}.{i}": state.clone() for s, all_ in self._states.items() for i, state in enumerate(all_)}
        return {**states, "next_sample": torch.tensor(self._next_sample), **self._identity()}

    def _identity(self) -> dict[str, torch.Tensor]:
        hashes = {key: hashed_bytes(8, key, value) for key, value in self._data.identity.items()}
        return {key: torch.tensor(int.from_bytes(text, "little", signed=True)) for key, text in hashes.items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        data, sources = self._data, self._data.sources
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise ValueError(f"The checkpoint has no {', '.join(missing)}: it does not hold the position of this data")
        names = {f"source.{i}": f'the documents of "{source.dataset}" (its files, options, or [validation])'
                 for i, source in enumerate(sources)}  # fmt: skip
        names["settings"] = "training.seq_len, the number of shards or sources, their weights or debug.seed"
        names["tokenizer"] = "the tokenizer (model.hf_assets_path)"
        changed = [names[key] for key, now in self._identity().items() if not torch.equal(state_dict[key], now)]
        if changed:
            raise ValueError(
                f"The checkpoint has a position in other data, which means nothing in this: {'; '.join(changed)} "
                "changed. Put that back as it was, or start a new run from the weights: checkpoint.initial_load_path "
                "with checkpoint.initial_load_model_only = true"
            )
        data.start_sample = int(state_dict["next_sample"])
        data.start_states = {
            s: [State(*state_dict[f"shard.{s}.{i}"].tolist()) for i in range(len(sources))] for s in data.shards
        }
        self._rewind()


def build_dataloader(
    config: Config,
    *,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    dp_rank: int,
    dp_degree: int,
    local_batch_size: int,
    seed: int,
) -> PackedDataLoader:
    seq_len, loading = config.training.seq_len, config.training.dataloader
    dataset = PackedDataset(sources, tokenizer, seq_len, loading.num_shards, seed, dp_rank, dp_degree, local_batch_size)
    R, S, M = dp_degree, dataset.num_shards, len(dataset.shards)
    readers = R // math.gcd(R, S)
    if readers > 1 and dp_rank == 0:
        logger.warning(
            f"{sum(len(source.pieces) for source in sources)} pieces in {S} shards for {R} data-parallel ranks: each "
            f"shard is read by {R} / gcd({R}, {S}) = {readers} ranks, which all tokenize all of it and skip each "
            f"other's samples. A training.dataloader.num_shards that is a multiple of {R}, with as many pieces, "
            "avoids it in a new run"
        )
    for source, dealt in zip(sources, dataset.mixture.pieces, strict=True):
        if len(dealt) < S and dp_rank == 0:
            logger.warning(
                f"{source.dataset} has {len(source.pieces)} pieces for {S} shards: {S} / {len(dealt)} of them take "
                "turns at each of its streams and read all of it; fewer training.dataloader.num_shards would read less"
            )
    workers = min(loading.num_workers, M)
    if workers < loading.num_workers and dp_rank == 0:
        logger.warning(
            f"training.dataloader.num_workers = {loading.num_workers}: only {workers} can share the {S} / gcd({R}, {S})"
            f" = {M} shards of a rank; with more training.dataloader.num_shards, more could in a new run"
        )
    return PackedDataLoader(dataset, num_workers=workers, prefetch_factor=loading.prefetch_factor if workers else None)


def build_dataloaders(
    config: Config, listing: Listing, tokenizer: Tokenizer, dp_rank: int, dp_degree: int
) -> tuple[PackedDataLoader, dict[str, PackedDataLoader]]:
    """The loaders of [training] and, where enabled, [validation]: by the names of its sets, "" for held-out documents
    or validation.dataset."""
    batch = microbatch_size(config)
    build = partial(
        build_dataloader, config, tokenizer=tokenizer, dp_rank=dp_rank, dp_degree=dp_degree, local_batch_size=batch
    )
    for source in listing.training:
        size = f"{sum(file.size for file in source.files):,} bytes" if source.files else source.revision
        logger.info(
            f"Data: {source.dataset} ({source.kind}, {size}, {len(source.pieces)} pieces), weight {source.weight}"
        )
    training = build(sources=listing.training, seed=config.debug.seed)
    sets = {} if listing.validation is None else {"": listing.validation}
    sets |= {name: [source] for name, source in listing.validation_sets.items()}
    # The same samples in every run.
    return training, {name: build(sources=sources, seed=0) for name, sources in sets.items()}
