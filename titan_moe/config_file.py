"""Reads a TOML file, the files it is based on, and command-line overrides into a `config.Config`, strictly.

Everything is flattened to dotted keys such as "training.dataloader.num_workers", each with the place it came from. So
one checker serves files and overrides, a key in a message is what follows `--`, and a file may be laid over its base
key by key: a list replaces the base's list. All problems are reported together: `read` lists what does not match the
schema; for what matches it, `check` (in config_check.py) lists what does not fit together, and `Loaded.located` says
where that is written. Imports neither torch nor torchtitan.
"""

import re
from dataclasses import dataclass

from titan_moe import titan02
from titan_moe.config import Config
from titan_moe.config_check import check, model_flavor
from titan_moe.config_keys import LEAVES, SECTIONS, build
from titan_moe.config_print import to_toml
from titan_moe.config_reading import COMMAND_LINE, Reading
from titan_moe.mistakes import ConfigError

__all__ = [
    "LEAVES",
    "SECTIONS",
    "ConfigError",
    "check",
    "load",
    "model_flavor",
    "raise_on_problems",
    "read",
    "to_toml",
]

USAGE = "usage: ./run_train.sh CONFIG.toml [--section.key=value ...]"

ENTRY = re.compile(r"[a-z0-9_.]+\[\d+\](?:\.[a-z0-9_]+)?")
"""An element of a list, or a key in it, as a message names it"""

# A degree or a size decides over more keys than a message about them names.
ENTANGLED = {
    "parallelism": ("parallelism.", "moe.", "training.local_batch_size", "training.global_batch_size"),
    "model": ("model.", "moe.", "parallelism."),
}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration and what there is to say about it."""

    config: Config
    file: str
    origins: dict[str, str]
    """Where each key was set, as "run.toml:3" or "command line"; a key at its default has none"""
    inner: dict[str, str]
    """The same of what is inside a list, as "training.mixture[1].weight", where its line is known"""
    problems: list[str]
    """What does not match the schema, each with its place; `config` has defaults in its stead"""
    notes: list[str]
    """What is ignored, or means something else than in torchtitan 0.2"""
    suspects: frozenset[str]
    """Keys whose value here is not what was meant"""

    def located(self, problems: list[str]) -> list[str]:
        """Problems of `check`, each behind the place where its first key is set, with those of its other keys at the
        end. What may only follow from a mistake reported already is left out."""
        doubtful = [*self.suspects]
        for suspect in self.suspects:
            doubtful += ENTANGLED.get(suspect.partition(".")[0], ())
        found = []
        for problem in problems:
            keys = mentioned(problem)
            if any(key.startswith(doubt) for key in keys for doubt in doubtful):
                continue
            is_set = [key for key in keys if key in self.origins]
            others = [f"{key}: {self.origins[key]}" for key in is_set[1:]]
            if is_set and is_set[0] != keys[0]:
                others.insert(0, f"{keys[0]}: default")
            entry = ENTRY.search(problem)
            place = self.inner.get(entry[0] if entry else "", self.origins[is_set[0]] if is_set else "")
            place += ": " if place else ""
            found.append(f"{place}{problem}" + (f" ({', '.join(others)})" if others else ""))
        return found


def mentioned(problem: str) -> list[str]:
    """The keys that a message names, in its order: in full, or by their last part where that tells them apart."""
    last = [key.rpartition(".")[2] for key in LEAVES]
    short = {name: key for name, key in zip(last, LEAVES) if "_" in name and last.count(name) == 1}
    words = re.findall(r"[a-z0-9_]+(?:\.[a-z0-9_]+)*", problem)
    keys = (word if word in LEAVES else short.get(word) for word in words)
    return list(dict.fromkeys(key for key in keys if key))


def load(argv: list[str], world_size: int = 1) -> Config:
    """The configuration that `argv`, the words after `train.py`, asks for: `CONFIG.toml [--section.key=value ...]`."""
    loaded = read(argv, world_size)
    if loaded.problems:
        raise ConfigError(loaded.file, loaded.problems)
    return loaded.config


def raise_on_problems(config: Config, world_size: int, *, accelerator: bool = False) -> None:
    """A ConfigError if something does not fit together when `world_size` processes train `config`."""
    if problems := check(config, world_size, accelerator=accelerator):
        raise ConfigError(f"configuration for {world_size} processes", problems)


def read(argv: list[str], world_size: int = 1) -> Loaded:
    """As `load`, but with all that there is to say; raises only when `argv` names no file. `world_size`: of the
    processes, which a twin is laid out for (scale_down.py).

    An override is `--section.key=value`, `--section.key value`, or for booleans `--section.key` (torchtitan's
    `--section.no_key` for false). The last one of a key counts, the command line counts more than the file, and the
    file more than its base.
    """
    file, overrides, problems = parse_arguments(argv)
    reading = Reading()
    reading.file(file)
    reading.problems += [f"{COMMAND_LINE}: {problem}" for problem in problems]
    for key, raw in overrides:
        reading.override(key, raw)
    for key, value in reading.values.items():
        if refusal := titan02.refusal(key, value):
            reading.problem(reading.origins[key], refusal, suspect=key)
    reading.dataset_or_mixture()
    reading.dtype_of_recipe()
    config = build(reading.values)
    if config.model.scale_down and not reading.problems:
        config = reading.twin(config, world_size)
    return Loaded(
        config=config,
        file=file,
        origins=reading.origins,
        inner=reading.inner,
        problems=reading.problems,
        notes=reading.notes + (reading.differences if reading.foreign else []),
        suspects=frozenset(reading.suspects),
    )


def parse_arguments(argv: list[str]) -> tuple[str, list[tuple[str, str | None]], list[str]]:
    """The configuration file, the overrides as (key, value or None for a bare flag), and what is neither."""
    rest, files, overrides, problems = list(argv), [], [], []
    if rest and not rest[0].startswith("-"):
        files.append(rest.pop(0))
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") and word.endswith(".toml"):
            files.append(word)
            continue
        if not word.startswith("--"):
            problems.append(f"{word!r}: unexpected; overrides are written --section.key=value")
            continue
        key, equals, raw = word[2:].partition("=")
        key = key.replace("-", "_")
        # Only `--` ends a value: a single dash starts a negative number.
        value = raw if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        if key == "job.config_file" and value:
            files.append(value)
        else:
            overrides.append((key, value))
    if not files:
        raise ConfigError("no configuration file", [USAGE])
    if len(files) > 1:
        problems.append(f"{len(files)} configuration files ({', '.join(files)}): give one, which may name a base")
    return files[0], overrides, problems
