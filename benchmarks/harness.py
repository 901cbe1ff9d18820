"""What all benchmark suites share: records, interleaved timing, tables, JSON.

A suite is a module with `measure(options) -> Iterator[Record]` (run.py names them). A record is one number, with what
it is compared with: `ratio` says how many times better than the baseline it is, whichever way is better, so that more
than 1 always means that ours wins. In the JSON each record also says on which machine and at which commit it was
measured, so that files of several machines can be joined.

Times are medians of interleaved repetitions: every variant runs in each repetition, in random order, each on inputs
drawn for it alone. A busy machine slows all of them alike, and no variant warms kernels up for another's shapes. Ratios
are medians of the ratios within a repetition, spreads are their quartiles.
"""

import gc
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, Literal

from titan_moe.whole_file import replacing

ROOT = Path(__file__).parents[1]
SIZES = ("smallest", "quick", "full")
PACKAGES = ("torch", "torchtitan", "transformers", "triton", "tokenizers", "transformer-engine")
Size = Literal["smallest", "quick", "full"]


@dataclass(frozen=True)
class Options:
    """smallest: what tests run, seconds. quick: at most a minute per suite on two cores. traces: a folder for them.
    more: words for train.py, of the suites that train."""

    size: Size = "quick"
    traces: Path | None = None
    more: tuple[str, ...] = ()

    def pick(self, smallest: Any, quick: Any, full: Any) -> Any:
        return {"smallest": smallest, "quick": quick, "full": full}[self.size]


@dataclass(frozen=True, kw_only=True)
class Record:
    suite: str
    case: str
    metric: str
    value: float
    unit: str = ""
    baseline: float | None = None
    ratio: float | None = None  # how many times better than the baseline
    against: str = ""  # what the baseline is
    low: float | None = None  # quartiles of the ratio; of the value where there is none
    high: float | None = None
    roof: float | None = None  # share of the machine's ceiling that is reached (roofline.py)
    target: str = ""  # "ratio >= 1.5", of a field of this record

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if not self.target:
            return None
        name, sign, limit = self.target.split()
        found = getattr(self, name)
        if found is None:
            return False
        return found >= float(limit) if sign == ">=" else found <= float(limit)


def versus(value: float, baseline: float, *, more_is_better: bool = False) -> dict[str, float | None]:
    """The fields of a comparison without repetitions: counts, bytes."""
    over, under = (value, baseline) if more_is_better else (baseline, value)
    return {"baseline": baseline, "ratio": over / under if under else None}


# ---------------------------------------------------------------------------------------------------------------------
# Timing


@dataclass
class Times:
    """Seconds of each repetition, by variant."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def quartiles(self, name: str) -> tuple[float, float]:
        return spread(self.seconds[name])

    def ratios(self, name: str, base: str) -> list[float]:
        """How many times faster `name` is than `base`, by repetition."""
        return [b / n for b, n in zip(self.seconds[base], self.seconds[name], strict=True)]

    def against(self, name: str, base: str, scale: float = 1e3) -> dict[str, Any]:
        """The fields of a Record, times in seconds x `scale`."""
        ratios = self.ratios(name, base)
        low, high = spread(ratios)
        return {
            "value": scale * self.median(name),
            "baseline": scale * self.median(base),
            "ratio": statistics.median(ratios),
            "low": low,
            "high": high,
            "against": base,
        }

    def alone(self, name: str, scale: float = 1e3) -> dict[str, Any]:
        """The same without a baseline."""
        low, high = self.quartiles(name)
        return {"value": scale * self.median(name), "low": scale * low, "high": scale * high}


def spread(values: list[float]) -> tuple[float, float]:
    """First and third quartile; of one value, itself."""
    if len(values) == 1:
        return values[0], values[0]
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[0], quartiles[2]


def interleaved(
    variants: Mapping[str, Callable[[], Callable[[], object]]],
    repetitions: int,
    *,
    warm_up: int = 2,
    budget_s: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
    seed: int = 0,
) -> Times:
    """Seconds of every variant, in random order in each repetition. A variant draws its inputs, which is not timed, and
    returns what is. `wait` is called before and after: on a GPU it waits for the device. After `budget_s` seconds no
    repetition begins any more, but three are made whatever they take.
    """
    order, times = random.Random(seed), Times({name: [] for name in variants})
    end = time.perf_counter() + budget_s
    was_enabled = gc.isenabled()
    gc.freeze()  # what is there already need not be looked through after each repetition
    gc.disable()
    try:
        for repetition in range(-warm_up, repetitions):
            if repetition >= 3 and time.perf_counter() > end:
                break
            for name in order.sample(list(variants), len(variants)):
                call = variants[name]()
                wait()
                start = clock()
                call()
                wait()
                spent = clock() - start
                if repetition >= 0:
                    times.seconds[name].append(spent)
                del call
            gc.collect()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    return times


def exponent(sizes: Iterable[float], values: Iterable[float]) -> float:
    """p of value = c size^p, by least squares on logarithms."""
    x, y = [log(s) for s in sizes], [log(v) for v in values]
    return statistics.linear_regression(x, y).slope


# ---------------------------------------------------------------------------------------------------------------------
# Where and when


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Short name of HEAD, with "+" where tracked files differ from it."""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "-s", "-uno") else "")


