"""What makes one plan faster, or smaller, than another: every part of the step's time and of the memory in both, what
changes in it, and the settings that differ. Behind `--plan.diff`, and the explanation of what a search found.

Parts are compared by name, and a part that one plan does not have is 0 there, so that changes add up to the change of
the whole; printed figures too, to the last digit. If the two runs compute as many tokens per GPU and step, times are
those of the step; else of a million tokens, in GPU-seconds. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_moe.config import Config
from titan_moe.config_keys import LEAVES, get
from titan_moe.config_print import literal
from titan_moe.plan.job import Job
from titan_moe.plan.memory import GIB, Memory, predict_memory
from titan_moe.plan.report import Plan
from titan_moe.plan.step import predict

ASKED = {key for key in LEAVES if key.startswith("plan.")} - {"plan.hardware", "plan.gpus"}
"""Keys that ask the planner something, and change no run"""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of two wholes."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What differs. `seconds` and `memory` (bytes) hold every part, the largest changes first."""

    settings: list[tuple[str, Any, Any]]
    """(key, value before, value after)"""
    unit: str
    """Of `seconds`"""
    seconds: list[Term]
    memory: list[Term]
    rates: tuple[float, float]
    """Tokens per second and GPU"""

    @property
    def gain(self) -> float:
        return self.rates[1] / self.rates[0] - 1

    @property
    def equal(self) -> bool:
        return not any(term.change for term in (*self.seconds, *self.memory))


def plain(job: Job) -> Plan:
    """The plan of a job without advice, which takes longest."""
    return Plan(job=job, speed=predict(job), memory=predict_memory(job), improvements=(), out_of_reach=None)


def of_plans(before: Plan, after: Plan, configs: tuple[Config, Config] | None = None) -> Diff:
    """How `after` differs. `configs`: those of the two, for the settings."""
    share = [plan.job.tokens_per_step / plan.job.gpus for plan in (before, after)]
    scales, unit = [1.0, 1.0], "s of the step"
    if share[0] != share[1]:
        scales, unit = [1e6 / each for each in share], "GPU-s of a million tokens"
    times = [
        {name.replace("_", " "): scale * seconds for name, seconds in plan.speed.parts.items()}
        for plan, scale in zip((before, after), scales)
    ]
    return Diff(
        settings=settings(*configs) if configs else [],
        unit=unit,
        seconds=_terms(*times),
        memory=_terms(_held(before.memory), _held(after.memory)),
        rates=(before.speed.tokens_per_s_per_gpu, after.speed.tokens_per_s_per_gpu),
    )


def settings(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, but for those that only ask the planner something."""
    pairs = [(key, get(before, key), get(after, key)) for key in LEAVES if key not in ASKED]
    return [(key, old, new) for key, old, new in pairs if old != new]


def _held(memory: Memory) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in memory.entries:
        name = f"activations: {entry.name}" if entry.group == "activations" else entry.name
        found[name] = found.get(name, 0.0) + entry.size
    return found | {"margin for fragmentation": memory.margin}


def _terms(before: Mapping[str, float], after: Mapping[str, float]) -> list[Term]:
    terms = [Term(name=name, before=before.get(name, 0.0), after=after.get(name, 0.0)) for name in {**before, **after}]
    return sorted(terms, key=lambda term: (-abs(term.change), term.name))


# ---------------------------------------------------------------------------------------------------------------------
# Text

SHOWN = 0.004
"""Parts that change by less, as a share of the whole before, are summed up as "other\""""


def to_text(diff: Diff, names: tuple[str, str]) -> str:
    lines = [f"Change from {names[0]} to {names[1]}", ""]
    if diff.settings:
        wide = max(len(key) for key, _, _ in diff.settings)
        lines += ["Settings", *(f"  {key:<{wide}}  {said(a)} -> {said(b)}" for key, a, b in diff.settings), ""]
    if diff.equal:
        lines.append("Equal: no part of time or memory differs.")
        return "\n".join(lines)
    lines.append(
        f"Speed    {diff.rates[0]:,.0f} -> {diff.rates[1]:,.0f} tokens/s per GPU, {diff.gain:+.1%}",
    )
    lines += ["", *table(f"Time ({diff.unit})", diff.seconds, 1.0, 3), ""]
    lines += table("Memory per GPU (GiB)", diff.memory, GIB, 2)
    return "\n".join(line.rstrip() for line in lines)


def said(value: Any) -> str:
    return "unset" if value is None else literal(value)


def table(title: str, terms: list[Term], unit: float, digits: int) -> list[str]:
    """Rows of name, before, after, change and change as a share of the whole before. Columns and rows add up to the
    last digit: each column is rounded so that it does, and changes are taken between rounded figures."""
    whole = sum(term.before for term in terms)
    large = [term for term in terms if abs(term.change) >= SHOWN * whole]
    small = [term for term in terms if term not in large]
    if small:
        large.append(
            Term(name="other", before=sum(t.before for t in small), after=sum(t.after for t in small)),
        )
    columns = [rounded([getattr(t, side) / unit for t in large], digits) for side in ("before", "after")]
    rows = [(t.name, a, b) for t, a, b in zip(large, *columns)]
    rows.append(("total", sum(columns[0]), sum(columns[1])))
    scale = 10**digits
    cells = [
        (name, *(f"{n / scale:,.{digits}f}" for n in (a, b)), f"{(b - a) / scale:+,.{digits}f}", f"{share:+.1%}")
        for name, a, b in rows
        for share in [(b - a) / scale / (whole / unit)]
    ]
    cells.insert(0, ("", "before", "after", "change", ""))
    wide = [max(len(cell[i]) for cell in cells) for i in range(5)]
    return [
        title,
        *(
            f"  {cell[0]:<{wide[0]}}  " + "  ".join(f"{text:>{width}}" for text, width in zip(cell[1:], wide[1:]))
            for cell in cells
        ),
    ]


def rounded(values: list[float], digits: int) -> list[int]:
    """Values in units of the last digit, each rounded down or up so that they add up to their rounded sum."""
    scaled = [value * 10**digits for value in values]
    down = [math.floor(value) for value in scaled]
    left = round(sum(scaled)) - sum(down)
    for i in sorted(range(len(values)), key=lambda i: (down[i] - scaled[i], i))[:left]:
        down[i] += 1
    return down


def to_json(diff: Diff) -> dict[str, Any]:
    return {
        "settings": [{"key": key, "before": old, "after": new} for key, old, new in diff.settings],
        "tokens_per_s_per_gpu": list(diff.rates),
        "gain": diff.gain,
        "unit": diff.unit,
        "seconds": [{"name": t.name, "before": t.before, "after": t.after, "change": t.change} for t in diff.seconds],
        "memory_bytes": [
            {"name": t.name, "before": t.before, "after": t.after, "change": t.change} for t in diff.memory
        ],
        "equal": diff.equal,
    }
