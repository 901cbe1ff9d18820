"""python -m titan_moe.tokenize: the same ids as a run would make, whole or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.pieces import TOKENIZER, documents_of, jsonl, listed, write, write_tokenizer
from titan_moe import tokenize
from titan_moe.config import Config
from titan_moe.preflight import data_problems
from titan_moe.sources import piece, tokens
from titan_moe.sources.lines import LinePiece
from titan_moe.tokenizer import build_tokenizer

REPO = Path(__file__).parents[1]
TEXTS = [f"text {i} Grüße" * (i % 5) for i in range(50)]  # some of them empty


def written(folder: Path) -> tuple[np.ndarray, np.ndarray, dict]:
    meta = json.loads((folder / "meta.json").read_text())
    return np.load(folder / "tokens.npy"), np.load(folder / "offsets.npy"), meta


@pytest.mark.parametrize("processes", [1, 2])
def test_the_ids_are_those_of_a_run(tmp_path: Path, processes: int) -> None:
    write_tokenizer(tmp_path, ["<s>", "</s>"])
    source = listed(write(tmp_path / "texts", {"a.jsonl": jsonl(TEXTS[:30]), "b.jsonl": jsonl(TEXTS[30:])}))
    for assets in ("", str(tmp_path)):
        tokenizer = build_tokenizer(assets, 300)
        folder = tmp_path / f"ids {len(assets)}"
        tokenize.write(source, tokenizer, assets, folder, processes)
        ids, offsets, meta = written(folder)
        expected = tokenizer.encode([text.encode() for text in TEXTS if text])
        assert ids.dtype == np.uint16 and offsets.dtype == np.int64 and np.array_equal(ids, np.concatenate(expected))
        assert offsets.tolist() == [0, *np.cumsum([each.size for each in expected]).tolist()]
        assert (meta["documents"], meta["tokens"], meta["skipped"]) == (40, ids.size, 0)
        assert meta["files"] == {name: (tmp_path / "texts" / name).stat().st_size for name in ("a.jsonl", "b.jsonl")}
        read = documents_of(listed(str(folder)))
        assert all(np.array_equal(one, other) for one, other in zip(read, expected, strict=True))
    assert not list(tmp_path.glob("*.partial"))


def test_large_vocabularies_and_no_bos(tmp_path: Path) -> None:
    class Large(type(TOKENIZER)):
        vocab_size = 70_000

    source = listed(write(tmp_path / "texts", {"a.jsonl": jsonl(["ab", "c"])}))
    tokenize.write(listed(source.dataset), Large(), "", tmp_path / "large")
    assert np.load(tmp_path / "large" / "tokens.npy").dtype == np.uint32
    command = [source.dataset, str(tmp_path / "bare"), "--no-add_bos", "--no-add_eos"]
    assert tokenize.main(command) == 0
    assert bytes(np.load(tmp_path / "bare" / "tokens.npy").tolist()) == b"abc"


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path, {"texts/a.jsonl": jsonl(["one"], "body") + b"broken\n" + jsonl(["two"], "body")})
    command = [sys.executable, "-m", "titan_moe.tokenize", "texts", "ids", "--text_field=body"]
    env = {**os.environ, "PYTHONPATH": str(REPO)}

    def run(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, *more], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    refused = run()
    assert refused.returncode == 2 and refused.stdout == "" and "Traceback" not in refused.stderr
    assert f"{tmp_path.resolve()}/texts/a.jsonl:2: is not JSON" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    done = run("--on_error=skip", "--processes=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ids: 10 tokens in 2 documents, 1 skipped; ")
    assert f"Skipped {tmp_path.resolve()}/texts/a.jsonl:2: is not JSON" in done.stderr and "100%" in done.stderr
    again = run("--on_error=skip")
    assert again.returncode == 2 and again.stderr == "ids exists: choose another, or remove it\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_only_what_is_shown_of_the_skipped_is_looked_up(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line of a document is found by counting from the start of the file: for each of many, that takes days."""
    looked_up, where = [], LinePiece.where

    def counting(piece: LinePiece, document: int, at: int = 0) -> str:
        looked_up.append(document)
        return where(piece, document, at)

    monkeypatch.setattr(LinePiece, "where", counting)
    monkeypatch.setattr(piece, "MIN_PIECE_BYTES", 100)
    folder = write(tmp_path / "texts", {"a.jsonl": (b"broken\n" * 3 + jsonl(["x"])) * 50})
    source = listed(folder, on_error="skip")
    assert len(source.pieces) > 10
    assert tokenize.write(source, TOKENIZER, "", tmp_path / "ids", processes)["skipped"] == 150
    assert len(looked_up) == 5
    shown = [line for line in capsys.readouterr().err.splitlines() if "Skipped" in line]
    assert [re.search(r"a\.jsonl:(\d+): ", line)[1] for line in shown] == ["1", "2", "3", "5", "6"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_half_written_has_the_name(tmp_path: Path, number: signal.Signals, status: int, processes: int) -> None:
    """Nor does a process stay, whose end of the pipe would be open, or a traceback tell what Ctrl-C is."""
    write(tmp_path, {f"texts/{i}.txt": b"x" for i in range(300)})
    (tmp_path / "slow.py").write_text(
        "import sys, time\nfrom titan_moe import tokenize\nplain = tokenize.encode\n"
        "def encode(*arguments):\n    time.sleep(0.1)\n    return plain(*arguments)\n"
        "tokenize.encode = encode\n"
        f"if __name__ == '__main__':\n    sys.exit(tokenize.main(['texts', 'ids', '--processes={processes}']))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(
        [sys.executable, "slow.py"],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where a shell runs this behind it
    )
    assert process.stderr is not None
    for progress in process.stderr:  # a line is over when the bar moves
        if re.search(r"\| [1-9]", progress):
            break
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == status and "Traceback" not in told
    assert number != signal.SIGINT or told.endswith("Interrupted\n")
    assert not (tmp_path / "ids").exists()
    if number == signal.SIGKILL:  # it could not clean up; the next one says so
        source = listed(str(tmp_path / "texts"))
        with pytest.raises(ValueError, match=r"ids\.partial exists: another process is writing it, or was killed"):
            tokenize.write(source, TOKENIZER, "", tmp_path / "ids")
    else:
        assert not (tmp_path / "ids.partial").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write(tmp_path, {"texts/a.txt": b"x"})
    monkeypatch.setattr(os, "fsync", full)
    assert tokenize.main([str(tmp_path / "texts"), str(tmp_path / "ids")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"a.jsonl": b"\n\n", "b/b.jsonl": b"broken\n"})
    texts, ids = str(tmp_path / "a.jsonl"), str(tmp_path / "ids")
    assert tokenize.main([texts, ids]) == 2 and "there is no document in it, 0 were skipped" in capsys.readouterr().err
    assert (
        tokenize.main([str(tmp_path / "b"), ids, "--on_error=skip"]) == 2 and "1 were skip" in capsys.readouterr().err
    )
    assert tokenize.main([texts, ids, "--processes=0"]) == 2 and "at least 1" in capsys.readouterr().err
    assert tokenize.main([str(tmp_path / "nowhere"), ids]) == 2 and "no file or folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b"]


