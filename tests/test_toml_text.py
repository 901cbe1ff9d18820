"""The line of every key of a TOML text, however it is written."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_moe import toml_text
from titan_moe.config_print import literal
from titan_moe.toml_text import index, read, scan

TEXT = '''\
# a = 1  [b]
base = "x = 1 # no comment \\" ["   # [c]
a.b . "c.d" = 'single # = ['
multi = """
[not.a.header]
x = 1 \\""" still = "in" it"""
after = 1
raw = \'\'\'
it's = 2
\'\'\'
[ "quoted table" . sub ]   # comment = 3
list = [  # [
  "one", # two = 2
  [1, 2],
  { x = 1, y.z = [
    3 ] },
] # end
date = 2026-11-30 10:00:00
table = { "k" = 1,
  # TOML 1.1
  l = [ 2 ],
}
bare-key_1=true
1.5 = 2

[[array]]
x = 1
[[array]]
x = 2
[after]
"" = 1
"\\u00e9" = 2
last = """a"""""
end = 1'''

LINES = {
    ("base",): 2,
    ("a",): 3,
    ("a", "b", "c.d"): 3,
    ("multi",): 4,
    ("after",): 7,
    ("raw",): 8,
    ("quoted table",): 11,
    ("quoted table", "sub", "list"): 12,
    ("quoted table", "sub", "list", 0): 13,
    ("quoted table", "sub", "list", 1): 14,
    ("quoted table", "sub", "list", 1, 1): 14,
    ("quoted table", "sub", "list", 2): 15,
    ("quoted table", "sub", "list", 2, "x"): 15,
    ("quoted table", "sub", "list", 2, "y", "z", 0): 16,
    ("quoted table", "sub", "date"): 18,
    ("quoted table", "sub", "table", "k"): 19,
    ("quoted table", "sub", "table", "l"): 21,
    ("quoted table", "sub", "table", "l", 0): 21,
    ("quoted table", "sub", "bare-key_1"): 23,
    ("quoted table", "sub", "1", "5"): 24,
    ("array",): 26,
    ("array", 0): 26,
    ("array", 0, "x"): 27,
    ("array", 1): 28,
    ("array", 1, "x"): 29,
    ("after", ""): 31,
    ("after", "\u00e9"): 32,
    ("after", "last"): 33,
    ("after", "end"): 34,
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_every_way_to_write_a_key(line_end: str) -> None:
    text = TEXT.replace("[after]", "[later]").replace("\n", line_end)
    tomli.loads(text)
    lines = index(text)
    wanted = {("later", *path[1:]) if path[0] == "after" and len(path) > 1 else path: n for path, n in LINES.items()}
    assert {path: lines.get(path) for path in wanted} == wanted
    # And no others: what tomli reads has a line, and every line is of something that tomli read.
    assert {path[0] for path in lines} == tomli.loads(text).keys()


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


KEYS = st.text(min_size=1, max_size=6) | st.sampled_from(["a.b", '"', "'", "#", "=", "[x]", "a\nb", " "])
HARD = st.sampled_from(['"""', "'''", "a = 1\n[b]", "\\"])
SCALARS = st.integers(-99, 99) | st.booleans() | st.text(max_size=12) | HARD
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=3), max_size=3), st.randoms())
@settings(max_examples=80, deadline=None)
def test_all_keys_of_any_text_are_found(tree: dict[str, Any], random: Any) -> None:
    """Each key of a section on a line that we count as we write it, with comments and empty lines between."""
    lines: list[str] = []
    expected: dict[tuple[str, ...], int] = {}

    def write(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{literal(k)} = {write(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            glue = random.choice([", ", " , # x = [1\n  ", ",\n"])
            return f"[{glue.join(map(write, value))}]"
        if isinstance(value, str) and "'" not in value and value.isprintable() and random.random() < 0.5:
            return f"'{value}'"
        return literal(value)

    for section, table in tree.items():
        lines += random.choice([[], ["# [z] = 1", ""]])
        lines.append(f"[{literal(section)}]")
        expected[(section,)] = len("\n".join(lines).split("\n"))
        for key, value in table.items():
            expected[section, key] = len("\n".join(lines).split("\n")) + 1
            lines.append(f" {literal(key)}\t= {write(value)} # = 5")
    text = "\n".join(lines)
    assert tomli.loads(text) == tree
    found = index(text)
    assert {path: found.get(path) for path in expected} == expected
    assert set(leaves(tree)) <= found.keys()


@given(st.text(alphabet="ab=[]{}\"'#.,\n\\ 1") | st.text())
@settings(max_examples=80, deadline=None)
def test_no_text_stops_it(text: str) -> None:
    """It is also asked about texts that tomli has refused, for where a key is that is there twice."""
    assert all(1 <= line <= text.count("\n") + 1 for _, line in scan(text))


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\r\n")
    assert read(str(tmp_path / "x.toml")) == ({"a": 1, "b": 2}, {("a",): 1, ("b",): 2})


@pytest.mark.parametrize("reader", [tomli, tomllib], ids=["tomli", "the standard library's"])
def test_the_line_of_what_is_not_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Any) -> None:
    """Also with Python's own copy of tomli, whose errors have no attributes."""
    monkeypatch.setattr(toml_text, "tomli", reader)
    path = tmp_path / "x.toml"
    for text, message in [
        ("a = 1\nb = [\n", "x.toml:2: is not valid TOML: "),
        ("a = 1\n\nb == 2", "x.toml:3: is not valid TOML: Invalid value, column 4"),
        ("[a]\n[b]\n\n[a]\nx = 1", "('a',) twice, column 3; it is there already, in line 1"),
        ("[a]\nx = 1\ny.z = 2\n[a.y]\nz = 3\n", "x.toml:4: is not valid TOML: "),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            read(str(path))
