"""MXFP8 by the Triton kernel, run by Triton's interpreter on a CPU: the bits of quantize.py, behind SwiGLU too, and
experts that compute with it what they compute without. test_triton_quantize.py runs these with TRITON_INTERPRET=1,
which Triton reads as it is imported."""

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor

from tests.moe.test_experts import problem
from titan_moe.moe.experts import grouped_gemm, swiglu
from titan_moe.moe.quantized_experts import grouped_mm
from titan_moe.precision import gemm, quantize, triton_quantize
from titan_moe.precision.recipes import RECIPES

MXFP8 = RECIPES["mxfp8"]
FORMAT = MXFP8.forward_x


def wide() -> Tensor:
    """[64, 160] bf16 of very different sizes: more than a tile across, and not a whole number of them."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-26, 26, (64, 160), generator=generator)
    return (torch.randn(64, 160, generator=generator) * torch.exp2(exponents)).bfloat16()


def special() -> Tensor:
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[5, 40], x[6, 41], x[7], x[:, 70] = float("nan"), float("inf"), -float("inf"), -0.0, 0.0
    return x.bfloat16()


def boundaries() -> Tensor:
    """Largest of a block at 448 x 2^n, and at the next bf16 number above, over all exponents that bf16 has."""
    powers = torch.exp2(torch.arange(-140, 116)).float()
    return torch.cat([powers * 448, powers * 450, powers * 1.0, -powers * 0.99]).repeat(32, 1).bfloat16()


INPUTS = {"wide": wide, "special": special, "boundaries": boundaries, "zeros": lambda: torch.zeros(32, 32).bfloat16()}


def bits(stored: Tensor) -> Tensor:
    """Codes, all NaN alike: which sign a processor gives them is its own affair."""
    codes = stored.view(torch.uint8)
    return torch.where(stored.float().isnan(), 0xFF, codes)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", INPUTS)
def test_the_kernel_gives_the_bits_of_quantize(name, axis):
    x = INPUTS[name]()
    expected, stored = quantize.quantize(x, FORMAT, axis), triton_quantize.quantize(x, axis)
    assert stored.scale.shape == expected.scale.shape and stored.data.shape == expected.data.shape
    assert torch.equal(bits(stored.data), bits(expected.data))
    assert torch.equal(bits(stored.scale), bits(expected.scale))
    values = quantize.round_trip(x, FORMAT, axis).values
    torch.testing.assert_close(triton_quantize.round_trip(x, axis), values, rtol=0, atol=0, equal_nan=True)


def test_blocks_of_weights_end_with_their_expert():
    w_EOI = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    for axis in (-1, -2):
        assert torch.equal(triton_quantize.round_trip(w_EOI, axis), quantize.round_trip(w_EOI, FORMAT, axis).values)


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_is_quantized_as_it_is_made(weighted):
    """As experts.swiglu and then quantize.py; on this CPU too but for numbers that are on an edge of bf16."""
    generator = torch.Generator().manual_seed(3)
    gate_up_R2F = (2 * torch.randn(64, 320, generator=generator)).bfloat16()
    weight_R = torch.rand(64, generator=generator) if weighted else None
    h_RF = swiglu(gate_up_R2F, weight_R, grouped_gemm(torch.tensor([64])))
    expected = quantize.round_trip(h_RF, FORMAT, -1).values
    found = triton_quantize.swiglu_round_trip(gate_up_R2F, weight_R)
    assert (found != expected).double().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=2**-3, atol=0)


def test_experts_compute_the_same_with_the_kernel(monkeypatch):
    """Output and every gradient, rows behind the slabs being NaN; and a kernel quantizes every operand."""
    *tensors, _ = problem([32, 0, 64], torch.bfloat16, tail=32, D=64, F=32)
    counts_E, grad_RD = torch.tensor([32, 0, 64]), torch.randn(128, 64).bfloat16()
    launched = []
    launch = triton_quantize._launch

    def run(**settings) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:4]]
        x_RD, weight_R, w13_EF2D, w2_EDF = leaves
        y_RD = grouped_mm(x_RD, counts_E, weight_R, w13_EF2D, w2_EDF, recipe=MXFP8, **settings)[:96]
        return [y_RD, *torch.autograd.grad(y_RD, leaves, grad_RD[:96])]

    expected = {late: run(late=late) for late in (False, True)}
    monkeypatch.setattr(gemm, "_kernels", lambda x, fmt: triton_quantize if triton_quantize.fits(x, fmt) else None)
    monkeypatch.setattr(
        triton_quantize, "_launch", lambda *args, **kwargs: (launched.append(kwargs), launch(*args, **kwargs))
    )
    for late, tensors_without in expected.items():
        launched.clear()
        for found, wanted in zip(run(late=late), tensors_without):
            assert torch.equal(found[:96], wanted[:96])
        # x by rows, and columns to keep; h; both weights by rows and columns; both gradients, and h again, by columns.
        assert len(launched) == 2 + 1 + 4 + 5 and sum(kwargs["swiglu"] for kwargs in launched) == 1
