"""Sources, the split, the packing, and the one global order: the same on every mesh, with workers, after a resume."""

import gc
import hashlib
import itertools
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_moe import sources
from titan_moe.config import Config
from titan_moe.data import (
    IGNORE_INDEX,
    PackedDataLoader,
    ShardStream,
    build_dataloader,
    build_dataloaders,
    count_shards,
    deal,
    permutation,
)
from titan_moe.sources import Document, list_documents, split
from titan_moe.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


class Made(Document):
    """A document without a file: its name, repeated up to its size."""

    def read(self, at_most: int = 1 << 30) -> bytes:
        return (self.name.encode() * self.end)[: self.end]


def made(*sizes: int) -> list[Document]:
    return [Made(f"{i}:", "", 0, size, size) for i, size in enumerate(sizes)]


def write(folder: Path, texts: dict[str, bytes]) -> str:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return str(folder)


def make_loader(
    documents: list[Document], rank: int = 0, ranks: int = 1, batch: int = 2, *, seq_len: int = 8, **options: int
) -> PackedDataLoader:
    config = Config()
    config.training.seq_len = seq_len
    config.training.dataloader.num_shards = options.get("num_shards", 4)
    config.training.dataloader.num_workers = options.get("num_workers", 0)
    return build_dataloader(
        config,
        documents=documents,
        tokenizer=TOKENIZER,
        dp_rank=rank,
        dp_degree=ranks,
        local_batch_size=batch,
        seed=options.get("seed", 0),
    )


Row = tuple[bytes, bytes, bytes]


def rows_of(batch: Any) -> list[Row]:
    """The samples of a batch in a form that compares."""
    inputs, labels_BL = batch
    tensors = (inputs["input"], inputs["positions"], labels_BL)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    return [tuple(row.numpy().tobytes() for row in rows) for rows in zip(*tensors, strict=True)]


def global_rows(documents: list[Document], count: int, **options: int) -> list[Row]:
    """The first samples of the global order, from one rank with batches of one."""
    return [rows_of(batch)[0] for batch in itertools.islice(make_loader(documents, batch=1, **options), count)]


# ---------------------------------------------------------------------------------------------------------------------
# Packing


def reference(documents: list[Document], seq_len: int, seed: int, shard: int, n: int) -> tuple[list, list, list, list]:
    """Sample n of a shard, token by token: (input, positions, labels, epoch of each token)."""
    tokens: list[tuple[int, int, int]] = []  # (token, place in its document, epoch)
    for epoch in itertools.count():
        if len(tokens) > (n + 1) * seq_len:
            break
        for i in permutation(len(documents), "epoch", seed, shard, epoch):
            tokens += [(t, j, epoch) for j, t in enumerate(TOKENIZER.encode_document(documents[i].read()).tolist())]
    window, following = tokens[n * seq_len : (n + 1) * seq_len], tokens[n * seq_len + 1 : (n + 1) * seq_len + 1]
    positions: list[int] = []
    for k, (_, place, _) in enumerate(window):
        positions.append(0 if k == 0 or place == 0 else positions[-1] + 1)
    labels = [IGNORE_INDEX if place == 0 else token for token, place, _ in following]
    return [token for token, _, _ in window], positions, labels, [epoch for _, _, epoch in window]


