"""Values, their places and what is wrong with them, while files and the command line are read (config_file.py).

Imports neither torch nor torchtitan.
"""

import math
import os
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import tomli

from titan_moe import mixture_check, precision_check, titan02, toml_text
from titan_moe.config import Config, DataSource
from titan_moe.config_check import unsound
from titan_moe.config_keys import LEAVES, SECTIONS, converted, not_none, printable, shown, unknown, wrong
from titan_moe.config_print import literal
from titan_moe.scale_down import scale_down

COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, or the command line."""

    name: str
    lines: dict[toml_text.KeyPath, int] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)  # where it sets which key
    distance: int = 0  # 0: the file that was named; 1: its base, ...; -1: the command line

    def place(self, path: toml_text.KeyPath = ()) -> str:
        """Where it has a key, as editors and terminals open it; without a line when that is not known."""
        return f"{self.name}:{self.lines[path]}" if path in self.lines else self.name


class Reading:
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
            source = Source(name=name, lines=lines, distance=len(chain) - 1)
            base = table.pop("base", None)
            self.table(table, (), source)
            if base is None:
                return
            at = f"{source.place(('base',))}: base = {shown(base)}: "
            if not isinstance(base, str) or not base or not base.isprintable():
                self.problems.append(f"{at}must name one other file")
                return
            name = os.path.join(os.path.dirname(name), os.path.expanduser(base))

    def table(self, table: dict[str, Any], parents: tuple[str, ...], source: Source) -> None:
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
                self.take(key, value, Source(name=COMMAND_LINE, distance=-1), written=written)

    def take(self, key: str, value: Any, source: Source, path: toml_text.KeyPath = (), written: str = "") -> None:
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
        self, mixture: list[Any], wrong: set[toml_text.KeyPath], source: Source, path: toml_text.KeyPath
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
