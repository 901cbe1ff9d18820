"""hf:owner/name[@revision][:split]: rows of a dataset on a Hugging Face hub, streamed through `datasets`.

The data files of the split are the pieces, so the order is as fixed as the files of one revision are, and the run keeps
to the revision that it found first. `datasets` 4 runs no code that comes with a dataset, and none is asked for here.
But a dataset's README may name any path or address as its data, this machine's files too: only its own are read.

Networks fail in the middle, and a rank that waits in silence looks to all others like a hanging collective. So a thread
reads, and reads ahead; when it fails it begins again at the row it had come to, after 1, 2, 4, ... seconds; and whoever
waits for it gives up in good time, with the last error in the message. `HF_ENDPOINT` names another hub, a mirror.
"""

import atexit
import itertools
import logging
import os
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_moe.sources.lines import text_of_field
from titan_moe.sources.piece import Fault, Piece

logger = logging.getLogger(__name__)

NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<split>[\w.-]+))?")
BATCH_ROWS = 32
BATCHES_AHEAD = 4
FIRST_WAIT, LONGEST_WAIT = 1.0, 16.0  # seconds between two tries
LISTING_TRIES = 2  # of which each is several of huggingface_hub's own


@dataclass(frozen=True, slots=True)
class HubPiece(Piece):
    dataset: Any  # datasets.IterableDataset, the same for all pieces
    index: int  # of the data file
    text_field: str
    patience: float  # seconds without a row after which the run ends

    @property
    def unit(self) -> str:
        return f"{self.name}:{self.index}"

    def documents(self, first: int = 0) -> Iterator[bytes | Fault]:
        rows: queue.Queue = queue.Queue(BATCHES_AHEAD)
        reader = Reader(self, first, rows)
        reader.start()
        try:
            while True:
                try:
                    batch = rows.get(timeout=self.patience)
                except queue.Empty:
                    reader.hangs = True
                    raise ValueError(self.message(reader)) from reader.error
                if batch is None:
                    return
                if isinstance(batch, Exception):
                    raise ValueError(f"{self.where(reader.row)}: {batch}") from batch
                yield from (text_of_field({self.text_field: text}, self.text_field) for text in batch)
        finally:
            reader.ended.set()

    def message(self, reader: "Reader") -> str:
        why = f"it failed {reader.failures} times, the last time with {reader.error!r}" if reader.error else "silence"
        return (
            f"{self.where(reader.row)}: nothing came for {self.patience:.0f} s from {endpoint()}: {why}. Resume from "
            "the last checkpoint when the hub answers again, or download the files and name them in training.dataset"
        )

    def where(self, document: int, at: int = 0) -> str:
        return f"{self.name}, data file {self.index}, row {document}"


_readers: weakref.WeakSet["Reader"] = weakref.WeakSet()


@atexit.register
def _end_readers() -> None:
    """Python aborts when a thread comes back from pyarrow while it shuts down. So wait for all, and where one hangs in
    the network, leave without the rest of the shut-down: at once where that is known, as torchrun shows the message of
    the rank that is gone first."""
    readers = list(_readers)
    for reader in readers:
        reader.ended.set()
    hangs = any(reader.hangs for reader in readers)
    deadline = time.monotonic() + (0 if hangs else 5)
    for reader in readers:
        reader.join(max(deadline - time.monotonic(), 0))
    if any(reader.is_alive() for reader in readers):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hangs or hasattr(sys, "last_value") else 0)  # last_value: of an error that nobody caught


