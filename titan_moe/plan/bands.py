"""How far off a prediction may be: bands from the errors of published runs, by hardware, model and execution mode.

An error counts as it is with the run's (model, hardware) cell left out of the fit. A job belongs to one group of each
kind. Its band is the widest of those of its groups that have enough runs, because the worst of what it has in common
with them decides; without such a group it is that of all runs. fit.py writes the bands into constants.toml, validate.py
prints the table.

None of the published runs is of this trainer: its own distance from Megatron is in no band.
"""

import math
from collections.abc import Sequence
from typing import Any

from titan_moe.flavors import PUBLISHED, Flavor
from titan_moe.plan import constants
from titan_moe.plan.job import Job

ENOUGH = 8
"""Runs: the share of them inside a band of 80 % is known to 14 points then"""
GRAPHS = {"none": "no CUDA graphs", "router": "CUDA graphs of parts", "attention": "CUDA graphs of parts"}
GRAPHS |= {"full": "CUDA graphs of all"}


def groups(job: Job) -> dict[str, str]:
    """{kind: group} that a job belongs to."""
    hidden = job.overlap != "none"
    low = {"fp8_current": "FP8", "fp8_block": "FP8", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
    return {
        "hardware": job.hardware.name,
        "model": model(job.model) or job.model_name,
        "precision": low.get(job.precision, "BF16"),
        "launches": GRAPHS[job.graphs],
        "communication": "overlapped" if hidden else "not overlapped",
    }


def model(flavor: Flavor) -> str | None:
    """The published name of a model of these sizes."""

    def sizes(f: Flavor) -> tuple[int, ...]:
        return f.n_layers, f.dim, f.moe_hidden_dim, f.num_experts, f.top_k

    return next((name for name, known in PUBLISHED.items() if sizes(known) == sizes(flavor)), None)


def half_width(errors: Sequence[float]) -> float:
    """The size that 80 % of errors do not exceed, rounded up to a thousandth."""
    sizes = sorted(abs(error) for error in errors)
    return math.ceil(1000 * sizes[math.ceil(0.8 * len(sizes)) - 1]) / 1000


def by_group(errors: Sequence[tuple[Job, float]]) -> dict[str, list[float]]:
    """{"kind: group": errors of its runs}, largest groups first."""
    found: dict[str, list[float]] = {}
    for job, error in errors:
        for kind, group in groups(job).items():
            found.setdefault(f"{kind}: {group}", []).append(error)
    kinds = list(dict.fromkeys(name.split(":")[0] for name in found))
    return dict(sorted(found.items(), key=lambda item: (kinds.index(item[0].split(":")[0]), -len(item[1]))))


def of(job: Job) -> tuple[tuple[float, float], str]:
    """(80 % band of measured over predicted - 1, whose it is)."""
    known: dict[str, Any] = constants.bands()
    mine = [f"{kind}: {group}" for kind, group in groups(job).items()]
    enough = [name for name in mine if name in known and known[name]["runs"] >= ENOUGH]
    if not enough:
        return constants.band(), "all published runs"
    widest = max(enough, key=lambda name: known[name]["half"])
    half = known[widest]["half"]
    return (-half, half), f"the {known[widest]['runs']} published runs with {widest}"
