"""The folder that one run writes to: which one, whether it is free, and a record of who trains in it.

`run.json` in the folder names the run. A process that comes back under the same run id (torchrun restarts its workers,
SLURM requeues a job) goes on there; another run may only when it resumes from checkpoints, because otherwise the
metrics and checkpoints of two runs would mix. Imports no torch.
"""

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from titan_moe.config import Config
from titan_moe.whole_file import replacing

_held: dict[Path, IO[bytes]] = {}
"""Lock file of each folder that this process has claimed: the lock lasts as long as some process has that file open"""

# A forked child (a data loader worker) has them open too and, outliving us for a moment, would shut out our restart:
# it forgets them, which closes them.
os.register_at_fork(after_in_child=_held.clear)


def choose(config: Config, env: Mapping[str, str]) -> Path:
    """job.dump_folder, or outputs/<RUN_ID>."""
    if config.job.dump_folder:
        folder = os.path.expanduser(config.job.dump_folder)
        if folder.startswith("~"):
            raise ValueError(
                f"job.dump_folder = {config.job.dump_folder!r}: there is no such user; write ./{folder} if meant"
            )
        return Path(folder)
    if not env.get("RUN_ID"):
        raise ValueError("RUN_ID is not set: start with ./run_train.sh, or set it, or set job.dump_folder")
    if problem := run_id_problem(env["RUN_ID"]):
        raise ValueError(problem)
    return Path("outputs", env["RUN_ID"])


def run_id_problem(run_id: str) -> str | None:
    """Why `run_id` is no name of a folder inside outputs/, or None: with ../ in it, a run would write anywhere."""
    if re.fullmatch("[A-Za-z0-9_.-]+", run_id) and run_id not in (".", ".."):
        return None
    return f"RUN_ID = {run_id!r} in the environment: names a folder; use letters, digits, _, . and -"


def new_run_id(config_path: str) -> str:
    """For example 20261129-201502-debug_model-7f3a: sorts by time, names its configuration, does not repeat."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{stem(config_path)}-{secrets.token_hex(2)}"


def stem(config_path: str) -> str:
    """The name of the configuration, as far as it can stand in the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(config_path).stem)[:64]


def refusal(folder: Path, run_id: str, resume: bool) -> str | None:
    """Why this run may not write to the folder, or None. Creates and changes nothing."""
    remedy = "give another --job.dump_folder"
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return f"run folder {folder}: {existing} is not a folder that you may write in; {remedy}"
    if folder.resolve() not in _held and is_held(folder):
        return f"run folder {folder}: another process trains in this folder; wait until it ends, or {remedy}"
    there = _run_there(folder)
    if there is None or (run_id and there.get("run_id") == run_id):
        return None
    # A run that saved checkpoints, or was about to, can be gone on with; any other would only be mixed with this one.
    resumable = there.get("checkpoints") or any(folder.glob("*/step-*"))
    if resume and resumable:
        return None
    return (
        f"run folder {folder}: holds another run ({there.get('run_id', 'without a readable run.json')})"
        f"{'' if resumable else ', without checkpoints to resume from'}; {remedy}, or leave it out to get a new folder "
        f"under outputs{', or resume what is there with --checkpoint.enable' if resumable else ''}"
    )


def is_held(folder: Path) -> bool:
    """Whether a process trains in the folder now. Raises OSError if its lock cannot be read."""
    if not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open("rb") as file:
        # Shared, so that all nodes of a job can look at the same moment without taking each other for a live run.
        return not _lock(file, fcntl.LOCK_SH)


def claim(folder: Path, run_id: str, resume: bool, record: dict[str, Any]) -> int:
    """Take the folder for this process until it ends and write run.json; returns the number of this attempt, from 1.

    Only global rank 0 claims. `resume` says that this run saves checkpoints, and goes on from those that are there.
    `record` is what run.json says about the attempt besides.
    """
    reason = refusal(folder, run_id, resume)
    if reason is None and folder.resolve() not in _held:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")
        if not _lock(lock, fcntl.LOCK_EX):
            raise ValueError(f"run folder {folder}: another process took this folder just now")
        _held[folder.resolve()] = lock
        reason = refusal(folder, run_id, resume)  # again, for a run that came and went in between
    if reason is not None:
        raise ValueError(reason)
    there = _run_there(folder) or {"attempt": 0}
    attempt: int = there["attempt"] + 1
    now = datetime.now(UTC).isoformat(timespec="seconds")
    run = {"run_id": run_id, "attempt": attempt, "created": there.get("created", now), "updated": now}
    run |= {"checkpoints": resume} | record
    with replacing(folder / "run.json") as file:
        file.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    return attempt


def _run_there(folder: Path) -> dict[str, Any] | None:
    """run.json of the run in the folder, without ids if that cannot be read; None if no run has been here."""
    try:
        there = json.loads((folder / "run.json").read_bytes())
        return {**there, "attempt": int(there["attempt"])}
    except (OSError, ValueError, TypeError, KeyError):
        traces = ("run.json", "metrics.jsonl", "checkpoint")
        ran = any((folder / trace).exists() for trace in traces) or any(folder.glob("*/step-*"))
        return {"attempt": 1} if ran else None


def _lock(file: IO[bytes], kind: int) -> bool:
    """Lock the file, or return False because another process has."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):  # Lustre mounted without -o flock
            raise
        warnings.warn(f"{file.name}: no locks on this file system; a second process here goes unnoticed", stacklevel=2)
    return True


def cores() -> int:
    """CPU cores that this process may run on; its children share them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def provenance() -> dict[str, Any]:
    """What the run is made of: commit, versions, platform, command line. None for what is not there."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(here.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # no git on this machine
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    # An installed package may lie in a .venv inside somebody else's repository, which does not track it.
    commit = git("rev-parse", "HEAD") if git("ls-files", "--error-unmatch", here.name) else None
    packages = ("torch", "torchtitan", "triton", "torchdata", "transformer-engine")
    return {
        "git_commit": commit,
        "git_dirty": None if commit is None else bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": {package: version(package) for package in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "argv": sys.argv,
    }
