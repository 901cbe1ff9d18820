"""Reads a TOML file into its values, with tomli, and the line of each key: tomli gives none, and a message should.

For the lines the text is cut into tokens that hide nothing: comments and strings of all four kinds come as one token
each, so an `=`, a bracket or a line break inside them is never taken for syntax. A stack of open arrays and inline
tables then says whether the next word is a key or part of a value. tomli has read the text, at least up to the place
where it stopped, so this only finds its way and checks nothing; where it cannot follow, a key has no line, and a
message names only its file.
"""

import re
from pathlib import Path
from typing import Any

import tomli

MOST_BYTES = 1 << 20  # a configuration has 5 kB; what is larger is some other file, and would take minutes to read

KeyPath = tuple[str | int, ...]
"""Keys from the outermost in; an element of an array is an integer"""

TOKEN = re.compile(
    r"""
      \#[^\n]*
    | \"{3} (?: \\. | [^\\] )*? \"{3} \"{0,2}   # up to five quotes at the end: two of them belong to the text
    | '{3} .*? '{3} '{0,2}
    | " (?: \\. | [^"\\\n] )* "
    | ' [^'\n]* '
    | [\[\]{},=\n]
    | [^\s\[\]{},="'\#]+
    """,
    re.VERBOSE | re.DOTALL,
)


def read(name: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The TOML table in a file and the line of each key; a ValueError that names the file if there is none."""
    text = _text(name)
    return _parsed(name, text), index(text)


def _text(name: str) -> str:
    """The text of a configuration file, or a ValueError about it."""
    path = Path(name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{name}: is no regular file, and every process has to read it again; write it to one")
        size = path.stat().st_size
        if size > MOST_BYTES and path.is_file():
            raise ValueError(f"{name}: has {size:,} bytes; a configuration has {MOST_BYTES:,} at most")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")  # -sig: some editors put a byte order mark in front, which TOML does not know
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}:{line}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parsed(name: str, text: str) -> dict[str, Any]:
    """The TOML table of a text, or a ValueError about it."""
    try:
        return tomli.loads(text)
    except RecursionError as error:
        raise ValueError(f"{name}: is not valid TOML: arrays or tables are nested too deeply") from error
    except tomli.TOMLDecodeError as error:
        # The text of the error has the place in all versions, and in the standard library's copy; its attributes not.
        at = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
        line = int(at[2]) if at else text.rstrip().count("\n") + 1  # else: (at end of document)
        first = _first_of_two(text, line)
        reason = f"{at[1]}, column {at[3]}" if at else str(error)
        reason += f"; it is there already, in line {first}" if first else ""
        raise ValueError(f"{name}:{line}: is not valid TOML: {reason}") from error
    except ValueError as error:  # int() on thousands of digits
        raise ValueError(f"{name}: is not valid TOML: {error}") from error


def index(text: str) -> dict[KeyPath, int]:
    """The line, from 1, that each key, table and array element first stands in; a table also where it is only a part
    of a dotted key."""
    lines: dict[KeyPath, int] = {}
    for path, line in scan(text):
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def scan(text: str) -> list[tuple[KeyPath, int]]:
    """Every key, table header and array element with its line, in the order of the text."""
    found: list[tuple[KeyPath, int]] = []
    table: KeyPath = ()  # what the last header opened
    stack: list[tuple[str, KeyPath]] = []  # open arrays and inline tables, each with its path
    counts: list[int] = []  # for each of them: the elements before the present one
    words: list[str] = []  # of a key, up to its "=" or "]"
    path: KeyPath | None = None  # of the value being read; None while a key is expected
    header: list[str] = []  # the brackets of the header being read
    arrays: dict[KeyPath, int] = {}  # how many [[headers]] each array of tables has had
    line, seen = 1, 0
    for match in TOKEN.finditer(text):
        token = match[0]
        line, seen = line + text.count("\n", seen, match.start()), match.start()
        in_array = bool(stack) and stack[-1][0] == "["
        if token[0] == "#":
            continue
        if token == "\n":
            if not stack:  # a statement ends with its line
                words, path, header = [], None, []
        elif header:
            if token == "]":
                table = _key(words)
                if len(header) == 2:  # of an array of tables: each is its next element
                    arrays[table] = arrays.get(table, -1) + 1
                    table = (*table, arrays[table])
                header = []
                found.append((table, line))
            else:
                (header if token == "[" else words).append(token)
        elif token in "]}":
            if stack:
                path = stack.pop()[1]  # what follows the value, up to "," or the end of the line, is not a key
                counts.pop()
        elif token == ",":
            if in_array:
                counts[-1] += 1
            words, path = [], None
        elif path is None and not in_array:
            if token == "=":
                path = (stack[-1][1] if stack else table) + _key(words)
                found.append((path, line))
                words = []
            elif token == "[" and not stack:
                header, words = ["["], []
            else:
                words.append(token)
        else:
            here = (*stack[-1][1], counts[-1]) if in_array else path
            assert here is not None
            if in_array:
                found.append((here, line))
            if token in "[{":
                stack.append((token, here))
                counts.append(0)
                path = None
    return found


def _first_of_two(text: str, line: int) -> int | None:
    """The line of the first of two equal keys or tables of which the second, in `line`, is what tomli stopped at."""
    found = [(path, at) for path, at in scan(text) if at <= line]
    return next((at for path, at in found if at < line and (path, line) in found), None)


def _key(words: list[str]) -> KeyPath:
    """The parts of a dotted key from its tokens: `a . "b.c"` is ("a", "b.c")."""
    parts: list[str] = []
    for word in words:
        if word[0] in "\"'":
            parts.append(tomli.loads(f"key = {word}")["key"])
        else:
            parts += filter(None, word.split("."))
    return tuple(parts)