corpora = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(corpora, st.integers(1, 24), st.integers(0, 3), st.integers(1, 5))
def test_stream_is_the_documents_end_to_end(sizes: list[int], seq_len: int, seed: int, skip: int) -> None:
    documents = made(*sizes)
    total = sum(sizes) + 2 * len(sizes)
    stream, jumping = (ShardStream(documents, TOKENIZER, seq_len, seed, 7) for _ in range(2))
    inputs: list[int] = []
    for n in range(2 * total // seq_len + 2):
        input_L, positions_L, labels_L = stream.sample(n)
        expected = reference(documents, seq_len, seed, 7, n)
        assert (input_L.tolist(), positions_L.tolist(), labels_L.tolist()) == expected[:3]
        assert stream.epoch in (expected[3][-1], expected[3][-1] + 1)
        inputs += input_L.tolist()
        if n % skip == 0:  # skipping arrives at the same sample and state
            assert all((a == b).all() for a, b in zip(jumping.sample(n), (input_L, positions_L, labels_L), strict=True))
            assert jumping.state == stream.state
        resumed = ShardStream(documents, TOKENIZER, seq_len, seed, 7, stream.state)
        assert resumed.sample(n + 1)[0].tolist() == reference(documents, seq_len, seed, 7, n + 1)[0]
    # Within each of two epochs: every document, whole, exactly once.
    for epoch in range(2):
        text = inputs[epoch * total : (epoch + 1) * total]
        ends = [i + 1 for i, token in enumerate(text) if token == TOKENIZER.eos_id]
        found = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert Counter(map(tuple, found)) == Counter(
            tuple(TOKENIZER.encode_document(d.read()).tolist()) for d in documents
        )


def test_labels_and_positions_by_hand() -> None:
    stream = ShardStream(made(2), TOKENIZER, 6, 0, 0)  # bos "0:" eos, again and again
    (bos, eos), no = (256, 257), IGNORE_INDEX
    assert [a.tolist() for a in stream.sample(0)] == [
        [bos, 48, 58, eos, bos, 48], [0, 1, 2, 3, 0, 1], [48, 58, eos, no, 48, 58]
    ]  # fmt: skip
    assert stream.state == (1, 1, 0, 2)
    assert [a.tolist() for a in stream.sample(1)] == [
        [58, eos, bos, 48, 58, eos], [0, 1, 0, 1, 2, 3], [eos, no, 48, 58, eos, no]
    ]  # fmt: skip
    assert stream.state == (2, 3, 0, 0)  # three epochs over, standing at the start of a document


def test_stream_does_not_go_back() -> None:
    stream = ShardStream(made(50), TOKENIZER, 4, 0, 0)
    stream.sample(3)
    with pytest.raises(AssertionError, match="cannot go back to 3"):
        stream.sample(3)


def test_epochs_and_shards_have_orders_of_their_own() -> None:
    orders = {permutation(50, "epoch", 0, shard, epoch).tobytes() for shard in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert sorted(permutation(50, "epoch", 0, 0, 0).tolist()) == list(range(50))
    assert permutation(5, "deal", 0).tolist() == [2, 1, 4, 3, 0], "the order of all training data has changed"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=100), st.integers(1, 64))
def test_deal_is_complete_balanced_and_leaves_no_shard_empty(sizes: list[int], num_shards: int) -> None:
    shards = deal(documents := made(*sizes), count := count_shards(num_shards, len(sizes)), 0)
    assert len(shards) == count and all(shards)
    assert sorted(d.name for shard in shards for d in shard) == sorted(d.name for d in documents)
    totals = [sum(d.end for d in shard) for shard in shards]
    assert max(totals) - min(totals) <= max(sizes)


def test_count_shards() -> None:
    assert [count_shards(64, n) for n in (1, 2, 3, 63, 64, 1000)] == [1, 2, 2, 32, 64, 64]
    assert [count_shards(48, n) for n in (47, 48, 1000)] == [32, 48, 48]


# ---------------------------------------------------------------------------------------------------------------------
# The global order

SIZES = [3, 90, 1, 17, 30, 5, 44, 61, 2, 12, 28]  # 315 tokens: an epoch is 39 samples of 8


@pytest.mark.parametrize(
    ("ranks", "batch", "microbatches"),
    [(1, 12, 1), (1, 3, 4), (2, 6, 1), (2, 2, 3), (3, 4, 1), (3, 1, 4), (4, 3, 1), (4, 1, 3), (12, 1, 1)],
)
def test_a_step_consumes_the_same_samples_on_every_mesh(ranks: int, batch: int, microbatches: int) -> None:
    documents = made(*SIZES)
    expected = global_rows(documents, 8 * 12)  # over two epochs
    batches = [iter(make_loader(documents, rank, ranks, batch)) for rank in range(ranks)]
    for step in range(8):
        rows = [row for b in batches for _ in range(microbatches) for row in rows_of(next(b))]
        assert sorted(rows) == sorted(expected[step * 12 : (step + 1) * 12])


