"""Which files a dataset's name stands for, how text is cut, and what is held out for validation."""

import gc
import hashlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pieces import documents_of, jsonl, listed, made, make_loader, write
from titan_moe.sources import piece, text
from titan_moe.sources.piece import Piece
from titan_moe.sources.split import split as split_source

# ---------------------------------------------------------------------------------------------------------------------
# Sources


def list_documents(dataset: str, seed: int = 0) -> list[Piece]:
    return list(listed(dataset, seed=seed).pieces)


def split(pieces: list[Piece], holdout: float) -> tuple[list[Piece], list[Piece]]:
    training, validation = split_source(replace(made(1), pieces=pieces), holdout)
    return list(training.pieces), list(validation.pieces)


def names(documents: list[Piece]) -> list[str]:
    return [document.name for document in documents]


def test_folder(tmp_path: Path) -> None:
    texts = ["b.txt", "a/z.md", "a/b/c.rst", "a.py", "Z.txt"]
    others = {"a/empty.txt": b"", "a/picture.png": b"x", ".hidden/a.txt": b"x"}
    folder = write(tmp_path, {name: name.encode() for name in texts} | others)
    documents = list_documents(folder)
    assert names(documents) == ["Z.txt", "a.py", "a/b/c.rst", "a/z.md", "b.txt"]
    assert [document.read().decode() for document in documents] == names(documents)


def test_a_suffix_counts_in_any_case(tmp_path: Path) -> None:
    """As plain text, a model would learn the braces of JSON, or bytes that are compressed."""
    for name in ("a.jsonl", "b.JSONL", "c.ndjson"):
        for dataset in (write(tmp_path / name, {name: jsonl(["text"])}), str(tmp_path / name / name)):
            source = listed(dataset)
            assert source.kind == "lines" and documents_of(source) == [b"text"]
    pq.write_table(pa.table({"text": ["text"]}), tmp_path / "a.PARQUET")
    assert documents_of(listed(str(tmp_path / "a.PARQUET"))) == [b"text"]
    assert names(list_documents(write(tmp_path / "texts", {"A.TXT": b"x", "b.Md": b"x"}))) == ["A.TXT", "b.Md"]
    write(tmp_path, {"a.GZ": b"x"})
    with pytest.raises(ValueError, match=r"a\.GZ is not plain text"):
        listed(str(tmp_path / "a.GZ"))


def test_a_json_file_is_not_taken_for_text(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": b"[]", "b.Json": b"[]", "c.txt": b"x"})
    for dataset in ("a.json", "b.Json", "*.json"):
        with pytest.raises(ValueError, match=r"\.[jJ]son would be .* rename it to \.jsonl if each line is an object"):
            listed(f"{tmp_path}/{dataset}")
    assert names(list_documents(f"{tmp_path}/*")) == ["a.json", "b.Json", "c.txt"]  # a folder of code has some


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
    write(tmp_path, {"a.gz": b"{}"})
    with pytest.raises(ValueError, match=r"a\.gz is not plain text"):
        list_documents(f"{tmp_path}/*")
    for name in ("b.jsonl.zst", "C.Gz", "d.arrow"):  # not left out without a word
        folder = write(tmp_path / name, {"a.txt": b"x", f"deep/{name}": b"x"})
        with pytest.raises(ValueError, match=rf"deep/{name} is not plain text: .* or leave it out with a glob"):
            list_documents(folder)
        assert names(list_documents(f"{folder}/**/*.txt")) == ["a.txt"]
    (tmp_path / "a.gz").unlink()
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"b\.txt cannot be read"):
        list_documents(str(tmp_path))

    def denied(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ValueError, match=r"cannot be listed: .*Permission denied"):
        list_documents(str(tmp_path))


def test_a_file_that_vanishes_shrinks_or_grows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = list_documents(write(tmp_path, {"a.txt": b"12345", "b.txt": b"12345", "c.txt": b"12345"}))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").write_bytes(b"123")
    (tmp_path / "c.txt").write_bytes(b"1234567")
    with pytest.raises(ValueError, match=r"a\.txt changed after it was listed: .*No such file.*resume"):
        documents[0].read()
    with pytest.raises(ValueError, match=r"b\.txt changed .* shrunk from 5 to 3 bytes"):
        documents[1].read()
    with pytest.raises(ValueError, match=r"c\.txt changed .* grown from 5 to 7 bytes"):
        documents[2].read()
    # Ending the worker of an iterator that the garbage collector found takes this long.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    for num_workers in (0, 1):  # from a worker too: an error with the name in it, not a wait for a batch
        with pytest.raises(ValueError, match=r"[abc]\.txt changed after it was listed"):
            next(iter(make_loader(replace(made(1), pieces=documents), num_workers=num_workers)))
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
    monkeypatch.setattr(piece, "PIECE_BYTES", 4096)
    monkeypatch.setattr(text, "CUT_WINDOW", 512)
    content = TEXTS[kind][cut_off:]
    (tmp_path / "a.txt").write_bytes(content)
    pieces = list_documents(str(tmp_path / "a.txt"))
    texts = [each.read() for each in pieces]
    assert len(pieces) == -(-len(content) // 4096) and b"".join(texts) == content
    assert all(2048 - 512 < len(each) <= 4096 + 512 for each in texts)
    if kind == "lines":
        assert all(each.endswith(b"\n") for each in texts)
    if kind.startswith("characters") and cut_off == 0:
        assert "".join(each.decode() for each in texts).encode() == content


def test_piece_of_real_size(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % i for i in range(300_000))
    (tmp_path / "a.txt").write_bytes(text)
    documents = list_documents(str(tmp_path / "a.txt"))
    assert len(documents) == 4 and b"".join(document.read() for document in documents) == text


def test_synthetic_text_is_fixed() -> None:
    documents = list_documents("synthetic")
    assert len(documents) == 4096 and 9e6 < sum(document.size for document in documents) < 10e6
    digest = hashlib.blake2b(b"".join(document.read() for document in documents[:50]), digest_size=8).hexdigest()
    assert digest == "f0404d3a504c41a0", "synthetic text has changed, and with it every recorded loss"
    assert all(len(document.read()) == document.size for document in documents[:50])
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
    assert sum(document.size for document in documents) > 4e6
    assert all(document.read() for document in documents)


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
    monkeypatch.setattr(piece, "PIECE_BYTES", 4096)
    monkeypatch.setattr(text, "CUT_WINDOW", 512)
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
    training, validation = split(list(made(*range(1, count + 1)).pieces), holdout)
    assert training and validation and len(training) + len(validation) == count


def test_a_split_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one short file or copies.*validation\.enable = false"):
        split(list_documents(write(tmp_path, {"a.txt": b"same", "b.txt": b"same"})), 0.5)
    with pytest.raises(ValueError, match=r"one short file or copies"):
        split(list_documents(str(tmp_path / "a.txt")), 0.5)
    for holdout in (0, 1, -1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            split(list(made(1, 2).pieces), holdout)
