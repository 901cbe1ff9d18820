"""Where text comes from: a listing of documents, cheap to make and the same on every rank; each is read when needed.

A document is a byte range of a file. A file over 1 MiB is listed as several of equal length, so that nobody ever holds
a huge file or its tokens. Listing looks at sizes only: a piece moves its two ends to line starts when it is read, by a
rule that depends on nothing but the bytes at the cut, so that neighbours agree and no byte is lost or read twice.
What is random here comes from the hash of a name, so it is the same on every rank, Python, NumPy and machine.
"""

import glob
import hashlib
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import BinaryIO, NoReturn

from titan_moe.config import Config

PIECE_BYTES = 1 << 20  # a longer file becomes several documents
CUT_WINDOW = 1 << 16  # how far a cut looks for a line start; below PIECE_BYTES / 2, so that no piece becomes empty
HEAD_BYTES = 1 << 12  # how much of files of one size is compared, to keep copies on one side of a split

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py")  # what a folder is searched for; a glob takes any name
# Refused: a model would learn the packaging, not the text.
NOT_TEXT_SUFFIXES = (".jsonl", ".parquet", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")

# Tests are half of the standard library and repeat themselves; encodings are number tables; pydoc_data is one file as
# long as forty others; the last line is packaged apart from Python by some distributions. 8 MB remain.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings", "pydoc_data"}
STDLIB_LEFT_OUT |= {"idlelib", "lib2to3", "tkinter", "turtledemo"}
SYNTHETIC_DOCUMENTS = 4096  # 10 MB


def hashed_bytes(count: int, *key: object) -> bytes:
    """`count` pseudo-random bytes that depend on nothing but the key."""
    return hashlib.shake_128("\0".join(map(str, key)).encode(errors="surrogateescape")).digest(count)


@dataclass(frozen=True, slots=True)
class Document:
    name: str  # path relative to what was listed, so the same wherever the files lie; pieces of one file share it
    path: str
    start: int
    end: int
    file_size: int  # at listing

    def read(self, at_most: int = 2 * PIECE_BYTES) -> bytes:
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.file_size:
                    raise OSError(f"it has shrunk from {self.file_size} to {size} bytes")
                start = _cut(file, self.start) if self.start > 0 else 0
                end = _cut(file, self.end) if self.end < self.file_size else self.end
                file.seek(start)
                return file.read(min(end - start, at_most))
        except OSError as error:
            raise ValueError(
                f"{self.path} changed after it was listed: {error}. Text must stay as it is while a job runs: put the "
                "file back and resume from the last checkpoint, or start a new run without it"
            ) from error


def _cut(file: BinaryIO, at: int) -> int:
    """The first line start at or after `at`; without one nearby, `at` itself, moved off the middle of a character."""
    file.seek(at - 1)
    window = file.read(CUT_WINDOW)
    line_end = window.find(b"\n")
    if line_end >= 0:
        return at + line_end
    # UTF-8 continues a character with up to three bytes 10xxxxxx. Four in a row are not UTF-8: any place will do.
    return at + next((i for i, byte in enumerate(window[1:5]) if byte & 0xC0 != 0x80), 0)


class SyntheticDocument(Document):
    """Made up from its name: words that follow one another by fixed odds, some of them ending a line."""

    def read(self, at_most: int = 2 * PIECE_BYTES) -> bytes:
        words, followers = _language()
        length = min(self.end, at_most)
        first, *draws = hashed_bytes(1 + length // 3, self.name)  # the shortest word has 3 bytes
        word, text = first, bytearray(words[first])
        for draw in draws:
            word = followers[word][draw % 8]
            text += words[word]
        return bytes(text[:length])


@cache
def _language() -> tuple[list[bytes], list[list[int]]]:
    """256 words and what follows each: four others at odds of 4 : 2 : 1 : 1, so 1.75 bits a word once known."""
    words, followers = [], []
    for i in range(256):
        length, end, *letters = hashed_bytes(10, "word", i)
        stem = bytes(b"etaoinshrdlucmfw"[letter % 16] for letter in letters[: 2 + length % 7])
        words.append(stem + (b".\n" if end % 16 == 0 else b" "))
        a, b, c, d = hashed_bytes(4, "followers", i)
        followers.append([a, a, a, a, b, b, c, d])
    return words, followers


def list_documents(dataset: str, seed: int = 0) -> list[Document]:
    """The documents of `training.dataset` in a fixed order, each file once even where links or a glob show it twice.

    A folder is searched for TEXT_SUFFIXES, outside of hidden and linked folders. `seed` is for "synthetic" alone.
    """
    if dataset == "synthetic":
        draws = [int.from_bytes(hashed_bytes(8, "size", seed, i), "little") for i in range(SYNTHETIC_DOCUMENTS)]
        sizes = [64 + (draw >> 8) % (256 << draw % 7) for draw in draws]  # 64 to 16,447 bytes, short ones more often
        return [SyntheticDocument(f"synthetic/{seed}/{i}", "", 0, size, size) for i, size in enumerate(sizes)]
    path = os.path.expanduser(dataset)
    if dataset == "python_stdlib":
        root = sysconfig.get_path("stdlib")
        paths, looked_for = _walk(root, (".py",), STDLIB_LEFT_OUT), f".py files under {root}"
    elif os.path.isdir(path):
        root = path
        paths, looked_for = _walk(root, TEXT_SUFFIXES, set()), f"{' '.join(TEXT_SUFFIXES)} files under {root}"
    elif os.path.exists(path):
        root, paths, looked_for = os.path.dirname(path), [path], f"text in {path}"
    elif glob.has_magic(path):
        root = os.path.dirname(re.split(r"[*?[]", path, maxsplit=1)[0])
        paths, looked_for = glob.glob(path, recursive=True), f"files that match {path}"
    else:
        raise ValueError(
            f'dataset = "{dataset}": there is no file or folder {os.path.abspath(path)}. It can be a file, a folder, a '
            'glob like "text/**/*.txt", "python_stdlib" or "synthetic"'
        )
    documents = _pieces(root, paths)
    if not documents:
        hint = 'empty ones do not count. A glob, like "text/**/*.c", takes files of any name'
        raise ValueError(f'dataset = "{dataset}": no document found, looked for {looked_for}; {hint}')
    return documents


def _walk(root: str, suffixes: tuple[str, ...], left_out: set[str]) -> list[str]:
    def unreadable(error: OSError) -> NoReturn:  # os.walk by itself would pass over the folder
        raise ValueError(f"{error.filename} cannot be listed: {error}. Mend it, or choose files with a glob") from error

    found = []
    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [os.path.join(folder, name) for name in files if name.endswith(suffixes)]
    return found


def _pieces(root: str, paths: Iterable[str]) -> list[Document]:
    documents, seen = [], set()
    for name, path in sorted((os.path.relpath(path, root or "."), path) for path in paths):
        real = os.path.realpath(path)
        try:
            status = os.stat(real)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}. Mend it, or choose files with a glob") from error
        if real in seen or not stat.S_ISREG(status.st_mode):
            continue
        if path.endswith(NOT_TEXT_SUFFIXES):
            raise ValueError(f"{path} is not plain text: write its texts to .txt files and train on those")
        seen.add(real)
        count = -(-(size := status.st_size) // PIECE_BYTES)  # 0 for an empty file
        documents += [Document(name, real, size * i // count, size * (i + 1) // count, size) for i in range(count)]
    return documents


def split(documents: list[Document], holdout: float) -> tuple[list[Document], list[Document]]:
    """(training, validation): about a share `holdout` of the files is kept away from training, always the same ones.

    A file's side follows from its name, whatever else is listed, and byte-identical files are always on one side: files
    of one size that begin alike follow the first of them. That reads HEAD_BYTES of each file that shares its size with
    another, and nothing of the rest. Pieces of a file stay together, unless it is the only file.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"validation.holdout = {holdout}: a share of the documents, so it must be between 0 and 1")
    one_file = len({document.name for document in documents}) == 1
    files = [d for d in documents if d.start == 0 and not isinstance(d, SyntheticDocument)]
    files_of_size = Counter(file.file_size for file in files)
    first_alike: dict[tuple[int, bytes], str] = {}
    leader: dict[str, str] = {}  # name of a file -> name of the file whose side it takes
    for file in files:
        if files_of_size[file.file_size] > 1:
            head = hashlib.blake2b(file.read(HEAD_BYTES), digest_size=16).digest()
            leader[file.name] = first_alike.setdefault((file.file_size, head), file.name)

    def place(document: Document) -> float:
        key = document.start if one_file else leader.get(document.name, document.name)
        return int.from_bytes(hashed_bytes(6, "split", key), "little") / 2**48

    places = [place(document) for document in documents]
    lowest, highest = min(places), max(places)
    if lowest == highest:
        raise ValueError(
            f"validation.holdout = {holdout}: there is nothing to keep away from training, all text found is one short "
            "file or copies of it. Add text, name other text in validation.dataset, or set validation.enable = false"
        )
    # The lowest is always held out and the highest always trained on, so that a small corpus has both.
    held_out = [place != highest and (place < holdout or place == lowest) for place in places]
    return list(compress(documents, (not held for held in held_out))), list(compress(documents, held_out))


def list_both(config: Config) -> tuple[list[Document], list[Document] | None]:
    """The documents of [training] and, where enabled, of [validation]: its own, or some held out of the former."""
    documents = list_documents(config.training.dataset, config.debug.seed)
    if not config.validation.enable:
        return documents, None
    if config.validation.dataset:
        return documents, list_documents(config.validation.dataset, seed=-1)  # no training's seed: other synthetic text
    return split(documents, config.validation.holdout)
