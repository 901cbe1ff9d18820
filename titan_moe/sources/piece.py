"""The unit that a source is listed in, dealt out in and read in: a piece, which yields its documents one by one.

Listing has to be cheap, and shards need many units of known size, so a source is not listed by documents but by pieces:
a byte range of a text file, a run of lines of a .jsonl, rows of a .parquet, a range of pre-tokenized documents, a file
on a hub. A piece is read from its start, or from a given document on, and always gives the same documents in the same
order. A document that cannot be used comes as a `Fault` in its place, so that the numbers of the others do not depend
on what is done about it (`on_error`).
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

PIECE_BYTES = 1 << 20  # what a piece has at most, where documents allow it
MIN_PIECE_BYTES = 1 << 14
MAX_PIECES = 1 << 16  # of one source of lines, rows or tokens: each rank holds the list
MAX_DOCUMENT_BYTES = 1 << 25  # a tokenizer takes some 50 times that in memory, and a minute: longer ones are faults


@dataclass(frozen=True, slots=True)
class Fault:
    """A document that cannot be used, and why; `at` is the byte of it where that shows."""

    reason: str
    at: int = 0


Document = bytes | np.ndarray
"""Text, or the token ids of a source that was tokenized before"""


@dataclass(frozen=True, slots=True)
class Piece:
    name: str  # relative to what was listed, so the same wherever the files lie; pieces of one file share it
    size: int  # bytes, by which shards are balanced

    @property
    def unit(self) -> str:
        """Pieces of one unit are kept on one side of the split into training and validation."""
        return self.name

    def documents(self, first: int = 0) -> Iterator[Document | Fault]:
        """The documents from number `first` on. Numbers count faults and empty documents too."""
        raise NotImplementedError

    def where(self, document: int, at: int = 0) -> str:
        """What a user looks for: file and line."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FilePiece(Piece):
    """A range of a local file: of its bytes, unless a subclass says otherwise."""

    path: str
    start: int
    end: int
    file_size: int  # at listing

    def open(self) -> BinaryIO:
        """The file, as long as it is what was listed."""
        try:
            file = open(self.path, "rb", buffering=1 << 17)  # noqa: SIM115
        except OSError as error:
            raise changed(self.path, str(error)) from error
        size = os.fstat(file.fileno()).st_size
        if size != self.file_size:
            file.close()
            verb = "shrunk" if size < self.file_size else "grown"
            raise changed(self.path, f"it has {verb} from {self.file_size} to {size} bytes")
        return file

    def lines_before(self, end: int) -> int:
        """Line ends in the first `end` bytes of the file: slow, for messages."""
        count = 0
        with self.open() as file:
            while end > 0 and (block := file.read(min(end, 1 << 20))):
                count += block.count(b"\n")
                end -= len(block)
        return count


def changed(path: str, what: str) -> ValueError:
    return ValueError(
        f"{path} changed after it was listed: {what}. Text must stay as it is while a job runs: put the file back and "
        "resume from the last checkpoint, or start a new run without it"
    )


def piece_bytes(total: int) -> int:
    """How large pieces of a source of `total` bytes are: small enough that a small source fills all shards."""
    return max(min(total // 1024, PIECE_BYTES), MIN_PIECE_BYTES, -(-total // MAX_PIECES))


def hashed_bytes(count: int, *key: object) -> bytes:
    """`count` pseudo-random bytes that depend on nothing but the key."""
    return hashlib.shake_128("\0".join(map(str, key)).encode(errors="surrogateescape")).digest(count)
