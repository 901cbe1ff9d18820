"""A GEMM on emulated low-precision operands: what the hardware would multiply, multiplied by torch.

`QuantizedGemm` puts each operand of forward, dgrad and wgrad into its format (recipes.py), along the axis that this
GEMM adds up over, and hands what that stands for to a GEMM in high precision, dense or grouped. In bf16 those numbers
are exact, and so are their products in the fp32 accumulator: all that is rounded is what the formats round, and the
result.

    values     block scales are in them: E4M3 x 2^n or E2M1 x E4M3, 8 significant bits at most
    factors    fp32, one per tensor or expert: multiplied onto the GEMM's result. In bf16 this is one rounding more than
               in hardware, which scales its accumulator: at most 2^-9 of a number, where the format's own is 2^-4

Weights are quantized again in backward. What forward quantized would outlive the gathered weight, which FSDP frees, and
would not do: dgrad wants the other axis.

The wgrad wants its x in low precision along the rows. `keep` makes that of it in forward already, to be kept in place
of the bf16 tensor: half of its bytes, or a third in nvfp4.

Where rows, or a width, are no multiple of a format's block, the last block is filled up with zeros, which change
neither its largest number nor a sum.

Shape letters: as in moe/experts.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from titan_moe.moe.experts import GroupedGemm, swiglu
from titan_moe.precision import noise
from titan_moe.precision.once import once
from titan_moe.precision.quantize import Groups, Quantized, RoundTrip, quantize, round_trip
from titan_moe.precision.recipes import Format, Recipe
from titan_moe.rebuild import has_anyway


class DenseGemm:
    """y = x w^T of one weight, which has no E: [O, I]. In high precision."""

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        return x_RI @ w_EOI.t()

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        return grad_RO @ w_EOI

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
        return grad_RO.t() @ x_RI

    def blocks(self, width: int) -> list[slice]:
        return [slice(None)]


class QuantizedGemm:
    """`gemm` on operands in the formats of `recipe`.

    Arguments:
        gemm: the GEMM in high precision.
        recipe: of the formats.
        groups: which slab a row is in, of a grouped GEMM; slabs are multiples of the recipe's alignment. None: dense.
        keeps_input: keep x for `wgrad` as it is, because somebody else does so anyway.
    """

    def __init__(
        self,
        gemm: GroupedGemm,
        recipe: Recipe,
        groups: Groups | None = None,
        *,
        keeps_input: bool = False,
    ) -> None:
        self.gemm, self.recipe, self.groups = gemm, recipe, groups
        self.keeps_input = keeps_input
        self.made: StorageWeakRef | None = None  # memory of the last result of `swiglu`, if that is quantized

    def swiglu(self, gate_up_R2F: Tensor, weight_R: Tensor | None) -> Tensor:
        """h for `forward`, quantized already where one kernel does both."""
        kernels = _kernels(gate_up_R2F[:, ::2], self.recipe.forward_x)
        if kernels is None:
            return swiglu(gate_up_R2F, weight_R, self)
        h_RF = kernels.swiglu_round_trip(gate_up_R2F, weight_R)
        self.made = StorageWeakRef(h_RF.untyped_storage())
        return h_RF

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        if self.made is not None and self.made == StorageWeakRef(x_RI.untyped_storage()):
            x = RoundTrip(x_RI, None)
        else:
            x = once(x_RI, (self.recipe.forward_x, -1), partial(self._rows, x_RI, self.recipe.forward_x, -1))
        w = _operand(w_EOI, self.recipe.forward_w, -1)
        return self._scaled(self.gemm.forward(x.values, w.values), x.factor, w.factor)

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        grad = self._rows(grad_RO, self.recipe.dgrad_g, -1)
        w = _operand(w_EOI, self.recipe.dgrad_w, -2)
        return self._scaled(self.gemm.dgrad(grad.values, w.values), grad.factor, w.factor)

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor | RoundTrip) -> Tensor:
        """`x_RI`: the rows, or what `keep` has kept of them."""
        grad = self._rows(grad_RO, self.recipe.wgrad_g, -2)
        x = x_RI if isinstance(x_RI, RoundTrip) else self._rows(x_RI, self.recipe.wgrad_x, -2)
        grad_EOI = self.gemm.wgrad(grad.values, x.values)
        factor = _product(grad.factor, x.factor)
        if factor is None:
            return grad_EOI
        return (grad_EOI * (factor if self.groups is None else factor[:, None, None])).to(grad_EOI.dtype)

    def blocks(self, width: int) -> list[slice]:
        return self.gemm.blocks(width)

    def keep(self, x_RI: Tensor) -> tuple[Callable[..., Any] | None, tuple[Tensor, ...]]:
        """What makes the argument of `wgrad`, and what of: of x itself, if that is there in backward anyway."""
        if self.keeps_input or has_anyway(x_RI):
            return None, (x_RI,)
        fmt = self.recipe.wgrad_x
        stored: Quantized = once(x_RI, ("stored", fmt), partial(self._stored, x_RI, fmt))
        kept = (stored.data, stored.scale, stored.tensor_scale)
        again = partial(_again, fmt=fmt, groups=stored.groups, shape=x_RI.shape, dtype=x_RI.dtype)
        return again, tuple(tensor for tensor in kept if tensor is not None)

    def _rows(self, x_RI: Tensor, fmt: Format, axis: int) -> RoundTrip:
        chance = noise.generator(x_RI.device) if fmt.stochastic else None
        return _operand(x_RI, fmt, axis, self.groups, chance)

    def _stored(self, x_RI: Tensor, fmt: Format) -> Quantized:
        assert not fmt.stochastic, "only gradients are rounded by chance"
        if kernels := _kernels(x_RI, fmt):
            return kernels.quantize(x_RI, -2)
        x_RI, groups = _filled(x_RI, fmt, -2, self.groups)
        return quantize(x_RI, fmt, -2, groups=groups)

    def _scaled(self, y_RO: Tensor, x_factor: Tensor | None, w_factor: Tensor | None) -> Tensor:
        factor = _product(x_factor, w_factor)
        if factor is None:
            return y_RO
        if self.groups is not None:  # rows behind the last slab count as the last expert's: any number will do
            factor = factor[self.groups.of_row.clamp(max=self.groups.count - 1), None]
        return (y_RO * factor).to(y_RO.dtype)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Of two factors; with a dimension, so that a bf16 result times it is computed in fp32."""
    factors = [factor for factor in (a, b) if factor is not None]
    return torch.stack([torch.atleast_1d(factor) for factor in factors]).prod(0) if factors else None


