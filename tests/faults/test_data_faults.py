"""Files that fail, vanish or change: before a run, between two of its starts, and in its middle. Each is named, the run
ends on all ranks in good time, and nothing is left out or half written."""

import errno
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.harness import REPO, SMALL_FP32, torchrun
from tests.faults.corpora import TEXTS
from tests.pieces import TOKENIZER, jsonl, listed, make_loader, write
from tests.test_own_data import config_of, parquet
from titan_moe import tokenize
from titan_moe.config import Config, DataSource
from titan_moe.metrics import read_metrics
from titan_moe.preflight import list_sources, resume_problems
from titan_moe.sources import hub, lines, piece, record, text, tokens
from titan_moe.sources.listing import Source
from titan_moe.sources.record import list_all

KINDS = ["text", "lines", "rows", "tokens"]
READERS = [*((kind, 0) for kind in KINDS), ("text", 1), ("tokens", 1)]
"""Kinds of sources, and workers: a worker tells the training process what went wrong, for all kinds alike"""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files were a thousand times as large, and read in parts that are as small."""
    monkeypatch.setattr(piece, "MIN_PIECE_BYTES", 100)
    monkeypatch.setattr(piece, "PIECE_BYTES", 300)
    monkeypatch.setattr(text, "CUT_WINDOW", 100)
    monkeypatch.setattr(lines, "BLOCK", 64)
    monkeypatch.setattr(tokens, "TOKENS_TOGETHER", 64)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


def source_of(kind: str, folder: Path, **options: Any) -> Source:
    """All of TEXTS in one file of this kind."""
    whole = {
        "text": {"a.txt": "\n".join(TEXTS).encode()},
        "lines": {"a.jsonl": jsonl(TEXTS)},
        "rows": {"a.parquet": parquet(TEXTS, row_group_size=4)},
    }
    if kind == "tokens":
        tokenize.write(source_of("lines", folder / "lines"), TOKENIZER, "", folder / "ids")
        return listed(str(folder / "ids"), **options)
    return listed(write(folder, whole[kind]), **options)


def file_of(source: Source) -> Path:
    """The one that its documents are in."""
    return Path(next(file.path for file in source.files if not file.name.endswith(("meta.json", "offsets.npy"))))


def flip(path: Path, at: int) -> None:
    """One bit, in place, as an editor or a disk may."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# ---------------------------------------------------------------------------------------------------------------------
# A disk that fails


class Failing(io.BufferedReader):
    """A file whose disk gives up after some reads."""

    reads_left = 0

    def _check(self) -> None:
        type(self).reads_left -= 1
        if self.reads_left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, *arguments: Any) -> bytes:
        self._check()
        return super().read(*arguments)

    def readinto(self, buffer: Any) -> int:
        self._check()
        return super().readinto(buffer)


def fail_after(reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread

    def failing_pread(descriptor: int, size: int, at: int) -> bytes:
        Failing.reads_left -= 1
        if Failing.reads_left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, size, at)

    monkeypatch.setattr(Failing, "reads_left", reads)
    monkeypatch.setattr(piece, "open", lambda path, mode, buffering: Failing(io.FileIO(path)), raising=False)
    monkeypatch.setattr(os, "pread", failing_pread)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(("kind", "num_workers"), READERS)
