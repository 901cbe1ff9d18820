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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
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

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The file, as long as it is what was listed; a ValueError that names it also for what fails inside."""
        with open_as_listed(self.path, self.file_size) as file:
            yield file

    def lines_before(self, end: int) -> int:
        """Line ends in the first `end` bytes of the file: slow, for messages."""
        count = 0
        with self.open() as file:
            while end > 0 and (block := file.read(min(end, 1 << 20))):
                count += block.count(b"\n")
                end -= len(block)
        return count


@contextmanager
def open_as_listed(path: str, size: int) -> Iterator[BinaryIO]:
    """The file, if it has `size` bytes and nobody has written to it since this process opened it first. Whether it is
    still the file that was listed, a start asks that compares contents (record.py); this notices what changes under a
    run, also where the size stays."""
    try:
        file = open(path, "rb", buffering=1 << 17)  # noqa: SIM115
    except OSError as error:
        raise changed(path, str(error)) from error
    with file:
        status = os.fstat(file.fileno())
        if status.st_size != size:
            verb = "shrunk" if status.st_size < size else "grown"
            raise changed(path, f"it has {verb} from {size} to {status.st_size} bytes")
        if status.st_mtime_ns != _written.setdefault(path, status.st_mtime_ns):
            raise changed(path, f"it was written to at {datetime.fromtimestamp(status.st_mtime):%F %T}")
        try:
            yield file
        except OSError as error:
            raise unreadable(path, error) from error


_written: dict[str, int] = {}
"""When each file had been written to when this process opened it first, in ns"""


def listed_anew(path: str) -> None:
    _written.pop(path, None)


def unreadable(path: str, error: OSError) -> ValueError:
    return ValueError(
        f"{path} cannot be read: {error}. No document is left out for that, whatever on_error says: mend the disk or "
        "get the file again, and resume from the last checkpoint"
    )


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
