"""python -m titan_moe.tokenize TEXT FOLDER: tokenizes once what many runs, or many epochs, are going to read.

TEXT is whatever `training.dataset` can be, and FOLDER what it can be afterwards (`sources/tokens.py` has the format).
Documents keep the order of the listing, whatever the number of processes. Everything is written to FOLDER.partial,
which takes the name FOLDER when it is complete and on disk, so FOLDER is never half of something; a second one cannot
be written over it.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from tqdm import tqdm

from titan_moe.config import DataSource
from titan_moe.packing import SHOWN_FAULTS, Encoder
from titan_moe.sources import tokens
from titan_moe.sources.listing import Source, list_source
from titan_moe.sources.piece import Fault, Piece
from titan_moe.tokenizer import Tokenizer, build_tokenizer

HEADER_BYTES = 128  # of the .npy of any vector: NumPy leaves room for the length
BATCH_BYTES = 1 << 16  # of text encoded in one call


@dataclass(frozen=True, slots=True)
class Encoded:
    """A piece's documents."""

    ids: np.ndarray
    lengths: np.ndarray
    skipped: int
    first: list[tuple[int, Fault]]
    """A few of the skipped, by number: what file and line each is costs a look at all lines before it"""


def encode(piece: Piece, encoder: Encoder, dtype: str) -> Encoded:
    found: list[np.ndarray] = []
    skipped, first = 0, []
    for number, ids in enumerate(_encoded(piece, encoder)):
        if isinstance(ids, Fault):
            if encoder.source.on_error == "raise":
                encoder.take(ids, piece, number)
            skipped += 1
            if skipped <= SHOWN_FAULTS:
                first.append((number, ids))
        elif ids.size:
            found.append(ids.astype(dtype))
    lengths = np.array([ids.size for ids in found], np.int64)
    return Encoded(np.concatenate(found) if found else np.empty(0, dtype), lengths, skipped, first)


def _encoded(piece: Piece, encoder: Encoder) -> Iterator[np.ndarray | Fault]:
    batch, size = [], 0
    for document in piece.documents():
        batch.append(document)
        size += 0 if isinstance(document, Fault) else len(document)
        if size >= BATCH_BYTES:
            yield from encoder.encode(batch)
            batch, size = [], 0
    yield from encoder.encode(batch)


_encoder: Encoder | None = None  # of a worker process


def _start(source: Source, tokenizer: Tokenizer) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(source, tokenizer)


def _end_with_parent() -> None:
    """A parent that is killed outright tells nobody, and the pool's processes would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(piece: Piece, dtype: str) -> Encoded:
    assert _encoder is not None
    return encode(piece, _encoder, dtype)


def encode_all(source: Source, tokenizer: Tokenizer, dtype: str, processes: int) -> Iterator[Encoded]:
    """Each piece's documents, in order; with several processes, a few pieces per process are under way."""
    if processes == 1:
        encoder = Encoder(source, tokenizer)
        yield from (encode(piece, encoder, dtype) for piece in source.pieces)
        return
    ahead: deque[Future[Encoded]] = deque()
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start, (source, tokenizer))
    try:
        for piece in source.pieces:
            ahead.append(pool.submit(_encode, piece, dtype))
            if len(ahead) > 3 * processes:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError("A tokenizing process was killed, for memory perhaps: take fewer --processes") from error
    finally:
        pool.shutdown(cancel_futures=True)


