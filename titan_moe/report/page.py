"""One HTML file with everything in it: style, scripts, data. It needs no network and opens from disk.

Text and tables are written here; the curves, bars and heat maps are drawn in the browser (web/) from the data in the
page. Nothing of a run can become markup or a script: text is escaped (tables.py), data is JSON in which <, > and & are
written as \\u003c and the like, and the page allows only the scripts whose hash it names, and no connection.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from titan_moe.report import charts, heat, phases, summary, tables
from titan_moe.report.against_plan import Comparison, compare
from titan_moe.report.decimate import rounded
from titan_moe.report.read import Run
from titan_moe.report.tables import text

WEB = Path(__file__).parent / "web"
LICENSE = "uplot/LICENSE"
SCRIPTS = ("uplot/uPlot.iife.min.js", "state.js", "curves.js", "phases.js", "heat.js", "main.js")
STYLES = ("uplot/uPlot.min.css", "page.css")
CELLS = 1_100_000
"""Of all heat maps together; 4/3 bytes each"""
MARKS = 2000
"""Checkpoints, or skips, that are drawn"""


def make(runs: Sequence[Run], refresh: float | None = None) -> str:
    """The page of these runs. With `refresh`, it loads itself again after so many seconds."""
    chosen, left_out = charts.charts(runs)
    comparisons = [compare(run) for run in runs]
    sections = {
        "numbers": f"<section id='numbers'><h2 class='aside'>Key numbers</h2>{tables.tiles(runs)}</section>",
        "notices": _notices(runs),
        "training": _group("training", chosen),
        "phases": _phases(runs, comparisons),
        "experts": _experts(runs),
        "others": "".join(_group(name, chosen) for name in charts.GROUPS if name != "training"),
        "left out": _left_out(left_out),
        "plan": _plan(runs, comparisons),
        "values": _section("values", "Last values", tables.last_values(runs, chosen)) if chosen else "",
        "config": _config(runs),
        "environment": _environment(runs),
    }
    scripts = f"/*\n{_web(LICENSE)}\n*/\n" + "\n".join(map(_web, SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode()
    fill = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        "title": text(_title(runs)),
        "style": "\n".join(map(_web, STYLES)),
        "header": _header(runs),
        "sections": "\n".join(filter(None, sections.values())),
        "data": as_script(_data(runs, chosen, refresh)),
        "scripts": scripts,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    }
    page = _web("page.html")
    before, *pieces = page.split("{{")  # one pass: what is filled in is not looked at again
    filled = [before]
    for piece in pieces:
        name, _, after = piece.partition("}}")
        filled += [fill[name], after]
    return "".join(filled)


def _web(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def as_script(data: Any) -> str:
    """JSON that can stand in a <script> element."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: no U+2028 either
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---------------------------------------------------------------------------------------------------------------------
# Data for the scripts


def _data(runs: Sequence[Run], chosen: Sequence[charts.Chart], refresh: float | None) -> dict[str, Any]:
    ends = [(run.steps[0], run.steps[-1]) for run in runs if run.steps]
    each = CELLS // max(len(runs), 1)
    return {
        "refresh": refresh,
        "key": [str(run.folder.absolute()) for run in runs],
        "first": min((first for first, _ in ends), default=0),
        "last": max((last for _, last in ends), default=1),
        "charts": charts.payload(runs, chosen),
        "runs": [
            {
                "name": run.name,
                "checkpoints": run.checkpoints[-MARKS:],
                "restarts": run.restarts[-MARKS:],
                "skips": run.skips()[-MARKS:],
                "phases": _bars(run),
                "heat": _heat(run, each),
            }
            for run in runs
        ],
    }


def _bars(run: Run) -> dict[str, Any]:
    found = phases.bars(run)
    seconds = {name: [rounded(value, 4) for value in values] for name, values in found.seconds.items()}
    return {"ends": found.ends, "names": list(seconds), "seconds": list(seconds.values())}


