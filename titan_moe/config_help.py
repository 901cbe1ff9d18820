"""`python -m titan_moe.config_help [SECTION or KEY]`: the keys of a configuration, as TOML that could be one.

All of them take a line each: default, type, and the first sentence of the help text. Those of one section come with
their whole text. Imports nothing but the schema, so that it answers at once, before anything is installed.
"""

import ast
import inspect
import os
import shutil
import sys
import textwrap
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from titan_moe import config
from titan_moe.config_keys import LEAVES, SECTIONS, build, get, not_none, unknown
from titan_moe.config_print import literal

BASE = """\
# base = "OTHER.toml" at the top of a file: what it does not set comes from that other file, which is sought beside it.
# On the command line a key is --section.key=value, --section.key value, or --section.key to set one to true.
"""


def main(argv: list[str]) -> int:
    """Print the help on what is asked for first; the exit status."""
    asked = argv[0].strip("[]-").replace("-", "_") if argv else ""
    try:
        print(help_text(asked), flush=True)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        print(f"--help: {error}", file=sys.stderr)
        return 2
    return 0


def help_text(what: str = "") -> str:
    """All keys, in short; or those of one section, or one key, in full."""
    if what == "base":
        return BASE.rstrip("\n")
    array, _, inner = what.rpartition(".")
    if array in LEAVES and (fields := entries(LEAVES[array])):
        names = [text.partition(":")[0] for text in fields]
        if inner not in names:
            raise ValueError(f"unknown key {what}; an entry of {array} has {', '.join(names)}")
        return f"# of each [[{array}]]:\n# {fields[names.index(inner)]}"
    keys = [key for key in LEAVES if not what or key == what or key.startswith(f"{what}.")]
    if not keys:
        message, _ = unknown(what, is_table="." not in what, section_known=False)
        raise ValueError(f"{message}; sections are {', '.join(SECTIONS)}")
    texts, defaults = documentation(), build({})
    lines = [] if what else [BASE]
    for section in SECTIONS:
        here = [key for key in keys if key.rpartition(".")[0] == section]
        if here:
            lines.append(f"[{section}]")
        for key in here:
            name, default, kind = key.rpartition(".")[2], get(defaults, key), type_text(LEAVES[key])
            setting = f"# {name} is not set" if default is None else f"{name} = {literal(default)}"
            if what:
                width = min(shutil.get_terminal_size().columns, 120) - 2
                lines += ["", *(f"# {line}" for line in textwrap.wrap(texts[key], width))]
                lines += [f"# {line}" for line in textwrap.wrap(kind, width)]
                for entry in entries(LEAVES[key]):
                    lines += [f"#   {line}" for line in textwrap.wrap(entry, width - 2, subsequent_indent="  ")]
                lines.append(setting)
            else:
                lines.append(f"{setting:<39} # {kind}: {first_sentence(texts[key])}")
        if here:
            lines.append("")
    return "\n".join(lines).rstrip("\n")


def type_text(hint: Any) -> str:
    """A type as it is written in a file: its choices, or its name."""
    if hint != not_none(hint):
        return f'{type_text(not_none(hint))} | "none"'
    if get_origin(hint) is Union:
        return " | ".join(map(type_text, get_args(hint)))
    if get_origin(hint) is Literal:
        return " | ".join(map(literal, get_args(hint)))
    if get_origin(hint) is list:
        return f"list of {type_text(get_args(hint)[0])}"
    if is_dataclass(hint):
        return "tables"
    return {int: "integer", float: "float", bool: "true | false", str: "string"}[hint]


def entries(hint: Any) -> list[str]:
    """The keys of the tables in an array of tables, with their types and texts; none for another type."""
    cls = next(iter(get_args(hint)), None)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        return []
    texts = field_texts()
    return [f"{name}: {type_text(inner)}: {texts[cls.__name__, name]}" for name, inner in get_type_hints(cls).items()]


def first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def documentation() -> dict[str, str]:
    """The help text of every key."""
    texts = field_texts()

    def of(cls: type, prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, hint in get_type_hints(cls).items():
            nested = isinstance(hint, type) and is_dataclass(hint)
            found |= of(hint, f"{prefix}{name}.") if nested else {prefix + name: texts[cls.__name__, name]}
        return found

    return of(config.Config, "")


def field_texts() -> dict[tuple[str, str], str]:
    """The string under each field in the source of the schema, on one line, by class and field."""
    texts: dict[tuple[str, str], str] = {}
    for cls in ast.parse(inspect.getsource(config)).body:
        if isinstance(cls, ast.ClassDef):
            for field, below in zip(cls.body, cls.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    texts[cls.name, field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
