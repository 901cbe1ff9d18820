"""Quantization to MXFP8 of packed matrices, for quantization.py.

Scales are tiled as tensor cores read them: scale [i, j] of a tile of 128 x 4 lies at [i % 32, i // 32, j]. Columnwise
data stay where they were, and their scales are those of the transposed matrix.

Shape letters: R rows, K columns, S = K / 32.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_BLOCK = 32
_UNDEFINED = 0xFF  # NaN, as data in e4m3 and as a scale


def _quantized_group(values_RK: Tensor, counts: list[int], columns: bool) -> tuple[Tensor, Tensor]:
    """Data and scales, both flat. Rows beyond the last slab are not written."""
    R, K = values_RK.shape
    data, scales = (values_RK.new_full((n,), _UNDEFINED, dtype=torch.uint8) for n in (R * K, R * K // _BLOCK))
    if isinstance(values_RK, FakeTensor):
        return data, scales
    slabs = values_RK.split([*counts, R - sum(counts)])[:-1]
    for rows, flat, tiles in zip(slabs, *_parts(data, scales, counts, K)):
        quantized, exponents = _quantized(rows.T if columns else rows)
        flat.copy_((quantized.T if columns else quantized).reshape(-1))
        tiles.copy_(_tiled(exponents).reshape(-1))
    return data, scales


def _parts(data: Tensor, scales: Tensor, counts: list[int], K: int) -> list[list[Tensor]]:
    """What belongs to each slab."""
    sizes = [count * K for count in counts]
    end = sum(sizes)
    return [list(data[:end].split(sizes)), list(scales[: end // _BLOCK].split([size // _BLOCK for size in sizes]))]


def _quantized(rows_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of e4m3 [R, K] and of e8m0 [R, S]: the scale is the power of two at or above (largest number) / 448."""
    blocks = rows_RK.float().unflatten(1, (-1, _BLOCK))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1) / 448)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    biased = torch.where(mantissa == 0, 0, (exponent + 127).clamp(0, 254))
    data = torch.ldexp(blocks, 127 - biased[..., None]).to(torch.float8_e4m3fn)
    return data.flatten(1).view(torch.uint8), biased.to(torch.uint8)


def _tiled(scales_RS: Tensor) -> Tensor:
    """[R / 128, S / 4, 32, 4, 4]"""
    R, S = scales_RS.shape
    return scales_RS.reshape(R // 128, 4, 32, S // 4, 4).permute(0, 3, 2, 1, 4)


def _numbers(data_RK: Tensor, tiles: Tensor) -> Tensor:
    """What a kernel reads, in fp32: e4m3 data along whose rows tiles of e8m0 scales lie, [..., 32, 4, 4]."""
    R, K = data_RK.shape
    tiles = tiles.view(torch.uint8).reshape(R // 128, K // 128, 32, 4, 4)
    scales_RS = tiles.permute(0, 3, 2, 1, 4).reshape(R, K // _BLOCK)
    exponents = scales_RS.int().sub(127).repeat_interleave(_BLOCK, dim=1)
    numbers = torch.ldexp(data_RK.float(), exponents)
    return torch.where(scales_RS.repeat_interleave(_BLOCK, dim=1) == _UNDEFINED, float("nan"), numbers)