def test_a_rank_opens_its_share_of_the_shards(caplog: pytest.LogCaptureFixture) -> None:
    documents = made(*SIZES)
    assert [list(make_loader(documents, r, 2).dataset.shards) for r in range(2)] == [[0, 2], [1, 3]]
    assert [list(make_loader(documents, r, 8).dataset.shards) for r in range(8)] == [[r % 4] for r in range(8)]
    assert not [record for record in caplog.records if " 2 data-parallel" in record.message]
    assert "11 documents in 4 shards for 8 data-parallel ranks" in caplog.text and "gcd(8, 4) = 2 ranks" in caplog.text
    caplog.clear()
    assert [list(make_loader(documents, r, 3).dataset.shards) for r in range(3)] == [[0, 1, 2, 3]] * 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # once, not from every rank
    assert "gcd(3, 4) = 3 ranks" in caplog.text


@pytest.mark.parametrize("sizes", [[1], [1, 1], [300]])
@pytest.mark.parametrize("seq_len", [1, 7, 500])
def test_tiny_corpora(sizes: list[int], seq_len: int) -> None:
    documents = made(*sizes)
    expected = global_rows(documents, 12, seq_len=seq_len)
    loaders = [iter(make_loader(documents, rank, 3, seq_len=seq_len)) for rank in range(3)]
    for step in range(2):
        rows = [row for loader in loaders for row in rows_of(next(loader))]
        assert sorted(rows) == sorted(expected[step * 6 : (step + 1) * 6])


def test_seed_and_sequence_length_change_the_order() -> None:
    documents = made(*SIZES)
    orders = [global_rows(documents, 20), global_rows(documents, 20, seed=1), global_rows(documents, 20, num_shards=2)]
    assert orders[0] == global_rows(documents, 20) and orders[0] != orders[1] and orders[0] != orders[2]


def test_workers_change_nothing() -> None:
    documents = made(*SIZES)
    alone, helped = (make_loader(documents, 1, 2, num_workers=workers) for workers in (0, 2))
    for one, other in itertools.islice(zip(alone, helped, strict=True), 12):
        assert rows_of(one) == rows_of(other)
        assert same_state(alone.state_dict(), helped.state_dict())  # so nothing that was only prefetched counts
    assert helped.state_dict()["next_sample"] == 12 * 2 * 2


def test_iter_starts_over_and_leaves_nothing_behind() -> None:
    loader = make_loader(made(*SIZES), num_workers=1)
    random_state = torch.get_rng_state()
    first = iter(loader)
    rows = [rows_of(next(first)) for _ in range(3)]
    second = iter(loader)
    assert loader.state_dict()["next_sample"] == 0
    assert [rows_of(next(second)) for _ in range(3)] == rows
    assert torch.equal(random_state, torch.get_rng_state()), "drawing batches moved the training's random numbers"
    with pytest.raises(AssertionError, match=r"newer iter\(\)"):
        next(first)
    del first, second
    assert not multiprocessing.active_children(), "workers outlive their iterator"


# ---------------------------------------------------------------------------------------------------------------------
# Resuming

State = dict[str, torch.Tensor]


