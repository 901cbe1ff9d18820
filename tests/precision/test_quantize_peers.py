"""Bit for bit what torchao's emulation and Transformer Engine's own Python references make of the same tensors."""

from dataclasses import replace

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from tests.precision import inputs, te_reference
from titan_moe.precision import formats
from titan_moe.precision.quantize import quantize, round_trip
from titan_moe.precision.recipes import RECIPES, Format

MXFP8, NVFP4, CURRENT = RECIPES["mxfp8"], RECIPES["nvfp4"], RECIPES["fp8_current"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def codes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@DTYPES
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mxfp8_equals_torchao(element, dtype):
    """Its mode RCEIL. It takes the ceiling of an fp32 logarithm, which far from 1 does not see that a number is a bit
    more than a power of two; there its scale is half of what its definition says, and elements saturate. In those
    blocks, and no others, ours is the double."""
    fmt = Format(element, "e8m0", (1, 32))
    limit = formats.ELEMENTS[element].limit
    for kind in inputs.KINDS:
        x = inputs.tensor(kind, 128, 256, dtype)
        scale, data = to_mx(x, formats.FLOAT8[element], 32, ScaleCalculationMode.RCEIL)
        stored = quantize(x, fmt, -1)
        amax = x.float().abs().unflatten(-1, (-1, 32)).amax(-1).double()
        too_small = scale.float().double() * limit < amax
        assert kind == "boundaries" or not too_small.any()
        assert torch.equal(codes(stored.scale), codes(scale) + too_small), kind
        same = ~too_small.repeat_interleave(32, -1)
        assert torch.equal(codes(stored.data)[same], codes(data)[same]), kind
        back = to_dtype(data, scale, formats.FLOAT8[element], 32, dtype)
        assert torch.equal(stored.dequantize(dtype)[same], back[same]), kind
        assert torch.equal(round_trip(x, fmt, -1).values[same], back[same]), kind


@DTYPES
def test_nvfp4_equals_torchao(dtype):
    """Where both mean the same: torchao divides by the tensor's scale where Transformer Engine multiplies with its
    reciprocal, so that is made a power of two; and it has no scales below 2^-6."""
    for kind in ("normal", "tiles", "ties"):
        x = inputs.tensor(kind, 128, 256, dtype)
        x[0, 0] = 2688 * 2.0**-4  # more than any other
        scale, data = nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
        stored = quantize(x, NVFP4.forward_x, -1)
        assert float(stored.tensor_scale) == 2.0**-4
        has = scale.float() > 2.0**-6
        assert torch.equal(codes(stored.scale)[has], codes(scale)[has])
        numbers = has.repeat_interleave(8, -1)
        assert torch.equal(stored.data[numbers], data[numbers])
        assert has.float().mean() > 0.3


@DTYPES
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=["1x16", "16x16"])
def test_nvfp4_equals_transformer_engine(tile, dtype):
    """Rows and columns, with and without tiles, scales and the tensor's largest number included."""
    te = te_reference.quantizers("nvfp4")
    quantizer = te.NVFP4QuantizerRef(te.reference_utils.Fp4Formats.E2M1, quant_tile_shape=tile)
    for kind in inputs.KINDS:
        if kind == "tiny":
            continue  # its fp32 scales overflow differently from the kernel's
        x = inputs.tensor(kind, 128, 256, dtype)
        theirs = quantizer.quantize(x)
        for axis, data, scale, amax in (
            (-1, theirs.data, theirs.scale, theirs.global_amax_row),
            (-2, theirs.data_t, theirs.scale_t, theirs.global_amax_col),
        ):
            stored = quantize(x, replace(NVFP4.forward_x, block=tile), axis)
            own_scale, own_data = (stored.scale, stored.data) if axis == -1 else (stored.scale.mT, stored.data.mT)
            assert torch.equal(codes(own_scale).repeat_interleave(tile[0], 0), codes(scale)), kind
            assert torch.equal(plus_zero(own_data), plus_zero(data)), kind
            assert float(stored.tensor_scale) == pytest.approx(float(amax) / 2688, rel=2e-7)


