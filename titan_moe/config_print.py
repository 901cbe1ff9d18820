"""Prints a configuration as TOML that reads back equal. Imports nothing but the schema."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from titan_moe.config import Config
from titan_moe.config_keys import LEAVES, SECTIONS, get, printable


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """TOML that reads back as an equal Config, each key with the place it was set in. Unset keys are left out, and the
    dataset where a mixture has its place."""
    lines, left_out = [], {"training.dataset"} if config.training.mixture else set()
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for path in LEAVES:
            parent, _, key = path.rpartition(".")
            if parent == section and path not in left_out and (value := get(config, path)) is not None:
                origin = origins.get(path) if origins else None
                lines.append(f"{key} = {literal(value)}" + (f"  # {printable(origin)}" if origin else ""))
        lines.append("")
    return "\n".join(lines)


def literal(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if is_dataclass(value):
        pairs = {field.name: getattr(value, field.name) for field in fields(value)}
        return f"{{{', '.join(f'{k} = {literal(v)}' for k, v in pairs.items() if v is not None)}}}"
    if isinstance(value, float):
        return repr(value)  # the shortest text that reads back equal; json would write Infinity
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON is TOML but for DEL
