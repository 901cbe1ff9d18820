"""From documents to batches: packed, in one global order that no mesh changes, resumable at every step on any mesh.

The order is fixed by the data, `seed`, `seq_len` and the number of shards, and by nothing else:

1. The documents, in a seeded permutation, are dealt out to S logical shards, each to the one with the fewest bytes so
   far: shards are consumed alike, so only in equal ones does every document come up equally often.
2. A shard is an endless stream of tokens: all its documents, tokenized one after the other in an order drawn anew for
   every epoch, then the next epoch's. Its sample n has the L tokens from nL on as inputs, so within an epoch every
   token is an input exactly once; no padding, nothing dropped. The label of a token is the one after it, or
   IGNORE_INDEX where that would be the first token of another document. `positions` count from 0 at the start of
   every document and of every sample: attention cannot see what an earlier sample had of a document that was cut.
3. Global sample g is sample g // S of shard g mod S.

Data-parallel rank r of R takes the samples g with g mod R = r. Its batches of B are the next B of them, so that R ranks
and A microbatches together consume the next R*A*B global samples in every optimizer step, whatever R, A and B are: the
loss of a step does not depend on the mesh. The shards of those g are s with s mod G = r mod G, G = gcd(R, S), so when R
divides S every shard is read by one rank; otherwise R / G ranks read the same shard and skip each other's samples.

    S = 4, R = 2, B = 2          rank 0: shards 0, 2          rank 1: shards 1, 3
    step 0: g = 0 1 2 3          0 and 2                      1 and 3
    step 1: g = 4 5 6 7          4 and 6                      5 and 7

Skipping builds no samples but has to tokenize, because nothing else tells how long a document is. Workers take turns at
whole batches, so each goes through all shards of its rank: they overlap reading with training, they do not divide it.

A checkpoint holds `next_sample`, the first global sample that the training loop has not consumed (whatever workers have
prefetched), and where the stream of each shard stands. A stream that stands too early can skip forward, so any rank of
any mesh can go on from `next_sample` with any state that is not past it. These are plain tensors, one key per shard,
which torch.distributed.checkpoint hands to whoever asks for the key.

Shapes: B batch (of one rank), L sequence; S is the number of shards, not a dimension.
"""

import heapq
import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_moe.config import Config
from titan_moe.config_check import microbatch_size
from titan_moe.sources import Document, hashed_bytes, list_both
from titan_moe.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100  # the label that no loss is computed for

State = tuple[int, int, int, int]  # of a stream: samples done, epoch, document in the epoch's order, token in it
START: State = (0, 0, 0, 0)
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def permutation(count: int, *key: object) -> np.ndarray:
    """An order of `count` things drawn from a hash of the key. NumPy's own shuffle may change with its version."""
    return np.frombuffer(hashed_bytes(8 * count, *key), dtype="<u8").argsort(kind="stable")


def count_shards(num_shards: int, num_documents: int) -> int:
    """S: `num_shards`, or with fewer documents the largest power of two that leaves no shard without a document."""
    assert num_shards > 0 and num_documents > 0
    return num_shards if num_documents >= num_shards else 1 << (num_documents.bit_length() - 1)


def deal(documents: list[Document], num_shards: int, seed: int) -> list[list[Document]]:
    """The documents of each shard, balanced by bytes."""
    shards: list[list[Document]] = [[] for _ in range(num_shards)]
    lightest = [(0, s) for s in range(num_shards)]  # a heap of (bytes, shard)
    for i in permutation(len(documents), "deal", seed):
        size, s = lightest[0]
        heapq.heapreplace(lightest, (size + documents[i].end - documents[i].start, s))
        shards[s].append(documents[i])
    return shards