def _operand(
    x: Tensor, fmt: Format, axis: int, groups: Groups | None = None, chance: torch.Generator | None = None
) -> RoundTrip:
    """`round_trip` of x, whatever its sizes."""
    if kernels := _kernels(x, fmt):
        return RoundTrip(kernels.round_trip(x, axis), None)
    filled, groups = _filled(x, fmt, axis, groups)
    values, factor = round_trip(filled, fmt, axis, groups=groups, generator=chance)
    return RoundTrip(_cut(values, fmt, axis, x.shape), factor)


def _kernels(x: Tensor, fmt: Format) -> Any:
    """The module of Triton kernels, where they do what quantize.py would do to x."""
    if not x.is_cuda:
        return None
    from titan_moe.precision import triton_quantize  # Triton comes with torch where torch has GPUs

    return triton_quantize if triton_quantize.takes(x, fmt) else None


def _again(
    data: Tensor,
    scale: Tensor,
    tensor_scale: Tensor | None = None,
    *,
    fmt: Format,
    groups: Groups | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> RoundTrip:
    """What `_operand` would make of the tensor of which these are stored."""
    if fmt.block is None:
        return RoundTrip(data.to(dtype), scale)
    values = Quantized(data, scale, None, fmt, -2, groups).dequantize(dtype)
    return RoundTrip(_cut(values, fmt, -2, shape), tensor_scale)


def _filled(x: Tensor, fmt: Format, axis: int, groups: Groups | None) -> tuple[Tensor, Groups | None]:
    """x with zeros behind it up to whole blocks."""
    if fmt.block is None:
        return x, groups
    across, along = fmt.block
    rows, columns = (across, along) if axis == -1 else (along, across)
    rows, columns = -x.shape[-2] % rows, -x.shape[-1] % columns
    if not rows and not columns:
        return x, groups
    if groups is not None:
        groups = Groups(F.pad(groups.of_row, (0, rows), value=groups.count), groups.count)
    return F.pad(x, (0, columns, 0, rows)), groups


def _cut(values: Tensor, fmt: Format, axis: int, shape: torch.Size) -> Tensor:
    """`_filled` undone. A Hadamard transform has spread its last block over all of it, so along `axis` that stays: the
    other operand is as long."""
    rows, columns = shape[-2:]
    if fmt.hadamard and axis == -2:
        rows = values.shape[-2]
    elif fmt.hadamard:
        columns = values.shape[-1]
    return values[..., :rows, :columns]
