""".jsonl: every line an object, one field of which is a document's text.

A file is cut at line starts, which listing looks for, so that every piece begins with a line and owns at least one: a
piece without a document could leave a whole shard empty. Which line of the file a document is follows from its number
in the piece, by counting the lines before the piece; only a message needs that.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_moe.sources.piece import MAX_DOCUMENT_BYTES, Fault, FilePiece, open_as_listed

BLOCK = (
    1 << 18
)  # read at once; the file is not open in between, or many shards of many sources would use up all handles


@dataclass(frozen=True, slots=True)
class LinePiece(FilePiece):
    text_field: str

    @property
    def unit(self) -> str:
        return f"{self.name}:{self.start}"  # its lines are documents in their own right

    def documents(self, first: int = 0) -> Iterator[bytes | Fault]:
        for number, line in enumerate(self._lines()):
            if number < first:
                continue
            if isinstance(line, int):
                yield Fault(f"the line has {line:,} bytes, more than {MAX_DOCUMENT_BYTES:,}; split the document")
            elif line and not line.isspace():
                yield text_of(line, self.text_field)
            else:
                yield b""

    def where(self, document: int, at: int = 0) -> str:
        return f"{self.path}:{1 + self.lines_before(self.start) + document}"

    def longest_line(self) -> tuple[int, int]:
        """(bytes, number in this piece)"""
        lengths = ((line if isinstance(line, int) else len(line), i) for i, line in enumerate(self._lines()))
        return max(lengths, key=lambda length: length[0])

    def _lines(self) -> Iterator[bytes | int]:
        """Each line, or the length of one that is too long to be held."""
        position = self.start
        while position < self.end:
            with self.open() as file:
                file.seek(position)
                block = file.read(min(BLOCK, self.end - position))
                too_long, rest = 0, b""
                if position + len(block) < self.end and not block.endswith(b"\n"):
                    whole, newline, last = block.rpartition(b"\n")
                    rest = file.readline(MAX_DOCUMENT_BYTES + 2 - len(last))
                    if rest.endswith(b"\n") or position + len(block) + len(rest) >= self.end:
                        block += rest
                    else:
                        block, too_long = whole + newline, len(last) + len(rest)
                        while not rest.endswith(b"\n") and position + len(block) + too_long < self.end:
                            rest = file.readline(1 << 20)
                            too_long += len(rest)
            position += len(block) + too_long
            lines = block.split(b"\n")
            if not lines[-1]:  # what follows the last line end, not a line
                lines.pop()
            yield from lines
            if too_long:
                yield too_long - rest.endswith(b"\n")


def text_of(line: bytes, text_field: str) -> bytes | Fault:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return Fault(f"is not UTF-8 ({error.reason}, byte {error.start + 1} of the line); convert the file")
    except json.JSONDecodeError as error:
        return Fault(f"is not JSON: {error.msg} at column {error.colno}, {excerpt(line, error.pos)}")
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, or nested that deep
        return Fault(f"is not JSON that can be read: {error}")
    if not isinstance(row, dict):
        return Fault(f'is a JSON {type(row).__name__}; each line must be an object, like {{"{text_field}": "..."}}')
    return text_of_field(row, text_field)


def text_of_field(row: dict[str, Any], text_field: str) -> bytes | Fault:
    """The bytes of a row's text; also for rows that come from elsewhere than JSON."""
    if text_field not in row:
        there = ", ".join(list(row)[:8]) or "none"
        return Fault(f'has no field "{text_field}"; its fields are: {there}. Name one of them with text_field')
    text = row[text_field]
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        return Fault(f'field "{text_field}" holds {"null" if text is None else type(text).__name__}, not a text')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        return Fault(f'field "{text_field}" has half of a surrogate pair at character {error.start + 1}: not Unicode')


def excerpt(line: bytes, at: int) -> str:
    around = line[max(at - 20, 0) : at + 20]
    return repr(around.decode(errors="replace"))


def pieces(name: str, path: str, size: int, piece_bytes: int, text_field: str) -> list[LinePiece]:
    found, start = [], 0
    with open_as_listed(path, size) as file:
        while start < size:
            end = min(start + piece_bytes, size)
            if end < size:
                file.seek(end - 1)  # so that a piece may end just there
                end -= 1
                while end < size:
                    part = file.readline(1 << 20)
                    end += len(part)
                    if not part or part.endswith(b"\n"):
                        break
                end = min(end, size)
            found.append(LinePiece(name, end - start, path, start, end, size, text_field))
            start = end
    return found
