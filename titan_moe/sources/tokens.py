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


def pieces(folder: str, name: str) -> list[TokenPiece]:
    path = os.path.join(folder, "tokens.npy")
    meta = read_meta(folder)
    try:
        tokens, offsets = _arrays(path, os.stat(path).st_mtime_ns)
        found = (tokens.size, offsets.size - 1, int(offsets[-1]), tokens.dtype.kind)
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(
            f"{folder} cannot be read: {error}. Write it again with python -m titan_moe.tokenize"
        ) from error
    if found != (meta["tokens"], meta["documents"], meta["tokens"], "u"):
        raise ValueError(
            f"{folder}: meta.json says {meta['tokens']} tokens in {meta['documents']} documents, but the .npy files "
            f"have {found[0]} in {found[1]}, of type {tokens.dtype}: they are not of one writing; write it again"
        )
    size = os.path.getsize(path)
    step = piece_bytes(4 * found[0]) // 4  # a token stands for some 4 bytes of text
    cuts = np.searchsorted(offsets, np.arange(0, found[0] + step, step)).clip(max=found[1])
    cuts = np.unique(np.append(cuts, [0, found[1]])).tolist()
    sizes = np.diff(offsets[cuts]).tolist()
    return [
        TokenPiece(name, max(weight, 1), path, start, end, size) for weight, start, end in zip(sizes, cuts, cuts[1:])
    ]
