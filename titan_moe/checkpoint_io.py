"""How torch.distributed.checkpoint (DCP) writes and reads the files of a checkpoint here: hashed as they are written,
published at once, and never a program that is run when they are read.

Saving: every rank writes its file into the temporary folder and hashes the bytes on their way to it; DCP gathers what
the ranks report at the coordinator, whose `finish` writes .metadata and the manifest and publishes (checkpoint_folder).
It runs where DCP does: in the training process, in a thread of it, or in the process that async_with_pinned_mem
starts, so a Writer can be pickled.

Loading: DCP's .metadata is a pickle, and a pickle can call anything. `read_metadata` takes the classes that DCP's own
are made of and refuses every other name. The values are read by torch.load with weights_only=True: DCP's reader does so
for tensors, but its planner not for other values; `SafeLoadPlanner` does for both.
"""

import errno
import hashlib
import io
import math
import os
import pickle
import re
import shutil
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_moe.checkpoint_folder import METADATA, TMP, Damaged, File, amount, hidden, publish

LARGE = 1 << 20  # bytes from which a thread of its own hashes, while the file is written

# ---------------------------------------------------------------------------------------------------------------------
# Saving


class HashingFile(io.RawIOBase):
    """A new file that is written from its start to its end, and the hash of what was written."""

    def __init__(self, path: Path) -> None:
        self.path, self.hash, self.size = path, hashlib.sha256(), 0
        self.error: OSError | None = None  # torch.save hides it behind an error of its own
        self._file = path.open("wb")
        self._thread = ThreadPoolExecutor(max_workers=1)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        hashing = None
        if len(view) >= LARGE:  # both let go of the interpreter's lock
            hashing = self._thread.submit(self.hash.update, view)
        else:
            self.hash.update(view)
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashing is not None:
                hashing.result()  # the caller may change the memory once we return
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self._thread.shutdown()
            self._file.close()
            super().close()


class HashingFileSystem(FileSystem):
    """The local file system, with a list of the files that were written."""

    def __init__(self) -> None:
        self.written: list[File] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        file = HashingFile(Path(path))
        try:
            with file:
                yield file
        except Exception as error:
            raise file.error or error from error
        assert file.size == Path(path).stat().st_size, "DCP did not write this file from start to end"
        self.written.append(File(Path(path).name, file.size, file.hash.hexdigest()))


@dataclass
class Share(_StoragePrefix):
    """What the coordinator tells a rank: how the names of its files start, and how large the whole checkpoint is."""

    total_bytes: int


@dataclass
class Written:
    """What a rank tells the coordinator."""

    results: list[WriteResult]
    files: list[File]


class Writer(FileSystemWriter):
    """Writes one checkpoint `.../step-N`. Errors of the file system are OSErrors that say how much room there is."""

    def __init__(self, checkpoint: str | os.PathLike) -> None:
        self.checkpoint = Path(checkpoint)
        super().__init__(hidden(self.checkpoint, TMP))
        self.hashing = HashingFileSystem()
        self.fs: FileSystem = self.hashing
        self.total_bytes = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: raises OSError if there is no room for the tensors alone, before any is written."""
        tensors = [item.tensor_data for plan in plans for item in plan.items if item.tensor_data is not None]
        self.total_bytes = sum(math.prod(t.chunk.sizes) * t.properties.dtype.itemsize for t in tensors)
        if self._free() < self.total_bytes:
            raise self._with_arithmetic(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)))
        plans = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=Share(plan.storage_data.prefix, self.total_bytes)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.total_bytes = plan.storage_data.total_bytes
        try:
            results = super().write_data(plan, planner).value()
        except OSError as error:
            raise self._with_arithmetic(error) from error
        done: Future[list[WriteResult]] = Future()
        # DCP only hands it on to `finish`, which is ours.
        done.set_result(cast(list[WriteResult], Written(results, self.hashing.written)))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once all ranks have written and synced their files."""
        ranks = cast(list[Written], results)
        self.hashing.written = []
        try:
            super().finish(metadata, [rank.results for rank in ranks])
            (listing,) = self.hashing.written
            files = [file for rank in ranks for file in rank.files]
            step = int(self.checkpoint.name.removeprefix("step-"))
            publish(self.checkpoint, step, len(ranks), [*files, replace(listing, name=METADATA)])
        except OSError as error:
            raise self._with_arithmetic(error) from error

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.checkpoint), save_id=self.save_id)

    def _free(self) -> int:
        return shutil.disk_usage(self.path).free

    def _with_arithmetic(self, error: OSError) -> OSError:
        """The error with bytes needed and free, if it is about those: a quota may be less than what is free."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        room = f"the checkpoint takes at least {amount(self.total_bytes)}, {amount(self._free())} are free"
        return OSError(error.errno, f"{error.strerror}: {room}", error.filename or str(self.path))


# ---------------------------------------------------------------------------------------------------------------------
# Loading

_DCP = "torch.distributed.checkpoint"
_NAMES = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}.metadata", name) for name in ("MetadataIndex", "StorageMeta")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks up a name in a table
    ("pathlib", "PosixPath"),  # in what stock torchtitan saves
    ("pathlib._local", "PosixPath"),  # as Python 3.13 calls it
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and re.fullmatch("[a-z0-9_]+", name) and getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _NAMES:
            raise Damaged(f"{METADATA} asks for {module}.{name}, which no checkpoint needs: it is not to be trusted")
        return super().find_class(module, name)


def read_metadata(checkpoint: Path) -> Metadata:
    """What is where in a checkpoint. Raises Damaged if it is anything else than data about files of this folder."""
    try:
        with (checkpoint / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise Damaged(f"{METADATA} cannot be read: {error.strerror}") from error
    except Damaged:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise Damaged(f"{METADATA} is not as DCP writes it: {error!r}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Damaged(f"{METADATA} is not as DCP writes it: {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise Damaged(f"{METADATA} names a file outside its folder: {info.relative_path}")
    return metadata


class Reader(FileSystemReader):
    """DCP's reader of a checkpoint whose metadata has been read."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:  # without DCP's search for other metadata, per rank
        return self.metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, but no value is unpickled that could run something."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert self.flatten_state_dict
        loaded = torch.load(cast(IO[bytes], value), weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