def same_state(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def run(loaders: list[PackedDataLoader], steps: int) -> tuple[list[Row], State]:
    """(the samples of these steps, sorted within each step, and the merged state of all ranks)."""
    rows, iterators = [], [iter(loader) for loader in loaders]
    for _ in range(steps):
        rows += sorted(row for iterator in iterators for row in rows_of(next(iterator)))
    states = [loader.state_dict() for loader in loaders]
    assert len({int(state["next_sample"]) for state in states}) == 1
    return rows, {key: value for state in states for key, value in state.items()}


def ranks_at(documents: list[Document], ranks: int, batch: int, state: State, **options: int) -> list[PackedDataLoader]:
    loaders = [make_loader(documents, rank, ranks, batch, **options) for rank in range(ranks)]
    for loader in loaders:
        loader.load_state_dict({key: state[key] for key in loader.state_dict()})  # as DCP: what the template asks for
    return loaders


def test_resume_at_every_step() -> None:
    documents = made(*SIZES)
    expected = global_rows(documents, 120)  # three epochs
    loader = make_loader(documents, batch=4)
    for step, batch in enumerate(itertools.islice(loader, 24)):
        assert rows_of(batch) == expected[4 * step : 4 * step + 4]
        assert [int(loader.state_dict()[f"shard.{s}"][0]) for s in range(4)] == [step + 1] * 4  # nothing left to skip
        (resumed,) = ranks_at(documents, 1, 4, loader.state_dict())
        assert [row for b in itertools.islice(resumed, 2) for row in rows_of(b)] == expected[
            4 * step + 4 : 4 * step + 12
        ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_resumes_in_a_row(num_workers: int) -> None:
    documents, rows = made(*SIZES), []
    state = make_loader(documents).state_dict()
    for steps in (5, 1, 0, 6):
        loader = ranks_at(documents, 1, 2, state, num_workers=num_workers)
        more, state = run(loader, steps)
        rows += more
    assert state["next_sample"] == 24
    expected = global_rows(documents, 24)
    assert rows == [row for i in range(0, 24, 2) for row in sorted(expected[i : i + 2])]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 4)), min_size=2, max_size=4))
def test_resume_on_any_mesh_at_any_position(runs: list[tuple[int, int, int]]) -> None:
    documents, rows = made(*SIZES), []
    state = run([make_loader(documents)], 0)[1]
    for ranks, batch, steps in runs:
        more, state = run(ranks_at(documents, ranks, batch, state), steps)
        rows += more
        assert state.keys() == {f"shard.{s}" for s in range(4)} | {"next_sample", "fingerprint"}
    consumed = sum(ranks * batch * steps for ranks, batch, steps in runs)
    assert state["next_sample"] == consumed
    assert sorted(rows) == sorted(global_rows(documents, consumed))


def test_a_state_is_a_copy() -> None:
    loader = make_loader(made(*SIZES))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    for tensor in loader.state_dict().values():
        tensor.fill_(99)  # DCP loads into the template
    assert same_state(state, loader.state_dict())
    assert all(value.dtype == torch.int64 for value in state.values())
    assert state["shard.0"].shape == (4,) and state["shard.3"].tolist() == [
        0,
        0,
        0,
        0,
    ]  # shards 2 and 3: not touched yet


def test_other_data_is_refused(tmp_path: Path) -> None:
    documents = made(*SIZES)
    state = make_loader(documents).state_dict()
    for other in (
        make_loader(documents, seq_len=9),
        make_loader(documents, seed=1),
        make_loader(documents, num_shards=2),
    ):
        with pytest.raises(ValueError, match=r"in this: training\.seq_len.*initial_load_path"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"in this: the documents .* changed.*initial_load_path"):
        make_loader(made(*SIZES[:-1], SIZES[-1] + 1)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"no shard\.0, .*next_sample"):
        make_loader(documents).load_state_dict({})


def test_a_file_that_became_shorter_in_tokens_is_named(tmp_path: Path) -> None:
    documents = list_documents(write(tmp_path, {"a.txt": b"x" * 40}))
    with pytest.raises(ValueError, match=r"a\.txt has 42 tokens, but the checkpoint stopped at its token 42"):
        ShardStream(documents, TOKENIZER, 4, 0, 0, (9, 0, 0, 42)).sample(9)


