"""The Triton kernel that quantizes to MXFP8, on the GPU: the bits of quantize.py there, and what follows SwiGLU."""

import titan_moe.runtime  # noqa: F401

import pytest
import torch

from tests.precision.triton_interpreted import FORMAT, INPUTS, bits
from titan_moe.moe.experts import grouped_gemm, swiglu
from titan_moe.precision import quantize, triton_quantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", INPUTS)
def test_the_kernel_gives_the_bits_of_quantize(name, axis):
    x = INPUTS[name]().cuda()
    assert triton_quantize.takes(x, FORMAT)
    expected, stored = quantize.quantize(x, FORMAT, axis), triton_quantize.quantize(x, axis)
    assert torch.equal(bits(stored.data), bits(expected.data))
    assert torch.equal(bits(stored.scale), bits(expected.scale))
    values = quantize.round_trip(x, FORMAT, axis).values
    torch.testing.assert_close(triton_quantize.round_trip(x, axis), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_is_quantized_as_it_is_made(weighted):
    """But for numbers that are on an edge of bf16, where the last bit of an exponential decides."""
    gate_up_R2F = (2 * torch.randn(256, 4096, device="cuda")).bfloat16()
    weight_R = torch.rand(256, device="cuda") if weighted else None
    h_RF = swiglu(gate_up_R2F, weight_R, grouped_gemm(torch.tensor([256], device="cuda")))
    expected = quantize.round_trip(h_RF, FORMAT, -1).values
    found = triton_quantize.swiglu_round_trip(gate_up_R2F, weight_R)
    assert (found != expected).double().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=2**-3, atol=0)
