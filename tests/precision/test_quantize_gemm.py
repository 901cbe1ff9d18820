"""What the three GEMMs make of quantized operands, against float64 and the bound that the formats imply."""

import pytest
import torch
from torch import Tensor

from tests.precision import reference
from tests.precision.test_quantize import as_numpy, factor_of
from titan_moe.precision import formats
from titan_moe.precision.quantize import round_trip
from titan_moe.precision.recipes import RECIPES, Format


def element_error(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """The most that a number of `x` may be off: half a grid step, a whole one by chance, no step finer than that of the
    least normal element; and what an E4M3 scale below 2^-6, which is rounded to multiples of 2^-9, may cut off."""
    element = formats.ELEMENTS[fmt.element]
    scales = reference.quantized(as_numpy(x), fmt, axis)
    half_step = (2.0 if fmt.stochastic else 1.0) * 2.0 ** -(element.mantissa + 1)
    least = torch.from_numpy(2.0**element.min_exponent * scales.block_scale * scales.tensor_scale)
    cut = element.limit * 2.0**-10 * torch.from_numpy(scales.tensor_scale) if fmt.two_level else 0.0
    rounding = 1 + 2.0**-20  # of fp32 products with scales that are no powers of two
    return half_step * torch.maximum(x.abs().double(), least) * rounding + cut


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_gemm_is_as_exact_as_its_formats(recipe, capsys):
    """Every number of every operand, and every output of the three GEMMs, against float64 and within the bound that
    follows from the formats: |a b - a' b'| <= sum |a| db + da |b| + da db."""
    generator = torch.Generator().manual_seed(0)
    rows, width_in, width_out = 256, 384, 128
    x, w, g = (
        torch.randn(s, generator=generator) for s in ((rows, width_in), (width_out, width_in), (rows, width_out))
    )
    gemms = {
        "forward": ((x, recipe.forward_x, -1), (w, recipe.forward_w, -1)),
        "dgrad": ((g, recipe.dgrad_g, -1), (w, recipe.dgrad_w, -2)),
        "wgrad": ((g, recipe.wgrad_g, -2), (x, recipe.wgrad_x, -2)),
    }
    for name, operands in gemms.items():
        sides = []  # of each operand: high precision, what the GEMM sees, magnitudes and bounds; contracted axis last
        for operand, fmt, axis in operands:
            seen = round_trip(operand, fmt, axis, generator=generator)
            numbers = seen.values.double() * factor_of(seen)
            transformed = formats.hadamard(operand, 16, axis) if fmt.hadamard else operand
            bound = element_error(transformed, fmt, axis)
            assert bool(((numbers - transformed.double()).abs() <= bound).all()), (name, fmt)
            side = (operand.double(), numbers, transformed.double().abs(), bound)
            sides.append(side if axis == -1 else tuple(part.T for part in side))
        (a, a_seen, a_abs, da), (b, b_seen, b_abs, db) = sides
        exact = a @ b.T
        error, allowed = (a_seen @ b_seen.T - exact).abs(), a_abs @ db.T + da @ b_abs.T + da @ db.T
        assert bool((error <= allowed + 1e-5).all())  # 1e-5: of a transform in fp32
        relative, share = float(error.norm() / exact.norm()), float((error / allowed).max())
        with capsys.disabled():
            print(
                f"\n{recipe.name:11} {name:7} error / result {relative:.4f}, largest error / bound {share:.3f}", end=""
            )
