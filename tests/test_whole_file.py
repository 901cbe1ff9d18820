"""Who reads a file while it is written, by one or by two, or when writing fails, sees a whole one."""

import errno
import threading
from pathlib import Path

import pytest

from titan_moe.whole_file import replacing


def test_whoever_reads_sees_all_of_one_version(tmp_path):
    """While two replace it again and again."""
    path, stop, seen = tmp_path / "page", threading.Event(), set()
    contents = [bytes([letter]) * 2_000_000 for letter in b"ab"]

    def write(content: bytes, times: int) -> None:
        for _ in range(times):
            with replacing(path) as file:
                file.write_bytes(content)

    def look() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    write(contents[0], 1)
    threads = [threading.Thread(target=look), *(threading.Thread(target=write, args=(each, 20)) for each in contents)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert seen <= set(contents) and [each.name for each in tmp_path.iterdir()] == ["page"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "page"
    path.write_text("old")

    def fail(path: Path, error: Exception) -> None:
        with replacing(path) as file:
            file.write_text("ne")
            raise error

    with pytest.raises(OSError, match="No space left on device: '.*page'") as caught:
        fail(path, OSError(errno.ENOSPC, "No space left on device", "another name"))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(path)
    with pytest.raises(KeyError):
        fail(path, KeyError("a mistake of whoever writes"))
    with pytest.raises(FileNotFoundError, match="page"), replacing(path):
        pass  # nothing was written
    with pytest.raises(FileNotFoundError, match="no folder/page"):
        fail(tmp_path / "no folder" / "page", KeyError())
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["page"]
