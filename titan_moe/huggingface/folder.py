"""What is in a folder of safetensors files, without reading a weight.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: for every tensor its type,
shape and place), and then the tensors' bytes. So all names and shapes of a model, and whether a download is complete,
are known from a few kilobytes per file. Several files have an index, which says what is in which.

Imports no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
"""Types that weights are read in"""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def is_one(folder: Path) -> bool:
    """Whether it was written for Hugging Face's libraries, whole or not."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: download it, or copy it from the same model") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Download again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it holds no object. Download again")
    return content


def tensors(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Every tensor of the folder by its name, and what is wrong: files cut short or missing, an index that does not say
    what is there."""
    try:
        names = _files(folder)
    except ValueError as error:
        return {}, [str(error)]
    found: dict[str, Stored] = {}
    problems: list[str] = []
    for name, listed in names.items():
        try:
            header = read_header(folder / name)
        except ValueError as error:
            problems.append(str(error))
            continue
        for tensor, stored in header.items():
            if tensor in found:
                problems.append(f"{tensor} is in {found[tensor].file} and in {name}: keep one of them")
            found[tensor] = stored
        if listed is not None:
            problems += [
                f"{INDEX}: no entry for {tensor}, which is in {name}; download the index again"
                for tensor in sorted(header.keys() - listed)
            ]
            problems += [
                f"{INDEX}: {tensor} is to be in {name}, which does not have it; download both again"
                for tensor in sorted(listed - header.keys())
            ]
    return found, problems


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Names of the files, each with the tensors that the index puts into it. Raises ValueError."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return {SINGLE: None}
        there = sorted(path.name for path in folder.glob("*.safetensors"))
        raise ValueError(
            f"{folder / INDEX} is missing, so nothing says whether {len(there)} files are all; download it"
        )
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{folder / INDEX} cannot be read: it has no weight_map from tensors to files. Download again")
    names: dict[str, set[str] | None] = {}
    for tensor, name in index.items():
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX} names a file outside its folder: {name!r}")
        listed = names.setdefault(name, set())
        assert listed is not None
        listed.add(tensor)
    return dict(sorted(names.items()))


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises ValueError if it is none, or not all of it is there."""
    from safetensors import SafetensorError, safe_open  # not everyone who asks what a folder is has the package

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: Stored(path.name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}. Download it") from error
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no whole safetensors file, with its {path.stat().st_size:,} bytes: {error}. Download it again"
        ) from error
