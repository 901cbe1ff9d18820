"""Sources for tests: made up, or written to a folder, one of each kind."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from titan_moe.config import Config, DataSource
from titan_moe.data import PackedDataLoader, build_dataloader
from titan_moe.sources.listing import Source, list_source
from titan_moe.sources.piece import Piece
from titan_moe.tokenizer import ByteTokenizer, Tokenizer

TOKENIZER = ByteTokenizer()

Row = tuple[bytes, bytes, bytes]
State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Made(Piece):
    """Documents without a file: the name, repeated up to each of the sizes."""

    sizes: tuple[int, ...]

    def documents(self, first: int = 0) -> Iterator[bytes]:
        for size in self.sizes[first:]:
            yield (self.name.encode() * size)[:size]

    def where(self, document: int, at: int = 0) -> str:
        return f"{self.name}{document}"


def made(*sizes: int | tuple[int, ...], weight: float = 1.0, **options: Any) -> Source:
    """A piece for each size, or for each tuple of the sizes of its documents."""
    several = [size if isinstance(size, tuple) else (size,) for size in sizes]
    pieces = [Made(f"{i}:", sum(each), each) for i, each in enumerate(several)]
    return Source("made", "text", pieces, weight=weight, fingerprint=str(sizes), **options)


def write(folder: Path, texts: dict[str, bytes]) -> str:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return str(folder)


def write_tokenizer(folder: Path, added: list[str], config: dict | None = None) -> LibraryTokenizer:
    """A byte-level BPE with no merges: ids 0-255, then the added tokens."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = LibraryTokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def jsonl(texts: Sequence[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({field: text, "n": i}).encode() + b"\n" for i, text in enumerate(texts))


def listed(dataset: str, **options: Any) -> Source:
    return list_source(DataSource(dataset=dataset), **options)


def documents_of(source: Source) -> list:
    """All documents in the order of the listing, empty ones left out."""
    documents = [document for piece in source.pieces for document in piece.documents()]
    return [d for d in documents if not isinstance(d, bytes | np.ndarray) or len(d)]


def make_loader(
    sources: Source | Sequence[Source],
    rank: int = 0,
    ranks: int = 1,
    batch: int = 2,
    *,
    seq_len: int = 8,
    tokenizer: Tokenizer = TOKENIZER,
    **options: int,
) -> PackedDataLoader:
    config = Config()
    config.training.seq_len = seq_len
    config.training.dataloader.num_shards = options.get("num_shards", 4)
    config.training.dataloader.num_workers = options.get("num_workers", 0)
    return build_dataloader(
        config,
        sources=[sources] if isinstance(sources, Source) else sources,
        tokenizer=tokenizer,
        dp_rank=rank,
        dp_degree=ranks,
        local_batch_size=batch,
        seed=options.get("seed", 0),
    )


def rows_of(batch: Any) -> list[Row]:
    """The samples of a batch in a form that compares."""
    inputs, labels_BL = batch
    tensors = (inputs["input"], inputs["positions"], labels_BL)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    return [tuple(row.numpy().tobytes() for row in rows) for rows in zip(*tensors, strict=True)]


def run(loaders: list[PackedDataLoader], steps: int) -> tuple[list[Row], State]:
    """(the samples of these steps, sorted within each step, and the merged state of all ranks)."""
    rows, iterators = [], [iter(loader) for loader in loaders]
    for _ in range(steps):
        rows += sorted(row for iterator in iterators for row in rows_of(next(iterator)))
    states = [loader.state_dict() for loader in loaders]
    assert len({int(state["next_sample"]) for state in states}) == 1
    return rows, {key: value for state in states for key, value in state.items()}


def ranks_at(sources: Any, ranks: int, batch: int, state: State | None, **options: Any) -> list[PackedDataLoader]:
    loaders = [make_loader(sources, rank, ranks, batch, **options) for rank in range(ranks)]
    for loader in loaders if state else []:
        loader.load_state_dict({key: state[key] for key in loader.state_dict()})  # as DCP: what the template asks for
    return loaders
