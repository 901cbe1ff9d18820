"""The packing, and the one global order: the same on every mesh, with workers, after a resume."""

import itertools
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pieces import (
    TOKENIZER,
    Made,
    Row,
    State,
    listed,
    made,
    make_loader,
    ranks_at,
    rows_of,
    run,
    write,
)
from titan_moe import data, packing
from titan_moe.config import Config
from titan_moe.data import build_dataloaders
from titan_moe.mixture import count_shards, deal
from titan_moe.packing import IGNORE_INDEX, Encoder, ShardStream, permutation
from titan_moe.packing import State as StreamState
from titan_moe.sources.listing import Source
from titan_moe.sources.piece import Piece
from titan_moe.sources.record import list_all


def global_rows(documents: Source, count: int, **options: int) -> list[Row]:
    """The first samples of the global order, from one rank with batches of one."""
    return [rows_of(batch)[0] for batch in itertools.islice(make_loader(documents, batch=1, **options), count)]


# ---------------------------------------------------------------------------------------------------------------------
# Packing


def stream_of(source: Source, seq_len: int, seed: object = 0, shard: int = 0, state: tuple = ()) -> ShardStream:
    return ShardStream(source.pieces, Encoder(source, TOKENIZER), seq_len, seed, shard, StreamState(*state))


def tokens_of(piece: Piece) -> list[list[int]]:
    return [ids.tolist() for ids in TOKENIZER.encode([text for text in piece.documents() if text])]


def reference(source: Source, seq_len: int, seed: int, shard: int, n: int) -> tuple[list, list, list, list]:
    """Sample n of a shard, token by token: (input, positions, labels, epoch of each token)."""
    tokens: list[tuple[int, int, int]] = []  # (token, place in its document, epoch)
    for epoch in itertools.count():
        if len(tokens) > (n + 1) * seq_len:
            break
        for i in permutation(len(source.pieces), "epoch", seed, shard, epoch):
            for document in tokens_of(source.pieces[i]):
                tokens += [(t, j, epoch) for j, t in enumerate(document)]
    window, following = tokens[n * seq_len : (n + 1) * seq_len], tokens[n * seq_len + 1 : (n + 1) * seq_len + 1]
    positions: list[int] = []
    for k, (_, place, _) in enumerate(window):
        positions.append(0 if k == 0 or place == 0 else positions[-1] + 1)
    labels = [IGNORE_INDEX if place == 0 else token for token, place, _ in following]
    return [token for token, _, _ in window], positions, labels, [epoch for _, _, epoch in window]


pieces = st.lists(st.integers(0, 40), max_size=4).map(tuple)
corpora = st.lists(pieces, min_size=1, max_size=6).filter(lambda corpus: any(map(any, corpus)))


