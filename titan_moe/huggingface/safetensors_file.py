"""A safetensors file written tensor by tensor: names, types and shapes are known before the first value is.

The library's own writer wants all tensors of a file in memory. See folder.py for what the format is.

Imports no torch at import: what it writes are bytes.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from titan_moe.huggingface.folder import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    dtype: str
    """As safetensors names it"""

    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def header(entries: Iterable[Entry]) -> bytes:
    """Of a file that has these tensors, in this order."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        assert entry.name not in content, entry.name
        content[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the values begin at a multiple of their size
    return len(text).to_bytes(8, "little") + text


class File:
    """A new file with room for `entries`, which come in their order."""

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self.waiting = list(reversed(entries))
        self._file: IO[bytes] = path.open("wb")
        self._file.write(header(entries))

    def write(self, name: str, values: memoryview) -> None:
        entry = self.waiting.pop()
        assert (name, values.nbytes) == (entry.name, entry.bytes), (name, values.nbytes, entry)
        self._file.write(values)

    def __enter__(self) -> "File":
        return self

    def __exit__(self, failed: Any, *_: Any) -> None:
        try:
            if not failed:
                assert not self.waiting, self.waiting
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
