"""Text that `python -m titan_moe.tokenize` turned into token ids beforehand: a folder that is read through mmap.

    tokens.npy    uint16 or uint32 [tokens]: all documents, one after the other
    offsets.npy   int64 [documents + 1]: where each begins, and the end
    meta.json     the tokenizer, whether bos and eos are in, what text it was, how many documents were left out

A folder appears under its name only when all of it is on disk.
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

from titan_moe.sources.piece import FilePiece, changed, piece_bytes

FORMAT = 1
CHECK = 1 << 20  # offsets looked at together


@dataclass(frozen=True, slots=True)
class TokenPiece(FilePiece):
    """`start` and `end` are documents; `path` is tokens.npy."""

    @property
    def unit(self) -> str:
        return f"{self.name}:{self.start}"

    def documents(self, first: int = 0) -> Iterator[np.ndarray]:
        if (size := os.path.getsize(self.path) if os.path.exists(self.path) else -1) != self.file_size:
            raise changed(self.path, f"it had {self.file_size} bytes, now {size}" if size >= 0 else "it is gone")
        tokens, offsets = _arrays(self.path, os.stat(self.path).st_mtime_ns)
        ends = offsets[self.start + first : self.end + 1].tolist()
        for start, end in pairwise(ends):
            yield tokens[start:end]

    def where(self, document: int, at: int = 0) -> str:
        return f"{self.path}, document {self.start + document}"


@lru_cache(maxsize=64)
def _arrays(path: str, mtime: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, offsets), mapped: a piece touches only its own pages. `mtime`: a folder may be written anew."""
    names = (path, os.path.join(os.path.dirname(path), "offsets.npy"))
    tokens, offsets = (np.load(name, mmap_mode="r").view(np.ndarray) for name in names)
    return tokens, offsets


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


def _problem(tokens: np.ndarray, offsets: np.ndarray) -> str | None:
    """Why the offsets are not where the documents begin. They are all looked at, some 8 bytes a document."""
    if tokens.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64:
        return f"tokens.npy has {tokens.ndim} dimensions, offsets.npy {offsets.ndim} of {offsets.dtype}, not 1 of int64"
    if offsets[0] != 0:
        return f"offsets.npy begins with {offsets[0]}, not with 0"
    for start in range(0, offsets.size - 1, CHECK):
        wrong = np.diff(offsets[start : start + CHECK + 1]) < 0
        if wrong.any():
            return f"offsets.npy decreases after document {start + int(wrong.argmax())}"
    return None


def pieces(folder: str, name: str) -> list[TokenPiece]:
    path = os.path.join(folder, "tokens.npy")
    meta = read_meta(folder)
    try:
        tokens, offsets = _arrays(path, os.stat(path).st_mtime_ns)
        found = (tokens.size, offsets.size - 1, int(offsets.flat[-1]), tokens.dtype.kind)
    except (OSError, EOFError, ValueError, TypeError, IndexError) as error:
        raise ValueError(
            f"{folder} cannot be read: {error}. Write it again with python -m titan_moe.tokenize"
        ) from error
    if found != (meta["tokens"], meta["documents"], meta["tokens"], "u"):
        raise ValueError(
            f"{folder}: meta.json says {meta['tokens']} tokens in {meta['documents']} documents, but the .npy files "
            f"have {found[0]} in {found[1]}, of type {tokens.dtype}: they are not of one writing; write it again"
        )
    if problem := _problem(tokens, offsets):
        raise ValueError(f"{folder} cannot be read: {problem}. Write it again with python -m titan_moe.tokenize")
    size = os.path.getsize(path)
    step = piece_bytes(4 * found[0]) // 4  # a token stands for some 4 bytes of text
    cuts = np.searchsorted(offsets, np.arange(0, found[0] + step, step)).clip(max=found[1])
    cuts = np.unique(np.append(cuts, [0, found[1]])).tolist()
    sizes = np.diff(offsets[cuts]).tolist()
    return [
        TokenPiece(name, max(weight, 1), path, start, end, size) for weight, start, end in zip(sizes, cuts, cuts[1:])
    ]
