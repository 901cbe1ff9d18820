# pyrefly: ignore-errors
"""MXFP8 in one kernel, with the SwiGLU before it if there is one: what quantize.py does in some twenty, on GPUs.

quantize.py goes over memory once for each of its steps: fp32 copy, magnitudes, largest of a block, scale, scaled copy,
four steps of rounding, scaled back. All of that is one read and one write of a tile that fits into registers:

    read 32 x 128 numbers -> [silu(gate) * up * weight, rounded to bf16] -> blocks of 32 along an axis -> write

Blocks lie along rows or columns, and what is written is either the numbers that the quantized tensor stands for, in
bf16, which an emulated GEMM multiplies, or the tensor itself, elements in E4M3 and scales in E8M0, which is kept for
wgrad. Hardware has its own kernels for that, with SwiGLU inside (moe/te_fused.py); these serve the emulated backend.

The arithmetic is formats.py's, step for step, and gives the same bits: a power of two comes from the bits of a number,
an element is rounded by two additions, its code is cut out of the bits of the result. No cast to a float8 type is used,
which GPUs before Hopper lack. SwiGLU's exponential is the device's, whose last bit in fp32 is its own affair: an h near
the middle between two bf16 numbers may become the other one.

Triton's interpreter (TRITON_INTERPRET=1, before this is imported) runs the kernel on a CPU, which is how tests compare
it with quantize.py. Import this file only where Triton is.

Shape letters: as in moe/experts.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.precision.quantize import Quantized
from titan_moe.precision.recipes import RECIPES, Format

BLOCK = 32
"""Numbers with one scale, and rows of a tile"""
TILE_COLUMNS = 128
FORMAT = RECIPES["mxfp8"].forward_x


def takes(x: Tensor, fmt: Format) -> bool:
    """Whether the kernel can quantize x [..., A, B]: bf16 on a GPU, whole blocks either way."""
    return x.is_cuda and fits(x, fmt)


def fits(x: Tensor, fmt: Format) -> bool:
    """The same but for the device."""
    rows, columns = x.shape[-2:]
    whole = rows % BLOCK == 0 and columns % BLOCK == 0 and x.numel() > 0
    return fmt == FORMAT and x.dtype == torch.bfloat16 and whole


def quantize(x: Tensor, axis: int) -> Quantized:
    """x [A, B] stored in MXFP8 with blocks along `axis`, -1 or -2."""
    data, scale = stored(x, axis)
    return Quantized(data.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), None, FORMAT, axis, None)


# Operators of torch, so that fake tensors know what they return without a kernel.


@torch.library.custom_op("titan_moe::mxfp8_round_trip", mutates_args=())
def round_trip(x: Tensor, axis: int) -> Tensor:
    """x [..., A, B], as MXFP8 with blocks along `axis` stands for it; bf16."""
    out = x.new_empty(x.shape)
    _launch(x, None, out, None, axis=axis, swiglu=False)
    return out


@torch.library.custom_op("titan_moe::mxfp8_stored", mutates_args=())
def stored(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The codes of x's elements, and of its blocks' scales; uint8."""
    data, scale = _empty(x, axis)
    _launch(x, None, data, scale, axis=axis, swiglu=False)
    return data, scale


@torch.library.custom_op("titan_moe::mxfp8_swiglu", mutates_args=())
def swiglu_round_trip(gate_up_R2F: Tensor, weight_R: Tensor | None) -> Tensor:
    """h [R, F] = silu(gate) * up (* weight), as MXFP8 with blocks along F stands for it; gate and up alternate."""
    h_RF = gate_up_R2F.new_empty(gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2)
    _launch(gate_up_R2F, weight_R, h_RF, None, axis=-1, swiglu=True)
    return h_RF


