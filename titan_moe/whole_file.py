"""Files that are there whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place at the end, or is removed when writing fails.

    So whoever reads `path`, also after a crash, sees all of the old content or all of the new, and two who write at
    once, on two nodes even, do not mix. An OSError names `path`.
    """
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield written
        with written.open("rb") as file:
            os.fsync(file.fileno())  # before its name: a crash could leave the name without the content
        os.replace(written, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            written.unlink(missing_ok=True)