# ---------------------------------------------------------------------------------------------------------------------
# What a run says about such a folder


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    source = listed(write(tmp_path / "texts", {"a.jsonl": jsonl(TEXTS)}))
    tokenize.write(source, TOKENIZER, "", tmp_path / "ids")
    return tmp_path / "ids"


def problems(ids: Path, hf_assets_path: str = "", **mixture: object) -> list[str]:
    config = Config()
    config.training.dataset, config.model.hf_assets_path = str(ids), hf_assets_path
    return data_problems(config, ids.parent / "run")


def test_another_tokenizer_is_refused_before_the_start(ids: Path) -> None:
    assert problems(ids) == []
    write_tokenizer(ids.parent, ["</s>"])
    (found,) = problems(ids, str(ids.parent))
    assert "its ids are of another tokenizer, with a vocabulary of 258 (model.hf_assets_path was" in found
    assert "than this run's, with 257" in found


def test_ids_past_the_vocabulary_are_named(ids: Path) -> None:
    """By hand: the tokenizer cannot have made it, but a GPU would say no more than "device-side assert"."""
    from tests.pieces import make_loader

    changed = np.load(ids / "tokens.npy")
    changed[100] = 300
    np.save(ids / "tokens.npy", changed)
    with pytest.raises(
        ValueError, match=r"ids/tokens\.npy, document \d+: has token id 300, but the tokenizer has only 258"
    ):
        [batch for batch, _ in zip(make_loader(listed(str(ids))), range(100), strict=False)]