class ShardStream:
    """The samples of one shard, in order; it holds the tokens of one document at a time."""

    def __init__(
        self, documents: list[Document], tokenizer: Tokenizer, seq_len: int, seed: int, shard: int, state: State = START
    ):
        self.documents, self.tokenizer, self.seq_len, self.seed, self.shard = documents, tokenizer, seq_len, seed, shard
        self.samples_done, self.epoch, self.index, self.offset = state
        self._order: np.ndarray | None = None  # of the documents in this epoch
        self._tokens: np.ndarray | None = None  # of the document that the stream stands in
        self._arange_L = np.arange(seq_len)

    @property
    def state(self) -> State:
        return self.samples_done, self.epoch, self.index, self.offset

    def sample(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(input_L, positions_L, labels_L) of the shard's sample n, skipping what comes before it."""
        assert n >= self.samples_done, f"shard {self.shard} stands at sample {self.samples_done}, cannot go back to {n}"
        for _ in self._walk((n - self.samples_done) * self.seq_len):
            pass
        input_L, positions_L = np.empty(self.seq_len, np.int64), np.empty(self.seq_len, np.int64)
        labels_L = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        filled = 0
        for tokens, start, end in self._walk(self.seq_len):
            length = end - start
            following = tokens[start + 1 : end + 1]  # one fewer than `length` where the document ends
            input_L[filled : filled + length] = tokens[start:end]
            positions_L[filled : filled + length] = self._arange_L[:length]
            labels_L[filled : filled + following.size] = following
            filled += length
        self.samples_done = n + 1
        return input_L, positions_L, labels_L

    def _walk(self, count: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """Move on by `count` tokens; yields (all tokens of a document, start, end) for every document on the way."""
        while count > 0:
            tokens = self._open_document()
            start, end = self.offset, min(self.offset + count, tokens.size)
            yield tokens, start, end
            count -= end - start
            self.offset = end
            if end == tokens.size:  # stand at the start of the next document, without opening it
                self.offset, self._tokens, self.index = 0, None, self.index + 1
            if self.index == len(self.documents):
                self.index, self._order, self.epoch = 0, None, self.epoch + 1

    def _open_document(self) -> np.ndarray:
        if self._tokens is None:
            if self._order is None:
                self._order = permutation(len(self.documents), "epoch", self.seed, self.shard, self.epoch)
            document = self.documents[self._order[self.index]]
            # int32 halves what the open documents of all shards take: up to 4 MiB each.
            self._tokens = self.tokenizer.encode_document(document.read()).astype(np.int32)
            if self.offset >= self._tokens.size:
                raise ValueError(
                    f"{document.path or document.name} has {self._tokens.size} tokens, but the checkpoint stopped at "
                    f"its token {self.offset}: it was changed since. Put the old one back, or start a new run"
                )
        return self._tokens


class PackedDataset(IterableDataset):
    """One rank's share of the global order. Every iteration starts from `start_sample` and `start_states`."""

    def __init__(
        self,
        documents: list[Document],
        tokenizer: Tokenizer,
        seq_len: int,
        num_shards: int,
        seed: int,
        dp_rank: int,
        dp_degree: int,
        local_batch_size: int,
    ):
        self.tokenizer, self.seq_len, self.seed = tokenizer, seq_len, seed
        self.dp_rank, self.dp_degree, self.local_batch_size = dp_rank, dp_degree, local_batch_size
        self.num_shards = count_shards(num_shards, len(documents))
        common = math.gcd(dp_degree, self.num_shards)
        self.shards = range(dp_rank % common, self.num_shards, common)
        dealt = deal(documents, self.num_shards, seed)
        self.documents = {s: dealt[s] for s in self.shards}
        self.start_sample = 0
        self.start_states = dict.fromkeys(self.shards, START)
        # What the numbers of a state refer to: the documents, and how they are cut into samples.
        listing = "\n".join(f"{d.name}\0{d.start}\0{d.end}" for d in documents)
        hashes = hashed_bytes(8, listing), hashed_bytes(8, seq_len, seed, self.num_shards, tokenizer.identity)
        self.fingerprint = tuple(int.from_bytes(text, "little", signed=True) for text in hashes)

    def samples_of_batch(self, k: int) -> list[int]:
        """The global samples of this rank's batch number k, counted from `start_sample`."""
        R, B = self.dp_degree, self.local_batch_size
        first = self.start_sample + (self.dp_rank - self.start_sample) % R  # the next that is r mod R
        return [first + (k * B + i) * R for i in range(B)]

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]]:
        """(inputs, labels_BL, states_B4): the last has the state of each sample's shard right after that sample."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        streams = {
            s: ShardStream(self.documents[s], self.tokenizer, self.seq_len, self.seed, s, state)
            for s, state in self.start_states.items()
        }
        for k in itertools.count(worker, workers):  # DataLoader asks its workers for one batch each, in turn
            samples, states = [], []
            for g in self.samples_of_batch(k):
                stream = streams[g % self.num_shards]
                samples.append(stream.sample(g // self.num_shards))
                states.append(stream.state)
            input_BL, positions_BL, labels_BL = (np.stack(rows) for rows in zip(*samples, strict=True))
            yield {"input": input_BL, "positions": positions_BL}, labels_BL, np.array(states)


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
        self._data, self._iteration = dataset, 0
        self._rewind()

    def _rewind(self) -> None:
        self._next_sample, self._states = self._data.start_sample, dict(self._data.start_states)
        self._iteration += 1

    def __iter__(self) -> Iterator[Batch]:  # pyrefly: ignore[bad-override]  # torch's own class is promised there
        self._rewind()
        return self._batches(self._get_iterator(), self._iteration)

    def _batches(self, iterator: Iterator[list], iteration: int) -> Iterator[Batch]:
        # `iterator` lives here alone: when the consumer drops this generator, its workers end.
        data = self._data
        for k, (inputs, labels_BL, states_B4) in enumerate(iterator):
            assert iteration == self._iteration, "a newer iter() or load_state_dict() took the place of this iterator"
            for g, state in zip(data.samples_of_batch(k), states_B4.tolist(), strict=True):
                self._states[g % data.num_shards] = tuple(state)
            self._next_sample = data.start_sample + (k + 1) * data.local_batch_size * data.dp_degree
            yield inputs, labels_BL

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Fresh tensors, which DCP may write into; together the ranks have the shards 0 to S - 1 on any mesh."""
        state = {f"shard.{s}": torch.tensor(shard_state) for s, shard_state in self._states.items()}
        state["next_sample"] = torch.tensor(self._next_sample)
        state["fingerprint"] = torch.tensor(self._data.fingerprint)
        return state

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        data = self._data
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise ValueError(f"The checkpoint has no {', '.join(missing)}: it does not hold the position of this data")
        same_documents, same_settings = (state_dict["fingerprint"] == torch.tensor(data.fingerprint)).tolist()
        if not (same_documents and same_settings):
            changed = [] if same_documents else ["the documents (training.dataset, its files, or [validation])"]
            changed += [] if same_settings else ["training.seq_len, the number of shards, debug.seed or the tokenizer"]
            raise ValueError(
                f"The checkpoint has a position in other data, which means nothing in this: {' and '.join(changed)} "
                "changed. Put that back as it was, or start a new run from the weights: checkpoint.initial_load_path "
                "with checkpoint.initial_load_model_only = true"
            )
        data.start_sample = int(state_dict["next_sample"])
        data.start_states = {s: tuple(state_dict[f"shard.{s}"].tolist()) for s in data.shards}
        self._rewind()


