"""The file that a search writes: based on the one it was given, with only what changes, and why. Imports no torch."""

import os
from itertools import groupby
from pathlib import Path

from titan_moe import config_file
from titan_moe.config_file import ConfigError
from titan_moe.config_print import literal
from titan_moe.plan import diff
from titan_moe.plan.memory import GIB
from titan_moe.plan.winner import HEADROOM, Searched
from titan_moe.whole_file import replacing


def text(searched: Searched, file: str, folder: Path) -> str:
    """The TOML for a file in `folder`, based on `file`; "" if the winner changes nothing of that file."""
    assert searched.config is not None and searched.best is not None and searched.reasons is not None
    # Without what the command line set besides, which has to be written down too.
    changes = diff.settings(config_file.load([file]), searched.config)
    if not changes:
        return ""
    speed, memory, given = searched.best.speed, searched.best.memory, searched.given.speed.tokens_per_s_per_gpu
    lines = [
        f"# Found by --plan.search: the fastest layout of {Path(file).name} on {searched.best.job.gpus:,} "
        f"{searched.best.job.hardware.name} that leaves {HEADROOM:.0%} of the memory free.",
        f"# Plan: {speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU against {given:,.0f}, "
        f"{memory.needed / GIB:,.1f} of {memory.capacity / GIB:,.1f} GiB. Behind each setting: what the one before it "
        "would change alone.",
        "",
        f"base = {literal(os.path.relpath(file, folder))}",
    ]
    for section, keys in groupby(changes, key=lambda change: change[0].rpartition(".")[0]):
        lines += ["", f"[{section}]"]
        for key, before, after in keys:
            why = searched.reasons.get(key, "from the command line")
            value = literal("none" if after is None else after)
            lines.append(f"{key.rpartition('.')[2]} = {value}  # {diff.said(before)}: {why}")
    return "\n".join(lines) + "\n"


def refusal(file: str, to: str) -> str | None:
    """Why the winner for `file` cannot be written to the file `to`, as far as it can be told before there is one."""
    path, start = Path(to), f"plan.toml = {literal(to)}: "
    if os.path.exists(path) and os.path.samefile(path, file):
        return f"{start}is the file that is searched for; name another"
    there = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    if path.is_dir() or not there.is_dir():
        return f"{start}{f'{path} is a folder' if path.is_dir() else f'{there} is no folder'}; name a file"
    return None if os.access(there, os.W_OK) else f"{start}nothing may be written to {there}"


def write(searched: Searched, file: str, to: str) -> str:
    """Write the winner to the file `to`; its text. It is complete or not there. Raises ConfigError if it cannot be
    written."""
    path = Path(to)
    found = text(searched, file, path.parent) or f"base = {literal(os.path.relpath(file, path.parent))}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as written:
            written.write_text(found, encoding="utf-8")
            loaded = config_file.read([str(written)])
            assert searched.config is not None and not loaded.problems
            assert not diff.settings(loaded.config, searched.config), "the file means another run"
    except OSError as error:  # as of a disk that is full
        raise ConfigError(file, [f"plan.toml = {literal(to)}: {error.strerror or error}"]) from error
    return found