class Reader(threading.Thread):
    """Puts batches of rows into `rows`: lists of texts, then None at the end, or an error that no repetition mends."""

    def __init__(self, piece: HubPiece, first: int, rows: queue.Queue) -> None:
        super().__init__(name=f"{piece.name} {piece.index}", daemon=True)
        self.piece, self.row, self.rows = piece, first, rows
        self.ended = threading.Event()  # nobody takes rows any more
        self.failures, self.hangs = 0, False
        self.error: Exception | None = None
        _readers.add(self)

    def run(self) -> None:
        wait = FIRST_WAIT
        while not self.ended.is_set():
            try:
                shard = self.piece.dataset.shard(self.piece.dataset.num_shards, self.piece.index)
                # iter(), not a plain loop: that would divide the rows among the workers of a torch DataLoader.
                for batch in shard.skip(self.row).iter(BATCH_ROWS):
                    texts = batch.get(self.piece.text_field)
                    if texts is None:
                        raise ValueError(f'no field "{self.piece.text_field}", only {", ".join(batch)}')
                    self.put(texts)
                    self.row += len(texts)
                    self.failures, self.error, wait = 0, None, FIRST_WAIT
                self.put(None)
                return
            except ValueError as error:  # what is in the file (also pyarrow's errors), not how it travelled
                self.put(error)
                return
            except Exception as error:  # of httpx, fsspec, aiohttp, ssl and others: whatever a network can do
                self.failures, self.error = self.failures + 1, error
                logger.warning(f"{self.piece.where(self.row)}: {error!r}; again in {wait:.0f} s")
                self.ended.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    def put(self, item: Any) -> None:
        while not self.ended.is_set():
            try:
                return self.rows.put(item, timeout=0.2)
            except queue.Full:
                continue
        return None


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def pieces(name: str, text_field: str, patience: float) -> tuple[list[HubPiece], str]:
    """The data files of a split, and the revision they are of. Asks the hub."""
    matched = NAME.fullmatch(name)
    if matched is None:
        raise ValueError(
            f'dataset = "{name}": write hf:owner/name, hf:owner/name:split or hf:owner/name@revision:split'
        )
    revision, dataset = _open(name, matched["repository"], matched["revision"], matched["split"] or "train")
    if dataset.features is not None:
        if text_field not in dataset.features:
            raise ValueError(
                f'dataset = "{name}" has no field "{text_field}"; its fields are: '
                f"{', '.join(dataset.features)}. Name one with text_field"
            )
        dataset = dataset.select_columns([text_field])
    count = dataset.num_shards
    return [HubPiece(name, 1, dataset, i, text_field, patience) for i in range(count)], revision


def _open(name: str, repository: str, revision: str | None, split: str) -> tuple[str, Any]:
    import datasets.config  # seconds, so only where it is needed
    import huggingface_hub

    # Its own tries, 20 of 5 s and more after each other, would outlast every collective on the other ranks.
    for tries in ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES"):
        setattr(datasets.config, tries, 1)
    foreign: list[str] = []
    for attempt in itertools.count(1):
        try:
            sha = huggingface_hub.HfApi().dataset_info(repository, revision=revision).sha
            builder = datasets.load_dataset_builder(repository, revision=sha)
            foreign = _foreign_files(builder.config.data_files, f"hf://datasets/{repository}@{sha}/")
            if not foreign:
                return str(sha), builder.as_streaming_dataset(split=split)
            break
        except Exception as error:
            offline = datasets.config.HF_HUB_OFFLINE
            answered = getattr(getattr(error, "response", None), "status_code", 503)
            gone = isinstance(error, (ValueError, FileNotFoundError)) or (answered < 500 and answered != 429)
            if not offline and not gone and attempt < LISTING_TRIES:
                logger.warning(f"{name}: {error!r}; again in {2 ** (attempt - 1)} s")
                time.sleep(2 ** (attempt - 1))
                continue
            why = "HF_HUB_OFFLINE is set" if offline else f"after {attempt} tries: {' '.join(str(error).split())}"
            raise ValueError(
                f'dataset = "{name}" cannot be listed at {endpoint()}, {why}. Check the name, the split ("{split}"), '
                "the network and, for a closed dataset, HF_TOKEN; without a network, download the files beforehand and "
                "name them instead"
            ) from error
    raise ValueError(
        f'dataset = "{name}": its data files lie outside of it, {foreign[0]}, and are not read: its README says so, or '
        f'there is a folder "{repository}" here. Name them in training.dataset if you want them'
    )


def _foreign_files(data_files: Mapping[str, Sequence[str]] | None, own: str) -> list[str]:
    """Those of a dataset's data files that do not lie in it; packed ones are written as "zip://name::file"."""
    names = [str(name) for split in (data_files or {}).values() for name in split]
    return [name for name in names if ".." in name.split("/") or not name.split("::")[-1].startswith(own)]