def build_dataloader(
    config: Config,
    *,
    documents: list[Document],
    tokenizer: Tokenizer,
    dp_rank: int,
    dp_degree: int,
    local_batch_size: int,
    seed: int,
) -> PackedDataLoader:
    seq_len, loading = config.training.seq_len, config.training.dataloader
    dataset = PackedDataset(
        documents, tokenizer, seq_len, loading.num_shards, seed, dp_rank, dp_degree, local_batch_size
    )
    R, S = dp_degree, dataset.num_shards
    readers = R // math.gcd(R, S)
    if readers > 1 and dp_rank == 0:
        logger.warning(
            f"{len(documents)} documents in {S} shards for {R} data-parallel ranks: each shard is read by {R} / "
            f"gcd({R}, {S}) = {readers} ranks, which all tokenize all of it and skip each other's samples. A "
            f"training.dataloader.num_shards that is a multiple of {R}, with as many documents, avoids it in a new run"
        )
    return PackedDataLoader(
        dataset,
        num_workers=loading.num_workers,
        prefetch_factor=loading.prefetch_factor if loading.num_workers else None,
        pin_memory=torch.cuda.is_available(),
    )


def build_dataloaders(
    config: Config, tokenizer: Tokenizer, dp_rank: int, dp_degree: int
) -> tuple[PackedDataLoader, PackedDataLoader | None]:
    """The loaders of [training] and, where enabled, [validation]."""
    documents, held_out = list_both(config)
    batch = microbatch_size(config)
    build = partial(
        build_dataloader, config, tokenizer=tokenizer, dp_rank=dp_rank, dp_degree=dp_degree, local_batch_size=batch
    )
    training = build(documents=documents, seed=config.debug.seed)
    return training, None if held_out is None else build(documents=held_out, seed=0)  # the same samples in every run
