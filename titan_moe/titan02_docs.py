"""Writes the docs page for those who come from torchtitan 0.2 out of the table that reading a file follows:

python -m titan_moe.titan02_docs > docs/coming_from_torchtitan.md
"""

from itertools import groupby
from typing import Any

from titan_moe.config import Config
from titan_moe.config_keys import get
from titan_moe.titan02 import CHANGED, DEFAULTS, SAME, Change, Differs, Ignored, Refused, Renamed, Translated


def markdown() -> str:
    """docs/coming_from_torchtitan.md, from the tables above."""
    rows = []
    for row, keys in groupby(CHANGED, key=lambda key: _row(CHANGED[key])):
        rows.append(f"| {', '.join(f'`{key}`' for key in keys)} | {row} |")
    ours = Config()
    defaults = [f"| `{key}` | `{_toml(old)}` | `{_toml(get(ours, key))}` |" for key, old in DEFAULTS.items()]
    same = ", ".join(f"`{key}`" for key in SAME)
    return f"""# Coming from torchtitan 0.2

`python -m titan_moe.titan02_docs > docs/coming_from_torchtitan.md` makes this page from the table that reading a file
follows: it says what happens, and a test keeps it current.

An 0.2 file of a DeepSeek-V3 model (`[model] name = "deepseek_v3"`, flavor `debugmodel`, `16B`, `236B` or `671B`) is
read as it is. What it asks for and does not get here is listed by key before anything starts: a note for what only
changes what is shown or how fast it goes (none if the value asks for nothing), a mistake for what would change the
training. `--section.key value` works on the command line as before, booleans also as `--checkpoint.enable=false`.
Without starting anything, of torchtitan 0.2.2's own file,

```bash
./run_train.sh tests/torchtitan_0_2_2/debug_model.toml --training.dataset=python_stdlib \\
    --model.hf_assets_path= --print_config
```

lists it.

## Keys that differ

| key of torchtitan 0.2 (or older) | here |
|---|---|
{chr(10).join(rows)}

## Defaults that differ

What a file that leaves the key out gets. `debug.seed` was not fixed in 0.2 and is {_toml(ours.debug.seed)} here.

| key | torchtitan 0.2.2 | here |
|---|---|---|
{chr(10).join(defaults)}

## Keys that are the same

{same}.

`./run_train.sh --help` lists the keys that there are besides, `[moe]` and the sizes in `[model]` among them.
"""


def _row(change: Change) -> str:
    match change:
        case Renamed(to):
            return f"renamed: write `{to}`"
        case Ignored(why):
            return f"ignored: {why}"
        case Refused(why, unless, only):
            return f"refused {f'for {_list(only)}' if only else f'unless {_list(unless)}'}: {why}"
        case Translated(to, values):
            pairs = ", ".join(f"`{_toml(a)}` as {f'`{_toml(b)}`' if b else 'its default'}" for a, b in values)
            return f"taken for `{to}`: {pairs}"
        case Differs(why, values):
            return f"same key, but {_list(values[:1])} {why}"


def _list(values: tuple[Any, ...]) -> str:
    return ", ".join("a number" if value is int else f"`{_toml(value)}`" for value in values)


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


if __name__ == "__main__":
    print(markdown(), end="")