def machine() -> str:
    """Processor, cores, memory, GPU."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.partition(":") for line in info.read_text().splitlines()]
        known = {name.strip(): value.strip() for name, _, value in reversed(lines)}
        model = known.get("model name", model)
        kinds = [kind for kind in ("amx_bf16", "avx512_bf16", "avx512f") if kind in known.get("flags", "").split()]
        model += f" ({kinds[0]})" if kinds else ""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {gib:.0f} GiB{gpu()}"


def gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    return f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([f"Python {platform.python_version()}", *found])


# ---------------------------------------------------------------------------------------------------------------------
# Tables and JSON


def number(value: float | None) -> str:
    """Three significant digits, whole numbers from 100 on."""
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.01 else f"{value:.1e}"


def cells(record: Record) -> list[str]:
    baseline = "" if record.baseline is None else f"{number(record.baseline)} ({record.against})".replace(" ()", "")
    ratio = "" if record.ratio is None else f"{record.ratio:.2f}"
    quartiles = "" if record.low is None else f"{number(record.low)} - {number(record.high)}"
    roof = "" if record.roof is None else f"{record.roof:.0%}"
    target = record.target and f"{record.target}: {'met' if record.met else 'missed'}"
    value = f"{number(record.value)} {record.unit}".strip()
    return [record.case, record.metric, value, baseline, ratio, quartiles, roof, target]


HEADER = ["case", "metric", "value", "baseline", "times better", "quartiles", "of ceiling", "target"]


def table(records: Iterable[Record]) -> str:
    """Markdown, without columns that nothing is in; a case is named in its first row."""
    rows = [cells(record) for record in records]
    for before, row in reversed(list(pairwise(rows))):
        row[0] = "" if row[0] == before[0] else row[0]
    used = [i for i in range(len(HEADER)) if any(row[i] for row in rows)]
    lines = [[row[i].replace("|", "/") for i in used] for row in [HEADER, ["---"] * len(HEADER), *rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(path: Path, records: Iterable[tuple[Record, Mapping[str, str]]]) -> None:
    """A list of records, one a line, each with what is said about it: machine, threads, versions, commit. All or
    nothing."""
    lines = [json.dumps({**asdict(record), **about}, ensure_ascii=False) for record, about in records]
    with replacing(path) as file:
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def add(path: Path, records: Iterable[Record], about: Mapping[str, str]) -> None:
    """Put a run's records into a file, in place of those that it had of the same suites on the same machine."""
    records = list(records)
    suites = {record.suite for record in records}
    before = list(read(path)) if path.exists() else []
    kept = [(r, known) for r, known in before if r.suite not in suites or known["machine"] != about["machine"]]
    write(path, [*kept, *((record, about) for record in records)])


def read(path: Path) -> Iterator[tuple[Record, dict[str, str]]]:
    """The records of a file, each with what `write` was told about them."""
    names = Record.__dataclass_fields__
    for line in json.loads(path.read_text(encoding="utf-8")):
        yield (
            Record(**{name: value for name, value in line.items() if name in names}),
            {name: value for name, value in line.items() if name not in names},
        )
