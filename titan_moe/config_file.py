"""Reads a TOML file and command-line overrides into a `config.Config`, strictly, and prints it back.

Everything here works on dotted paths such as "training.dataloader.num_workers": the schema flattened to `LEAVES`, the
file and the overrides flattened to values. So one converter checks both, and a path in a message is what follows `--`.
All problems are reported together: `load` lists what does not match the schema; for what matches it, `check` (in
config_check.py) lists what does not fit together. Imports neither torch nor torchtitan.
"""

import difflib
import json
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli

from titan_moe.config import Config
from titan_moe.config_check import (
    check,
    data_parallel_degree,
    gradient_accumulation_steps,
    model_flavor,
)

__all__ = [
    "ConfigError",
    "check",
    "data_parallel_degree",
    "gradient_accumulation_steps",
    "load",
    "model_flavor",
    "parse_arguments",
    "raise_on_problems",
    "to_toml",
]

USAGE = "usage: ./run_train.sh CONFIG.toml [--section.key=value ...]"

# Keys that torchtitan users still have in their files: torchtitan's own renames, and keys that we folded into another.
RENAMED = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "debug.moe_force_load_balance": "moe.force_balance",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.tokenizer_path": "model.hf_assets_path",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.dataset_path": "training.dataset",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "validation.dataset_path": "validation.dataset",
}


class ConfigError(ValueError):
    """Everything wrong with one configuration, listed under the name of its file."""

    def __init__(self, name: str, problems: list[str]) -> None:
        super().__init__(name, problems)
        self.name, self.problems = name, problems

    def __str__(self) -> str:
        return "".join([f"{self.name}:", *(f"\n    {problem}" for problem in self.problems)])


def _leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        nested = isinstance(hint, type) and is_dataclass(hint)
        found |= _leaves(hint, f"{prefix}{name}.") if nested else {prefix + name: hint}
    return found


LEAVES = _leaves(Config)
"""Type of every key, by its dotted path"""

SECTIONS = list(dict.fromkeys(path.rpartition(".")[0] for path in LEAVES))
"""Every section, "training.dataloader" too"""


def load(argv: list[str]) -> Config:
    """The configuration that `argv`, the words after `train.py`, asks for: `CONFIG.toml [--section.key=value ...]`.

    An override is `--section.key=value`, `--section.key value`, or for booleans `--section.key` (torchtitan's
    `--section.no_key` for false). The last one of a key counts, and the command line counts more than the file.
    """
    path, overrides, problems = parse_arguments(argv)
    values: dict[str, Any] = {}
    _flatten(_read(path), "", values, problems)
    for key, raw in overrides:
        section, _, last = key.rpartition(".")
        if raw is None and last.startswith("no_") and LEAVES.get(f"{section}.{last[3:]}") is bool:
            key, raw = f"{section}.{last[3:]}", "false"
        if raw is None and LEAVES.get(key) is bool:
            raw = "true"
        if key in SECTIONS:
            problems.append(f"--{key}: is a section; write --{key}.KEY=VALUE")
        elif key not in LEAVES:
            problems.append(f"--{key}: {_unknown(key)}")
        elif raw is None:
            problems.append(f"--{key}: needs a value")
        else:
            try:
                values[key] = _convert(_parse(raw, LEAVES[key]), LEAVES[key])
            except ValueError as error:
                problems.append(f"--{key}={raw}: {error}")
    if problems:
        raise ConfigError(path, problems)
    config: Config = _build(Config, "", values)
    return config


def raise_on_problems(config: Config, world_size: int, *, accelerator: bool = False) -> None:
    """A ConfigError if something does not fit together when `world_size` processes train `config`."""
    if problems := check(config, world_size, accelerator=accelerator):
        raise ConfigError(f"configuration for {world_size} processes", problems)


def parse_arguments(argv: list[str]) -> tuple[str, list[tuple[str, str | None]], list[str]]:
    """The configuration file, the overrides as (key, value or None for a bare flag), and what is neither."""
    rest, files, overrides, problems = list(argv), [], [], []
    if rest and not rest[0].startswith("-"):
        files.append(rest.pop(0))
    while rest:
        word = rest.pop(0)
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
        problems.append(f"{len(files)} configuration files ({', '.join(files)}): give one")
    return files[0], overrides, problems


def _read(path: str) -> dict[str, Any]:
    try:
        # -sig: some editors put a byte order mark in front, which TOML does not know.
        return tomli.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"is not UTF-8 text: {error.reason} at byte {error.start}"]) from error
    except ValueError as error:  # TOMLDecodeError, or int() on thousands of digits
        raise ConfigError(path, [f"is not valid TOML: {error}"]) from error