@settings(max_examples=60, deadline=None)
@given(corpora, st.integers(1, 24), st.integers(0, 3), st.integers(1, 5), st.sampled_from([1, 20, 1 << 16]))
def test_stream_is_the_documents_end_to_end(
    corpus: list[tuple[int, ...]], seq_len: int, seed: int, skip: int, encode_bytes: int
) -> None:
    source = made(*corpus)
    documents = [document for piece in source.pieces for document in tokens_of(piece)]
    total = sum(map(len, documents))
    stream, jumping = (stream_of(source, seq_len, seed, 7) for _ in range(2))
    inputs: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ENCODE_BYTES", encode_bytes)
        for n in range(2 * total // seq_len + 2):
            input_L, positions_L, labels_L = stream.sample(n)
            expected = reference(source, seq_len, seed, 7, n)
            assert (input_L.tolist(), positions_L.tolist(), labels_L.tolist()) == expected[:3]
            assert stream.epoch == expected[3][-1]
            inputs += input_L.tolist()
            if n % skip == 0:  # skipping arrives at the same sample and state
                skipped = jumping.sample(n)
                assert all((a == b).all() for a, b in zip(skipped, (input_L, positions_L, labels_L), strict=True))
                assert jumping.state == stream.state
            resumed = stream_of(source, seq_len, seed, 7, stream.state)
            assert resumed.sample(n + 1)[0].tolist() == reference(source, seq_len, seed, 7, n + 1)[0]
    # Within each of two epochs: every document, whole, exactly once.
    for epoch in range(2):
        text = inputs[epoch * total : (epoch + 1) * total]
        ends = [i + 1 for i, token in enumerate(text) if token == TOKENIZER.eos_id]
        found = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert Counter(map(tuple, found)) == Counter(map(tuple, documents))


def test_labels_and_positions_by_hand() -> None:
    stream = stream_of(made(2), 6)  # bos "0:" eos, again and again
    (bos, eos), no = (256, 257), IGNORE_INDEX
    assert [a.tolist() for a in stream.sample(0)] == [
        [bos, 48, 58, eos, bos, 48], [0, 1, 2, 3, 0, 1], [48, 58, eos, no, 48, 58]
    ]  # fmt: skip
    assert stream.state == (1, 1, 0, 0, 2, 0)
    assert [a.tolist() for a in stream.sample(1)] == [
        [58, eos, bos, 48, 58, eos], [0, 1, 0, 1, 2, 3], [eos, no, 48, 58, eos, no]
    ]  # fmt: skip
    assert stream.state == (2, 2, 0, 1, 0, 0)  # after the document of the third epoch


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, True), (False, True), (True, False), (False, False)])
def test_bos_and_eos_are_the_sources_choice(add_bos: bool, add_eos: bool) -> None:
    source = made(2, 3, add_bos=add_bos, add_eos=add_eos)
    expected = [[256] * add_bos + list(text) + [257] * add_eos for text in (b"0:", b"1:1")]
    inputs = stream_of(source, 5 + 2 * (add_bos + add_eos)).sample(0)[0].tolist()
    assert inputs in (expected[0] + expected[1], expected[1] + expected[0])


def test_a_stream_without_documents_is_an_error_not_a_loop() -> None:
    with pytest.raises(ValueError, match=r'"made": shard 3 has no document in its 2 pieces, of 0:, 1:.*num_shards'):
        stream_of(made((0, 0), ()), 8, shard=3).sample(0)