def test_folders_that_are_not_whole(ids: Path) -> None:
    with pytest.raises(ValueError, match=r"holds token ids: name the folder"):
        listed(str(ids / "tokens.npy"))
    np.save(ids / "offsets.npy", np.load(ids / "offsets.npy")[:-1])
    with pytest.raises(ValueError, match=r"meta\.json says \d+ tokens in 40 documents, but the \.npy files have"):
        listed(str(ids))
    (ids / "tokens.npy").write_bytes((ids / "tokens.npy").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"ids cannot be read: .*Write it again"):
        listed(str(ids))
    (ids / "meta.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match=r"meta\.json cannot be read: .*format 2, this version reads 1"):
        listed(str(ids))
    (ids / "meta.json").unlink()
    with pytest.raises(ValueError, match=r"meta\.json cannot be read: .*written by python -m titan_moe\.tokenize"):
        listed(str(ids))


@pytest.mark.parametrize("check", [1, 7, 1 << 20])
def test_offsets_that_no_writing_has(ids: Path, check: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would end a run with a traceback, or train on other documents than were written."""
    monkeypatch.setattr(tokens, "CHECK", check)
    whole = np.load(ids / "offsets.npy")
    moved, swapped, last = whole.copy(), whole.copy(), whole.copy()
    moved[0], swapped[[7, 8]], last[-2] = 1, whole[[8, 7]], whole[-1] + 1
    for offsets, message in (
        (moved, r"begins with 1, not with 0"),
        (swapped, r"decreases after document 7"),
        (last, r"decreases after document 39"),
        (whole[None], r"offsets\.npy has 2 dimensions, not 1"),
        (whole.astype(np.uint64), r"offsets uint64: they are not of one writing"),
        (whole.astype(float), r"offsets float64: they are not"),
    ):
        np.save(ids / "offsets.npy", offsets)
        tokens._vector.cache_clear()
        with pytest.raises(ValueError, match=rf"ids cannot be read: .*{message}.*Write it again"):
            listed(str(ids))
    (ids / "offsets.npy").write_bytes(b"")
    tokens._vector.cache_clear()
    with pytest.raises(ValueError, match=r"ids cannot be read: No data left in file"):
        listed(str(ids))
    np.save(ids / "offsets.npy", whole)
    tokens._vector.cache_clear()
    assert listed(str(ids)).pieces
    np.save(ids / "tokens.npy", np.load(ids / "tokens.npy")[None])
    with pytest.raises(ValueError, match=r"ids cannot be read: tokens\.npy has 2 dimensions"):
        listed(str(ids))


def test_numpys_header_has_the_size_that_is_left_for_it(tmp_path: Path) -> None:
    for length in (0, 1, 10**6):
        file = tokenize.VectorFile(tmp_path / "a.npy", "uint16")
        file.append(np.zeros(length, np.uint16))
        file.close()
        assert np.load(tmp_path / "a.npy", mmap_mode="r" if length else None).shape == (length,)
    assert tokens.FORMAT == 1
