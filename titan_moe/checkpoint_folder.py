"""What is a complete checkpoint on disk: folders, names, renames, and the manifest that says what belongs to one.

A checkpoint is written as `.step-20.tmp`, beside the finished ones, and one rename makes it `step-20`: a folder of that
name is whole, however its writer ended. Before the rename, every file and folder has been synced to the disk, and the
manifest has been written last: names, sizes and SHA-256 of all other files, hashed while they were written. So it is
also the mark of completeness where a rename is not atomic (buckets mounted as a file system copy the files of a folder
one after the other) and in a copy that was cut short: what it lists is missing or short then, or it is missing itself.

    step-20/            manifest.json, .metadata (what is where), __<rank>_0.distcp (the values)
    .step-20.tmp        not finished: removed when the run comes back
    .step-20.deleted    no longer kept: renamed before its files go, so that half of it is never taken for a checkpoint
    .step-20.replaced   for a moment, while a new step-20 takes its place
    damaged-step-20     refused when it was to be loaded; never deleted by the run

Imports no torch.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_moe.huggingface import folder as huggingface

MANIFEST, METADATA = "manifest.json", ".metadata"
VERSION = 1
TMP, DELETED, REPLACED = "tmp", "deleted", "replaced"


@dataclass(frozen=True, slots=True)
class File:
    name: str
    size: int
    """Bytes"""

    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    world_size: int
    """Processes that wrote it; any number can read it"""

    files: list[File]
    """Rank by rank, then .metadata"""

    def text(self) -> str:
        """As it is stored: with a hash of itself, so that no byte of it can change unnoticed."""
        content = {"version": VERSION, **asdict(self)}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"


class Damaged(ValueError):
    """Why a checkpoint is not complete: the file, and what is wrong with it."""


class ForeignFormat(ValueError):
    """That a checkpoint is whole, but another version's: nothing to go back from."""


def _digest(content: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Of a checkpoint's folder; raises Damaged if there is none, or it is not as it was written, and ForeignFormat if
    another version wrote it."""
    if not folder.is_dir():
        raise Damaged("there is no such folder")
    try:
        stored = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise Damaged(
            f"it has no {MANIFEST}: a copy that was cut short, or made by another program or an earlier version"
        ) from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    try:
        content = json.loads(stored)
        version = content["version"]
        if version != VERSION and content.pop("sha256") == _digest(content):
            raise ForeignFormat(
                f"{folder / MANIFEST} is of format {version}, from another version of this program, not {VERSION}: go "
                "on with the version that wrote it, or move that checkpoint away"
            )
        files = [File(**file) for file in content["files"]]
        manifest = Manifest(step=content["step"], world_size=content["world_size"], files=files)
    except ForeignFormat:
        raise
    except (ValueError, TypeError, KeyError):
        manifest = None
    if manifest is None or manifest.text().encode() != stored:
        raise Damaged(f"{MANIFEST} is not as this version writes it: its text and its own hash do not fit")
    return manifest


def check_sizes(folder: Path, files: Iterable[File]) -> None:
    """Raises Damaged if a file is missing or has another size."""
    for file in files:
        try:
            size = (folder / file.name).stat().st_size
        except OSError as error:
            raise Damaged(f"{file.name} is missing or cannot be read: {error.strerror}") from None
        if size != file.size:
            raise Damaged(f"{file.name} has {size:,} bytes; {file.size:,} were written")


def check_hashes(folder: Path, files: Iterable[File]) -> str | None:
    """What is wrong with the first file whose content is not as it was written; reads all of each."""
    for file in files:
        try:
            with (folder / file.name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            return f"{file.name} cannot be read: {error.strerror}"
        if found != file.sha256:
            return f"{file.name} has another content: SHA-256 {found[:12]}..., {file.sha256[:12]}... was written"
    return None


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def hidden(checkpoint: Path, state: str) -> Path:
    """Where a checkpoint is while it is not one."""
    return checkpoint.with_name(f".{checkpoint.name}.{state}")


def steps(folder: Path) -> list[int]:
    """Of the checkpoints in a folder, newest first."""
    names = [path.name for path in folder.glob("step-*") if path.is_dir()]
    return sorted((int(name[5:]) for name in names if re.fullmatch("step-(0|[1-9][0-9]*)", name)), reverse=True)


def misnamed(path: Path) -> str | None:
    """Why this cannot be the folder of a checkpoint or of Hugging Face weights, and what to name instead; None if it
    can."""
    if not path.is_dir():
        return "is no folder; name a checkpoint's step-N folder, or a Hugging Face folder"
    for place in (path, path / "checkpoint"):
        if found := steps(place):
            return f"is no checkpoint, but holds some; name one of them, such as {step_folder(place, found[0])}"
    if any((path / name).exists() for name in (MANIFEST, METADATA)) or is_hugging_face(path):
        return None
    if any(path.glob("*.bin")):
        return "has weights in pytorch_model*.bin, which may run programs when loaded; take the model in safetensors"
    return (
        f"holds neither a checkpoint ({MANIFEST}, {METADATA}) nor Hugging Face weights (config.json, *.safetensors); "
        "name a folder that does"
    )


def is_hugging_face(path: Path) -> bool:
    """Whether the folder was written for Hugging Face's libraries, whole or not."""
    return not (path / MANIFEST).exists() and huggingface.is_one(path)


def publish(checkpoint: Path, step: int, world_size: int, files: Sequence[File]) -> None:
    """Complete the checkpoint that was written in its temporary folder: manifest, sync, rename. Raises OSError, also
    when a file that a rank wrote is not there: another node may have another folder of that name."""
    temporary, replaced = hidden(checkpoint, TMP), hidden(checkpoint, REPLACED)
    try:
        check_sizes(temporary, files)
    except Damaged as damage:
        raise OSError(errno.ENOENT, f"{damage}; do all nodes see the same folder?", str(temporary)) from damage
    with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(Manifest(step, world_size, list(files)).text())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(temporary)
    if checkpoint.exists():  # folders cannot be exchanged in one go; `recover` undoes this half
        os.rename(checkpoint, replaced)
    os.rename(temporary, checkpoint)
    sync_folder(checkpoint.parent)
    with suppress(OSError):  # the next start tries again
        remove(replaced)


def remove(path: Path | str) -> None:
    """A checkpoint that is none any more, if it is there; of a link to one elsewhere, only the link. Raises OSError."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlast a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prepare(folder: Path) -> None:
    """Make the folder of a run's checkpoints, find out whether it can be written, and remove what killed processes
    left. Only for the process that has claimed the run folder. Raises ValueError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
        for path in folder.glob(".step-*"):
            left = re.fullmatch(rf"\.(step-[0-9]+)\.({TMP}|{DELETED}|{REPLACED})", path.name)
            if left is None:
                continue
            if left[2] == REPLACED and not (folder / left[1]).exists():
                os.rename(path, folder / left[1])
            else:
                remove(path)
    except OSError as error:
        raise ValueError(
            f"checkpoint.folder: {folder} cannot be written: {error}; mend that, or give another --job.dump_folder"
        ) from error


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that was refused, so that it neither counts as one nor is deleted; returns where it is."""
    names = [f"damaged-{checkpoint.name}", *(f"damaged-{checkpoint.name}.{i}" for i in range(2, 1000))]
    aside = next(path for name in names if not (path := checkpoint.with_name(name)).exists())
    os.rename(checkpoint, aside)
    return aside


def amount(size: float) -> str:
    """A number of bytes to read: whole below one MiB."""
    return f"{size / 2**30:,.3f} GiB" if size >= 2**20 else f"{size:,.0f} bytes"