def plus_zero(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 codes without the sign of zeros, which the reference does not always keep."""
    low, high = packed & 15, packed >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


def test_the_hadamard_transform_equals_transformer_engine():
    """With its signs, on columns only; small whole numbers, which every order of adding up gives exactly."""
    te = te_reference.quantizers("nvfp4")
    quantizer = te.NVFP4QuantizerRef(te.reference_utils.Fp4Formats.E2M1, with_rht=True)
    x = torch.randint(-6, 7, (128, 64), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 4
    theirs = quantizer.quantize(x)
    assert torch.equal(formats.hadamard(x, 16, -2).T, quantizer._apply_rht(x.T.contiguous()))
    assert te.get_wgrad_sign_vector().tolist() == [1 - 2 * (formats.SIGNS >> row & 1) for row in range(16)]
    stored = quantize(x, NVFP4.wgrad_x, -2)
    assert torch.equal(codes(stored.scale.mT), codes(theirs.scale_t))
    assert torch.equal(plus_zero(stored.data.mT), plus_zero(theirs.data_t))
    assert torch.equal(plus_zero(quantize(x, NVFP4.forward_x, -1).data), plus_zero(theirs.data))


@DTYPES
def test_current_scaling_equals_transformer_engine(dtype):
    te = te_reference.quantizers("current_scaling")
    for fmt in (CURRENT.forward_x, CURRENT.dgrad_g):
        quantizer = te.CurrentScalingQuantizerRef(formats.FLOAT8[fmt.element])
        for kind in ("normal", "wide", "tiles", "boundaries", "ties"):
            x = inputs.tensor(kind, 64, 128, dtype)
            data, scale, data_t, _ = quantizer._quantize(x)
            for axis, expected in ((-1, data), (-2, data_t.T)):
                stored = quantize(x, fmt, axis)
                assert torch.equal(codes(stored.data), codes(expected)), kind
                assert float(stored.scale) == float(scale), kind


@DTYPES
def test_block_scaling_equals_transformer_engine(dtype):
    """Its scale of a block, from its reference of that function."""
    te = te_reference.quantizers("current_scaling")
    fmt = RECIPES["fp8_block"].forward_x
    for kind in inputs.KINDS:
        if kind == "tiny":
            continue  # the reference's own assertion
        x = inputs.tensor(kind, 64, 256, dtype)
        amax = x.float().abs().unflatten(-1, (-1, 128)).amax(-1)
        encode, decode, _ = te._scale_from_amax_tensor(dtype, amax, torch.float8_e4m3fn, eps=0.0, pow_2_scales=True)
        stored = quantize(x, fmt, -1)
        assert torch.equal(stored.scale, decode), kind
        elements = x.float() * encode.repeat_interleave(128, -1)
        assert torch.equal(codes(stored.data), codes(elements.to(torch.float8_e4m3fn))), kind


def test_recipes_are_transformer_engines_defaults():
    te = te_reference.recipes()
    element = {te.Format.E4M3: ("e4m3", "e4m3"), te.Format.HYBRID: ("e4m3", "e5m2"), te.Format.E2M1: ("e2m1", "e2m1")}

    current, own = te.Float8CurrentScaling(), CURRENT
    assert (own.forward_x.element, own.dgrad_g.element) == element[current.fp8_format]
    assert (own.forward_w.element, own.wgrad_x.element, own.wgrad_g.element) == ("e4m3", "e4m3", own.dgrad_g.element)
    assert not current.fp8_quant_fwd_inp.power_2_scale and own.forward_x.scale == "fp32"

    block, own = te.Float8BlockScaling(), RECIPES["fp8_block"]
    assert (own.forward_x.element, own.dgrad_g.element) == element[block.fp8_format]
    dims = (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim)
    assert dims == tuple({(1, 128): 1, (128, 128): 2}[f.block] for f in (own.forward_x, own.forward_w, own.dgrad_g))
    assert block.fp8_quant_fwd_inp.power_2_scale and own.forward_x.scale == "pow2"

    mx, own = te.MXFP8BlockScaling(), MXFP8
    assert (own.forward_x.element, own.dgrad_g.element) == element[mx.fp8_format]
    assert not mx.enable_2d_quantization and own.forward_w.block == (1, 32)

    nvfp4, own = te.NVFP4BlockScaling(), NVFP4
    assert (own.forward_x.element, own.dgrad_g.element) == element[nvfp4.fp4_format]
    for params, row, column in (  # the transform is on columns only
        (nvfp4.fp4_quant_fwd_inp, own.forward_x, own.wgrad_x),
        (nvfp4.fp4_quant_fwd_weight, own.forward_w, own.dgrad_w),
        (nvfp4.fp4_quant_bwd_grad, own.dgrad_g, own.wgrad_g),
    ):
        assert (row.hadamard, column.hadamard) == (0, 16 * params.random_hadamard_transform)
        assert row.stochastic == column.stochastic == params.stochastic_rounding
        assert row.block == column.block == ((16, 16) if params.fp4_2d_quantization else (1, 16))
    assert not nvfp4.row_scaled_activation and nvfp4.nvfp4_4over6 == "none"
