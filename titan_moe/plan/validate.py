"""`python -m titan_moe.plan.validate CSV [--json]`: the planner against published runs.

For every run of a file in the format of published_runs.csv, in tokens per second and GPU: predicted with the frozen
constants, measured, and the error predicted / measured - 1. Beside it

- tables only: all constants at their priors, so that nothing was fitted;
- cell left out: constants fitted without any run of this model on this hardware, the honest error of a new one;
- FLOPs: the row's TFLOPS over its tokens, against the formula.

Nothing here fits: the constants are those in constants.toml. A run whose error is more than three standard deviations
of the cells left out is reported as suspect: its data, or its configuration, are more likely wrong than the model. Rows
that cannot be predicted are listed with the reason.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_moe.plan import bands, constants, whatif
from titan_moe.plan.constants import Constants
from titan_moe.plan.published import NUMBERS, Row, Run, flops_error, read, run_of
from titan_moe.plan.rows import is_blank, real
from titan_moe.plan.step import tokens_per_s

SUSPECT_SIGMAS = 3.0
SIGMAS_OF_80_PERCENT = 1.2816  # of a normal distribution


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A run and its predictions, in tokens per second and GPU. Errors are signed fractions of the measured."""

    run: Run
    predicted: float
    tables_only: float
    left_out: float

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1

    @property
    def tables_only_error(self) -> float:
        return self.tables_only / self.run.measured - 1

    @property
    def left_out_error(self) -> float:
        return self.left_out / self.run.measured - 1

    @property
    def suspect(self) -> bool:
        """Whether the error is beyond three standard deviations of the band."""
        return abs(math.log1p(self.error)) > SUSPECT_SIGMAS * math.log1p(constants.band()[1]) / SIGMAS_OF_80_PERCENT


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Mean and largest size of errors, and their mean with sign. None without runs."""

    mean: float | None
    largest: float | None
    bias: float | None


@dataclass(frozen=True, kw_only=True)
class Validation:
    scored: list[Scored]
    unscored: list[tuple[Row, str]]
    """Rows without a prediction to score, and why"""

    def summary(self, which: str = "error") -> Summary:
        errors = [getattr(each, which) for each in self.scored]
        if not errors:
            return Summary(mean=None, largest=None, bias=None)
        sizes = [abs(error) for error in errors]
        return Summary(mean=sum(sizes) / len(sizes), largest=max(sizes), bias=sum(errors) / len(errors))


def validate(rows: Sequence[Row], frozen: Constants | None = None) -> Validation:
    """Every row predicted and compared, with the frozen constants or those given."""
    fitted, priors = frozen or constants.fitted(), constants.priors()
    scored, unscored = [], []
    for row in rows:
        try:
            run = run_of(row)
            predicted = tokens_per_s(run.job, c=fitted)
        except (LookupError, ValueError) as error:
            unscored.append((row, str(error.args[0] if error.args else error)))
            continue
        if not run.measured:
            unscored.append((row, f"nothing measured; predicted {predicted:,.0f} tokens/s/GPU"))
            continue
        without = constants.without_cell(run.cell)
        scored.append(
            Scored(
                run=run,
                predicted=predicted,
                tables_only=tokens_per_s(run.job, c=priors),
                left_out=tokens_per_s(run.job, c=without),
            )
        )
    return Validation(scored=scored, unscored=unscored)


# ---------------------------------------------------------------------------------------------------------------------
# Shown


def table(found: Validation) -> list[str]:
    """The runs, one a line."""
    head = f"{'model':<17} {'hardware':<8} {'GPUs':>5} {'precision':<11} {'TP PP VP EP MBS':<16} {'release':<16}"
    lines = [f"{head} {'measured':>9} {'predicted':>9} {'error':>7} {'tables':>7} {'cell out':>8} {'FLOPs':>6}"]
    for each in found.scored:
        job = each.run.job
        layout = f"{job.tp:>2} {job.pp:>2} {job.vp:>2} {job.ep:>2} {job.micro_batch_size:>3}"
        flops = flops_error(each.run)
        lines.append(
            f"{job.model_name[:17]:<17} {job.hardware.name:<8} {job.gpus:>5} {job.precision:<11} {layout:<16} "
            f"{job.release:<16} {each.run.measured:>9,.0f} {each.predicted:>9,.0f} {each.error:>+7.1%} "
            f"{each.tables_only_error:>+7.1%} {each.left_out_error:>+8.1%} "
            f"{'' if flops is None else f'{flops:+.1%}':>6}{'  suspect' if each.suspect else ''}"
        )
    return lines


def by_group(found: Validation) -> list[str]:
    """Errors by hardware, model and execution mode, one group a line."""
    lines = [
        f"{'group':<38} {'runs':>4} {'mean |error|':>12} {'largest':>8} {'bias':>6} "
        f"{'cell out: mean':>14} {'largest':>8} {'80 % band':>9}"
    ]
    fitted = bands.by_group([(each.run.job, each.error) for each in found.scored])
    left_out = bands.by_group([(each.run.job, each.left_out_error) for each in found.scored])
    for name, errors in fitted.items():
        sizes, out = [abs(error) for error in errors], [abs(error) for error in left_out[name]]
        held = constants.bands().get(name)
        used = held is not None and held["runs"] >= bands.ENOUGH
        band = "too few" if held is None or not used else f"{held['half']:.1%}"
        lines.append(
            f"{name:<38} {len(errors):>4} {sum(sizes) / len(sizes):>12.1%} {max(sizes):>8.1%} "
            f"{sum(errors) / len(errors):>+6.1%} {sum(out) / len(out):>14.1%} {max(out):>8.1%} {band:>9}"
        )
    return lines


def report(found: Validation) -> str:
    """Everything that validate says, as text."""
    lines = ["Tokens per second and GPU"]
    lines += table(found) if found.scored else ["no runs to score"]
    for name, which in (
        ("fitted", "error"),
        ("tables only, all constants at their priors", "tables_only_error"),
        ("one (model, hardware) cell left out", "left_out_error"),
    ):
        summary = found.summary(which)
        if summary.mean is not None and summary.largest is not None and summary.bias is not None:
            lines.append(
                f"{name}: mean |error| {summary.mean:.1%}, largest {summary.largest:.1%}, bias {summary.bias:+.1%}"
            )
    low, high = constants.band()
    lines.append(f"80 % band of a new run, from the cells left out: {low:+.1%} to {high:+.1%}")
    if found.scored:
        lines += ["", *by_group(found), ""]
    for each in found.scored:
        if each.suspect:
            lines.append(
                f"suspect: line {each.run.row.line}, {each.run.cell}: {each.error:+.0%} is beyond {SUSPECT_SIGMAS:.0f} "
                "standard deviations; check the row's numbers and layout"
            )
    for row, why in found.unscored:
        what = f"{row.fields.get('model', '?')} on {row.fields.get('hardware', '?')}"
        lines.append(f"not scored: line {row.line}, {what}: {why}")
    for each in found.scored:
        for note in each.run.job.notes:
            lines.append(f"assumed: line {each.run.row.line}, {each.run.cell}: {note}")
    lines += ["", "Constants: value, prior, value / prior, range"]
    for one in constants.described():
        lines.append(
            f"{one.name:<14} {one.value:>8.4g} {one.prior:>8.4g} {one.value / one.prior:>6.2f}   {one.low:g} .. "
            f"{one.high:g} {one.unit}; {one.source}"
        )
    lines += ["", "What-ifs and the H800 trace: predicted, measured, error, allowed"]
    for check in whatif.checks():
        error = f"{check.error:+.3g}" if check.absolute else f"{check.error:+.1%}"
        allowed = f"{check.within:.3g}" if check.absolute else f"{check.within:.0%}"
        verdict = "" if check.holds else "  MISSED"
        lines.append(
            f"{check.name:<38} {check.predicted:>9.4g} {check.measured:>9.4g} {error:>8} {allowed:>6}{verdict}"
        )
    lines.append(f"ladder: {whatif.ladder_signs(whatif.ladder())} of 12 changes go the right way")
    return "\n".join(lines)


def as_json(found: Validation) -> dict[str, Any]:
    """The same for programs: numbers as numbers, errors as signed fractions."""
    errors, tables, cells = (found.summary(w) for w in ("error", "tables_only_error", "left_out_error"))
    return {
        "rows": [
            {
                **_values(each.run.row),
                "predicted": each.predicted,
                "measured": each.run.measured,
                "error": each.error,
                "error_tables_only": each.tables_only_error,
                "error_cell_left_out": each.left_out_error,
                "flops_error": flops_error(each.run),
                "suspect": each.suspect,
                "assumed": list(each.run.job.notes),
            }
            for each in found.scored
        ],
        "mean_abs_error": errors.mean,
        "max_abs_error": errors.largest,
        "bias": errors.bias,
        "tables_only": asdict(tables),
        "cell_left_out": asdict(cells),
        "band_80": list(constants.band()),
        "bands_80": constants.bands(),
        "not_scored": [{**_values(row), "line": row.line, "reason": why} for row, why in found.unscored],
        "constants": [{**asdict(one), "value_over_prior": one.value / one.prior} for one in constants.described()],
        "what_ifs": [{**asdict(check), "error": check.error, "holds": check.holds} for check in whatif.checks()],
    }


def _values(row: Row) -> dict[str, Any]:
    numbers = NUMBERS.split()
    found: dict[str, Any] = {}
    for key, value in row.fields.items():
        found[key] = value
        if key in numbers and not is_blank(value):
            number = real(row.fields, key)
            found[key] = int(number) if number == int(number) else number
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m titan_moe.plan.validate", description=__doc__.split("\n\n")[0])
    parser.add_argument("csv", type=Path, help="runs in the format of titan_moe/plan/published_runs.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    try:
        found = validate(read(parsed.csv))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(as_json(found), indent=1) if parsed.json else report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
