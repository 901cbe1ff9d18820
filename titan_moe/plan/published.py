"""Published runs: a CSV file read, and what can be said of each of its rows.

A row is a run with a layout that gives a Job, and what was measured; or it is listed with the reason why it is not
scored. What was measured plays no part in the Job.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_moe.plan import flops
from titan_moe.plan.job import Job
from titan_moe.plan.rows import BadNumber, is_blank, real

RUNS = Path(__file__).with_name("published_runs.csv")
NEEDED = ("model", "hardware", "gpus", "global_batch_size", "seq_len", "tp", "pp", "ep")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the file, as text, and its line."""

    line: int
    fields: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row that can be predicted. `measured` is tokens per second and GPU; 0 when the row has no measurement."""

    row: Row
    job: Job
    measured: float

    @property
    def cell(self) -> str:
        return f"{self.job.model_name} on {self.job.hardware.name}"

    @property
    def uncertain(self) -> bool:
        return self.row.fields.get("config_confidence", "").startswith("low")


def read(path: Path) -> list[Row]:
    """The rows of a CSV file. Raises ValueError, naming line and column, for a file that is not of this format."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    reader = csv.DictReader(text.splitlines())
    if reader.fieldnames is None:
        return []
    names = [name.strip() for name in reader.fieldnames]
    if missing := [name for name in NEEDED if name not in names]:
        raise ValueError(f"{path}, line 1: lacks the columns {', '.join(missing)}; it has {', '.join(names)}")
    rows = []
    for fields in reader:
        if None in fields:
            raise ValueError(
                f"{path}, line {reader.line_num}: more values than the {len(names)} columns of line 1; quote values "
                "that hold a comma"
            )
        plain = {(key or "").strip(): (value or "").strip() for key, value in fields.items()}
        if any(plain.values()):
            rows.append(Row(line=reader.line_num, fields=plain))
    for row in rows:
        _check_numbers(path, row)
    return rows


NUMBERS = (
    "gpus global_batch_size micro_batch_size seq_len tp cp pp vp ep tokens_per_s_per_gpu tflops_per_gpu mtp_layers "
    "comm_sms"
)
"""Columns that hold numbers or nothing"""


def _check_numbers(path: Path, row: Row) -> None:
    for column in NUMBERS.split():
        if not is_blank(row.fields.get(column)):
            try:
                real(row.fields, column)
            except BadNumber as error:
                raise ValueError(f"{path}, line {row.line}, column {error}") from None


def measured(fields: Mapping[str, str], job: Job) -> float:
    """Tokens per second and GPU that the row reports, or that follow from its TFLOPS; 0 if it reports neither."""
    if not is_blank(fields.get("tokens_per_s_per_gpu")):
        return real(fields, "tokens_per_s_per_gpu")
    if is_blank(fields.get("tflops_per_gpu")):
        return 0.0
    return real(fields, "tflops_per_gpu") * 1e12 / flops_per_token(fields, job)


def flops_per_token(fields: Mapping[str, str], job: Job) -> float:
    """FLOPs per token by which the row's TFLOPS are counted: causal, with MTP unless the row says otherwise."""
    mtp = 0 if fields.get("flops_include_mtp") == "no" else job.num_mtp_layers
    return sum(flops.per_token(job.model, job.seq_len, num_mtp_layers=mtp).values())


def flops_error(run: Run) -> float | None:
    """The row's TFLOPS over its tokens, against the formula; None if it has not both."""
    fields = run.row.fields
    if is_blank(fields.get("tokens_per_s_per_gpu")) or is_blank(fields.get("tflops_per_gpu")):
        return None
    reported = real(fields, "tflops_per_gpu") * 1e12 / real(fields, "tokens_per_s_per_gpu")
    return flops_per_token(fields, run.job) / reported - 1


def run_of(row: Row) -> Run:
    """The run of a row. Raises ValueError or LookupError with the reason why there is none."""
    job = Job.from_row(row.fields)
    if (why := row.fields.get("config_confidence", "")).startswith("excluded"):
        raise LookupError(why)
    job.hardware.peak_tflops(job.precision)
    found = measured(row.fields, job)
    assert math.isfinite(found)
    return Run(row=row, job=job, measured=found)


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """The runs with a layout and a measurement."""
    found = []
    for row in rows:
        try:
            run = run_of(row)
        except (LookupError, ValueError):
            continue
        if run.measured:
            found.append(run)
    return found
