"""Which recipe runs where: `python -m scripts.precision_table` renews the table in docs/precision.md.

Nothing in it is written by hand: it asks titan_moe/precision/support.py, as the refusals do. So it can be out of date,
which tests/precision/test_support.py notices, but not wrong.
"""

from pathlib import Path

from titan_moe.precision import support
from titan_moe.precision.support import ALL_RECIPES, LOW_PRECISION, MULTIPLES, Capability
from titan_moe.precision.support import Path as Way

PAGE = Path("docs/precision.md")
START, END = "<!-- python -m scripts.precision_table -->\n", "<!-- end -->\n"
GPUS: dict[str, Capability] = {
    "A100, 8.0": (8, 0),
    "L40S, 8.9": (8, 9),
    "H100, H200, 9.0": (9, 0),
    "B200, GB200, 10.0": (10, 0),
    "B300, GB300, 10.3": (10, 3),
    "RTX Blackwell, 12.0": (12, 0),
}


def grouped(recipe: str, capability: Capability) -> str:
    """Of experts, by which path."""
    if not (host := support.find(recipe, "host splits", capability)):
        return "no"
    device = support.find(recipe, "device splits", capability)
    how = f" ({host.note})" if host.note else ""
    return f"yes{how}, {support.cublaslt_version(device.cublaslt)}" if device else f"yes{how}, host"


def single(recipe: str, path: Way, capability: Capability) -> str:
    row = support.find(recipe, path, capability)
    return "no" if row is None else f"yes ({row.note})" if row.note else "yes"


def table() -> str:
    heads = ["", "emulated", *GPUS]
    rows = [
        *([f"linear layers, {r}", "yes", *(single(r, "linears", c) for c in GPUS.values())] for r in LOW_PRECISION),
        *(
            [f"experts, {r}", "not needed" if r == "bf16" else "yes", *(grouped(r, c) for c in GPUS.values())]
            for r in ALL_RECIPES
        ),
        ["`te_fused`, mxfp8", "no", *(single("mxfp8", "te_fused", c) for c in GPUS.values())],
        ["`te_ep_payload`, mxfp8", "no", *(single("mxfp8", "payload", c) for c in GPUS.values())],
    ]
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    widths = ", ".join(
        f"{recipe} {MULTIPLES['linears'][recipe]} ({MULTIPLES['device splits'][recipe]})" for recipe in LOW_PRECISION
    )
    return "\n".join(
        [
            *lines,
            "",
            "A version is that of cuBLASLt from which on experts do not make the host wait. With an older one, and",
            'where it says "host", the host reads the slab sizes once per layer. Widths of matrices must be multiples',
            f"of (in brackets: for experts whose host does not wait) {widths}.",
        ]
    )


def renewed(page: str) -> str:
    """The page with its generated part made again."""
    before, rest = page.split(START)
    return f"{before}{START}{table()}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
