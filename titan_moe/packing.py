"""Documents to samples: one source's share of one shard, as an endless stream that can stop and go on anywhere.

All documents of the shard's pieces follow one another, tokenized, the pieces in an order drawn anew for every epoch,
then the next epoch's. Sample n has the L tokens from nL on as inputs, so within an epoch every token is an input
exactly once; no padding, nothing dropped. The label of a token is the one after it, or IGNORE_INDEX where that would be
the first token of another document. `positions` count from 0 at the start of every document and of every sample:
attention cannot see what an earlier sample had of a document that was cut.

Where a stream stands is six numbers (`State`). To go on from there, a piece is read from a document on, and only that
document is tokenized for nothing up to a token. Skipping forward builds no samples but has to tokenize, because nothing
else tells how long a document is.

Shapes: L sequence.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from titan_moe.sources.listing import Source
from titan_moe.sources.piece import MAX_DOCUMENT_BYTES, Document, Fault, Piece, hashed_bytes
from titan_moe.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100  # the label that no loss is computed for
ENCODE_BYTES = 1 << 16  # of text tokenized in one call
SHOWN_FAULTS = 5  # of one source, in one process; all are counted


class State(NamedTuple):
    samples: int = 0  # done
    epoch: int = 0
    piece: int = 0  # in the epoch's order
    document: int = 0  # of the piece
    token: int = 0  # of the document
    skipped: int = 0  # documents left out so far, every epoch's


START = State()
Sample = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(input_L, positions_L, labels_L)"""


def permutation(count: int, *key: object) -> np.ndarray:
    """An order of `count` things drawn from a hash of the key. NumPy's own shuffle may change with its version."""
    return np.frombuffer(hashed_bytes(8 * count, *key), dtype="<u8").argsort(kind="stable")


class Encoder:
    """A source's documents as token ids: by the tokenizer, or as they are; with what its on_error does about others."""

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer, self._shown = source, tokenizer, set[str]()
        self.bos = tokenizer.bos_id is not None if source.add_bos is None else source.add_bos
        self.eos = source.add_eos is not False

    def encode(self, documents: Sequence[Document | Fault]) -> list[np.ndarray | Fault]:
        """Token ids of each: none where it is empty, a Fault where it cannot be used."""
        if self.source.kind == "tokens":
            return [self._checked(document) for document in documents if isinstance(document, np.ndarray)]
        texts = [document for document in documents if isinstance(document, bytes) and self._usable(document)]
        ids = iter(self.tokenizer.encode(texts, self.bos, self.eos))
        return [next(ids) if isinstance(d, bytes) and self._usable(d) else self._unusable(d) for d in documents]

    def _usable(self, text: bytes) -> bool:
        return 0 < len(text) <= MAX_DOCUMENT_BYTES

    def _unusable(self, document: Document | Fault) -> np.ndarray | Fault:
        if isinstance(document, Fault):
            return document
        if not len(document):
            return np.empty(0, np.int32)
        return Fault(f"has {len(document):,} bytes, more than the {MAX_DOCUMENT_BYTES:,} a document may have; split it")

    def _checked(self, ids: np.ndarray) -> np.ndarray | Fault:
        """An id past the tokenizer's would index past the embedding: on a GPU, an error without a name."""
        if ids.size and (largest := int(ids.max())) >= self.tokenizer.vocab_size:
            return Fault(f"has token id {largest}, but the tokenizer has only {self.tokenizer.vocab_size}")
        return ids

    def take(self, fault: Fault, piece: Piece, document: int) -> None:
        """Raise, or show the first few."""
        if self.source.on_error == "raise":
            raise ValueError(
                f"{piece.where(document, fault.at)}: {fault.reason}. To leave such documents out, set on_error = "
                '"skip" (training.dataloader, or its entry of training.mixture or validation.sets)'
            )
        if len(self._shown) < SHOWN_FAULTS and (where := piece.where(document, fault.at)) not in self._shown:
            self._shown.add(where)
            logger.warning(f"Skipped {where}: {fault.reason}")


class ShardStream:
    """The samples of some pieces, in order; it holds the tokens of a few documents at a time."""

    def __init__(
        self, pieces: Sequence[Piece], encoder: Encoder, seq_len: int, seed: object, shard: int, state: State = START
    ):
        self.pieces, self.encoder, self.seq_len, self.seed, self.shard = pieces, encoder, seq_len, seed, shard
        self.samples_done, self.epoch, self.piece, self.document, self.token, self.skipped = state
        self._order: np.ndarray | None = None  # of the pieces in this epoch
        self._reader: Iterator[Document | Fault] | None = None  # of the piece that the stream stands in
        self._read = 0  # documents that the reader has given: the number of the next one
        self._ready: deque[tuple[int, np.ndarray | Fault]] = deque()  # encoded, not used up: (number, tokens)
        self._fruitful = state[2:5] != (0, 0, 0)  # a document was found in this epoch, or may have been
        self._arange_L = np.arange(seq_len)

    @property
    def state(self) -> State:
        return State(self.samples_done, self.epoch, self.piece, self.document, self.token, self.skipped)

    def sample(self, n: int) -> Sample:
        """The shard's sample n, skipping what comes before it."""
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
            tokens = self._current()
            start, end = self.token, min(self.token + count, tokens.size)
            yield tokens, start, end
            count -= end - start
            self.token = end
            if end == tokens.size:  # stand at the start of the next document, without opening it
                self._ready.popleft()
                self.token, self.document = 0, self.document + 1

    def _current(self) -> np.ndarray:
        """The tokens of the document that the stream stands in, once it has passed what is none."""
        while True:
            if not self._ready and not self._read_more():
                self._next_piece()
                continue
            self.document, tokens = self._ready[0]
            if isinstance(tokens, Fault):
                self.encoder.take(tokens, self._piece(), self.document)
                self.skipped += 1
            elif tokens.size:
                if self.token >= tokens.size:
                    raise ValueError(
                        f"{self._piece().where(self.document)} has {tokens.size} tokens, but the checkpoint stopped at "
                        f"its token {self.token}: it was changed since. Put the old one back, or start a new run"
                    )
                self._fruitful = True
                return tokens
            self._ready.popleft()
            self.document += 1

    def _read_more(self) -> bool:
        """Read and encode the next few documents of the piece; False at its end."""
        if self._reader is None:
            self._reader, self._read = self._piece().documents(self.document), self.document
        batch: list[Document | Fault] = []
        size = 0
        for document in self._reader:
            batch.append(document)
            size += 0 if isinstance(document, Fault) else len(document)
            if size >= ENCODE_BYTES:
                break
        self._ready.extend(enumerate(self.encoder.encode(batch), self._read))
        self._read += len(batch)
        return bool(batch)

    def _piece(self) -> Piece:
        if self._order is None:
            self._order = permutation(len(self.pieces), "epoch", self.seed, self.shard, self.epoch)
        return self.pieces[self._order[self.piece]]

    def _next_piece(self) -> None:
        self._reader, self.document, self.piece = None, 0, self.piece + 1
        if self.piece == len(self.pieces):
            if not self._fruitful:
                names = sorted({piece.name for piece in self.pieces})
                raise ValueError(
                    f'dataset = "{self.encoder.source.dataset}": shard {self.shard} has no document in its '
                    f"{len(self.pieces)} pieces, of {', '.join(names[:3])}: {self.skipped} were skipped, others are "
                    "empty. Mend the files, or take fewer training.dataloader.num_shards in a new run"
                )
            self.piece, self._order, self.epoch, self._fruitful = 0, None, self.epoch + 1, False
