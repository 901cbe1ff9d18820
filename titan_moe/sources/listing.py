"""From the name of a dataset to a source: what kind it is of, its files in a fixed order, cut into pieces."""

import glob
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from titan_moe.config import DataSource
from titan_moe.sources import hub, lines, rows, synthetic, text, tokens
from titan_moe.sources.piece import MAX_DOCUMENT_BYTES, Piece, listed_anew, piece_bytes

Kind = Literal["synthetic", "hub", "tokens", "text", "lines", "rows"]

# Of files in any case: DATA.JSONL is no plain text.
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py")  # what a folder is searched for; a glob takes any name
KIND_OF_SUFFIX: dict[str, Kind] = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "rows"}
# Refused: a model would learn the packaging, not the text.
PACKED_SUFFIXES = (".arrow", ".npy", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")

# Tests are half of the standard library and repeat themselves; encodings are number tables; pydoc_data is one file as
# long as forty others; the last line is packaged apart from Python by some distributions. 8 MB remain.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings", "pydoc_data"}
STDLIB_LEFT_OUT |= {"idlelib", "lib2to3", "tkinter", "turtledemo"}


@dataclass(frozen=True, slots=True)
class File:
    name: str
    path: str  # without links
    size: int
    written: int  # when, in ns


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of the mixture, listed."""

    dataset: str  # as it was written
    kind: Kind
    pieces: Sequence[Piece]
    weight: float = 1.0
    text_field: str = "text"
    on_error: str = "raise"
    add_bos: bool | None = None
    add_eos: bool | None = None
    files: Sequence[File] = ()
    revision: str = ""  # of what has no local files
    made_by: dict[str, Any] = field(default_factory=dict)  # of token ids: what meta.json says
    fingerprint: str = ""  # of all of the above but weight, on_error, and where the files lie; see `record.py`


def list_source(
    spec: DataSource, *, text_field: str = "text", on_error: str = "raise", seed: int = 0, patience: float = 50.0
) -> Source:
    """Finds the files of a source and cuts them into pieces. `text_field` and `on_error`: where the entry has none;
    `seed`: of synthetic text; `patience`: seconds that a hub may be silent."""
    name, text_field, on_error = spec.dataset, spec.text_field or text_field, spec.on_error or on_error
    source = Source(name, "text", (), spec.weight, text_field, on_error, spec.add_bos, spec.add_eos)
    if name == "synthetic":
        return replace(source, kind="synthetic", pieces=synthetic.pieces(seed), revision=str(seed))
    if name.startswith("hf:"):
        pieces, revision = hub.pieces(name, text_field, patience)
        return replace(source, kind="hub", pieces=pieces, revision=revision)
    path = os.path.expanduser(name)
    if os.path.isdir(path) and tokens.is_tokens(path):
        meta, label = tokens.read_meta(path), os.path.basename(os.path.realpath(path))
        files = _files(path, [os.path.join(path, part) for part in ("meta.json", "offsets.npy", "tokens.npy")])
        found = tokens.pieces(os.path.realpath(path), label)
        source = replace(source, kind="tokens", pieces=found, files=files, made_by=meta)
        looked_for = f"documents in {path}"
    else:
        files, looked_for = _find(name, path)
        kind = _kind(name, files)
        source = replace(source, kind=kind, pieces=_cut(kind, files, text_field), files=files)
    if not source.pieces:
        hint = 'empty ones do not count. A glob, like "text/**/*.c", takes files of any name'
        raise ValueError(f'dataset = "{name}": no document found, looked for {looked_for}; {hint}')
    if source.kind == "lines" and on_error == "raise":
        _refuse_long_lines(source)
    return source


def _find(name: str, path: str) -> tuple[list[File], str]:
    """The files that a name stands for, in a fixed order and each once, and what was looked for."""
    if name == "python_stdlib":
        root = sysconfig.get_path("stdlib")
        return _files(root, _walk(root, (".py",), STDLIB_LEFT_OUT)), f".py files under {root}"
    if os.path.isdir(path):
        suffixes = (*TEXT_SUFFIXES, *KIND_OF_SUFFIX)
        packed = tuple({*PACKED_SUFFIXES} - {".npy"})  # found too, to be refused; arrays are no texts to be missed
        return _files(path, _walk(path, (*suffixes, *packed), set())), f"{' '.join(suffixes)} files under {path}"
    if os.path.exists(path):
        return _files(os.path.dirname(path), [path]), f"text in {path}"
    if glob.has_magic(path):
        root = os.path.dirname(re.split(r"[*?[]", path, maxsplit=1)[0])
        return _files(root, glob.glob(path, recursive=True)), f"files that match {path}"
    raise ValueError(
        f'dataset = "{name}": there is no file or folder {os.path.abspath(path)}. It can be a file, a folder, a glob '
        'like "text/**/*.txt", a folder that titan_moe.tokenize wrote, "hf:owner/name:split", "python_stdlib" or '
        '"synthetic"'
    )


def _walk(root: str, suffixes: tuple[str, ...], left_out: set[str]) -> list[str]:
    def unreadable(error: OSError) -> NoReturn:  # os.walk by itself would pass over the folder
        raise ValueError(f"{error.filename} cannot be listed: {error}. Mend it, or choose files with a glob") from error

    found = []
    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [os.path.join(folder, name) for name in files if name.lower().endswith(suffixes)]
    return found


def _files(root: str, paths: Iterable[str]) -> list[File]:
    """The regular files among the paths by name, each once even where links or a glob show it twice."""
    found, seen = [], set()
    for name, path in sorted((os.path.relpath(path, root or "."), path) for path in paths):
        real = os.path.realpath(path)
        try:
            status = os.stat(real)
            if stat.S_ISREG(status.st_mode):
                os.close(os.open(real, os.O_RDONLY))  # allowed to read it? Better asked now than at step 1,000
                listed_anew(real)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}. Mend it, or choose files with a glob") from error
        if real in seen or not stat.S_ISREG(status.st_mode):
            continue
        seen.add(real)
        found.append(File(name, real, status.st_size, status.st_mtime_ns))
    return found


def _kind(name: str, files: list[File]) -> Kind:
    for file in files:
        if file.name.lower().endswith(PACKED_SUFFIXES) and not file.name.endswith("tokens.npy"):
            raise ValueError(
                f"{file.path} is not plain text: write its texts to .jsonl or .txt files and train on those, or "
                "leave it out with a glob"
            )
        if file.name.endswith("tokens.npy"):
            raise ValueError(f"{file.path} holds token ids: name the folder that python -m titan_moe.tokenize wrote")
        if file.name.lower().endswith(".json") and name.lower().endswith(".json"):  # not one of many in "src/**"
            raise ValueError(
                f"{file.path} would be trained on as plain text, braces and all: rename it to .jsonl if each line is "
                "an object, to .txt if that is what you want"
            )
    kinds: dict[Kind, File] = {
        KIND_OF_SUFFIX.get(os.path.splitext(file.name)[1].lower(), "text"): file for file in files if file.size
    }
    if len(kinds) > 1:
        examples = ", ".join(f"{file.name} ({kind})" for kind, file in sorted(kinds.items()))
        raise ValueError(
            f'dataset = "{name}": holds files of several kinds, {examples}. Choose one with a glob, like '
            f'"{os.path.join(name, "**/*.jsonl")}", or name each as a [[training.mixture]] of its own'
        )
    return next(iter(kinds), "text")


def _cut(kind: Kind, files: list[File], text_field: str) -> list[Piece]:
    """The pieces of local files. Cutting lines and rows opens each file; both look at a part of it only."""
    size = piece_bytes(sum(file.size for file in files))
    cutters: dict[str, Callable[[File], Sequence[Piece]]] = {
        "text": lambda file: text.pieces(file.name, file.path, file.size),
        "lines": lambda file: lines.pieces(file.name, file.path, file.size, size, text_field),
        "rows": lambda file: rows.pieces(file.name, file.path, file.size, size, text_field) if file.size else [],
    }
    return [piece for file in files for piece in cutters[kind](file)]


def _refuse_long_lines(source: Source) -> None:
    """Now rather than at step 1,000: a line that no piece may hold makes its piece longer than that."""
    for piece in source.pieces:
        if isinstance(piece, lines.LinePiece) and piece.size > MAX_DOCUMENT_BYTES:
            length, number = piece.longest_line()
            if length > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{piece.where(number)}: the line has {length:,} bytes, more than the {MAX_DOCUMENT_BYTES:,} that "
                    'a document may have; split the document, or leave such lines out with on_error = "skip"'
                )
