"""Text that `python -m titan_moe.tokenize` turned into token ids beforehand: a folder that is read in parts.

    tokens.npy    uint16 or uint32 [tokens]: all documents, one after the other
    offsets.npy   int64 [documents + 1]: where each begins, and the end
    meta.json     the tokenizer, whether bos and eos are in, what text it was, how many documents were left out

A folder appears under its name only when all of it is on disk.

The arrays are read, not mapped into memory: where a disk fails or somebody cuts a mapped file short, the process ends
with SIGBUS, without a word. A read of that place is an error with a name, and costs next to nothing in blocks.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.sources.piece import FilePiece, changed, open_as_listed, piece_bytes

FORMAT = 1
CHECK = 1 << 20  # offsets looked at together when a folder is listed
OFFSETS_TOGETHER, TOKENS_TOGETHER = 1 << 12, 1 << 16  # read at once


@dataclass(frozen=True, slots=True)
class TokenPiece(FilePiece):
    """`start` and `end` are documents; `path` is tokens.npy."""

    @property
    def unit(self) -> str:
        return f"{self.name}:{self.start}"

    def documents(self, first: int = 0) -> Iterator[np.ndarray]:
        with self.open():
            pass
        try:
            tokens, offsets = vectors(self.path)
        except (OSError, EOFError, ValueError) as error:
            raise changed(os.path.dirname(self.path), str(error)) from error
        for begin in range(self.start + first, self.end, OFFSETS_TOGETHER):
            ends = offsets.read(begin, min(OFFSETS_TOGETHER, self.end - begin) + 1)
            if ends[0] < 0 or ends[-1] > tokens.length or (np.diff(ends) < 0).any():
                raise changed(offsets.path, f"the ends of documents {begin} to {begin + len(ends) - 2} are none")
            at = 0
            while at + 1 < len(ends):  # some documents together, and at least one
                stop = max(int(np.searchsorted(ends, ends[at] + TOKENS_TOGETHER, side="right")) - 1, at + 1)
                block = tokens.read(int(ends[at]), int(ends[stop] - ends[at]))
                for start, end in pairwise((ends[at : stop + 1] - ends[at]).tolist()):
                    yield block[start:end]
                at = stop

    def where(self, document: int, at: int = 0) -> str:
        return f"{self.path}, document {self.start + document}"


@dataclass(frozen=True, slots=True)
class Vector:
    """A one-dimensional .npy of numbers, as it was when it was looked at."""

    path: str
    file_size: int
    data_at: int  # byte
    length: int
    dtype: np.dtype

    def read(self, first: int, count: int) -> np.ndarray:
        assert first >= 0 and 0 <= count <= self.length - first
        with open_as_listed(self.path, self.file_size) as file:  # closed in between: shards of many sources are open
            size, at = count * self.dtype.itemsize, self.data_at + first * self.dtype.itemsize
            content = os.pread(file.fileno(), size, at)  # no more than that, as read() would
        if len(content) < size:
            raise changed(self.path, f"it ends inside the {count} elements from {first} on")
        return np.frombuffer(content, self.dtype)


def vectors(path: str) -> tuple[Vector, Vector]:
    """(tokens, offsets) of the folder of this tokens.npy."""
    offsets = os.path.join(os.path.dirname(path), "offsets.npy")
    found = [(name, os.stat(name)) for name in (path, offsets)]
    tokens, ends = (_vector(name, status.st_size, status.st_mtime_ns) for name, status in found)
    return tokens, ends


@lru_cache(maxsize=64)
def _vector(path: str, size: int, written: int) -> Vector:
    """Size and time of writing: a folder may be written anew."""
    # Maps the file, which looks at its header and length only. Objects, which would have to be unpickled, are refused.
    mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    if mapped.ndim != 1:
        raise ValueError(f"{os.path.basename(path)} has {mapped.ndim} dimensions, not 1")
    return Vector(path, size, mapped.offset, mapped.size, mapped.dtype)


def is_tokens(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in ("tokens.npy", "offsets.npy"))


def read_meta(folder: str) -> dict[str, Any]:
    path = Path(folder, "meta.json")
    try:
        meta = json.loads(path.read_bytes())
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
        _ = [meta[key] for key in ("tokenizer", "hf_assets_path", "vocab_size", "tokens", "documents")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read: {error!r}. A folder of token ids is written by python -m titan_moe.tokenize"
        ) from error
    return meta


def _cuts(tokens: Vector, offsets: Vector, step: int) -> list[tuple[int, int]]:
    """(document, its first token) where a piece begins, of some `step` tokens, and of the end. Looks at all offsets,
    8 bytes a document. Raises ValueError where they are not where the documents begin."""
    targets = np.arange(0, tokens.length + step, step)
    cuts, before = {0: 0}, 0
    for first in range(0, offsets.length, CHECK):
        block = offsets.read(first, min(CHECK, offsets.length - first))
        if first == 0 and block[0] != 0:
            raise ValueError(f"offsets.npy begins with {block[0]}, not with 0")
        wrong = np.diff(block, prepend=before) < 0
        if wrong.any():
            raise ValueError(f"offsets.npy decreases after document {first + int(wrong.argmax()) - 1}")
        before = int(block[-1])
        passed = np.searchsorted(targets, before, side="right")
        found = np.searchsorted(block, targets[:passed])
        cuts |= dict(zip((first + found).tolist(), block[found].tolist(), strict=True))
        targets = targets[passed:]
    if before != tokens.length:
        raise ValueError(f"offsets.npy ends with {before}, but tokens.npy has {tokens.length} tokens")
    return sorted((cuts | {offsets.length - 1: before}).items())


def pieces(folder: str, name: str) -> list[TokenPiece]:
    path = os.path.join(folder, "tokens.npy")
    meta = read_meta(folder)
    try:
        tokens, offsets = vectors(path)
        found = (tokens.length, offsets.length - 1, tokens.dtype.kind, offsets.dtype)
        if found != (meta["tokens"], meta["documents"], "u", np.int64):
            raise ValueError(
                f"meta.json says {meta['tokens']} tokens in {meta['documents']} documents, but the .npy files have "
                f"{found[0]} of {tokens.dtype} in {found[1]}, offsets {found[3]}: they are not of one writing"
            )
        # A token stands for some 4 bytes of text.
        cuts = _cuts(tokens, offsets, piece_bytes(4 * tokens.length) // 4)
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise ValueError(
            f"{folder} cannot be read: {error}. Write it again with python -m titan_moe.tokenize"
        ) from error
    return [
        TokenPiece(name, max(end - start, 1), path, first, last, tokens.file_size)
        for (first, start), (last, end) in pairwise(cuts)
    ]
