"""Tensors into a recipe's formats and back.

`quantize` stores a tensor: elements, block scales and, where the format has one, the fp32 scale of the tensor.
`round_trip` is what an emulated GEMM calls: the numbers that the quantized tensor stands for, in bf16 or fp32, in few
passes and without storing anything in between.

Scales come at two levels. Block scales are folded into the values of `round_trip`: an E4M3 number times a power of two,
and an E2M1 number times an E4M3 one, are exact in bf16. The fp32 scale of a whole tensor or expert is not exact there.
It is returned as `factor`, and belongs on the GEMM's output, where the hardware applies it too, before the output is
rounded to its type:

    a, b = round_trip(x, ...), round_trip(w, ...)
    y = (a.values @ b.values.T) * a.factor * b.factor          (None counts as 1)

Operands are [R, D] rows, or weights [E, O, I] of which each expert is quantized by itself. Rows of several experts
come with `groups`: then whatever is one per tensor is one per expert. Rows that belong to no expert (the tail behind
the last slab, undefined memory) never reach another row's scale.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from titan_moe.precision import formats
from titan_moe.precision.recipes import Format


class Groups(NamedTuple):
    """Which expert each row belongs to: `of_row` int64 [R], of which ids outside 0..count-1 mark the tail."""

    of_row: Tensor
    count: int

    @staticmethod
    def of_slabs(counts_E: Tensor, rows: int) -> "Groups":
        """From the sizes of expert-major slabs, int64 [E], in a buffer of `rows` rows. No host sync."""
        index = torch.arange(rows, device=counts_E.device)
        return Groups(torch.searchsorted(counts_E.cumsum(0), index, right=True), len(counts_E))

    def of_block(self, rows: int) -> Tensor:
        """int64 [R / rows]: the expert of each block of `rows` rows, the tail's all `count`."""
        ids = self.of_row[::rows]
        return torch.where((ids >= 0) & (ids < self.count), ids, self.count)


class RoundTrip(NamedTuple):
    """What a GEMM sees: `values`, and the `factor` (fp32, [] or one per expert [E]; None is 1) for its output."""

    values: Tensor
    factor: Tensor | None


