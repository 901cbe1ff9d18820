"""Every kind of source gives the same samples on every mesh, with workers, over epochs and after two resumes; and says
what is broken in it."""

import io
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from tests.pieces import (
    TOKENIZER,
    Row,
    documents_of,
    jsonl,
    listed,
    make_loader,
    ranks_at,
    rows_of,
    run,
    write,
    write_tokenizer,
)
from titan_moe import tokenize
from titan_moe.config import Config, DataSource, ValidationSet
from titan_moe.preflight import source_problems
from titan_moe.sources import hub, lines, piece, record, rows
from titan_moe.sources.listing import Source
from titan_moe.sources.piece import Fault
from titan_moe.sources.record import Listing, list_all
from titan_moe.sources.split import split
from titan_moe.tokenizer import build_tokenizer

TEXTS = [f"{i}: " + "text " * (7 * i % 13) + "Grüße 漢字\n"[: i % 11] for i in range(40)]
KINDS = ["text", "lines", "rows", "tokens", "hub"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files were a thousand times as large."""
    monkeypatch.setattr(piece, "MIN_PIECE_BYTES", 100)
    monkeypatch.setattr(lines, "BLOCK", 64)
    # Ending the workers of an iterator that was dropped takes this long.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


def parquet(texts: Sequence, field: str = "text", **options: int) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({field: texts, "n": list(range(len(texts)))}), content, **options)
    return content.getvalue()


def source_of(kind: str, folder: Path) -> Source:
    """TEXTS, as a source of this kind; two files where that makes sense."""
    first, second = TEXTS[:15], TEXTS[15:]
    if kind == "text":
        return listed(write(folder, {f"{i:02}.txt": text.encode() for i, text in enumerate(TEXTS)}))
    if kind in ("lines", "tokens"):
        source = listed(write(folder, {"a.jsonl": jsonl(first), "b/b.jsonl": b"\n\n" + jsonl(second)}))
        if kind == "tokens":
            tokenize.write(source, TOKENIZER, "", folder / "ids")
            source = listed(str(folder / "ids"))
        return source
    if kind == "rows":
        files = {"a.parquet": parquet(first, row_group_size=4), "b.parquet": parquet(second)}
        return listed(write(folder, files))
    import datasets

    parts = [TEXTS[i::6] for i in range(6)]
    write(folder, {f"{i}.jsonl": jsonl(part) for i, part in enumerate(parts)})
    files = [str(folder / f"{i}.jsonl") for i in range(6)]
    dataset = datasets.load_dataset("json", data_files=files, streaming=True, cache_dir=folder, split="train")
    pieces = [hub.HubPiece("hf:me/texts", 1, dataset, i, "text", 60) for i in range(6)]
    return Source("hf:me/texts", "hub", pieces, revision="1")


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece, "MIN_PIECE_BYTES", 100)
        return source_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """All kinds, of different weights, and some with fewer pieces than shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece, "MIN_PIECE_BYTES", 100)
        made = [source_of(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS]
    return [replace(source, weight=weight) for source, weight in zip(made, (3.0, 1.0, 0.5, 2.0, 1.5), strict=True)]


def in_order(sources: Source | list[Source], count: int, **options: int) -> list[Row]:
    return [rows_of(b)[0] for b in itertools.islice(make_loader(sources, batch=1, **options), count)]


def test_all_documents_are_listed(source: Source) -> None:
    texts = documents_of(source)
    if source.kind == "tokens":
        texts = [TOKENIZER.decode(ids).encode() for ids in texts]
    assert len(source.pieces) > 4
    assert sorted(texts) == sorted(text.encode() for text in TEXTS)


def test_a_piece_can_be_read_from_any_document_on(source: Source) -> None:
    for each in source.pieces:
        documents = [np.array(d).tolist() for d in each.documents()]
        for first in range(len(documents) + 1):
            assert [np.array(d).tolist() for d in each.documents(first)] == documents[first:]


def test_an_epoch_has_every_document_once(source: Source) -> None:
    """One shard, so that its epoch is everybody's."""
    total = sum(len(text.encode()) + 2 for text in TEXTS)
    tokens = b"".join(input_L for input_L, _, _ in in_order(source, 2 * total // 8 + 1, num_shards=1))
    ids = np.frombuffer(tokens, np.int64)
    for epoch in range(2):
        documents = b"".join(bytes([min(i, 255)]) for i in ids[epoch * total : (epoch + 1) * total] if i != 256)
        assert Counter(documents.split(b"\xff")) == Counter([b"", *(text.encode() for text in TEXTS)])


MESHES = [(1, 4, 3), (2, 3, 2), (4, 1, 3), (4, 3, 1)]  # (ranks, batch, microbatches): 12 samples a step


@pytest.mark.parametrize(("ranks", "batch", "microbatches"), MESHES)
def test_no_sample_is_lost_repeated_or_reordered(source: Source, ranks: int, batch: int, microbatches: int) -> None:
    expected = in_order(source, 30 * 12)  # more than two epochs
    rows, _ = run(ranks_at(source, ranks, batch, None), 30 * microbatches)
    step = ranks * batch
    assert rows == [row for i in range(0, len(rows), step) for row in sorted(expected[i : i + step])]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_resumes_in_a_row_on_other_meshes(source: Source, num_workers: int) -> None:
    rows, state = [], None
    for ranks, batch, steps in ((1, 4, 3), (2, 2, 5), (4, 1, 20), (2, 2, 3)):
        more, state = run(ranks_at(source, ranks, batch, state, num_workers=num_workers if ranks < 4 else 0), steps)
        rows += more
    expected = in_order(source, len(rows))
    assert rows == [row for i in range(0, len(rows), 4) for row in sorted(expected[i : i + 4])]


def test_the_same_for_a_mixture(mixture: list[Source]) -> None:
    expected = in_order(mixture, 480)
    for ranks, batch, workers in ((1, 4, 0), (2, 2, 2), (4, 1, 0)):
        rows, _ = run(ranks_at(mixture, ranks, batch, None, num_workers=workers), 60)
        assert rows == [row for i in range(0, 240, 4) for row in sorted(expected[i : i + 4])]
    rows, state = [], None
    for ranks, batch, steps, workers in ((2, 2, 40, 2), (1, 4, 30, 0), (4, 1, 30, 0), (1, 4, 20, 2)):
        more, state = run(ranks_at(mixture, ranks, batch, state, num_workers=workers), steps)
        rows += more
    assert rows == [row for i in range(0, 480, 4) for row in sorted(expected[i : i + 4])]


# ---------------------------------------------------------------------------------------------------------------------
# What is broken is named, by file and line

BROKEN = {
    "not JSON": (b'{"text": "a"', r"is not JSON: Expecting ',' delimiter at column 13, '\{\"text\": \"a\"'"),
    "no JSON at all": (b"hello", "is not JSON: Expecting value at column 1, 'hello'"),
    "no object": (b'["a"]', r'is a JSON list; each line must be an object, like {"text": "..."}'),
    "no field": (
        b'{"body": "a", "n": 1}',
        'has no field "text"; its fields are: body, n. Name one of them with text_f',
    ),
    "null": (b'{"text": null}', 'field "text" holds null, not a text'),
    "a number": (b'{"text": 3}', 'field "text" holds int, not a text'),
    "not UTF-8": (b'{"text": "\xff"}', "is not UTF-8 (invalid start byte, byte 11 of the line); convert the file"),
    "half a surrogate": (b'{"text": "\\ud800"}', "half of a surrogate pair at character 1"),
    "nested too deep": (b"[" * 100_000, "is not JSON that can be read"),
    "many digits": (b'{"text": ' + b"1" * 5000 + b"}", "is not JSON that can be read"),
    "two objects": (b'{"text": "a"}{"text": "b"}', "is not JSON: Extra data at column 14"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_is_named_or_skipped(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    line, message = BROKEN[what]
    content = jsonl(TEXTS[:20]) + line + b"\n\r\n" + jsonl(TEXTS[20:])
    folder = write(tmp_path, {"a.jsonl": content})
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/a.jsonl:21: ") + ".*" + plain(message)) as error:
        run(ranks_at(listed(folder), 1, 4, None), 100)
    assert 'set on_error = "skip"' in str(error.value)

    skipping = listed(folder, on_error="skip")
    good = [TOKENIZER.encode([text.encode()])[0] for text in TEXTS]
    total = sum(ids.size for ids in good if isinstance(ids, np.ndarray))
    (loader,) = ranks_at(skipping, 1, 1, None, num_shards=1, seq_len=total)
    first = next(iter(loader))[0]["input"].numpy()
    assert sorted(first.tobytes()) == sorted(np.concatenate(good).astype(np.int64).tobytes())
    assert loader.skipped == 1
    assert re.search(f"Skipped {re.escape(str(tmp_path))}/a.jsonl:21: ", caplog.text)
    assert "Broken documents left out so far on data-parallel rank 0: 1" in caplog.text


def plain(message: str) -> str:
    return message if "\\" in message else re.escape(message)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_documents_are_counted_over_epochs_resumes_and_workers(
    tmp_path: Path, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"".join(jsonl([text]) + b"broken\n" for text in TEXTS)
    source = listed(write(tmp_path, {"a.jsonl": content}), on_error="skip")
    rows, state, skipped = [], None, []
    for ranks, steps in ((1, 10), (2, 50), (1, 30)):
        loaders = ranks_at(source, ranks, 4 // ranks, state, num_workers=num_workers)
        more, state = run(loaders, steps)
        rows += more
        skipped.append(sum(loader.skipped for loader in loaders))
    assert 0 < skipped[0] < skipped[1] < skipped[2]
    (straight,) = ranks_at(source, 1, 4, None)
    expected, _ = run([straight], 90)
    assert rows == expected and straight.skipped == skipped[2]
    assert straight.statistics(None, torch.device("cpu")) == {"skipped_documents": skipped[2]}
    assert make_loader(replace(source, on_error="raise")).statistics(None, torch.device("cpu")) == {}
    assert caplog.text.count("left out so far") <= 20


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stream_that_shards_take_turns_at_is_counted_once(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of the second source is one document, with a broken one before it; its k-th in shard s of four is number
    4 * k + s of the stream."""
    write(tmp_path, {"b.jsonl": b"broken\n" + jsonl(["b" * 6])} | {f"a/{i}.jsonl": jsonl(["a"] * 9) for i in range(6)})
    sources = [listed(str(tmp_path / name), on_error="skip") for name in ("a", "b.jsonl")]
    loaders = ranks_at(sources, ranks, 4, None)
    assert [len(dealt) for dealt in loaders[0]._data.mixture.pieces] == [4, 1]
    taken = Counter(
        g % 4
        for rank, loader in enumerate(loaders)
        for i, row in enumerate(row for batch in itertools.islice(loader, 12) for row in rows_of(batch))
        if b"b" in row[0]
        for g in [rank + ranks * i]
    )
    samples = max(4 * k + s - 3 for s, k in taken.items())
    assert len(taken) == 4 and samples > 10

    def over_all_ranks(counts: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX
        counts.copy_(torch.stack([loader._skipped_by_stream() for loader in loaders]).amax(0))

    monkeypatch.setattr(dist, "all_reduce", over_all_ranks)
    mesh = SimpleNamespace(get_group=lambda: None)
    for loader in loaders:
        assert loader.statistics(mesh, torch.device("cpu")) == {"skipped_documents": samples}  # pyrefly: ignore
        assert loader.skipped <= samples


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text", "body"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r'a\.parquet has several columns "text"; rename them'):
        listed(str(tmp_path))
    assert documents_of(listed(str(tmp_path), text_field="body")) == [b"c"]


def test_a_run_that_stopped_at_a_broken_document_goes_on_without_it(tmp_path: Path) -> None:
    """As the message advises: from the last checkpoint, with what it had still to read; and back again."""
    folder = write(tmp_path, {"a.jsonl": jsonl(TEXTS[:30]) + b"broken\n" + jsonl(TEXTS[30:])})
    config = config_of(DataSource(dataset=folder))
    listing = list_all(config)
    (loader,) = ranks_at(listing.training, 1, 4, None)
    rows, state = [], {}

    def train() -> None:
        nonlocal state
        for batch in loader:
            rows.extend(sorted(rows_of(batch)))
            state = loader.state_dict()

    with pytest.raises(ValueError, match=r"a\.jsonl:31: is not JSON.*set on_error"):
        train()
    assert len(rows) > 4
    record.save(listing, tmp_path)
    config.training.dataloader.on_error = "skip"
    skipping = list_all(config)
    assert record.changes(skipping, tmp_path) == []
    (straight,) = ranks_at(skipping.training, 1, 4, None)
    expected, after = run([straight], len(rows) // 4 + 20)
    more, _ = run(ranks_at(skipping.training, 1, 4, state), 20)
    assert rows + more == expected and straight.skipped
    (raising,) = ranks_at(listing.training, 1, 4, after)
    with pytest.raises(ValueError, match=r"a\.jsonl:31: is not JSON"):
        run([raising], 100)


def test_a_shard_of_broken_lines_alone_is_an_error_too(tmp_path: Path) -> None:
    source = listed(write(tmp_path, {"a.jsonl": b"broken\n" * 30}), on_error="skip")
    with pytest.raises(ValueError, match=r"shard \d has no document in its \d+ pieces, of a\.jsonl: \d+ were skipped"):
        next(iter(make_loader(source)))


def test_lines_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a block, a piece and a shard; and longer than a document may be."""
    monkeypatch.setattr(lines, "MAX_DOCUMENT_BYTES", 5000)
    texts = ["a" * size for size in (10, 4900, 70, 1000, 4900, 1, 500)]
    folder = write(tmp_path, {"a.jsonl": jsonl(texts)})
    assert documents_of(listed(folder)) == [text.encode() for text in texts]
    for ending in (b"\n", b""):
        (tmp_path / "a.jsonl").write_bytes(
            jsonl(texts) + jsonl(["b" * 20_000, "c"]) + jsonl(["d" * 6000])[:-1] + ending
        )
        found = documents_of(listed(folder, on_error="skip"))
        faults = [(i, d.reason) for i, d in enumerate(found) if isinstance(d, Fault)]
        assert [(i, int(re.search(r"has ([\d,]+) bytes", why)[1].replace(",", ""))) for i, why in faults] == [
            (7, len(jsonl(["b" * 20_000])) - 1), (9, len(jsonl(["d" * 6000])) - 1)
        ]  # fmt: skip
        assert found[8] == b"c"


def test_a_line_of_100_mb_is_named_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + jsonl(["x" * 100_000_000]) + jsonl(TEXTS))
    with pytest.raises(ValueError, match=r"a\.jsonl:41: the line has 100,000,020 bytes, more than the 33,554,432 that"):
        listed(str(tmp_path))
    source = listed(str(tmp_path), on_error="skip")
    assert [isinstance(d, Fault) for d in documents_of(source)] == [False] * 40 + [True] + [False] * 40


def test_a_document_longer_than_a_shard(tmp_path: Path) -> None:
    """Ten short ones and a huge one: it is one shard, nobody is lost."""
    texts = [f"short {i}" for i in range(10)] + ["long " * 2000]
    source = listed(write(tmp_path, {"a.jsonl": jsonl(texts)}))
    expected = in_order(source, 200)
    assert sorted(expected) == sorted(run(ranks_at(source, 4, 5, None), 10)[0])


@pytest.mark.parametrize("kind", ["text", "lines", "rows", "tokens"])
@pytest.mark.parametrize("what", ["gone", "longer", "shorter"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_changes_under_a_run_is_named(tmp_path: Path, kind: str, what: str, num_workers: int) -> None:
    source = source_of(kind, tmp_path)
    for path in {Path(each.path) for each in source.pieces}:
        content = path.read_bytes()
        path.unlink()
        if what != "gone":
            path.write_bytes(content + b"\n" if what == "longer" else content[:-1])
    with pytest.raises(ValueError, match=rf"{tmp_path}.* changed after it was listed: .*start a new run without it"):
        next(iter(make_loader(source, num_workers=num_workers)))


def test_text_that_is_not_utf8_is_named_where_a_tokenizer_minds(tmp_path: Path) -> None:
    source = listed(write(tmp_path / "texts", {"a.txt": b"one\ntwo \xe9\n", "b.txt": b"fine"}))
    next(iter(make_loader(source)))  # bytes are bytes
    write_tokenizer(tmp_path, ["</s>"])
    tokenizer = build_tokenizer(str(tmp_path), 300)
    with pytest.raises(ValueError, match=r"a\.txt:2: is not UTF-8: byte 0xe9, .*; convert the file"):
        list(itertools.islice(make_loader(source, tokenizer=tokenizer), 9))


def test_parquet_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'a\.parquet has no column "text"; its columns are: body, n\. Name one'):
        listed(write(tmp_path, {"a.parquet": parquet(["a"], "body")}))
    with pytest.raises(ValueError, match=r'column "n" holds int64, not text'):
        listed(str(tmp_path), text_field="n")
    assert documents_of(listed(str(tmp_path), text_field="body")) == [b"a"]
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"a\.parquet is no \.parquet that can be read: .*Get the file again"):
        listed(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(parquet(pa.array([], pa.string())))
    with pytest.raises(ValueError, match="no document found"):
        listed(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(parquet(["a", None, "c"]))
    with pytest.raises(ValueError, match=r'a\.parquet, row 1: field "text" holds null, not a text'):
        next(iter(make_loader(listed(str(tmp_path)))))
    whole = parquet(["a" * 1000, "b" * 1000], compression="none")
    (tmp_path / "a.parquet").write_bytes(whole[:4] + bytes(len(whole) // 3) + whole[4 + len(whole) // 3 :])
    with pytest.raises(ValueError, match=r"a\.parquet, row group 0: cannot be read: .*Get the file again"):
        next(iter(make_loader(listed(str(tmp_path)))))


def test_row_groups_are_cut_into_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH_ROWS", 3)
    texts = [str(i) * 20 for i in range(50)]
    source = listed(write(tmp_path, {"a.parquet": parquet(texts, row_group_size=23)}))
    assert len(source.pieces) > 8 and documents_of(source) == [text.encode() for text in texts]
    assert {piece.where(0) for piece in source.pieces} >= {f"{tmp_path}/a.parquet, row {i}" for i in (0, 23, 46)}


def test_kinds_are_not_mixed_in_silence(tmp_path: Path) -> None:
    folder = write(tmp_path, {"README.md": b"about", "x/a.jsonl": jsonl(TEXTS), "empty.txt": b""})
    with pytest.raises(
        ValueError, match=r"holds files of several kinds, x/a\.jsonl \(lines\), README\.md \(text\)\. Choose"
    ):
        listed(folder)
    assert documents_of(listed(f"{folder}/**/*.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# A whole configuration


def config_of(*sources: DataSource, **validation: object) -> Config:
    config = Config()
    config.training.mixture = list(sources)
    for key, value in validation.items():
        setattr(config.validation, key, value)
    return config


def test_a_file_is_in_one_source_only(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.jsonl": jsonl(TEXTS), "b.jsonl": jsonl(TEXTS)})
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "a.jsonl")
    both = [DataSource(dataset=folder), DataSource(dataset=f"{folder}/c.jsonl")]
    with pytest.raises(ValueError, match=r"a\.jsonl is in training source 1 .* and in training source 2 .*more weight"):
        list_all(config_of(*both))
    validation = {"enable": True, "dataset": f"{folder}/b.jsonl"}
    with pytest.raises(ValueError, match=r"b\.jsonl is in training source 1 .* validation source 1 .*leave it to one"):
        list_all(config_of(both[0], **validation))
    list_all(config_of(both[1], **validation))


def test_options_of_an_entry_and_of_all(tmp_path: Path) -> None:
    write(
        tmp_path, {"a.jsonl": jsonl(TEXTS, "body"), "b.jsonl": jsonl(TEXTS, "content"), "c.jsonl": jsonl(TEXTS, "body")}
    )
    config = config_of(
        DataSource(dataset=f"{tmp_path}/a.jsonl"),
        DataSource(dataset=f"{tmp_path}/b.jsonl", text_field="content", on_error="raise", weight=2),
        enable=True, dataset=f"{tmp_path}/c.jsonl",
    )  # fmt: skip
    config.training.dataloader.text_field, config.training.dataloader.on_error = "body", "skip"
    listing = list_all(config)
    assert listing.validation is not None
    found = [
        (s.text_field, s.on_error, s.weight, len(documents_of(s))) for s in (*listing.training, *listing.validation)
    ]
    assert found == [("body", "skip", 1, 40), ("content", "raise", 2, 40), ("body", "skip", 1, 40)]
    assert not source_problems(listing, TOKENIZER)


def test_validation_sets_have_options_of_their_own_and_nothing_of_the_training_data(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": jsonl(TEXTS), "b/b.jsonl": jsonl(TEXTS, "body"), "b/c.jsonl": jsonl(TEXTS, "body")})
    sets = [
        ValidationSet(name="all", dataset=f"{tmp_path}/b", text_field="body"),
        ValidationSet(name="part", dataset=f"{tmp_path}/b/c.jsonl", on_error="skip"),  # also in the other
    ]
    config = config_of(DataSource(dataset=f"{tmp_path}/a.jsonl"), enable=True, sets=sets)
    listing = list_all(config)
    found = [(name, s.text_field, s.on_error, len(s.files)) for name, s in listing.validation_sets.items()]
    assert found == [("all", "body", "raise", 2), ("part", "text", "skip", 1)]
    assert [part["part"] for part in listing.summary()] == [
        "training", "validation", "validation, all", "validation, part"
    ]  # fmt: skip
    assert listing.validation is not None and listing.validation[0].dataset.endswith("a.jsonl")  # held out, as without
    record.save(listing, tmp_path)
    config.validation.sets = [ValidationSet(name="other", dataset=f"{tmp_path}/b/b.jsonl")]
    assert record.changes(list_all(config), tmp_path) == []  # nobody has a position there
    (problem,) = source_problems(list_all(config), TOKENIZER)
    assert problem.startswith(f'{tmp_path}/b/b.jsonl:1: has no field "text"')
    config.validation.sets = [ValidationSet(name="x", dataset=f"{tmp_path}/*.jsonl")]
    with pytest.raises(ValueError, match=r'a\.jsonl is in training source 1 .* validation set "x" .*leave it to one'):
        list_all(config)
    config.validation.enable = False
    assert list_all(config).validation_sets == {}


def test_a_wrong_field_shows_before_the_start(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.jsonl": b"\n" + jsonl(TEXTS, "body")})
    (problem,) = source_problems(list_all(config_of(DataSource(dataset=folder))), TOKENIZER)
    assert problem.startswith(f'{folder}/a.jsonl:2: has no field "text"; its fields are: body, n.')


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_documents_are_not_trained_on(tmp_path: Path, kind: str) -> None:
    source = source_of(kind, tmp_path)
    training, validation = (Counter(map(bytes, map(np.array, documents_of(part)))) for part in split(source, 0.3))
    assert training and validation and not training & validation
    assert training + validation == Counter(map(bytes, map(np.array, documents_of(source))))


def change(edit: Callable[[Path], object], tmp_path: Path, **options: object) -> list[str]:
    """What is told about a run of two sources when `edit` has changed something in between."""
    write(tmp_path, {f"a/{i}.jsonl": jsonl(TEXTS[i:]) for i in range(6)} | {"b.txt": b"text " * 20_000})
    config = config_of(DataSource(dataset=f"{tmp_path}/a"), DataSource(dataset=f"{tmp_path}/b.txt"))
    (tmp_path / "run").mkdir()
    record.save(list_all(config), tmp_path / "run")
    assert record.changes(list_all(config), tmp_path / "run") == []
    edit(tmp_path)
    for key, value in options.items():
        setattr(config.training.mixture[0], key, value)
    return record.changes(list_all(config), tmp_path / "run")


def same_size(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_changed_between_two_starts_is_named(tmp_path: Path) -> None:
    def at(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    found = change(lambda p: (p / "a/0.jsonl").write_bytes(jsonl(["other"])), folder := at("1"))
    assert len(found) == 1 and re.fullmatch(
        rf'training source "{folder}/a" changed: changed: 0\.jsonl \(\d+ bytes, \w+ -> 26 bytes, \w+\)', found[0]
    )
    assert "changed: gone: 0.jsonl" in change(lambda p: (p / "a/0.jsonl").unlink(), at("2"))[0]
    assert "new: z.jsonl" in change(lambda p: (p / "a/z.jsonl").write_bytes(jsonl(["z"])), at("3"))[0]
    assert "b.txt (100000 bytes" in change(lambda p: same_size(p / "b.txt", 50_000), at("4"))[0]
    assert "how it is read has: its name, options" in change(lambda p: None, at("5"), add_eos=False)[0]
    everything = change(lambda p: [f.write_bytes(jsonl(["y"])) for f in (p / "a").iterdir()], at("6"))[0]
    assert everything.count("->") == 3 and everything.endswith("and 3 more")
    assert change(lambda p: None, at("7"), weight=2.0) == ["training.mixture[0].weight was 1.0, now 2.0"]


def test_a_folder_that_moved_is_the_same_data(tmp_path: Path) -> None:
    write(tmp_path, {"old/a.jsonl": jsonl(TEXTS)})
    listings = [list_all(config_of(DataSource(dataset=f"{tmp_path}/old")))]
    (tmp_path / "old").rename(tmp_path / "new")
    listings.append(list_all(config_of(DataSource(dataset=f"{tmp_path}/new"))))
    assert len({listing.training[0].fingerprint for listing in listings}) == 1


def test_what_the_run_folder_says(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": jsonl(TEXTS)})
    listing = list_all(config_of(DataSource(dataset=f"{tmp_path}/a.jsonl"), DataSource(dataset="synthetic", weight=3)))
    assert isinstance(listing, Listing)
    record.save(listing, tmp_path)
    saved = json.loads((tmp_path / record.FILE_NAME).read_text())
    assert saved["sources"] == listing.summary()
    assert [(s["kind"], s["weight"], s["files"]) for s in saved["sources"]] == [("lines", 1, 1), ("synthetic", 3, 0)]
    assert len({s["fingerprint"] for s in saved["sources"]}) == 2
    assert list(saved["files"][f"{tmp_path}/a.jsonl"]) == ["a.jsonl"]


def test_more_workers_than_shards_are_not_started(caplog: pytest.LogCaptureFixture, mixture: list[Source]) -> None:
    loader = make_loader(mixture, 0, 2, num_workers=8)
    assert loader.num_workers == 2
    assert "only 2 can share the 4 / gcd(2, 4) = 2 shards of a rank" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
