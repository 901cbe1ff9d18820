"""Plain text: a file is a document, one over 1 MiB is several of equal length, so that nobody ever holds a huge one.

Listing looks at sizes only: a piece moves its two ends to line starts when it is read, by a rule that depends on
nothing but the bytes at the cut, so that neighbours agree and no byte is lost or read twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

from titan_moe.sources import piece
from titan_moe.sources.piece import FilePiece

CUT_WINDOW = 1 << 16  # how far a cut looks for a line start; below PIECE_BYTES / 2, so that no piece becomes empty


@dataclass(frozen=True, slots=True)
class TextPiece(FilePiece):
    def documents(self, first: int = 0) -> Iterator[bytes]:
        if first == 0:
            yield self.read()

    def read(self, at_most: int | None = None) -> bytes:
        with self.open() as file:
            start, end = self._range(file)
            file.seek(start)
            return file.read(end - start if at_most is None else min(end - start, at_most))

    def _range(self, file: BinaryIO) -> tuple[int, int]:
        start = _cut(file, self.start) if self.start > 0 else 0
        return start, _cut(file, self.end) if self.end < self.file_size else self.end

    def where(self, document: int, at: int = 0) -> str:
        with self.open() as file:
            start, _ = self._range(file)
        return f"{self.path}:{1 + self.lines_before(start + at)}"


def pieces(name: str, path: str, size: int) -> list[TextPiece]:
    count = -(-size // piece.PIECE_BYTES)  # 0 for an empty file
    ends = [size * i // count for i in range(count + 1)] if count else []
    return [TextPiece(name, end - start, path, start, end, size) for start, end in pairwise(ends)]


def _cut(file: BinaryIO, at: int) -> int:
    """The first line start at or after `at`; without one nearby, `at` itself, moved off the middle of a character."""
    file.seek(at - 1)
    window = file.read(CUT_WINDOW)
    line_end = window.find(b"\n")
    if line_end >= 0:
        return at + line_end
    # UTF-8 continues a character with up to three bytes 10xxxxxx. Four in a row are not UTF-8: any place will do.
    return at + next((i for i, byte in enumerate(window[1:5]) if byte & 0xC0 != 0x80), 0)