@dataclass
class Quantized:
    """A stored tensor.

    data: x's shape in float8, or uint8 with two E2M1 numbers per byte along the contracted axis, the first one low.
    scale: what elements are multiplied with: fp32 for one scale per tensor ([] or [E]) and for powers of two, float8
        E8M0 or E4M3 for those (x's shape divided by the block).
    tensor_scale: fp32 [] or [E], of two-level formats.
    """

    data: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    format: Format
    axis: int
    groups: Groups | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.tensor_scale) if tensor is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The tensor that is stored, as a GEMM sees it: a Hadamard transform is not undone."""
        if self.format.element == "e2m1":
            halves = torch.stack([self.data & 15, self.data >> 4], dim=self.axis if self.axis == -1 else -2)
            values = formats.decode_e2m1(halves.flatten(*((-2, -1) if self.axis == -1 else (-3, -2))))
        else:
            values = self.data.float()
        if self.format.block is None:
            return values.mul_(_of_rows(self.scale, values, self.groups)).to(dtype)
        values = _joined(_blocks(values, self.format, self.axis) * self.scale.float()[..., :, None, :, None])
        if self.tensor_scale is not None:
            values.mul_(_of_rows(self.tensor_scale, values, self.groups))
        return values.to(dtype)


class _Scaled(NamedTuple):
    """fp32 `y`, x in units of its elements, and the scales that take it back; `decode` is None without blocks."""

    y: Tensor
    decode: Tensor | None
    tensor_decode: Tensor | None


@torch.no_grad()
def quantize(
    x: Tensor, fmt: Format, axis: int, *, groups: Groups | None = None, generator: torch.Generator | None = None
) -> Quantized:
    """`x` [R, D] or [E, O, I], fp32 or bf16, in `fmt` with blocks along `axis`, the contracted one, the last or the one
    before. `generator`, on x's device, draws for stochastic rounding.

    Raises ValueError where blocks do not tile the tensor or one spans two experts.
    """
    axis = _check(x, fmt, axis, groups)
    y, decode, tensor_decode = _scaled(x, fmt, axis, groups)
    signs = y.clone()
    elements = _round(y, fmt, generator).copysign_(signs)
    if fmt.element == "e2m1":
        pairs = formats.encode_e2m1(elements).unflatten(axis, (x.shape[axis] // 2, 2))
        low, high = pairs.unbind(-1 if axis == -1 else -2)
        data = low | high << 4
    else:
        data = elements.to(formats.FLOAT8[fmt.element])
    if decode is None:
        assert tensor_decode is not None
        return Quantized(data, tensor_decode, None, fmt, axis, groups)
    stored = {"pow2": torch.float32, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[fmt.scale]
    return Quantized(data, decode.to(stored), tensor_decode, fmt, axis, groups)


@torch.no_grad()
def round_trip(
    x: Tensor,
    fmt: Format,
    axis: int,
    *,
    groups: Groups | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> RoundTrip:
    """`quantize` and back, in `dtype` (default: x's; elements and block scales are exact in bf16)."""
    axis = _check(x, fmt, axis, groups)
    y, decode, tensor_decode = _scaled(x, fmt, axis, groups)
    values = _round(y, fmt, generator)
    if decode is not None:
        _blocks(values, fmt, axis).mul_(decode[..., :, None, :, None])
    return RoundTrip(values.to(dtype or x.dtype), tensor_decode)


def _round(y: Tensor, fmt: Format, generator: torch.Generator | None) -> Tensor:
    chance = formats.chances(y, generator) if fmt.stochastic else None
    return formats.round_(y, formats.ELEMENTS[fmt.element], chance)


def _scaled(x: Tensor, fmt: Format, axis: int, groups: Groups | None) -> _Scaled:
    if fmt.hadamard:
        x = formats.hadamard(x, fmt.hadamard, axis)
    x = x.float()
    limit = formats.ELEMENTS[fmt.element].limit
    if fmt.block is None:
        encode, decode = formats.tensor_scale(_tensor_amax(x.abs(), groups, 1), limit)
        return _Scaled(x * _of_rows(encode, x, groups), None, decode)
    amax, tensor_decode = _block_amax(x, fmt, axis), None
    if fmt.scale == "pow2":
        encode, decode = formats.power_of_two_scale(amax, limit)
    elif fmt.scale == "e8m0":
        encode, decode = formats.e8m0_scale(amax, limit)
    else:
        rows = fmt.block[0] if axis == -1 else fmt.block[1]
        tensor_encode, tensor_decode = formats.two_level_scale(_tensor_amax(amax, groups, rows), limit)
        encode, decode = formats.e4m3_scale(amax, limit, _of_rows(tensor_encode, amax, groups, rows))
    return _Scaled(_joined(_blocks(x, fmt, axis) * encode[..., :, None, :, None]), decode, tensor_decode)


def _check(x: Tensor, fmt: Format, axis: int, groups: Groups | None) -> int:
    """The axis counted from the end, after all checks."""
    axis = axis - x.dim() if axis >= 0 else axis
    assert x.dim() in (2, 3) and axis in (-1, -2) and (groups is None or x.dim() == 2)
    assert x.dtype in (torch.float32, torch.bfloat16)
    if fmt.block is None:
        return axis
    m, k = fmt.block
    for dim, block in ((axis, k), (-3 - axis, m)):
        if x.shape[dim] % block:
            raise ValueError(
                f"{fmt.element} with a scale per {m} x {k} numbers: axis {dim} of {list(x.shape)} is {x.shape[dim]} = "
                f"{x.shape[dim] // block} x {block} + {x.shape[dim] % block}; make it a multiple of {block}"
            )
    if groups is not None and x.numel():
        _check_boundaries(groups, k if axis == -2 else m)
    return axis


def _check_boundaries(groups: Groups, block: int) -> None:
    """That no run of `block` rows belongs to two experts. Only a CPU is waited for, and fake tensors have no values."""
    if block == 1:
        return
    runs = groups.of_row.unflatten(0, (-1, block))
    same = (runs == runs[:, :1]).all()
    if same.device.type != "cpu" or is_fake(same):
        torch._assert_async(same)
    elif not same:
        row = int((runs != runs[:, :1]).flatten().int().argmax())
        raise ValueError(
            f"row {row} starts another expert inside a block of {block} rows ({row} = {row // block} x {block} + "
            f"{row % block}): slabs must be multiples of {block} rows"
        )


def _blocks(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """A view of x [..., A, B] as [..., A / a, a, B / b, b]."""
    m, k = fmt.block or x.shape[-2:]
    a, b = (m, k) if axis == -1 else (k, m)
    *lead, A, B = x.shape
    return x.view(*lead, A // a, a, B // b, b)


def _joined(blocks: Tensor) -> Tensor:
    """The inverse of `_blocks`."""
    return blocks.flatten(-4, -3).flatten(-2)


def _block_amax(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """Largest magnitude of each block, [..., A / a, B / b]."""
    amax = _blocks(x.abs(), fmt, axis)
    amax = amax.amax(-3) if amax.shape[-3] > 1 else amax.squeeze(-3)
    if amax.shape[-1] == 16:  # torch reduces fewer than 32 neighbours one by one on a CPU
        amax = torch.maximum(amax[..., :8], amax[..., 8:])
    return amax.amax(-1) if amax.shape[-1] > 1 else amax.squeeze(-1)


def _tensor_amax(magnitude: Tensor, groups: Groups | None, rows: int) -> Tensor:
    """Largest of `magnitude` [..., A, B]: of the tensor [], of each expert of weights [E], or of each group [count],
    where a row of it stands for `rows` rows."""
    if not magnitude.numel():
        return magnitude.new_zeros(magnitude.shape[:-2] if groups is None else groups.count)
    amax = magnitude.amax(-1)
    if groups is None:
        return amax.amax(-1)
    return amax.new_zeros(groups.count + 1).scatter_reduce_(0, groups.of_block(rows), amax, "amax")[:-1]


def _of_rows(scale: Tensor, x: Tensor, groups: Groups | None, rows: int = 1) -> Tensor:
    """A scale per tensor or expert, shaped to be multiplied with x, a row of which stands for `rows` rows. Rows of the
    tail get 1."""
    if groups is not None:
        return torch.cat([scale, scale.new_ones(1)])[groups.of_block(rows), None]
    return scale[:, None, None] if x.dim() == 3 else scale
