"""hf: sources, streamed from a hub on loopback that drops connections, falls silent, or is not there.

Each test is a script in a process of its own: where the hub is, the libraries read at import.
"""

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import SMALL_FP32, torchrun
from tests.hub_server import Hub, serving
from tests.pieces import jsonl, listed
from tests.test_own_data import parquet
from titan_moe.sources import hub

REPO = Path(__file__).parents[1]
TEXTS = [f"text {i} Grüße" for i in range(120)]

PARQUET = {
    f"data/train-{i:05}-of-00004.parquet": parquet(TEXTS[i::4], row_group_size=8) for i in range(4)
} | {"data/validation-00000-of-00001.parquet": parquet(["held out"]), "README.md": b"# Texts\n"}  # fmt: skip
JSONL = {f"{i}.jsonl": jsonl(TEXTS[i::4]) for i in range(4)}

PRELUDE = """
import itertools, sys, time
from tests.pieces import *
from titan_moe.sources import hub
def all_texts(source):
    return sorted(text.decode() for text in documents_of(source))
def refused(dataset, **options):
    start = time.monotonic()
    try:
        for _ in itertools.islice(make_loader(listed(dataset, **options)), 40):
            pass
    except ValueError as error:
        print(f"{time.monotonic() - start:.1f} s: {error}")
    else:
        print("not refused")
"""


def environment(url: str, folder: Path, **more: str) -> dict[str, str]:
    cache = {"HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}
    return {**os.environ, "PYTHONPATH": str(REPO), "HF_ENDPOINT": url, **cache, **more}


def script(code: str, url: str, folder: Path, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=environment(url, folder, **more), cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("files", [PARQUET, pytest.param(JSONL, marks=pytest.mark.slow)], ids=["parquet", "jsonl"])
def test_rows_arrive_though_connections_drop(tmp_path: Path, files: dict[str, bytes]) -> None:
    """In the middle of a file, with the training process reading and with two workers; from any row on."""
    code = """
        source = listed("hf:me/texts")
        assert len(source.pieces) == 4 and len(source.revision) == 40 and source.files == ()
        texts = all_texts(source)
        assert texts == sorted(f"text {i} Grüße" for i in range(120))
        (piece, *_) = source.pieces
        assert list(piece.documents(7)) == list(piece.documents())[7:]
        batches = [list(itertools.islice(make_loader(source, num_workers=n), 150)) for n in (0, 2)]
        assert [rows_of(b) for b in batches[0]] == [rows_of(b) for b in batches[1]]
        print("all there")
    """
    with serving(files) as server:
        server.drops = 3
        assert "all there" in script(code, server.url, tmp_path)
        assert server.drops == 0


def test_what_cannot_be_read_is_named_in_good_time(tmp_path: Path) -> None:
    code = """
        refused("hf:me/nothing")
        refused("hf:me/texts:test")
        refused("hf:me/texts@nowhere")
        refused("hf:me/texts", text_field="body")
        refused("hf:me/a/b")
        assert all_texts(listed("hf:me/texts:validation")) == ["held out"]
        source = listed("hf:me/texts@main:train", patience=3)
        print(source.revision, flush=True)
        sys.stdin.readline()
        start = time.monotonic()
        try:
            next(iter(make_loader(source)))
        except ValueError as error:
            print(f"{time.monotonic() - start:.1f} s: {error}")
    """
    expected = ['"hf:me/nothing" cannot be listed at http://127.0.0.1', "Bad split: test", "Invalid rev id"]
    expected += ['has no field "body"; its fields are: text, n', "write hf:owner/name"]
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        serving(PARQUET) as server,
        subprocess.Popen(command, cwd=tmp_path, env=environment(server.url, tmp_path), **pipes) as process,
    ):
        lines = [process.stdout.readline() for _ in range(6)]
        server.hangs.set()
        rest, _ = process.communicate("go\n", timeout=60)
        assert process.returncode == 1, "it aborted"  # 1: who gave up has failed
    assert all(part in line for part, line in zip(expected, lines, strict=False)), lines
    assert lines[5].strip() == server.sha
    seconds, message = rest.split(" s: ")
    assert 3 <= float(seconds) < 20
    assert "hf:me/texts@main:train, data file" in message and "nothing came for 3 s from http://127.0.0.1" in message
    assert "Resume from the last checkpoint when the hub answers again" in message


def test_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # what the variable sets, before the import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r'"hf:me/texts" cannot be listed at https://.*, HF_HUB_OFFLINE is set\. Check'
    ) as e:
        listed("hf:me/texts")
    assert "without a network, download the files beforehand" in str(e.value)


