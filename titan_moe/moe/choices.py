"""Which backends run, and why: what "auto" means, and what a backend that was asked for lacks here."""

from collections.abc import Iterable

from titan_moe.runtime import DEVICE_TYPE

import torch

from titan_moe.moe import te, te_experts, te_fused, te_quantize
from titan_moe.moe.experts import grouped_mm_problem
from titan_moe.precision import support
from titan_moe.precision.recipes import RECIPES

# Slab sizes: what tensor cores and TE's grouped GEMM want, and what makes a CPU meet few kernel shapes.
ALIGNMENT = 16 if DEVICE_TYPE == "cpu" else 128


def slab_alignment(experts: str, recipe: str | None = None) -> int:
    """Slab sizes are multiples of it, for an experts backend as `choose_experts` gave it and a recipe that quantizes
    its GEMMs. All of these are powers of two."""
    backend = te_fused.ALIGNMENT if experts == "te_fused" else ALIGNMENT
    if recipe is None:
        return backend
    return max(backend, RECIPES[recipe].alignment, te_quantize.ALIGNMENT if experts == "te" else 1)


def choose_dispatcher(name: str, ranks: int) -> tuple[str, str]:
    """(dispatcher, why) for the configured name and the number of expert-parallel ranks."""
    if name != "auto":
        return name, "as configured"
    if ranks == 1:
        return "local", "one expert-parallel rank"
    return "dedup", f"sends a token once to each of the {ranks} expert-parallel ranks, not once per expert"


def choose_experts(
    name: str,
    device: str,
    dtype: torch.dtype,
    dim: int,
    hidden: int,
    local_experts: int = 1,
    recipe: str | None = None,
    quantizer: str = "auto",
) -> tuple[str, str]:
    """(experts backend, why) for experts of these sizes, so many on a rank, whose GEMMs `recipe` quantizes if it is
    given, by what precision.backend says. Raises ValueError for a backend that cannot compute them."""
    problem = grouped_mm_problem(device, dtype, dim, hidden)
    portable = "loop" if problem else "grouped_mm"
    if recipe is not None and name in ("auto", "te"):
        return _choose_quantized(name, dtype, dim, hidden, local_experts, recipe, quantizer, portable)
    if name == "auto":
        return ("grouped_mm", "one grouped GEMM for all experts") if problem is None else ("loop", problem)
    if name == "grouped_mm" and problem is not None:
        raise ValueError(f'moe.experts = "grouped_mm": {problem}; available here: "loop"')
    if name == "te":
        if problem := te_experts.problem(te.facts(), dtype):
            raise ValueError(f'moe.experts = "te": {problem}; available here: "{portable}"')
        return name, f"as configured; {te_experts.how(te.facts(), dtype, dim, hidden)}"
    if name == "te_fused":
        if said := te_fused.problems(te.facts(), dtype, dim, hidden, local_experts):
            raise ValueError(f'moe.experts = "te_fused": {"; ".join(said)}; available here: "{portable}"')
        if recipe != te_fused.RECIPE:
            raise ValueError(f'moe.experts = "te_fused": computes in mxfp8; set precision.recipe = "{te_fused.RECIPE}"')
        return name, "as configured"
    return name, "as configured" if recipe is None else f"as configured; {recipe} emulated"


def _choose_quantized(
    name: str,
    dtype: torch.dtype,
    dim: int,
    hidden: int,
    local_experts: int,
    recipe: str,
    quantizer: str,
    portable: str,
) -> tuple[str, str]:
    """`choose_experts` where Transformer Engine or an emulation on `portable` quantizes."""
    problem = te_experts.recipe_problem(te.facts(), RECIPES[recipe], dtype, dim, hidden, local_experts)
    if name == "te" and problem is not None:
        raise ValueError(f'moe.experts = "te": {problem}; available here: "{portable}", which emulates {recipe}')
    by, why = ("te", "as configured") if name == "te" else support.choose(quantizer, problem)
    if by == "emulated":
        return portable, f"{recipe} emulated: {why}"
    return "te", f"{recipe}: {why}; {te_experts.how(te.facts(), dtype, dim, hidden, RECIPES[recipe])}"


def choose_quantizer(backend: str, recipe: str, dtype: torch.dtype, widths: Iterable[int]) -> tuple[str, str]:
    """(who quantizes the linear layers, why): "te" or "emulated", for matrices of these widths. Raises ValueError where
    precision.backend asks for "te" and it cannot."""
    problem = te.problem(te.facts()) or support.te_problem(recipe, "linears", te.facts().capability)
    if problem is None and dtype != torch.bfloat16:
        problem = f"Transformer Engine quantizes from bfloat16 here, not from {dtype}"
    return support.choose(backend, problem or support.width_problem(recipe, "linears", *widths))


def experts_sync_problem(
    name: str, device: str, dtype: torch.dtype, dim: int, hidden: int, recipe: str | None = None
) -> str | None:
    """Why the host waits for the device in the experts backend `name`, as `choose_experts` gave it; None: never."""
    if name == "te":
        return te_experts.device_splits_problem(te.facts(), dtype, dim, hidden, RECIPES[recipe] if recipe else None)
    if name == "loop" or device == "cpu":
        return "the host cuts the rows into slabs, so it has to know their sizes"
    return None
