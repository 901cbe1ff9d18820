"""Which backends run, and why: what "auto" means, and what a backend that was asked for lacks here."""

from titan_moe.runtime import DEVICE_TYPE

import torch

from titan_moe.moe import te, te_experts, te_fused
from titan_moe.moe.experts import grouped_mm_problem
from titan_moe.precision.recipes import RECIPES

# Slab sizes: what tensor cores and TE's grouped GEMM want, and what makes a CPU meet few kernel shapes.
ALIGNMENT = 16 if DEVICE_TYPE == "cpu" else 128


def slab_alignment(experts: str, recipe: str | None = None) -> int:
    """Slab sizes are multiples of it, for an experts backend as `choose_experts` gave it and a recipe that quantizes
    its GEMMs. All of these are powers of two."""
    backend = te_fused.ALIGNMENT if experts == "te_fused" else ALIGNMENT
    return max(backend, RECIPES[recipe].alignment) if recipe else backend


def choose_dispatcher(name: str, ranks: int) -> tuple[str, str]:
    """(dispatcher, why) for the configured name and the number of expert-parallel ranks."""
    if name != "auto":
        return name, "as configured"
    if ranks == 1:
        return "local", "one expert-parallel rank"
    return "dedup", f"sends a token once to each of the {ranks} expert-parallel ranks, not once per expert"


def choose_experts(
    name: str, device: str, dtype: torch.dtype, dim: int, hidden: int, local_experts: int = 1
) -> tuple[str, str]:
    """(experts backend, why) for experts of these sizes, so many on a rank. Raises ValueError for a backend that cannot
    compute them."""
    problem = grouped_mm_problem(device, dtype, dim, hidden)
    if name == "auto":
        return ("grouped_mm", "one grouped GEMM for all experts") if problem is None else ("loop", problem)
    portable = "loop" if problem else "grouped_mm"
    if name == "grouped_mm" and problem is not None:
        raise ValueError(f'moe.experts = "grouped_mm": {problem}; available here: "loop"')
    if name == "te":
        if problem := te_experts.problem(te.facts(), dtype):
            raise ValueError(f'moe.experts = "te": {problem}; available here: "{portable}"')
        return name, f"as configured; {te_experts.how(te.facts(), dtype, dim, hidden)}"
    if name == "te_fused":
        if said := te_fused.problems(te.facts(), dtype, dim, hidden, local_experts):
            raise ValueError(f'moe.experts = "te_fused": {"; ".join(said)}; available here: "{portable}"')
        return name, "as configured; GEMMs in MXFP8"
    return name, "as configured"


def experts_sync_problem(name: str, device: str, dtype: torch.dtype, dim: int, hidden: int) -> str | None:
    """Why the host waits for the device in the experts backend `name`, as `choose_experts` gave it; None: never."""
    if name == "te":
        return te_experts.device_splits_problem(te.facts(), dtype, dim, hidden)
    if name == "loop" or device == "cpu":
        return "the host cuts the rows into slabs, so it has to know their sizes"
    return None
