"""Quantization to MXFP8 of packed matrices, under the rules of TE's kernel.

Scales are tiled as tensor cores read them: scale [i, j] of a tile of 128 x 4 lies at [i % 32, i // 32, j]. Columnwise
data stay where they were, and their scales are those of the transposed matrix.

Shape letters: R rows, K columns, S = K / 32.
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

_BLOCK = 32
_UNDEFINED = 0xFF  # NaN, as data in e4m3 and as a scale


def group_quantize(
    tensor: Tensor,
    quantizer: MXFP8Quantizer,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
    noop_flag: Tensor | None = None,
    output=None,
):
    """Rows beyond the last slab are not written."""
    assert tensor.dim() == 2 and tensor.is_contiguous(), "the kernel reads memory and does not look at strides"
    assert tensor.dtype == torch.bfloat16, "the double quantizes from bf16"
    assert not (torch.is_grad_enabled() and tensor.requires_grad), "no autograd in here"
    assert isinstance(quantizer, MXFP8Quantizer) and quantizer.optimize_for_gemm and quantizer.internal
    assert last_dims is None and noop_flag is None and output is None, "the double does not do these"
    assert 1 <= num_tensors <= 64, "Number of tensors in a group must be between 1 and 64."
    R, K = tensor.shape
    assert R % 128 == 0 and K % 128 == 0, "the double knows whole tiles of scales only"
    data, scales = (tensor.new_full((n,), _UNDEFINED, dtype=torch.uint8) for n in (R * K, R * K // _BLOCK))
    if first_dims is None:
        assert tensor_offsets is None and R % num_tensors == 0 and R // num_tensors % 128 == 0, "equal matrices"
        counts = [R // num_tensors] * num_tensors
    else:
        for values, length in ((first_dims, num_tensors), (tensor_offsets, num_tensors + 1)):
            assert (
                values is not None
                and values.dtype == torch.int64
                and values.shape == (length,)
                and values.is_contiguous()
            )
        counts = [] if isinstance(tensor, FakeTensor) else first_dims.tolist()
    if not isinstance(tensor, FakeTensor):
        assert all(count % 128 == 0 for count in counts) and sum(counts) <= R, f"slabs of {counts} rows in {R}"
        if tensor_offsets is not None:
            begins = [sum(counts[:n]) * K for n in range(num_tensors + 1)]
            assert tensor_offsets.tolist() == begins, "where slabs begin, in elements"
        for rows, flat, tiles in zip(tensor.split([*counts, R - sum(counts)])[:-1], *_parts(data, scales, counts, K)):
            quantized, exponents = _quantized(rows.T if quantizer._columnwise else rows)
            flat.copy_((quantized.T if quantizer._columnwise else quantized).reshape(-1))
            tiles.copy_(_tiled(exponents).reshape(-1))
    names = ("columnwise_data", "columnwise_scale_inv") if quantizer._columnwise else ("rowwise_data", "scale_inv")
    return SimpleNamespace(**dict(zip(names, (data, scales))))


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