def test_stream_does_not_go_back() -> None:
    stream = stream_of(made(50), 4)
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
    shards = deal(pieces := made(*sizes).pieces, count := count_shards(num_shards, len(sizes)), 0)
    assert len(shards) == count and all(shards)
    assert sorted(piece.name for shard in shards for piece in shard) == sorted(piece.name for piece in pieces)
    totals = [sum(piece.size for piece in shard) for shard in shards]
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
    assert "11 pieces in 4 shards for 8 data-parallel ranks" in caplog.text and "gcd(8, 4) = 2 ranks" in caplog.text
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_divide_the_shards(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Together they encode what the training process alone would, each document in one of them."""
    source = made(*[(5,) * 3] * 24)
    encoded: Counter[str] = Counter()
    plain = Made.documents

    def documents(piece: Made, first: int = 0) -> Iterator[bytes]:
        encoded[piece.name] += 1
        return plain(piece, first)

    monkeypatch.setattr(Made, "documents", documents)
    dataset = make_loader(source, 0, ranks, num_shards=8).dataset
    opened, sizes = [], []
    for worker in range(3):
        encoded.clear()
        monkeypatch.setattr(data, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker, num_workers=3))
        parts = list(itertools.islice(dataset, 10))  # a piece of a shard has 21 tokens: 5 samples of 8 need two
        sizes.append([len(part[0]) for part in parts])
        opened.append(set(encoded))
    # Runs of 3 workers x 2 samples, up to the 8 (or 4) shards of the rank; a worker may have none of what is left.
    assert sizes == [[2, 1] * 5, [2, 1] * 5, [2, 0] * 5] if ranks == 1 else [[2] * 10, [1] * 10, [1] * 10]
    assert opened[0] and not opened[0] & opened[1] and not opened[0] & opened[2] and not opened[1] & opened[2]


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


def same_state(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_resume_at_every_step() -> None:
    documents = made(*SIZES)
    expected = global_rows(documents, 120)  # three epochs
    loader = make_loader(documents, batch=4)
    for step, batch in enumerate(itertools.islice(loader, 24)):
        assert rows_of(batch) == expected[4 * step : 4 * step + 4]
        assert [int(loader.state_dict()[f"shard.{s}.0"][0]) for s in range(4)] == [step + 1] * 4  # nothing left to skip
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
        identity = {"next_sample", "settings", "tokenizer", "source.0"}
        assert state.keys() == {f"shard.{s}.0" for s in range(4)} | identity
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
    assert state["shard.0.0"].shape == (6,) and not state["shard.3.0"].any()  # shards 2 and 3: not touched yet


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
    with pytest.raises(ValueError, match=r'in this: the documents of "made" .* changed.*initial_load_path'):
        make_loader(made(*SIZES[:-1], SIZES[-1] + 1)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"no shard\.0\.0, .*next_sample"):
        make_loader(documents).load_state_dict({})


def test_each_of_several_sources_that_changed_is_named() -> None:
    sources = [made(*SIZES), made(*SIZES, weight=2.0)]
    state = make_loader(sources).state_dict()
    reweighed = [sources[0], made(*SIZES, weight=3.0)]
    with pytest.raises(ValueError, match=r"in this: training\.seq_len, .*their weights .* changed"):
        make_loader(reweighed).load_state_dict(state)
    with pytest.raises(ValueError, match=r"no .*shard\.0\.2, .*source\.2"):
        make_loader([*sources, made(1, 2)]).load_state_dict(state)
    longer = replace(made(*SIZES, 7, weight=2.0), dataset="longer")
    with pytest.raises(ValueError, match=r'in this: the documents of "longer" .* changed'):
        make_loader([sources[0], longer]).load_state_dict(state)


def test_a_file_that_became_shorter_in_tokens_is_named(tmp_path: Path) -> None:
    source = listed(write(tmp_path, {"a.txt": b"x" * 40}))
    with pytest.raises(ValueError, match=r"a\.txt:1 has 42 tokens, but the checkpoint stopped at its token 42"):
        stream_of(source, 4, state=(9, 0, 0, 0, 42)).sample(9)


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
# From a configuration


def test_build_dataloaders(tmp_path: Path) -> None:
    config = Config()
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.training.dataset = write(tmp_path, {f"{i}.txt": b"%d" % i * 9 for i in range(40)})

    def build() -> tuple[set[str], set[str], list]:
        listing = list_all(config)
        _, validation = build_dataloaders(config, listing, TOKENIZER, 0, 1)
        assert [*validation] == [""] and listing.validation is not None
        rows = [rows_of(batch) for batch in itertools.islice(validation[""], 3)]
        parts = (listing.training, listing.validation)
        training, held_out = ({piece.name for source in part for piece in source.pieces} for part in parts)
        return training, held_out, rows

    listing = list_all(config)
    assert listing.validation is None and [len(source.pieces) for source in listing.training] == [40]
    assert build_dataloaders(config, listing, TOKENIZER, 0, 1)[1] == {}
    config.validation.enable, config.validation.holdout = True, 0.3
    trained_on, kept_away, rows = build()
    assert kept_away and trained_on and not kept_away & trained_on and len(kept_away | trained_on) == 40
    config.debug.seed = 1
    assert build() == (trained_on, kept_away, rows)  # another seed, the same validation
    config.debug.seed, config.training.dataset, config.validation.dataset = 0, "synthetic", "synthetic"
    trained_on, kept_away, _ = build()
    assert len(trained_on) == len(kept_away) == 4096 and not trained_on & kept_away


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def test_speed() -> None:
    batches: Iterator = iter(make_loader(listed("python_stdlib"), batch=8, seq_len=2048, num_shards=64))
    start, tokens = time.process_time(), 0
    for _ in range(200):
        tokens += next(batches)[1].numel()
    speed = tokens / (time.process_time() - start)
    print(f"{speed:,.0f} tokens/s")
    assert speed > 1e6, f"{speed:,.0f} tokens/s from {os.cpu_count()} cores"


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError])
def test_a_worker_that_is_killed_while_it_hands_over_a_batch_is_named(error: type[Exception]) -> None:
    """torch sees only that a connection broke."""

    def broken() -> Iterator:
        raise error
        yield

    loader = make_loader(made(*SIZES), num_workers=1)
    with pytest.raises(RuntimeError, match="A DataLoader worker exited unexpectedly"):
        next(loader._batches(broken(), loader._iteration))
