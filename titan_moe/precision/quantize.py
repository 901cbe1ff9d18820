"""Tensors into a recipe's formats and back.

`quantize` stores a tensor: elements, block scales and, where the format has one, the fp32 scale of the tensor.
`round_trip` is what an emulated GEMM calls: the numbers that the quantized tensor stands for, in bf16 or fp32, in few
passes and without storing anything in between.

Scales come at two levels. Block scales are folded into the values of `round_trip`: an E4M3 number times a power of two,
and an E2M1 number times an E4M3 one, are exact in bf16. The fp32 scale of a whole tensor or expert is not exact there.
It is returned as `factor`, and belongs on the GEMM's output, where the hardware applies it too:

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

from titan_moe.precision import formats
from titan_moe.precision.recipes import Format

FP32_MAX = torch.finfo(torch.float32).max


class Groups(NamedTuple):
    """Which expert each row belongs to: `of_row` int64 [R], of which ids outside 0..count-1 mark the tail."""

    of_row: Tensor
    count: int

    @staticmethod
    def of_slabs(counts_E: Tensor, rows: int) -> "Groups":
        """From the sizes of expert-major slabs, int64 [E], in a buffer of `rows` rows. No host sync."""
        index = torch.arange(rows, device=counts_E.device)
        return Groups(torch.searchsorted(counts_E.cumsum(0), index, right=True), len(counts_E))


class RoundTrip(NamedTuple):
    """What a GEMM sees: `values`, and the `factor` (fp32, [] or one per expert [E]; None is 1) for its output."""

    values: Tensor
    factor: Tensor | None


@dataclass
class Quantized:
    """A stored tensor.

    data: x's shape in float8, or uint8 with two E2M1 numbers per byte along the contracted axis, the first one low.
    scale: what a block's elements are multiplied with: fp32 (scale "fp32", [] or [E]; "pow2", one per block), uint8
        E8M0 or float8 E4M3 (one per block, x's shape divided by the block).
    global_scale: fp32 [] or [E], of two-level formats.
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    format: Format
    axis: int
    groups: Groups | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.global_scale) if tensor is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The tensor these numbers stand for, without the Hadamard transform's inverse: as the GEMM sees it."""
        if self.format.element == "e2m1":
            halves = torch.stack([self.data & 15, self.data >> 4], dim=self.axis if self.axis == -1 else -2)
            shape = list(self.data.shape)
            shape[self.axis] *= 2
            values = formats.decode_e2m1(halves.reshape(shape))
        else:
            values = self.data.float()
        if self.format.block is None:
            return (values * _per_row(self.scale, values, self.groups)).to(dtype)
        scale = formats.decode_e8m0(self.scale) if self.format.scale == "e8m0" else self.scale.float()
        values = _blocks(values, self.format, self.axis) * scale[..., :, None, :, None]
        values = values.flatten(-4, -3).flatten(-2)
        if self.global_scale is not None:
            values = values * _per_row(self.global_scale, values, self.groups)
        return values.to(dtype)


def quantize(
    x: Tensor, fmt: Format, axis: int, *, groups: Groups | None = None, generator: torch.Generator | None = None
) -> Quantized:
    """`x` [R, D] or [E, O, I], fp32 or bf16, in `fmt` with blocks along `axis`, the contracted one (the last or the one
    before). Raises ValueError where blocks do not tile the tensor or a block spans two experts."""
    axis = _check(x, fmt, axis, groups)
    elements, scale, global_scale = _elements(x, fmt, axis, groups, generator)
    if fmt.element == "e2m1":
        codes = formats.encode_e2m1(elements)
        pairs = codes.unflatten(axis, (-1, 2))
        low, high = pairs.unbind(axis if axis == -1 else -2)
        data = low | high << 4
    else:
        data = elements.to(formats.FLOAT8[fmt.element])
    return Quantized(data, scale, global_scale, fmt, axis, groups)


