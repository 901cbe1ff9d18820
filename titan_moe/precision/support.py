"""Which recipe runs on which GPU, and by which of Transformer Engine's (TE's) paths: plain data, imports no torch.

The emulated backend runs every recipe anywhere. TE runs a recipe where the tensor cores have its format, or where TE
knows how to make do with another (FP8 with scales per block is MXFP8 on Blackwell), and not by every path:

    linears         general_gemm: one matrix
    host splits     general_grouped_gemm: a GEMM per expert, for which the host reads the slab sizes
    device splits   one grouped GEMM of cuBLASLt, of which the host knows nothing; needs a new cuBLASLt
    te_fused        cuDNN's kernels, with SwiGLU and its quantization inside the GEMM
    payload         quantized rows on the wire of moe.dispatcher = "te_ep"

TABLE is the one place that says so. The refusals at run time and before it ask it, and the table in docs/precision.md
is printed from it. It follows TE 2.20.2: `check_recipe_support` of pytorch/quantization.py,
`is_module_grouped_tensor_path_supported` of pytorch/module/grouped_linear.py and pytorch/ep.py.
"""

from dataclasses import dataclass, replace
from typing import Literal

from titan_moe.precision.recipes import RECIPES

Capability = tuple[int, int]
"""Compute capability, as in (9, 0) for Hopper"""
Path = Literal["linears", "host splits", "device splits", "te_fused", "payload"]

LOW_PRECISION = tuple(RECIPES)
ALL_RECIPES = ("bf16", *LOW_PRECISION)
MAX_EXPERTS = 64
"""Of a rank: matrices that TE takes in one list, and quantizes in one call"""


@dataclass(frozen=True)
class Support:
    """That `path` runs `recipe` on GPUs of compute capability `oldest` up to, but without, `before`."""

    recipe: str
    path: Path
    oldest: Capability
    before: Capability | None = None
    """None: no end is known"""
    cublaslt: int = 0
    """Oldest version that has it, as in 130400 for 13.4.0"""
    note: str = ""


_MATRICES = [
    Support("bf16", "linears", (8, 0)),
    Support("fp8_current", "linears", (8, 9)),
    Support("fp8_block", "linears", (9, 0), (10, 0)),
    Support("fp8_block", "linears", (10, 0), note="as MXFP8"),
    Support("mxfp8", "linears", (10, 0), (12, 0)),
    Support("nvfp4", "linears", (10, 0)),
]
TABLE = [
    *_MATRICES,
    *(replace(row, path="host splits") for row in _MATRICES),
    Support("bf16", "device splits", (9, 0), (10, 0), 130400),
    Support("bf16", "device splits", (10, 0), (11, 1), 130300),
    Support("fp8_current", "device splits", (9, 0), (10, 0), 130500),
    Support("fp8_current", "device splits", (10, 0), (11, 1), 130300),
    Support("fp8_block", "device splits", (9, 0), (10, 0), 130600),
    Support("mxfp8", "device splits", (10, 0), (11, 1), 130300),
    Support("nvfp4", "device splits", (10, 0), (11, 1), 130300),
    Support("mxfp8", "te_fused", (10, 0), (10, 7)),
    Support("mxfp8", "payload", (10, 0), (12, 0)),
]

MULTIPLES: dict[Path, dict[str, int]] = {
    "linears": {recipe.name: recipe.multiple for recipe in RECIPES.values()} | {"nvfp4": 32},
    "device splits": {"bf16": 8, "fp8_current": 16, "fp8_block": 128, "mxfp8": 128, "nvfp4": 128},
}
"""Widths of matrices must be multiples of it: rows of 16 bytes, whole blocks, and, with the scales of all experts in
one tensor, whole tiles of scales"""

CAPABILITY: dict[str, Capability] = {
    "ampere": (8, 0),
    "hopper": (9, 0),
    "blackwell": (10, 0),
    "blackwell_ultra": (10, 3),
}
"""Of the planner's architectures (plan/hardware.py); the others are not NVIDIA's, and TE does not run there"""


def find(recipe: str, path: Path, capability: Capability) -> Support | None:
    """The row of TABLE that holds on this GPU; None: TE cannot."""
    for row in TABLE:
        above = row.before is None or capability < row.before
        if (row.recipe, row.path) == (recipe, path) and row.oldest <= capability and above:
            return row
    return None


def has(path: Path, capability: Capability) -> list[str]:
    """The recipes that TE runs by this path on this GPU."""
    return [recipe for recipe in ALL_RECIPES if find(recipe, path, capability)]


def te_problem(recipe: str, path: Path, capability: Capability | None) -> str | None:
    """Why TE cannot run `recipe` by `path` on this GPU (None: there is none), or None if it can."""
    if capability is None:
        return "Transformer Engine needs a GPU of NVIDIA"
    if find(recipe, path, capability):
        return None
    there = ", ".join(has(path, capability)) or "none"
    return (
        f"Transformer Engine runs {recipe} on compute capability {spans(recipe, path)}, and this GPU has "
        f"{dotted(capability)}, where it runs {there}"
    )


def width_problem(recipe: str, path: Path, *widths: int) -> str | None:
    """Why matrices of these widths cannot be multiplied by `path`, or None. "host splits" is as "linears"."""
    multiple = MULTIPLES["device splits" if path == "device splits" else "linears"].get(recipe, 1)
    wrong = [f"{width} = {width // multiple} x {multiple} + {width % multiple}" for width in widths if width % multiple]
    return f"{recipe} wants widths that are multiples of {multiple}, but {', '.join(wrong)}" if wrong else None


def experts_problem(local_experts: int) -> str | None:
    """Why TE cannot quantize the experts of a rank, or None."""
    if local_experts <= MAX_EXPERTS:
        return None
    return (
        f"Transformer Engine quantizes {MAX_EXPERTS} matrices in one call, and a rank has {local_experts} "
        "experts; raise parallelism.expert_parallel_degree"
    )


def choose(backend: str, problem: str | None) -> tuple[str, str]:
    """(who quantizes, why) of precision.backend, with what keeps TE from it here. Raises ValueError where TE was asked
    for and cannot."""
    if backend == "te" and problem is not None:
        raise ValueError(
            f'precision.backend = "te": {problem}; choose another recipe, or "emulated", which rounds alike and saves '
            "no time"
        )
    if backend == "auto":
        return ("te", "Transformer Engine has it here") if problem is None else ("emulated", problem)
    return backend, "as configured"


def dotted(numbers: tuple[int, ...]) -> str:
    """(10, 3) is 10.3."""
    return ".".join(map(str, numbers))


def cublaslt_version(number: int) -> str:
    """130400 is 13.4.0."""
    return dotted((number // 10000, number // 100 % 100, number % 100))


def spans(recipe: str, path: Path) -> str:
    """The compute capabilities: "10.0 to 11.x", "8.9 and newer"."""
    rows = [row for row in TABLE if (row.recipe, row.path) == (recipe, path)]
    oldest, before = dotted(min(row.oldest for row in rows)), rows[-1].before
    if before is None:
        return f"{oldest} and newer"
    major, minor = before
    return f"{oldest} to {major}.{minor - 1}" if minor else f"{oldest} to {major - 1}.x"
