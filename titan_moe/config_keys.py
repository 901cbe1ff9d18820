"""The schema as flat dotted keys, such as "training.dataloader.num_workers": which there are, what a value must be, and
which one was meant by a key that is not there. Imports nothing but the schema.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from titan_moe.config import Config


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

SHOWN = 80  # characters of a wrong value that a message repeats


def build(values: dict[str, Any]) -> Config:
    """The configuration with these values of keys, and defaults for the others."""
    config = Config()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(config), name, value)
    return config


def get(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def not_none(hint: Any) -> Any:
    """The X of `X | None`; any other type as it is."""
    return get_args(hint)[0] if NoneType in get_args(hint) else hint


def wrong(value: Any, hint: Any) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """What is wrong with a value as TOML gives it: the place inside it, () for the whole, and what was expected.

    "none" unsets a key that may be unset: TOML has no null, and a file has to be able to take back what its base sets.
    """
    if hint != not_none(hint) and value == "none":
        return
    hint = not_none(hint)
    if get_origin(hint) is Union:  # words or a number
        words, number = get_args(hint)
        if isinstance(value, str):
            yield from ((at, f"{message}, or a number") for at, message in wrong(value, words))
        else:
            yield from wrong(value, number)
    elif get_origin(hint) is Literal:
        if value not in get_args(hint):
            choices = {choice.lower(): choice for choice in get_args(hint)}
            near = difflib.get_close_matches(str(value)[:SHOWN].lower(), choices, n=1)
            meant = f" (did you mean {choices[near[0]]!r}?)" if near else ""
            yield (), f"choose from {', '.join(map(repr, choices.values()))}{meant}"
    elif get_origin(hint) is list:
        if not isinstance(value, list):
            yield (), f"expected list, got {_kind(value)}"
            return
        for i, element in enumerate(value):
            yield from (((i, *at), message) for at, message in wrong(element, get_args(hint)[0]))
    elif is_dataclass(hint):
        yield from _wrong_table(value, hint)
    elif hint is str and isinstance(value, str) and "\0" in value:
        yield (), "has a NUL character, which no path and no text may have"
    elif type(value) is not hint and not (hint is float and type(value) is int):
        # type, not isinstance: a bool is an int there
        yield (), f"expected {hint.__name__}, got {_kind(value)}"


def _wrong_table(value: Any, cls: Any) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """`wrong` for one entry of an array of tables."""
    if not isinstance(value, dict):
        yield (), f"expected table, got {_kind(value)}"
        return
    hints = get_type_hints(cls)
    for key, element in value.items():
        if key in hints:
            yield from (((key, *at), message) for at, message in wrong(element, hints[key]))
        else:
            near = difflib.get_close_matches(key, hints, n=1)
            yield (key,), "unknown key" + (f" (did you mean {near[0]}?)" if near else "")
    for field in fields(cls):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in value:
            yield (), f"needs {field.name}"


def _kind(value: Any) -> str:
    return "section" if isinstance(value, dict) else type(value).__name__


def converted(value: Any, hint: Any) -> Any:
    """A value that is not `wrong`, as the schema wants it."""
    if hint != not_none(hint) and value == "none":
        return None
    hint = not_none(hint)
    if get_origin(hint) is list:
        return [converted(element, get_args(hint)[0]) for element in value]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        entry: Any = hint
        return entry(**{key: converted(element, hints[key]) for key, element in value.items()})
    if get_origin(hint) is Union:
        return value if isinstance(value, str) else converted(value, get_args(hint)[1])
    # Through str: float() of an integer beyond its range raises, this is inf.
    return float(str(value)) if hint is float and type(value) is int else value


def shown(value: Any) -> str:
    """A value as a message repeats it: on one line, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]} ... {text[-10:]}"


def printable(text: str) -> str:
    """The text on one line, without control characters and bytes of other encodings."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def unknown(path: str, is_table: bool, section_known: bool) -> tuple[str, str | None]:
    """Says that a path is not in the schema and what may have been meant; and the key that probably was."""
    section, _, key = path.rpartition(".")
    if is_table or not (section_known or section in ("", *SECTIONS)):
        what, written = "section", path if is_table else section
        hints = [f"did you mean [{near}]?" for near in _near(written, SECTIONS)]
        written, meant = f"[{written}]", None
    else:
        what, written = "key", path
        meant = next(iter(_near(path, [leaf for leaf in LEAVES if leaf.rpartition(".")[0] == section])), None)
        hints = [f"did you mean {meant}?"] if meant else []
    homes = [f"[{s}]" for s, _, name in (leaf.rpartition(".") for leaf in LEAVES) if name == key]
    if homes and not is_table:
        hints.append(f"{key} lives in section {' or '.join(homes)}")
    return f"unknown {what} {written}" + (f" ({' '.join(hints)})" if hints else ""), meant


def _near(path: str, known: list[str]) -> list[str]:
    """The path among `known` whose last part is most like that of `path`, if one is. Words that both have do not count,
    or a sequence_parallel_degree, which we lack, would pass for a misspelt expert_parallel_degree."""
    ours = path.rpartition(".")[2].split("_")

    def likeness(other: str) -> float:
        theirs = other.rpartition(".")[2].split("_")
        only_ours, only_theirs = [w for w in ours if w not in theirs], [w for w in theirs if w not in ours]
        a, b = (only_ours, only_theirs) if only_ours and only_theirs else (ours, theirs)
        return difflib.SequenceMatcher(None, "_".join(a), "_".join(b)).ratio()

    return [best for best in sorted(known, key=likeness)[-1:] if likeness(best) >= 0.6]