def round_trip(
    x: Tensor,
    fmt: Format,
    axis: int,
    *,
    groups: Groups | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> RoundTrip:
    """`quantize` and back, in `dtype` (default: x's)."""
    axis = _check(x, fmt, axis, groups)
    elements, scale, global_scale = _elements(x, fmt, axis, groups, generator)
    if fmt.element != "e2m1":
        elements = elements.to(formats.FLOAT8[fmt.element]).float()
    dtype = dtype or x.dtype
    if fmt.block is None:
        return RoundTrip(elements.to(dtype), scale)
    scale = formats.decode_e8m0(scale) if fmt.scale == "e8m0" else scale.float()
    values = _blocks(elements, fmt, axis) * scale[..., :, None, :, None]
    return RoundTrip(values.flatten(-4, -3).flatten(-2).to(dtype), global_scale)


def _check(x: Tensor, fmt: Format, axis: int, groups: Groups | None) -> int:
    """The axis counted from the end, after all checks."""
    axis = axis - x.dim() if axis >= 0 else axis
    assert x.dim() in (2, 3) and axis in (-1, -2) and (groups is None or x.dim() == 2)
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
    """That no run of `block` rows belongs to two experts. A device other than the CPU is not waited for."""
    runs = groups.of_row.unflatten(0, (-1, block))
    same = (runs == runs[:, :1]).all()
    if same.device.type != "cpu":
        torch._assert_async(same)
    elif not same:
        row = int((runs != runs[:, :1]).flatten().int().argmax())
        raise ValueError(
            f"row {row} starts another expert inside a block of {block} rows ({row} = {row // block} x {block} + "
            f"{row % block}): slabs must be multiples of {block} rows"
        )


def _blocks(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """x [..., A, B] as [..., A / a, a, B / b, b]; a view of contiguous memory."""
    m, k = fmt.block or x.shape[-2:]
    a, b = (m, k) if axis == -1 else (k, m)
    return x.unflatten(-1, (-1, b)).unflatten(-3, (-1, a))


def _amax(x: Tensor, groups: Groups | None) -> Tensor:
    """fp32: of the tensor [], of each expert of weights [E], or of each group [count]."""
    if not x.numel():
        count = x.shape[:1] if x.dim() == 3 else (groups.count,) if groups is not None else ()
        return x.new_zeros(count, dtype=torch.float32)
    if groups is None:
        return x.abs().flatten(-2).amax(-1).float()
    rows = x.abs().amax(-1).float()
    ids = torch.where((groups.of_row >= 0) & (groups.of_row < groups.count), groups.of_row, groups.count)
    return rows.new_zeros(groups.count + 1).scatter_reduce_(0, ids, rows, "amax")[:-1]


def _per_row(scale: Tensor, x: Tensor, groups: Groups | None) -> Tensor:
    """A scale per tensor or expert, shaped to be multiplied with x."""
    if groups is not None:
        return torch.cat([scale, scale.new_ones(1)])[groups.of_row.clamp(-1, groups.count), None]
    return scale[:, None, None] if x.dim() == 3 else scale


def _elements(
    x: Tensor, fmt: Format, axis: int, groups: Groups | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """fp32 elements in range (E2M1 ones rounded), their scale as stored, and the global scale."""
    if fmt.hadamard:
        x = formats.hadamard(x, fmt.hadamard, axis)
    limit = formats.MAX[fmt.element]
    if fmt.block is None:
        amax = _amax(x, groups)
        encode = _encode_scale(amax, limit, FP32_MAX)
        return (x.float() * _per_row(encode, x, groups)).clamp(-limit, limit), 1 / encode, None
    blocks = _blocks(x, fmt, axis)
    amax = blocks.abs().amax((-3, -1)).float() if x.numel() else x.new_zeros(blocks.shape[:-4] + blocks.shape[-4::2])
    global_scale = None
    if fmt.scale == "pow2":
        encode = _encode_scale(amax, limit, torch.finfo(x.dtype).max)
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
        scale = 1 / encode
    elif fmt.scale == "e8m0":
        scale = formats.e8m0_round_up(amax * torch.tensor(1 / limit))
        encode = torch.ldexp(torch.ones(()), 127 - scale.int())
    else:
        top = 448.0 * limit
        global_amax = _amax(x, groups)
        global_encode = (top / global_amax).clamp(max=FP32_MAX)
        global_encode = torch.where(global_encode == 0, 1.0, global_encode)
        global_scale = global_amax / top
        row = _per_row(global_encode, x, groups)
        row = row[:: fmt.block[1]] if groups is not None and axis == -2 else row
        scale = (amax * (row * torch.tensor(1 / limit))).clamp(max=448.0).to(torch.float8_e4m3fn)
        encode = (1 / (scale.float() * (1 / row))).clamp(max=FP32_MAX)
    elements = (blocks.float() * encode[..., :, None, :, None]).clamp(-limit, limit)
    elements = elements.flatten(-4, -3).flatten(-2)
    if fmt.element == "e2m1":
        rounded = formats.round_e2m1_stochastic(elements, generator) if fmt.stochastic else formats.round_e2m1(elements)
        return rounded, scale, global_scale
    return elements, scale, global_scale


def _encode_scale(amax: Tensor, limit: float, value_for_inf: float) -> Tensor:
    """The fp32 scale that takes amax to `limit`; 1 where amax is zero or not finite."""
    encode = (limit / amax).clamp(max=value_for_inf)
    return torch.where((amax > 0) & (amax < torch.inf), encode, 1.0)
