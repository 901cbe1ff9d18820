"""Reads a TOML file, the files it is based on, and command-line overrides into a `config.Config`, strictly.

Everything is flattened to dotted keys such as "training.dataloader.num_workers", each with the place it came from. So
one checker serves files and overrides, a key in a message is what follows `--`, and a file may be laid over its base
key by key: a list replaces the base's list. All problems are reported together: `read` lists what does not match the
schema; for what matches it, `check` (in config_check.py) lists what does not fit together, and `Loaded.located` says
where that is written. Imports neither torch nor torchtitan.
"""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import tomli

from titan_moe import mixture_check, precision_check, titan02, toml_text
from titan_moe.config import Config, DataSource
from titan_moe.config_check import check, model_flavor, unsound
from titan_moe.config_keys import LEAVES, SECTIONS, build, converted, not_none, printable, shown, unknown, wrong
from titan_moe.config_print import literal, to_toml
from titan_moe.mistakes import ConfigError
from titan_moe.scale_down import scale_down

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
COMMAND_LINE = "command line"

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
    reading = _Reading()
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


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A file, or the command line."""

    name: str
    lines: dict[toml_text.KeyPath, int] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)  # where it sets which key
    distance: int = 0  # 0: the file that was named; 1: its base, ...; -1: the command line

    def place(self, path: toml_text.KeyPath = ()) -> str:
        """Where it has a key, as editors and terminals open it; without a line when that is not known."""
        return f"{self.name}:{self.lines[path]}" if path in self.lines else self.name


class _Reading:
    """What has been read so far, from the file that was named outwards to its bases, then from the command line."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.inner: dict[str, str] = {}
        self.distances: dict[str, int] = {}  # of the source of each value
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.differences: list[str] = []  # notes that only who comes from torchtitan needs
        self.foreign = False  # whether a key was seen that only torchtitan has
        self.suspects: set[str] = set()

    def file(self, name: str) -> None:
        """Read a file and its bases. A key that is set already stays: the nearer file counts more."""
        chain: list[str] = []
        at = ""  # where the file is named
        while True:
            if any(os.path.realpath(name) == os.path.realpath(other) for other in chain):
                self.problems.append(f"{at}goes round in a circle, {' -> '.join([*chain, name])}")
                return
            chain.append(name)
            try:
                table, lines = toml_text.read(name)
            except ValueError as problem:
                self.problems.append(f"{at}{problem}")
                self.suspects |= LEAVES.keys()  # with a file missing, any value may be another than was meant
                return
            source = _Source(name=name, lines=lines, distance=len(chain) - 1)
            base = table.pop("base", None)
            self.table(table, (), source)
            if base is None:
                return
            at = f"{source.place(('base',))}: base = {shown(base)}: "
            if not isinstance(base, str) or not base or not base.isprintable():
                self.problems.append(f"{at}must name one other file")
                return
            name = os.path.join(os.path.dirname(name), os.path.expanduser(base))

    def table(self, table: dict[str, Any], parents: tuple[str, ...], source: _Source) -> None:
        for name, value in table.items():
            path, key = (*parents, name), ".".join((*parents, name))
            place = source.place(path)
            if "." in name or not name:  # in quotes: it would pass for the path that it looks like
                hint = f" (without the quotes it is {key})" if key in LEAVES or key in SECTIONS else ""
                self.problem(place, f"unknown key {'.'.join((*parents, literal(name)))}{hint}", suspect=key)
            elif isinstance(value, dict) and (key in SECTIONS or titan02.has_section(key)):
                self.table(value, path, source)
            elif key in SECTIONS:
                self.problem(place, f"{key} = {shown(value)}: is a section; write [{key}]")
                self.suspects |= {leaf for leaf in LEAVES if leaf.startswith(f"{key}.")}
            elif key in LEAVES or titan02.is_foreign(key):
                self.take(key, value, source, path)
            elif name == "base":
                self.problem(place, f"unknown key {key} (base stands at the top of a file, before its first section)")
            else:
                self.unknown(place, key, is_table=isinstance(value, dict))

    def override(self, key: str, raw: str | None) -> None:
        """Take `--key=raw`, or `--key` with raw None."""
        section, _, last = key.rpartition(".")
        positive = f"{section}.{last.removeprefix('no_')}"
        if raw is None and positive != key and (LEAVES.get(positive) is bool or titan02.is_foreign(positive)):
            key, raw = positive, "false"
        written = printable(f"--{key}" if raw is None else f"--{key}={raw}")
        if raw is None and (LEAVES.get(key) is bool or titan02.is_foreign(key)):
            raw = "true"
        if key in SECTIONS:
            self.problem(COMMAND_LINE, f"--{key}: is a section; write --{key}.KEY=VALUE")
        elif key == "base":
            self.problem(COMMAND_LINE, f'{written}: is for files; write base = "OTHER.toml" at the top of one')
        elif key not in LEAVES and not titan02.is_foreign(key):
            self.unknown(f"{COMMAND_LINE}: --{printable(key)}", key)
        elif raw is None:
            self.problem(COMMAND_LINE, f"--{key}: needs a value", suspect=key)
        else:
            try:
                value = _parse(raw, LEAVES.get(key))
            except UnicodeEncodeError:  # bytes that are not UTF-8 arrive as lone surrogates, which no TOML can hold
                self.problem(COMMAND_LINE, f"{written}: is not UTF-8 text", suspect=key)
            else:
                self.take(key, value, _Source(name=COMMAND_LINE, distance=-1), written=written)

    def take(self, key: str, value: Any, source: _Source, path: toml_text.KeyPath = (), written: str = "") -> None:
        """Take one value of a key of ours or of torchtitan's; `written` is how the command line has it."""
        place, overrides = source.place(path), bool(written)
        start = f"{written}: " if overrides else ""
        foreign = titan02.is_foreign(key)
        # A value of the right type may still be overridden, so `read` asks again about what is left in the end.
        if (refusal := titan02.refusal(key, value)) and (foreign or any(wrong(value, LEAVES[key]))):
            self.problem(place, f"{start}{refusal}", suspect=titan02.leads_to(key))
            return
        self.foreign = self.foreign or foreign
        if note := titan02.note(key, value):
            (self.notes if foreign else self.differences).append(f"{place}: {note}")
        if foreign:
            pair = titan02.translation(key, value)
            if pair is None:
                return
            self.notes.append(f"{place}: {key} = {shown(value)} is taken for {pair[0]} = {literal(pair[1])}")
            key, value = pair
        mistakes = list(wrong(value, LEAVES[key]))
        for at, message in mistakes:
            element = value
            for i in at:
                element = element[i]
            start = f"{key}{_inner(at)} = {shown(element)}" if at or not written else ""
            start = ": ".join(filter(None, (written, start)))
            self.problem(source.place((*path, *at)), f"{start}: {message}", suspect=key)
        if key == "training.mixture" and mistakes and isinstance(value, list):
            self.entries(value, {at for at, _ in mistakes}, source, path)
        if key in source.seen:
            self.problem(place, f"{key}: is already set, in {source.seen[key]}; keep one", suspect=key)
        source.seen[key] = place
        if key not in self.suspects and (overrides or key not in self.values):
            self.values[key], self.origins[key] = converted(value, LEAVES[key]), place
            self.distances[key] = source.distance
            self.inner = {name: there for name, there in self.inner.items() if not name.startswith(f"{key}[")}
            self.inner |= {
                key + _inner(at[len(path) :]): source.place(at) for at in source.lines if at[: len(path)] == path != at
            }

    def entries(
        self, mixture: list[Any], wrong: set[toml_text.KeyPath], source: _Source, path: toml_text.KeyPath
    ) -> None:
        """What `check` would say about a mixture that it does not get to see: about what is not `wrong` already."""
        hints = get_type_hints(DataSource)
        for i, entry in enumerate(mixture):
            if not isinstance(entry, dict):
                continue
            sound = {name: value for name, value in entry.items() if name in hints and (i, name) not in wrong}
            (spec,) = converted([{"dataset": "not known", **sound}], LEAVES["training.mixture"])
            for problem in mixture_check.check_entry(i, spec):
                name = problem.removeprefix(f"training.mixture[{i}].").split()[0]
                self.problem(source.place((*path, i, name)), problem)

    def dataset_or_mixture(self) -> None:
        """A mixture takes the place of a dataset that its base sets; elsewhere, who sets one wants to train on it."""
        dataset, mixture = "training.dataset", "training.mixture"
        if not self.values.get(mixture) or dataset not in self.values:
            return
        nearer = self.distances[mixture] - self.distances[dataset]
        if nearer >= 0 and self.values[dataset]:
            remedy = f"leave it out, or set {mixture} = [] to train on it alone" if nearer else "keep one"
            self.problem(
                self.origins[dataset],
                f"{dataset} = {shown(self.values[dataset])}: would be ignored, because {mixture} takes its place "
                f"({self.origins[mixture]}); {remedy}",
                suspect=dataset,
            )
        else:
            del self.values[dataset], self.origins[dataset]

    def dtype_of_recipe(self) -> None:
        """A recipe that quantizes nothing takes the place of a compute type that its base sets."""
        recipe, dtype = "precision.recipe", "training.mixed_precision_param"
        meant = precision_check.DTYPES.get(self.values.get(recipe) or "")
        if meant is None or self.distances.get(dtype, math.inf) <= self.distances[recipe]:
            return  # nothing to replace, or set no further away: `check` compares
        self.values[dtype], self.origins[dtype] = meant, self.origins[recipe]

    def twin(self, config: Config, world_size: int) -> Config:
        """The twin of `config`; what it changes was set by model.scale_down, or is at its default there."""
        if unsound(config):  # nothing can be calculated, and `check` is there to say why
            return config
        origin = f"model.scale_down ({self.origins['model.scale_down']})"
        twin, changed = scale_down(config, world_size, {k for k, at in self.origins.items() if at == COMMAND_LINE})
        self.origins |= dict.fromkeys(changed, origin)
        return twin

    def unknown(self, place: str, key: str, is_table: bool = False) -> None:
        section_known = titan02.has_section(key.rpartition(".")[0])
        message, meant = unknown(printable(key), is_table, section_known)
        self.problem(place, message, suspect=meant)

    def problem(self, place: str, message: str, suspect: str | None = None) -> None:
        self.problems.append(f"{place}: {message}")
        self.suspects |= {suspect} if suspect else set()


def _inner(at: toml_text.KeyPath) -> str:
    """A place inside a value as messages write it behind the key."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at)


def _parse(raw: str, hint: Any) -> Any:
    """A value from the command line as TOML would have given it, or as it is where it is no TOML."""
    raw.encode()  # a UnicodeEncodeError for lone surrogates
    if hint != not_none(hint) and raw.lower() == "none":
        return "none"
    hint = not_none(hint)
    if hint is str:
        return raw
    if hint in (bool, None) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    if get_origin(hint) is list and not raw.startswith("["):
        return [_parse(part.strip(), get_args(hint)[0]) for part in raw.split(",") if part.strip()]
    try:
        table = tomli.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    return table["value"] if table.keys() == {"value"} else raw  # a line break in raw can begin a second key
