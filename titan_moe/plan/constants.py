"""The planner's fitted constants: values, physical ranges, priors and sources, read from constants.toml.

Everything else in the planner is a table with a source or arithmetic. fit.py writes the file: the values fitted to all
published runs, and those fitted with one (model, hardware) cell left out, by which an error band is honest.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("constants.toml")


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Names as in constants.toml, which says what each is and where its prior comes from."""

    gemm_fp8: float
    gemm_bf16: float
    rows_half: float
    wgrad: float
    hbm: float
    kernel_gap_us: float
    host_us: float
    host_drift: float
    host_norm: float
    comm: float
    contention: float
    overlap_miss: float


@dataclass(frozen=True, kw_only=True)
class Described:
    """One constant as the file has it."""

    name: str
    value: float
    prior: float
    low: float
    high: float
    unit: str
    source: str


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def described() -> list[Described]:
    """All constants with range, prior and source."""
    return [Described(name=name, **entry) for name, entry in _file()["constants"].items()]


def fitted() -> Constants:
    """The constants of the frozen fit."""
    return Constants(**{each.name: each.value for each in described()})


def priors() -> Constants:
    """All constants at their priors: what tables alone predict."""
    return Constants(**{each.name: each.prior for each in described()})


def without_cell(cell: str) -> Constants:
    """The constants fitted without the runs of `cell`, "MODEL on HARDWARE"; for one it never saw, the frozen fit."""
    entry = _file().get("cells", {}).get(cell)
    return Constants(**entry) if entry else fitted()


def without_cause(cause: str) -> Constants:
    """The constants fitted to a wrong model: without "communication", or without the "host"."""
    return Constants(**_file()["without"][cause])


def bands() -> dict[str, dict[str, float]]:
    """{"kind: group": {"runs", "half": half of its 80 % band}} (bands.py)."""
    return _file().get("bands", {})


def band() -> tuple[float, float]:
    """80 % band of measured over predicted - 1, from the errors with a cell left out."""
    low, high = _file()["fit"]["band"]
    return low, high