@pytest.mark.slow
def test_with_a_network_that_leads_nowhere(tmp_path: Path) -> None:
    refused = script('hub.LISTING_TRIES = 1\nrefused("hf:me/texts")', "http://127.0.0.1:9", tmp_path)
    assert "after 1 tries" in refused and "download the files beforehand" in refused


class Flaky:
    """As much of a datasets.IterableDataset as is used; every `every` batches, something happens."""

    num_shards = 1

    def __init__(self, texts: list, every: int, what: Callable[[], object]) -> None:
        self.texts, self.every, self.what, self.batches = texts, every, what, 0

    def shard(self, count: int, index: int) -> "Flaky":
        return self

    def skip(self, count: int) -> "Skipped":
        return Skipped(self, count)


class Skipped:
    def __init__(self, dataset: Flaky, first: int) -> None:
        self.dataset, self.first = dataset, first

    def iter(self, size: int) -> Iterator[dict[str, list]]:
        for start in range(self.first, len(self.dataset.texts), size):
            self.dataset.batches += 1
            if self.dataset.batches % self.dataset.every == 0:
                self.dataset.what()
            yield {"text": self.dataset.texts[start : start + size]}


def raising(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


def piece_of(dataset: Flaky, patience: float = 10) -> hub.HubPiece:
    return hub.HubPiece("hf:me/texts", 1, dataset, 0, "text", patience)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FIRST_WAIT", 0.01)


def test_no_row_is_lost_or_repeated_when_reading_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    texts = [str(i) for i in range(1000)]
    piece = piece_of(Flaky(texts, 3, raising(ConnectionError("dropped"))))
    assert [text.decode() for text in piece.documents(5)] == texts[5:]
    assert "data file 0, row 69: ConnectionError('dropped'); again in 0 s" in caplog.text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            raising(ConnectionError("dropped")),
            r"row 32: nothing came for 0 s .* failed \d+ times, the last time with Conn",
        ),
        (lambda: time.sleep(60), r"row 32: nothing came for 0 s .*: silence\. Resume"),
        (raising(ValueError("Schema\nat index 1 was different")), r"row 32: Schema\nat index 1 was different"),
    ],
)
def test_who_waits_gives_up(what: Callable[[], object], message: str) -> None:
    dataset = Flaky([str(i) for i in range(100)], 2, what)
    dataset.shard = lambda count, index: dataset if dataset.batches < 2 else Broken(what)
    documents = piece_of(dataset, patience=0.4).documents()
    assert len(list(itertools.islice(documents, 32))) == 32
    with pytest.raises(ValueError, match=f"hf:me/texts, data file 0, {message}"):
        next(documents)


class Broken:
    def __init__(self, what: Callable[[], object]) -> None:
        self.what = what

    def skip(self, count: int) -> None:
        self.what()


def test_the_reader_ends_with_who_reads() -> None:
    piece = piece_of(Flaky(["a"] * 10_000, 10**9, lambda: None))
    documents = piece.documents()
    next(documents)
    readers = [thread for thread in threading.enumerate() if isinstance(thread, hub.Reader)]
    (reader,) = [thread for thread in readers if thread.piece is piece]
    documents.close()
    reader.join(5)
    assert not reader.is_alive()


@pytest.mark.slow
def test_a_hub_that_falls_silent_ends_a_run_of_two_ranks_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the time limit of the collective that the other rank waits in."""
    files = {f"data/train-{i:05}-of-00004.parquet": parquet([f"{i} {j} " * 40 for j in range(4000)]) for i in range(4)}
    with serving(files) as server:
        command = ["train.py", *SMALL_FP32, "--training.dataset=hf:me/texts", f"--job.dump_folder={tmp_path}/run"]
        command += ["--training.steps=100000", "--comm.train_timeout_seconds=40", "--lr_scheduler.total_steps=100000"]
        watch(server, tmp_path)
        for name, value in environment(server.url, tmp_path).items():
            monkeypatch.setenv(name, value)
        finished = torchrun(2, *command)
        output = finished.stdout + finished.stderr
    assert finished.returncode != 0
    assert "nothing came for 20 s" in output and "hf:me/texts, data file" in output, output[-5000:]
    assert "step:" in output


def watch(server: Hub, folder: Path) -> None:
    """Let the hub fall silent once the run has trained."""

    def wait() -> None:
        while not list(folder.glob("run/metrics.jsonl")):
            time.sleep(0.2)
        server.hangs.set()

    threading.Thread(target=wait, daemon=True).start()