def _empty(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    blocks = (rows, columns // BLOCK) if axis == -1 else (rows // BLOCK, columns)
    return x.new_empty(rows, columns, dtype=torch.uint8), x.new_empty(blocks, dtype=torch.uint8)


round_trip.register_fake(lambda x, axis: x.new_empty(x.shape))
stored.register_fake(_empty)
swiglu_round_trip.register_fake(lambda x, weight: x.new_empty(x.shape[0], x.shape[1] // 2))


def _launch(x: Tensor, weight_R: Tensor | None, out: Tensor, scale: Tensor | None, *, axis: int, swiglu: bool) -> None:
    columns = out.shape[-1]
    grid = (out.numel() // columns // BLOCK, triton.cdiv(columns, TILE_COLUMNS))
    _mxfp8[grid](
        x.contiguous(),
        x if weight_R is None else weight_R.contiguous(),
        out,
        out if scale is None else scale,
        columns,
        SWIGLU=swiglu,
        WEIGHTED=weight_R is not None,
        ALONG_ROWS=axis == -1,
        STORED=scale is not None,
        BLOCK=BLOCK,
        TILE_COLUMNS=TILE_COLUMNS,
    )


@triton.jit
def _mxfp8(
    x_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    columns,
    SWIGLU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One tile of BLOCK rows. A matrix of several experts is its rows, one expert's behind the other's."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    there = (column < columns)[None, :] & (row >= 0)[:, None]
    at = row[:, None] * columns + column[None, :]
    if SWIGLU:
        gate = _to_fp32(tl.load(x_ptr + 2 * at, mask=there, other=0.0))
        up = _to_fp32(tl.load(x_ptr + 2 * at + 1, mask=there, other=0.0))
        x = gate / (1.0 + tl.exp(-gate)) * up
        if WEIGHTED:
            x *= tl.load(weight_ptr + row)[:, None]
        x = _to_bf16(x)
    else:
        x = _to_fp32(tl.load(x_ptr + at, mask=there, other=0.0))

    if ALONG_ROWS:
        blocks = tl.reshape(x, (BLOCK, TILE_COLUMNS // BLOCK, BLOCK))
        exponent, bad = _exponent(_amax(blocks, 2), _any_nan(blocks, 2))
        encode, decode = _powers(exponent, bad)
        y = _rounded(blocks * encode[:, :, None])
        if STORED:
            out = tl.reshape(_code(y, blocks), (BLOCK, TILE_COLUMNS))
            block = tl.program_id(1) * (TILE_COLUMNS // BLOCK) + tl.arange(0, TILE_COLUMNS // BLOCK)
            blocks_of_row = columns // BLOCK
            scale_at = row[:, None] * blocks_of_row + block[None, :]
            scale_there = (block < blocks_of_row)[None, :] & (row >= 0)[:, None]
            tl.store(scale_ptr + scale_at, tl.where(bad, 255, exponent).to(tl.uint8), mask=scale_there)
        else:
            out = tl.reshape(y * decode[:, :, None], (BLOCK, TILE_COLUMNS))
    else:
        exponent, bad = _exponent(_amax(x, 0), _any_nan(x, 0))
        encode, decode = _powers(exponent, bad)
        y = _rounded(x * encode[None, :])
        if STORED:
            out = _code(y, x)
            scale_at = tl.program_id(0).to(tl.int64) * columns + column
            tl.store(scale_ptr + scale_at, tl.where(bad, 255, exponent).to(tl.uint8), mask=column < columns)
        else:
            out = y * decode[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)


# Both by the bits: the interpreter's casts cut off what should be rounded, and go wrong on subnormal numbers.


@triton.jit
def _to_fp32(x):
    """Of bf16 numbers."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(x):
    """Rounded to the nearest bf16 number, as fp32."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, nearest, bits).to(tl.float32, bitcast=True)


@triton.jit
def _amax(x, axis: tl.constexpr):
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis)


@triton.jit
def _any_nan(x, axis: tl.constexpr):
    return tl.max((x != x).to(tl.int32), axis) > 0


@triton.jit
def _exponent(amax, bad):
    """The E8M0 code of amax / 448 rounded up to a power of two, and whether it is NaN instead (formats.e8m0_scale)."""
    ratio = amax * (1.0 / 448.0)
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits + 0x7FFFFF) >> 23, 1), 254)
    return tl.where(bits <= 0x400000, 0, exponent), bad  # at most 2^-127


@triton.jit
def _powers(exponent, bad):
    """(encode, decode) of an E8M0 code: what elements are multiplied with before they are rounded, and after."""
    decode = tl.where(exponent == 0, 0x400000, exponent << 23)  # 2^-127 is no normal number of fp32
    encode = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
    encode = tl.where(exponent == 0, 0x3F800000, encode)  # 1
    decode, encode = tl.where(bad, 0x7FC00000, decode), tl.where(bad, 0x7FC00000, encode)
    return encode.to(tl.float32, bitcast=True), decode.to(tl.float32, bitcast=True)


@triton.jit
def _rounded(y):
    """To the nearest number of E4M3, saturating (formats.round_)."""
    y = tl.where(y > 448.0, 448.0, y)
    y = tl.where(y < -448.0, -448.0, y)
    power = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.where(power > 0.015625, power, 0.015625) * 1572864.0  # 2^-6, 1.5 x 2^20
    return (y + shift) - shift


@triton.jit
def _code(y, x):
    """The E4M3 code of y, which is one of its numbers; the sign is that of x, before zeros lost theirs."""
    magnitude = tl.abs(y)
    normal = (magnitude.to(tl.int32, bitcast=True) >> 20) - 960  # exponents begin at 2^-7 instead of 2^-127
    code = tl.where(magnitude < 0.015625, (tl.where(y == y, magnitude, 0.0) * 512.0).to(tl.int32), normal)
    code = tl.where(y == y, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