def test_a_read_that_fails_is_named_and_never_skipped(
    kind: str, num_workers: int, on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_error` is about documents that are broken for everybody. What one rank cannot read, others can: to leave that
    out would give every mesh, and every repetition, other samples."""
    source = source_of(kind, tmp_path, on_error=on_error)
    fail_after(20, monkeypatch)
    loader = make_loader(source, num_workers=num_workers)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*cannot be read: .*(Input/output error|Errno 5)"):
        deque(itertools.islice(loader, 2000), maxlen=0)
    assert loader.skipped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fails_while_files_are_listed_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(kind, tmp_path)
    fail_after(0, monkeypatch)
    with pytest.raises(ValueError, match=rf"{tmp_path}.* cannot be read: .*(Input/output error|Errno 5)"):
        list_all(config_of(DataSource(dataset=source.dataset)))


# ---------------------------------------------------------------------------------------------------------------------
# A file that changes in the middle of a run


@pytest.mark.parametrize(("kind", "num_workers"), READERS)
@pytest.mark.parametrize("what", ["gone", "cut short", "replaced", "changed in place"])
def test_a_file_that_changes_in_the_middle_of_an_epoch_is_named(
    kind: str, what: str, num_workers: int, tmp_path: Path
) -> None:
    """Also where its size stays. A mapped file that is cut short would end the process without a word (SIGBUS)."""
    source = source_of(kind, tmp_path)
    path, batches = file_of(source), iter(make_loader(source, num_workers=num_workers))
    for _ in range(4):
        next(batches)
    size, content = path.stat().st_size, path.read_bytes()
    changes: dict[str, Callable[[], object]] = {
        "gone": path.unlink,
        "cut short": lambda: os.truncate(path, size // 2),
        "replaced": lambda: (path.with_name("new").write_bytes(content[::-1]), path.with_name("new").rename(path)),
        "changed in place": lambda: flip(path, size // 2),
    }
    time.sleep(0.02)  # so that the time of writing is another
    changes[what]()
    expected = rf"{re.escape(str(path))} changed after it was listed: .*resume from the last"
    with pytest.raises(ValueError, match=expected):
        deque(itertools.islice(batches, 2000), maxlen=0)


def test_token_ids_are_not_read_past_their_ends(tmp_path: Path) -> None:
    """Offsets that changed and kept size and time, as on another node's copy, lead nowhere outside of the tokens."""
    source = source_of("tokens", tmp_path)
    path = file_of(source).with_name("offsets.npy")
    status, offsets = path.stat(), np.load(path)
    for at, value in ((20, offsets[-1] + 5), (20, -7), (20, offsets[19] - 1), (20, np.iinfo(np.int64).max)):
        changed = offsets.copy()
        changed[at] = value
        np.save(path, changed)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(ValueError, match=r"offsets\.npy changed after it was listed: the ends of documents \d+ to"):
            deque(itertools.islice(make_loader(source), 600), maxlen=0)
    np.save(path, offsets)


# ---------------------------------------------------------------------------------------------------------------------
# A file that changed between two starts


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_that_changed_between_two_starts_is_refused(kind: str, tmp_path: Path) -> None:
    """Anywhere in a file of up to 48 KiB, of which the digest covers all; and before a process group exists, which
    tests/test_preflight.py shows."""
    source = source_of(kind, tmp_path / "data")
    config = config_of(DataSource(dataset=source.dataset))
    record.save(list_all(config), tmp_path)
    path = file_of(source)
    at = path.read_bytes().find(b"text ") if kind != "tokens" else path.stat().st_size - 9
    flip(path, at)
    (change,) = record.changes(list_all(config), tmp_path)
    assert re.search(rf"changed: changed: {path.name} \(\d+ bytes, \w+ -> \d+ bytes, \w+\)", change)
    flip(path, at)
    assert record.changes(list_all(config), tmp_path) == []


def test_a_large_file_that_was_written_to_is_refused_or_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What no digest covers cannot be told from a `touch`: the user is told."""
    path = tmp_path / "data" / "a.txt"
    write(path.parent, {"a.txt": b"text\n" * 40_000})
    config = config_of(DataSource(dataset=str(path.parent)))
    config.checkpoint.enable = True
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    record.save(list_all(config), tmp_path)
    list_sources(config, TOKENIZER, tmp_path)
    assert not caplog.records
    time.sleep(0.02)
    flip(path, 30_000)
    list_sources(config, TOKENIZER, tmp_path)
    assert f"Data files were written to since this run began: {path}. Their sizes are what they were" in caplog.text
    for at in (5, 100_000, 199_990):
        flip(path, at)
        with pytest.raises(ValueError, match=r"is not what it was: .*a\.txt"):
            list_sources(config, TOKENIZER, tmp_path)
        flip(path, at)


def test_validation_may_change_between_two_starts_as_far_as_training_does_not(tmp_path: Path) -> None:
    """More often, of more steps, on other documents, or none. Not so with other held-out documents: what they are, is
    not trained on."""
    write(tmp_path, {f"texts/{i}.txt": b"text %d " % i * 99 for i in range(30)} | {"held/a.txt": b"other " * 999})

    def config(**validation: Any) -> Config:
        made = config_of(DataSource(dataset=f"{tmp_path}/texts"), **validation)
        made.checkpoint.enable = True
        return made

    own = {"enable": True, "dataset": f"{tmp_path}/held"}
    record.save(list_all(config(**own)), tmp_path)
    for changed in ({**own, "freq": 3, "steps": 7}, {"enable": False}, {"enable": True, "dataset": "synthetic"}):
        assert record.changes(list_all(config(**changed)), tmp_path) == []
    write(tmp_path, {"held/b.txt": b"more " * 999})
    assert record.changes(list_all(config(**own)), tmp_path) == []
    (change,) = record.changes(list_all(config(enable=True, holdout=0.2)), tmp_path)
    assert "training source" in change and "[validation]" in change

    record.save(list_all(config(enable=True, holdout=0.2)), tmp_path)
    assert record.changes(list_all(config(enable=True, holdout=0.2, freq=3, steps=7)), tmp_path) == []
    for changed in ({"enable": True, "holdout": 0.4}, {"enable": False}, own):
        (change,) = record.changes(list_all(config(**changed)), tmp_path)
        assert "training source" in change and "[validation]" in change


def test_another_revision_on_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written without @revision, and the dataset has moved on."""
    config, revision = config_of(DataSource(dataset="hf:me/texts")), "1" * 40
    monkeypatch.setattr(hub, "pieces", lambda *_: ([hub.HubPiece("hf:me/texts", 1, None, 0, "text", 1.0)], revision))
    record.save(list_all(config), tmp_path)
    assert record.changes(list_all(config), tmp_path) == []
    revision = "2" * 40
    (change,) = record.changes(list_all(config), tmp_path)
    assert "or the revision on the hub" in change


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def until(happened: Callable[[], bool], then: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 300
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.1)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def steps_done(run: Path) -> int:
    return max(read_metrics(run), default=0) if (run / "metrics.jsonl").exists() else 0


def nothing_half_written(run: Path) -> None:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert not list(run.glob("*.tmp"))
    saved = sorted((run / "checkpoint").glob("step-*"))
    assert saved and all((path / ".metadata").exists() for path in saved)


def command(tmp_path: Path, *more: str) -> list[str]:
    """Two ranks, each reading its own half of 64 files again and again."""
    write(tmp_path, {f"texts/{i:02}.txt": (f"{i}: " + "text " * 16).encode() for i in range(64)})
    saving = ["--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.keep_latest_k=2"]
    return [
        *("train.py", *SMALL_FP32, f"--training.dataset={tmp_path}/texts", f"--job.dump_folder={tmp_path}/run"),
        *("--training.steps=100000", "--lr_scheduler.total_steps=100000", "--validation.enable=false", *saving, *more),
    ]


@pytest.mark.slow
def test_a_file_that_vanishes_from_under_one_rank_ends_all_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And put back, it lets the run go on."""
    monkeypatch.undo()  # pieces of the size that the run has
    run, victim = tmp_path / "run", tmp_path / "texts" / "07.txt"
    argv = command(tmp_path)
    remover = until(lambda: steps_done(run) >= 6, lambda: victim.rename(tmp_path / "kept"))
    finished = torchrun(2, *argv)
    seconds = time.time() - (run / "metrics.jsonl").stat().st_mtime  # since the last step, after which it was read
    remover.join()
    output = finished.stdout + finished.stderr
    assert finished.returncode != 0 and seconds < 60, output[-4000:]
    assert f"{victim} changed after it was listed: [Errno 2]" in output and "resume from the last checkpoint" in output
    assert "in open_as_listed" not in output, "a fault of the data has no traceback"
    nothing_half_written(run)
    config = config_of(DataSource(dataset=f"{tmp_path}/texts"))
    config.checkpoint.enable, config.training.seq_len = True, 64
    (problem,) = resume_problems(config, list_all(config), run)
    assert "changed: gone: 07.txt" in problem, "started again without it"
    (tmp_path / "kept").rename(victim)
    assert resume_problems(config, list_all(config), run) == []


def children(process: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == process:
            yield int(path.name)
            yield from children(int(path.name))


@pytest.mark.slow
def test_a_data_worker_that_is_killed_ends_all_ranks(tmp_path: Path) -> None:
    """As by the kernel when memory is short."""
    run, argv = tmp_path / "run", command(tmp_path, "--training.dataloader.num_workers=1")
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *argv],
        cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 180
        while steps_done(run) < 6:
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        ranks = list(children(job.pid))
        workers = [worker for rank in ranks for worker in children(rank) if b"train.py" in cmdline(worker)]
        assert len(workers) == 2, "one of each rank"
        os.kill(workers[0], signal.SIGKILL)
        assert job.wait(60) != 0
        deadline = time.monotonic() + 20  # what is left is for init to collect
        while any(Path(f"/proc/{process}").exists() for process in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        job.kill()
    output = (tmp_path / "log").read_text()
    assert re.search(
        r"DataLoader worker( \(pid\(?s?\)? ?\d+\).*)? (killed by signal: Killed|exited unexpectedly)", output
    ), output[-3000:]
    nothing_half_written(run)


def cmdline(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
