"""The parts of the page that are text and tables. Whatever comes from a run is escaped here, and cut where it is long:
a description or a path may hold anything."""

import html
import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from titan_moe.config import Config
from titan_moe.config_keys import LEAVES, get
from titan_moe.config_print import literal
from titan_moe.phase_names import OUTSIDE
from titan_moe.report import phases
from titan_moe.report.against_plan import Comparison
from titan_moe.report.charts import Chart
from titan_moe.report.read import Run, flat
from titan_moe.report.summary import layer_order, layers_of, numbers, show

LONGEST = 600
"""Characters of a cell"""
ROWS = 600
"""Of a table whose length a file decides over"""
LAYER_COLUMNS = {
    "moe_max/mean": "heaviest / mean",
    "moe_maxvio": "MaxVio",
    "moe_maxvio_floor": "of random routing",
    "moe_dead": "dead",
    "moe_entropy": "entropy",
    "moe_confidence": "confidence",
    "moe_bias_min": "least bias",
    "moe_bias_max": "largest bias",
    "moe_dropped": "dropped",
}


def text(value: Any) -> str:
    """HTML that shows the value as it is."""
    shown = str(value)
    shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} … ({len(shown):,} characters)"
    return html.escape(shown.encode("utf-8", "backslashreplace").decode())  # lone surrogates: no UTF-8 has them


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "", marks: Sequence[str] = ()) -> str:
    """Cells are HTML already; the first of each row is its heading. `marks`: a class for each row."""
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = ""
    for i, (first, *cells) in enumerate(rows):
        mark = f' class="{marks[i]}"' if marks else ""
        body += f'<tr{mark}><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def run_heads(runs: Sequence[Run]) -> list[str]:
    return [f'<i class="dot run{i % 8}"></i>{text(run.name)}' for i, run in enumerate(runs)]


def tiles(runs: Sequence[Run]) -> str:
    """The key numbers: tiles of one run, a table of several."""
    if len(runs) == 1:
        cells = (
            f"<div><dt>{text(n.label)}</dt><dd>{text(n.text)}<small>{text(n.note)}</small></dd></div>"
            for n in numbers(runs[0])
        )
        return f'<dl class="tiles">{"".join(cells)}</dl>'
    by_run = [{n.label: n.text for n in numbers(run)} for run in runs]
    labels = list(dict.fromkeys(label for found in by_run for label in found))
    rows = [["state", *(f'<b class="state {slug(run.state())}">{run.state()}</b>' for run in runs)]]
    rows += [[text(label), *(text(found.get(label, "–")) for found in by_run)] for label in labels]
    return table(["", *run_heads(runs)], rows, kind="numbers")


def slug(state: str) -> str:
    return state.replace(" ", "-")


def last_values(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """Last value, smallest and largest of every curve: what the charts show, for those who do not see them."""
    heads = run_heads(runs)
    rows = []
    for chart in charts:
        for key, label in chart.curves.items():
            title = ", ".join(filter(None, (chart.title, label)))
            cells = [_range(run, key, chart.scale) for run in runs]
            rows.append([f"{text(title)} <small>{text(chart.unit)}</small>", *cells])
    return table(["", *(f"{head}<br><small>last (least to largest)</small>" for head in heads)], rows, kind="numbers")


def _range(run: Run, key: str, scale: float) -> str:
    series = run.series.get(key)
    values = [scale * value for value in series.values if value == value] if series else []
    if not values:
        return "–"
    return f"{show(values[-1])} <small>({show(min(values))} to {show(max(values))})</small>"


def phase_table(run: Run) -> str:
    found = phases.table(run)
    whole = sum(phase.seconds for phase in found if phase.name not in OUTSIDE)
    rows = []
    for phase in found:
        share = f"{phase.seconds / whole:.1%}" if whole and phase.name not in OUTSIDE else "–"
        slowest = "–" if phase.slowest is None else f"{phase.slowest:.4g}"
        rank = "–" if phase.rank is None else f"{phase.rank:,}"
        each = [f"{part:.4g}" if part is not None else "–" for part in (phase.forward, phase.backward, phase.seconds)]
        dot = f'<i class="dot" data-phase="{text(phase.name)}"></i>'
        note = " <small>mean over all steps</small>" if phase.name in OUTSIDE else ""
        rows.append([f"{dot}{text(phase.name)}{note}", *each, share, slowest, rank])
    head = ["phase", "forward", "backward", "together", "share", "slowest rank", "which"]
    return table(head, rows, kind="numbers")


def layer_table(run: Run) -> str:
    """The newest line about each MoE layer."""
    columns = {key: layers_of(run, key) for key in LAYER_COLUMNS}
    columns = {key: found for key, found in columns.items() if found}
    layers = sorted({layer for found in columns.values() for layer in found}, key=layer_order)
    if not layers:
        return ""
    rows = [
        [text(layer), *(show(found[layer].last()) if layer in found else "–" for found in columns.values())]
        for layer in layers[:ROWS]
    ]
    return table(["layer", *(LAYER_COLUMNS[key] for key in columns)], rows, kind="numbers")


def plan_table(comparison: Comparison) -> str:
    rows = []
    for row in comparison.rows:
        band = f" <small>(80 %: {show(row.low)} to {show(row.high)})</small>" if row.low and row.high else ""
        ratio = f"{row.measured / row.predicted:.2f} ×" if row.measured is not None and row.predicted else "–"
        name = f"{text(row.quantity)} <small>{text(row.unit)}</small>"
        rows.append([name, f"{show(row.predicted)}{band}", show(row.measured), ratio])
    return table(["", "predicted", "measured", "measured / predicted"], rows, kind="numbers")


def config_table(runs: Sequence[Run]) -> str:
    """All keys of all runs; a row is marked "same" where they agree, or one run has the default."""
    shown = [{key: _literal(value) for key, value in run.config.items()} for run in runs]
    if len(runs) == 1:
        defaults = {key: _literal(get(Config(), key)) for key in LEAVES}
        shown.append({key: value for key, value in defaults.items() if value != "null"})
    keys = [*LEAVES, *sorted({key for each in shown for key in each} - LEAVES.keys())]
    keys = [key for key in keys if any(key in each for each in shown)][:ROWS]
    rows = [[text(key), *(text(each.get(key, "–")) for each in shown)] for key in keys]
    marks = ["same" if len({each.get(key) for each in shown}) == 1 else "differs" for key in keys]
    heads = run_heads(runs) if len(runs) > 1 else ["this run", "default"]
    return table(["key", *heads], rows, kind="config", marks=marks)


def _literal(value: Any) -> str:
    try:
        return literal(value)
    except (TypeError, RecursionError):  # a date, for one, which no key of ours is
        return str(value)


def environment_table(runs: Sequence[Run]) -> str:
    """run.json of all runs."""
    facts = [flat(_readable(run.facts)) for run in runs]
    keys = list(dict.fromkeys(key for each in facts for key in each))[:ROWS]
    rows = [[text(key), *(text(_plain(each.get(key))) for each in facts)] for key in keys]
    return table(["", *run_heads(runs)], rows, kind="config")


def _readable(facts: dict[str, Any]) -> dict[str, Any]:
    """The command line as a shell has it, lists of tables as numbered tables."""
    found = {}
    for key, value in facts.items():
        if key == "argv" and isinstance(value, list):
            found[key] = shlex.join(map(str, value))
        elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
            found |= {f"{key} {i}": item for i, item in enumerate(value, start=1)}
        else:
            found[key] = value
    return found


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)
