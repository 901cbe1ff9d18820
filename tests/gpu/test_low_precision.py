"""Transformer Engine's (TE's) low-precision experts and linear layers against products of numbers that
precision/quantize.py rounds: each GEMM, on the GPU that is there.

Gradients in nvfp4 are rounded by chance there, so of nvfp4 only the forward is compared.

Shape letters: R rows of the padded slabs, E experts, D model width, F expert hidden width.
"""

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor

from tests.moe.test_te_quantize import COUNTS, D, F, difference, expected_gemms, wild
from titan_moe.moe import te, te_experts
from titan_moe.moe.te_quantize import QuantizedDeviceSplits, QuantizedHostSplits, quantizer
from titan_moe.precision import support
from titan_moe.precision.recipes import RECIPES
from titan_moe.precision.te_linear import TEGemm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tex")]
TOLERANCE = 1e-2  # of one GEMM, whose result is rounded to bf16; a wrong axis is off by half
TE_RECIPES = {
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


def require(name: str, path: support.Path) -> None:
    """Skip the test, with the reason, where TE cannot."""
    found = te.facts()
    why = te_experts.recipe_problem(found, RECIPES[name], torch.bfloat16, D, F, len(COUNTS))
    if path == "device splits" and why is None:
        why = te_experts.device_splits_problem(found, torch.bfloat16, D, F, RECIPES[name])
    if why is not None:
        pytest.skip(why)


def compare(name: str, got: list[Tensor], expected: list[Tensor]) -> None:
    for result, reference in list(zip(got, expected, strict=True))[: 1 if name == "nvfp4" else 3]:
        assert difference(result.cpu(), reference) < TOLERANCE


@pytest.mark.parametrize("path", ["host splits", "device splits"])
@pytest.mark.parametrize("name", RECIPES)
def test_experts(name, path):
    require(name, path)
    recipe, counts, end = RECIPES[name], torch.tensor(COUNTS, device="cuda"), sum(COUNTS)
    x_RD, w_EOI, grad_RO = (
        wild(end + 128, D, seed=1),
        wild(len(COUNTS), 2 * F, D, seed=2),
        wild(end + 128, 2 * F, seed=3),
    )
    x_RD[end:] = grad_RO[end:] = float("nan")
    if path == "host splits":
        gemm = QuantizedHostSplits(counts, recipe, keeps=True)
    else:
        gemm = QuantizedDeviceSplits(counts, (D, 2 * F), recipe, keeps=True)
    y, dx = gemm.forward(x_RD.cuda(), w_EOI.cuda()), gemm.dgrad(grad_RO.cuda(), w_EOI.cuda())
    again, kept = gemm.keep(x_RD.cuda())
    compare(
        name,
        [y[:end], dx[:end], gemm.wgrad(grad_RO.cuda(), again(*kept))],
        expected_gemms(recipe, COUNTS, x_RD, w_EOI, grad_RO),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_linear_layers(name):
    require(name, "linears")
    recipe, gemm = RECIPES[name], TEGemm(RECIPES[name])
    x, w, grad = wild(128, D, seed=1), wild(F, D, seed=2), wild(128, F, seed=3)
    again, kept = gemm.keep(x.cuda())
    got = [gemm.forward(x.cuda(), w.cuda()), gemm.dgrad(grad.cuda(), w.cuda()), gemm.wgrad(grad.cuda(), again(*kept))]
    y, dx, dw = expected_gemms(recipe, [128], x, w[None], grad)
    compare(name, got, [y, dx, dw[0]])


@pytest.mark.parametrize("name", RECIPES)
def test_quantizers_are_those_of_te_recipes(name):
    """That precision/recipes.py says what TE's own defaults are, and our quantizers say that."""
    from transformer_engine.common import recipe as te_recipes
    from transformer_engine.pytorch.quantization import RecipeState

    theirs = getattr(te_recipes, TE_RECIPES[name])()
    made = RecipeState.create(theirs, mode="forward", num_quantizers=2).make_quantizers()
    made += RecipeState.create(theirs, mode="backward", num_quantizers=1).make_quantizers()
    for role, reference in zip(("x", "w", "g"), made):
        own = quantizer(RECIPES[name], role, rows=True, columns=True)
        assert type(own) is type(reference)
        switches = {"internal", "optimize_for_gemm"}
        for key, value in vars(reference).items():
            if key not in switches and not isinstance(value, Tensor):
                assert getattr(own, key) == value, f"{role}: {key}"