def _flatten(table: dict[str, Any], prefix: str, values: dict[str, Any], problems: list[str]) -> None:
    """Put the keys of a TOML table into `values`, and what is wrong with them into `problems`."""
    for key, value in table.items():
        path = prefix + key
        if path in SECTIONS and isinstance(value, dict):
            _flatten(value, f"{path}.", values, problems)
        elif path in SECTIONS:
            problems.append(f"{path} = {value!r}: is a section; write [{path}]")
        elif path not in LEAVES:
            problems.append(_unknown(path, is_table=isinstance(value, dict)))
        else:
            try:
                values[path] = _convert(value, LEAVES[path])
            except ValueError as error:
                problems.append(f"{path} = {value!r}: {error}")


def _unknown(path: str, is_table: bool = False) -> str:
    """Says that a path is not in the schema, and what may have been meant."""
    if path in RENAMED:
        return f"{path} was renamed to {RENAMED[path]}"
    section, _, key = path.rpartition(".")
    hints = []
    if is_table or section not in ("", *SECTIONS):
        what, written = "section", path if is_table else section
        hints += [f"did you mean [{near}]?" for near in _near(written, SECTIONS)]
        written = f"[{written}]"
    else:
        what, written = "key", path
        here = [leaf for leaf in LEAVES if leaf.rpartition(".")[0] == section]
        hints += [f"did you mean {near}?" for near in _near(path, here)]
    homes = [f"[{s}]" for s, _, name in (leaf.rpartition(".") for leaf in LEAVES) if name == key]
    if homes and not is_table:
        hints.append(f"{key} lives in section {' or '.join(homes)}")
    return f"unknown {what} {written}" + (f" ({' '.join(hints)})" if hints else "")


def _near(path: str, known: list[str]) -> list[str]:
    """The path among `known` whose last part is most like that of `path`, if one is. Words that both have do not count,
    or tensor_parallel_degree, which we lack, would pass for a misspelt expert_parallel_degree."""
    ours = path.rpartition(".")[2].split("_")

    def likeness(other: str) -> float:
        theirs = other.rpartition(".")[2].split("_")
        only_ours, only_theirs = [w for w in ours if w not in theirs], [w for w in theirs if w not in ours]
        a, b = (only_ours, only_theirs) if only_ours and only_theirs else (ours, theirs)
        return difflib.SequenceMatcher(None, "_".join(a), "_".join(b)).ratio()

    return [best for best in sorted(known, key=likeness)[-1:] if likeness(best) >= 0.6]


def _not_none(hint: Any) -> Any:
    """The X of `X | None`; any other type as it is."""
    return get_args(hint)[0] if NoneType in get_args(hint) else hint


def _parse(raw: str, hint: Any) -> Any:
    """A value from the command line as TOML would have given it, or as it is where it is no TOML."""
    raw.encode()  # bytes that are not UTF-8 arrive as lone surrogates, which no TOML file can hold: a ValueError
    if hint != _not_none(hint) and raw.lower() == "none":
        return None
    hint = _not_none(hint)
    if hint is str:
        return raw
    if hint is bool and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    if get_origin(hint) is list and not raw.startswith("["):
        return [_parse(part.strip(), get_args(hint)[0]) for part in raw.split(",") if part.strip()]
    try:
        table = tomli.loads(f"value = {raw}")
    except ValueError:
        return raw
    return table["value"] if table.keys() == {"value"} else raw  # a line break in raw can begin a second key


def _convert(value: Any, hint: Any) -> Any:
    """The value as the schema wants it, or a ValueError with what it wants. None comes only from `_parse`."""
    if value is None:
        return None
    hint = _not_none(hint)
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        choices = {choice.lower(): choice for choice in get_args(hint)}
        near = difflib.get_close_matches(str(value).lower(), choices, n=1)
        meant = f" (did you mean {choices[near[0]]!r}?)" if near else ""
        raise ValueError(f"choose from {', '.join(map(repr, choices.values()))}{meant}")
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise ValueError(f"expected list, got {type(value).__name__}")
        return [_convert(element, get_args(hint)[0]) for element in value]
    if hint is float and type(value) is int:
        return float(str(value))  # through str: float() of an integer beyond its range raises, this is inf
    if type(value) is not hint:  # not isinstance: a bool is an int there
        raise ValueError(f"expected {hint.__name__}, got {type(value).__name__}")
    return value


def _build(cls: type, prefix: str, values: dict[str, Any]) -> Any:
    arguments = {}
    for name, hint in get_type_hints(cls).items():
        path = prefix + name
        if path in SECTIONS:
            arguments[name] = _build(hint, f"{path}.", values)
        elif path in values:
            arguments[name] = values[path]
    return cls(**arguments)


def to_toml(config: Config) -> str:
    """TOML that reads back as an equal Config. Unset (None) keys are left out."""

    def literal(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(literal, value))}]"
        if isinstance(value, float):
            return repr(value)  # the shortest text that reads back equal; json would write Infinity
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON is TOML but for DEL

    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for path in LEAVES:
            parent, _, key = path.rpartition(".")
            if parent == section and (value := attrgetter(path)(config)) is not None:
                lines.append(f"{key} = {literal(value)}")
        lines.append("")
    return "\n".join(lines)