def _heat(run: Run, cells: int) -> list[dict[str, Any]]:
    """The overview first; rows from top to bottom, each as base64 of its bytes."""
    whole = heat.overview(run)
    maps = {} if whole is None else {"": whole}
    maps |= heat.grids(run, cells)
    return [
        {"layer": name, "ends": grid.ends, "rows": len(grid.rows), "names": grid.rows if name == "" else []}
        | {"cells": base64.b64encode(b"".join(grid.cells)).decode()}
        for name, grid in maps.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Sections


def _title(runs: Sequence[Run]) -> str:
    names = ", ".join(run.name for run in runs[:3]) + (" ..." if len(runs) > 3 else "")
    loss = runs[0].last("loss") if len(runs) == 1 else None
    return f"{names} · {runs[0].state()}" + (f" · loss {loss:.4f}" if loss is not None else "")


def _header(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"<h1>{len(runs)} runs</h1><p class='about'>{' · '.join(text(run.name) for run in runs)}</p>"
    run = runs[0]
    model = " ".join(str(run.config[key]) for key in ("model.name", "model.flavor") if key in run.config)
    world, description = run.facts.get("world"), run.facts.get("description")
    ranks = f"{world:,} rank{'s' * (world != 1)}" if isinstance(world, int) else ""
    device = run.facts.get("device") or ""
    started = str(run.facts.get("updated", "")).replace("T", " ").replace("+00:00", " UTC")
    about = [description, model, ranks, device, started and f"started {started}"]
    state = run.state()
    step = f" at step {run.last_step:,}" if run.steps else ""
    return (
        f"<h1>{text(run.name)} <b class='state {tables.slug(state)}'>{state}{step}</b></h1>"
        f"<p class='about'>{' · '.join(text(part) for part in about if part)}</p>"
    )


def _section(name: str, title: str, content: str) -> str:
    return f"<section id='{name}'><h2>{title}</h2>{content}</section>"


def _notices(runs: Sequence[Run]) -> str:
    found = []
    for i, run in enumerate(runs):
        who = "" if len(runs) == 1 else f"<i class='dot run{i % 8}'></i><b>{text(run.name)}</b>: "
        found += [f"<li class='look'>{who}{text(sentence)}</li>" for sentence in summary.warnings(run)]
        found += [f"<li class='missing'>{who}{text(problem)}</li>" for problem in run.problems]
    return _section("notices", "To look at", f"<ul>{''.join(found)}</ul>") if found else ""


def _group(name: str, chosen: Sequence[charts.Chart]) -> str:
    if not any(chart.group == name for chart in chosen):
        return ""
    return _section(name, charts.GROUPS[name], f"<div class='grid' data-group='{name}'></div>")


def _left_out(quantities: Sequence[str]) -> str:
    if not quantities:
        return ""
    return f"<p class='note'>Not drawn, because there are so many: {text(', '.join(quantities))}</p>"


def _phases(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> str:
    if not any(phases.names(run) for run in runs):
        return ""
    content = "<div id='phase-chart'></div>"
    for run, comparison in zip(runs, comparisons):
        found = phases.inside(run)
        if not found:
            continue
        name = f"{text(run.name)}: a" if len(runs) > 1 else "A"
        content += f"<h3>{name} step, over the last quarter of the run</h3>"
        content += _stack({phase.name: phase.seconds for phase in found}, "measured, mean of the ranks")
        if comparison.parts:
            content += _stack(comparison.parts, "predicted")
        content += f"<details><summary>Seconds per phase</summary>{tables.phase_table(run)}</details>"
    return _section("phases", "Where the time goes", content)


def _stack(parts: dict[str, float], title: str) -> str:
    """A bar of parts beside each other."""
    whole = sum(parts.values()) or 1.0
    pieces = ""
    for name, seconds in parts.items():
        share = seconds / whole
        if share > 0.002:
            label = text(name.replace("_", " ")) if share > 0.07 else ""
            hint = f"{text(name)}: {seconds:.4g} s, {share:.1%}"
            pieces += f"<span data-phase='{text(name)}' style='flex:{share:.4f}' title='{hint}'>{label}</span>"
    return f"<p class='note'>{title}: {whole:.4g} s</p><div class='stack'>{pieces}</div>"


def _experts(runs: Sequence[Run]) -> str:
    if not any(summary.layers_of(run, "moe_max/mean") or run.loads for run in runs):
        return ""
    content = "<div id='heat-map'></div>"
    for run in runs:
        if found := tables.layer_table(run):
            name = f" of {text(run.name)}" if len(runs) > 1 else ""
            content += f"<details><summary>Last numbers{name} by layer</summary>{found}</details>"
    return _section("experts", "Load of the experts", content)


def _plan(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> str:
    content = ""
    for run, comparison in zip(runs, comparisons):
        name = f"<h3>{text(run.name)}</h3>" if len(runs) > 1 else ""
        if comparison.why_not:
            content += f"{name}<p class='note'>No prediction: {text(comparison.why_not)}</p>"
        else:
            content += f"{name}<p class='note'>Planned: {text(comparison.job)}</p>{tables.plan_table(comparison)}"
    return _section("plan", "Planned and measured", content)


def _config(runs: Sequence[Run]) -> str:
    if not any(run.config for run in runs):
        return ""
    what = "what differs between the runs" if len(runs) > 1 else "what differs from the defaults"
    toggle = "<label><input type='checkbox' id='all-keys'> all keys</label>"
    return _section(
        "config", "Configuration", f"<p class='note'>Shown: {what}. {toggle}</p>{tables.config_table(runs)}"
    )


def _environment(runs: Sequence[Run]) -> str:
    if not any(run.facts for run in runs):
        return ""
    return _section(
        "environment", "Environment", f"<details><summary>run.json</summary>{tables.environment_table(runs)}</details>"
    )