class VectorFile:
    """A one-dimensional .npy written piece by piece: its length is put in at the end."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.file: IO[bytes] = path.open("wb")
        self.dtype, self.length = np.dtype(dtype), 0
        self.file.seek(HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        assert values.dtype == self.dtype
        self.file.write(values.data)
        self.length += values.size

    def close(self) -> None:
        self.file.seek(0)
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self.file, header)
        assert self.file.tell() == HEADER_BYTES
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def write(source: Source, tokenizer: Tokenizer, hf_assets_path: str, folder: Path, processes: int = 1) -> dict:
    """Write the folder; returns what its meta.json says."""
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    with _published(folder) as partial:
        ids, offsets = VectorFile(partial / "tokens.npy", dtype), VectorFile(partial / "offsets.npy", "int64")
        offsets.append(np.zeros(1, np.int64))
        digest, skipped = hashlib.blake2b(digest_size=16), 0
        total = sum(piece.size for piece in source.pieces)
        with tqdm(total=total, unit="B", unit_scale=True, desc=source.dataset, mininterval=1, file=sys.stderr) as bar:
            for piece, encoded in zip(source.pieces, encode_all(source, tokenizer, dtype, processes), strict=True):
                offsets.append(ids.length + np.cumsum(encoded.lengths))
                ids.append(encoded.ids)
                digest.update(encoded.ids.data)
                for number, fault in encoded.first[: max(SHOWN_FAULTS - skipped, 0)]:
                    tqdm.write(f"Skipped {piece.where(number, fault.at)}: {fault.reason}", file=sys.stderr)
                skipped += encoded.skipped
                bar.update(piece.size)
                bar.set_postfix_str(f"{ids.length:,} tokens, {skipped:,} skipped", refresh=False)
        if not ids.length:
            raise ValueError(f'dataset = "{source.dataset}": there is no document in it, {skipped} were skipped')
        encoder = Encoder(source, tokenizer)
        meta = {
            "format": tokens.FORMAT,
            "tokenizer": tokenizer.identity,
            "hf_assets_path": hf_assets_path,
            "vocab_size": tokenizer.vocab_size,
            "bos": encoder.bos,
            "eos": encoder.eos,
            "tokens": ids.length,
            "documents": offsets.length - 1,
            "skipped": skipped,
            "digest": digest.hexdigest(),
            "dataset": source.dataset,
            "files": {file.name: file.size for file in source.files},
        }
        ids.close()
        offsets.close()
        with (partial / "meta.json").open("w", encoding="utf-8") as file:
            file.write(json.dumps(meta, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return meta


@contextmanager
def _published(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its name at the end, or goes away when something goes wrong."""
    partial = folder.with_name(f"{folder.name}.partial")
    for there, what in ((folder, "exists: choose another, or remove it"), (partial, "exists: another process is "
        "writing it, or was killed; in that case remove it")):  # fmt: skip
        if there.exists():
            raise ValueError(f"{there} {what}")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, folder)  # all at once, and not over anything but an empty folder
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)  # the name too
    os.close(descriptor)


def main(argv: list[str]) -> int:
    usage = "python -m titan_moe.tokenize"
    parser = argparse.ArgumentParser(usage, description="Turn text into a folder of token ids that runs can train on.")
    parser.add_argument("text", help='file, folder or glob of text, .jsonl or .parquet, or "hf:owner/name:split"')
    parser.add_argument("folder", type=Path, help="folder to write; name it in training.dataset")
    parser.add_argument(
        "--hf_assets_path", default="", help="the tokenizer, as in [model]; default: one token per byte"
    )
    parser.add_argument("--text_field", default="text", help="field or column with a document's text; default: text")
    parser.add_argument("--on_error", choices=("raise", "skip"), default="raise", help="what a broken document does")
    parser.add_argument("--processes", type=int, default=1, help="processes that tokenize; default: 1")
    parser.add_argument(
        "--add_bos", action=argparse.BooleanOptionalAction, default=None, help="begin documents with bos"
    )
    parser.add_argument("--add_eos", action=argparse.BooleanOptionalAction, default=None, help="end documents with eos")
    arguments = parser.parse_args(argv)
    spec = DataSource(dataset=arguments.text, add_bos=arguments.add_bos, add_eos=arguments.add_eos)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half written goes away
    start = time.monotonic()
    try:
        if arguments.processes < 1:
            raise ValueError(f"--processes {arguments.processes}: must be at least 1")
        tokenizer = build_tokenizer(arguments.hf_assets_path, rows=sys.maxsize)
        if arguments.add_bos and tokenizer.bos_id is None:
            raise ValueError("--add_bos: the tokenizer has no bos token; leave it out")
        source = list_source(spec, text_field=arguments.text_field, on_error=arguments.on_error)
        if source.kind == "tokens":
            raise ValueError(f"{arguments.text} holds token ids already")
        meta = write(source, tokenizer, arguments.hf_assets_path, arguments.folder, arguments.processes)
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    speed = meta["tokens"] / (time.monotonic() - start)
    skipped = f", {meta['skipped']:,} skipped" if meta["skipped"] else ""
    print(f"{arguments.folder}: {meta['tokens']:,} tokens in {meta['documents']:,} documents{skipped}; {speed:,.0f}/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
