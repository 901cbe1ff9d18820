"""Which number format each operand of each GEMM gets, recipe by recipe: plain data, imports no torch.

A linear layer y = x w^T has three GEMMs, and each contracts another axis:

    forward   y_RO = x_RI  w_OI^T      over I: x along I, w along I
    dgrad     dx_RI = g_RO  w_OI       over O: g along O, w along O
    wgrad     dw_OI = g_RO^T x_RI      over R: g along R, x along R

Scales of a run of numbers must lie along the contracted axis, or a dot product could not take them out of its partial
sums. So x, w and g are each quantized twice, from the high-precision tensor both times, and the two results differ.
Only a scale per tensor or per square block serves both.

The recipes are Transformer Engine 2.20.2's with their defaults (transformer_engine/common/recipe/__init__.py):
Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling and NVFP4BlockScaling. How scales are computed and rounded
is in formats.py; that of MXFP8 differs from the OCP specification.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Format:
    """How one operand is stored.

    `block` is (m, k): m x k numbers share a scale, k along the contracted axis, m along the other. None: one scale for
    the tensor, or for each expert of a grouped operand.

    `scale` is the format of the scales. "fp32": amax becomes the largest element. "pow2": the same, then the scale is
    rounded down to a power of two. "e8m0": a power of two in one byte, rounded so that no element can overflow.
    "e4m3": one byte times one fp32 scale for the tensor or expert.
    """

    element: Literal["e4m3", "e5m2", "e2m1"]
    scale: Literal["fp32", "pow2", "e8m0", "e4m3"]
    block: tuple[int, int] | None = None
    stochastic: bool = False
    """Whether elements are rounded up or down by chance, so that the mean is exact"""
    hadamard: int = 0
    """Size of the Hadamard transform along the contracted axis before quantization; 0: none"""

    @property
    def two_level(self) -> bool:
        """Whether block scales are relative to one fp32 scale for the tensor or expert."""
        return self.scale == "e4m3"


@dataclass(frozen=True)
class Recipe:
    """Formats of activations x, weights w and gradients g in the three GEMMs of a linear layer."""

    name: str
    forward_x: Format
    forward_w: Format
    dgrad_g: Format
    dgrad_w: Format
    wgrad_g: Format
    wgrad_x: Format
    alignment: int
    """Slabs of rows must be multiples of this, so that no scale along the rows spans two experts. Transformer Engine's
    kernels want more: 16 with one scale per tensor, and 128 for nvfp4 and whenever sizes stay on the device"""
    multiple: int
    """Input and output widths of a linear layer must be multiples of this, as GEMMs of GPUs want. A last block that is
    not full is filled up with zeros (gemm.py)"""


def _recipe(name: str, x: Format, w: Format, g: Format, alignment: int, multiple: int) -> Recipe:
    """A recipe whose operands have the same format in both GEMMs that they occur in."""
    return Recipe(name, x, w, g, w, g, x, alignment, multiple)


_CURRENT_E4M3, _CURRENT_E5M2 = Format("e4m3", "fp32"), Format("e5m2", "fp32")
_BLOCK_1, _BLOCK_2 = Format("e4m3", "pow2", (1, 128)), Format("e4m3", "pow2", (128, 128))
_MXFP8 = Format("e4m3", "e8m0", (1, 32))

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("fp8_current", _CURRENT_E4M3, _CURRENT_E4M3, _CURRENT_E5M2, alignment=1, multiple=16),
        _recipe("fp8_block", _BLOCK_1, _BLOCK_2, _BLOCK_1, alignment=128, multiple=16),
        _recipe("mxfp8", _MXFP8, _MXFP8, _MXFP8, alignment=32, multiple=32),
        Recipe(
            "nvfp4",
            forward_x=Format("e2m1", "e4m3", (1, 16)),
            forward_w=Format("e2m1", "e4m3", (16, 16)),
            dgrad_g=Format("e2m1", "e4m3", (1, 16), stochastic=True),
            dgrad_w=Format("e2m1", "e4m3", (16, 16)),
            wgrad_g=Format("e2m1", "e4m3", (1, 16), stochastic=True, hadamard=16),
            wgrad_x=Format("e2m1", "e4m3", (1, 16), hadamard=16),
            alignment=16,
            multiple=16,
        ),
    )
}