def _save_and_load(rank: int, ranks: int, folder: str, sizes: list[int]) -> None:
    """One of `ranks` processes: three steps, save, then load into a fresh loader and go on."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    loader = make_loader(made(*sizes), rank, ranks, 2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    dcp.save({"dataloader": loader}, checkpoint_id=f"{folder}/checkpoint")
    resumed = make_loader(made(*sizes), rank, ranks, 2)
    dcp.load({"dataloader": resumed}, checkpoint_id=f"{folder}/checkpoint")
    again = iter(resumed)
    assert all(rows_of(next(batches)) == rows_of(next(again)) for _ in range(3))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the last load, in one process, is meant to be
@pytest.mark.parametrize("ranks", [2, 3])  # 3: every rank reads every shard, and DCP keeps one rank's state of it
def test_dcp_saves_on_some_ranks_and_loads_on_others(tmp_path: Path, ranks: int) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_save_and_load, args=(r, ranks, str(tmp_path), SIZES)) for r in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * ranks

    documents, done = made(*SIZES), 3 * ranks * 2
    loader = make_loader(documents, batch=6)
    dcp.load({"dataloader": loader}, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    assert rows_of(next(iter(loader))) == global_rows(documents, done + 6)[done:]


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def names(documents: list[Document]) -> list[str]:
    return [document.name for document in documents]


def test_folder(tmp_path: Path) -> None:
    texts = ["b.txt", "a/z.md", "a/b/c.rst", "a.py", "Z.txt"]
    others = {"a/empty.txt": b"", "a/picture.png": b"x", ".hidden/a.txt": b"x"}
    folder = write(tmp_path, {name: name.encode() for name in texts} | others)
    documents = list_documents(folder)
    assert names(documents) == ["Z.txt", "a.py", "a/b/c.rst", "a/z.md", "b.txt"]
    assert [document.read().decode() for document in documents] == names(documents)


def test_glob_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"x/a.c": b"1", "x/y/b.c": b"2", "x/y/c.h": b"3"})
    assert names(list_documents(f"{tmp_path}/x/**/*.c")) == ["a.c", "y/b.c"]
    assert names(list_documents(f"{tmp_path}/*/*")) == ["x/a.c"]
    (document,) = list_documents(str(tmp_path / "x" / "y" / "c.h"))
    assert (document.name, document.read()) == ("c.h", b"3")
    absolute = list_documents(str(tmp_path / "x" / "**"))
    monkeypatch.chdir(tmp_path)
    assert list_documents("x/**") == absolute and names(absolute) == ["a.c", "y/b.c", "y/c.h"]
    monkeypatch.chdir(tmp_path / "x" / "y")
    assert names(list_documents("*.c")) == ["b.c"] and names(list_documents("c.h")) == ["c.h"]


def test_a_file_counts_once(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"1", "d/b.txt": b"2"})
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "e").symlink_to(tmp_path / "d")
    assert names(list_documents(str(tmp_path))) == ["a.txt", "d/b.txt"]
    assert names(list_documents(f"{tmp_path}/**/*.txt")) == ["a.txt", "d/b.txt"]


def test_nothing_found_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'no file or folder .*nowhere\. It can be .*"synthetic"'):
        list_documents(str(tmp_path / "nowhere"))
    write(tmp_path, {"a.log": b"x", "empty.txt": b""})
    with pytest.raises(ValueError, match=r"no document found, looked for \.txt .* files under .*A glob"):
        list_documents(str(tmp_path))
    with pytest.raises(ValueError, match=r"no document found, looked for files that match .*\*\.c;"):
        list_documents(f"{tmp_path}/*.c")
    with pytest.raises(ValueError, match=r"no document found, looked for text in .*empty\.txt"):
        list_documents(str(tmp_path / "empty.txt"))


def test_what_cannot_be_read_as_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.jsonl": b"{}"})
    with pytest.raises(ValueError, match=r"a\.jsonl is not plain text"):
        list_documents(f"{tmp_path}/*")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"b\.txt cannot be read"):
        list_documents(str(tmp_path))

    def denied(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ValueError, match=r"cannot be listed: .*Permission denied"):
        list_documents(str(tmp_path))


def test_a_file_that_vanishes_or_shrinks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = list_documents(write(tmp_path, {"a.txt": b"12345", "b.txt": b"12345"}))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"a\.txt changed after it was listed: .*No such file.*resume"):
        documents[0].read()
    with pytest.raises(ValueError, match=r"b\.txt changed .* shrunk from 5 to 3 bytes"):
        documents[1].read()
    # Ending the worker of an iterator that the garbage collector found takes this long.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    for num_workers in (0, 1):  # from a worker too: an error with the name in it, not a wait for a batch
        with pytest.raises(ValueError, match=r"[ab]\.txt changed after it was listed"):
            next(iter(make_loader(documents, num_workers=num_workers)))
    gc.collect()


TEXTS = {
    "lines": b"".join(b"line %d of a longer text\n" % i for i in range(900)),
    "no line ends": bytes(range(65, 91)) * 800,
    "characters of 1 to 4 bytes": "aß漢🙂".encode() * 2000,
    "characters of 4 bytes": "🙂".encode() * 5000,
    "long lines": (b"x" * 3000 + b"\n") * 7,
    "only line ends": b"\n" * 20000,
    "not UTF-8": b"\x80" * 20000,
    "a line end at the end": b"x" * 19999 + b"\n",
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("cut_off", [0, 1, 2, 3, 5000])
def test_pieces_are_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cut_off: int) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 4096)
    monkeypatch.setattr(sources, "CUT_WINDOW", 512)
    text = TEXTS[kind][cut_off:]
    (tmp_path / "a.txt").write_bytes(text)
    pieces = list_documents(str(tmp_path / "a.txt"))
    texts = [piece.read() for piece in pieces]
    assert len(pieces) == -(-len(text) // 4096) and b"".join(texts) == text
    assert all(2048 - 512 < len(piece) <= 4096 + 512 for piece in texts)
    if kind == "lines":
        assert all(piece.endswith(b"\n") for piece in texts)
    if kind.startswith("characters") and cut_off == 0:
        assert "".join(piece.decode() for piece in texts).encode() == text


def test_piece_of_real_size(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % i for i in range(300_000))
    (tmp_path / "a.txt").write_bytes(text)
    documents = list_documents(str(tmp_path / "a.txt"))
    assert len(documents) == 4 and b"".join(document.read() for document in documents) == text


def test_synthetic_text_is_fixed() -> None:
    documents = list_documents("synthetic")
    assert len(documents) == 4096 and 9e6 < sum(document.end for document in documents) < 10e6
    digest = hashlib.blake2b(b"".join(document.read() for document in documents[:50]), digest_size=8).hexdigest()
    assert digest == "f0404d3a504c41a0", "synthetic text has changed, and with it every recorded loss"
    assert all(len(document.read()) == document.end for document in documents[:50])
    assert list_documents("synthetic", seed=1)[0].read() != documents[0].read()


def test_synthetic_text_can_be_learned() -> None:
    text = b"".join(document.read() for document in list_documents("synthetic")[:300])
    counts = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
    unigram = -sum(p * np.log(p) for p in counts if p > 0)
    context, joint = (
        Counter(text[i : i + 3] for i in range(len(text))),
        Counter(text[i : i + 4] for i in range(len(text))),
    )
    four_gram = -sum(n * np.log(n / context[gram[:3]]) for gram, n in joint.items()) / len(text)
    assert unigram > 2.4 and four_gram < 1.5  # nats per byte; random bytes have 5.5


def test_python_stdlib() -> None:
    documents = list_documents("python_stdlib")
    listed = names(documents)
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} <= set(listed) and listed == sorted(listed)
    assert not [name for name in listed if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]
    assert sum(document.end - document.start for document in documents) > 4e6
    assert all(document.read(1) for document in documents)


# ---------------------------------------------------------------------------------------------------------------------
# Held-out documents


def test_split_is_disjoint_by_content_too() -> None:
    documents = list_documents("python_stdlib")
    training, validation = split(documents, 0.1)
    assert Counter(names(training + validation)) == Counter(names(documents))
    assert 0.04 < len(validation) / len(documents) < 0.2
    assert not {d.read() for d in training} & {d.read() for d in validation}
    assert split(documents, 0.1) == (training, validation)
    assert set(names(split(documents, 0.05)[1])) <= set(names(validation))


def test_copies_stay_together(tmp_path: Path) -> None:
    texts = {f"{i}/{j}.txt": b"text %d" % i + b"x" * (i % 3) for i in range(40) for j in range(3)}
    training, validation = split(list_documents(write(tmp_path, texts)), 0.3)
    assert len(validation) % 3 == 0 and not {d.read() for d in training} & {d.read() for d in validation}


def test_pieces_stay_together_unless_there_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 4096)
    monkeypatch.setattr(sources, "CUT_WINDOW", 512)
    folder = write(tmp_path, {f"{i}.txt": b"%d\n" % i * 9000 for i in range(10)})
    training, validation = split(list_documents(folder), 0.3)
    assert len(training) + len(validation) > 40 and not set(names(training)) & set(names(validation))
    pieces = list_documents(f"{folder}/9.txt")
    training, validation = split(pieces, 0.3)
    assert training and validation and sorted(training + validation, key=lambda d: d.start) == pieces


def test_adding_files_moves_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path, {f"{i}.txt": b"%d" % i for i in range(50)})
    before = set(names(split(list_documents(folder), 0.2)[1]))
    write(tmp_path, {f"more{i}.txt": b"more %d" % i for i in range(50)})
    assert {name for name in names(split(list_documents(folder), 0.2)[1]) if "more" not in name} == before


@given(st.integers(2, 30), st.sampled_from([1e-6, 0.02, 0.5, 0.999999]))
def test_both_sides_have_a_document(count: int, holdout: float) -> None:
    training, validation = split(made(*range(1, count + 1)), holdout)
    assert training and validation and len(training) + len(validation) == count


def test_a_split_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one short file or copies.*validation\.enable = false"):
        split(list_documents(write(tmp_path, {"a.txt": b"same", "b.txt": b"same"})), 0.5)
    with pytest.raises(ValueError, match=r"one short file or copies"):
        split(list_documents(str(tmp_path / "a.txt")), 0.5)
    for holdout in (0, 1, -1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            split(made(1, 2), holdout)


def test_build_dataloaders(tmp_path: Path) -> None:
    config = Config()
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.training.dataset = write(tmp_path, {f"{i}.txt": b"%d" % i * 9 for i in range(40)})

    def build() -> tuple[set[str], set[str], list]:
        training, validation = build_dataloaders(config, TOKENIZER, 0, 1)
        assert validation is not None
        rows = [rows_of(batch) for batch in itertools.islice(validation, 3)]
        return set(names(documents_of(training))), set(names(documents_of(validation))), rows

    training, validation = build_dataloaders(config, TOKENIZER, 0, 1)
    assert len(documents_of(training)) == 40 and validation is None
    config.validation.enable, config.validation.holdout = True, 0.3
    trained_on, kept_away, rows = build()
    assert kept_away and trained_on and not kept_away & trained_on and len(kept_away | trained_on) == 40
    config.debug.seed = 1
    assert build() == (trained_on, kept_away, rows)  # another seed, the same validation
    config.debug.seed, config.training.dataset, config.validation.dataset = 0, "synthetic", "synthetic"
    trained_on, kept_away, _ = build()
    assert len(trained_on) == len(kept_away) == 4096 and not trained_on & kept_away


def documents_of(loader: PackedDataLoader) -> list[Document]:
    return list(itertools.chain.from_iterable(loader.dataset.documents.values()))


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def test_speed() -> None:
    batches: Iterator = iter(make_loader(list_documents("python_stdlib"), batch=8, seq_len=2048, num_shards=64))
    start, tokens = time.process_time(), 0
    for _ in range(200):
        tokens += next(batches)[1].numel()
    speed = tokens / (time.process_time() - start)
    print(f"{speed:,.0f} tokens/s")
    assert speed > 1e6, f"{speed:,.0f} tokens/s from {os.cpu_count()} cores"
