"""Grouped GEMMs on Transformer Engine's (TE's) quantized operands: te_experts.py under a low-precision recipe.

What a recipe means is said once, in precision/recipes.py, and `quantizer` says it to TE. A quantizer makes copies of a
matrix for GEMMs that add up along its rows, or along its columns, or both in one pass; each operand needs

                 forward     dgrad        wgrad
    x            rows                     columns
    weight       rows        columns
    gradient                 rows         columns

and every copy is made from the unquantized tensor. Copies of weights live for one GEMM: with FSDP a gathered weight is
freed after forward, and a quantized copy that lived until backward would be the memory that this saves. So backward,
which gathers the weight again, quantizes it again. Of x the copy by columns is kept for wgrad, in place of x in bf16
(half of the bytes, or a quarter): forward makes both copies in one pass if `keeps` says so, and `keep` hands the one
out. Where rows can be gathered again (experts.py, `Source`), nothing is kept.

Both of TE's grouped GEMMs (te_experts.py) take quantized operands. With host splits the operands are lists, and the
GEMM brings scales into the order of the tensor cores. With device splits a group is quantized as one tensor, whose
scales are in that order already: for MXFP8 and NVFP4 nothing would sort them later. Weights are one group too, but for
NVFP4, for which TE has no kernel that quantizes a group in square blocks: those are a list, one kernel each.

Shape letters: as in experts.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.moe import quantized_experts
from titan_moe.moe.experts import Source, by_gemm
from titan_moe.moe.te_experts import DeviceSplits, HostSplits, fits_device_splits, te_grouped
from titan_moe.precision.recipes import Recipe

ALIGNMENT = 128  # of slabs: scales of a group lie in tiles for 128 rows


def te_quantized(
    x_RD: Tensor,
    counts_E: Tensor,
    weight_R: Tensor,
    w13_EF2D: Tensor,
    w2_EDF: Tensor,
    *,
    recipe: Recipe,
    late: bool = False,
    source: Source | None = None,
) -> Tensor:
    """y_RD by TE in low precision; the rows beyond the last slab are undefined."""
    if x_RD.shape[0] == 0:  # nothing to quantize; only exact sizes are 0, which the host knows anyway
        return te_grouped(x_RD, counts_E, weight_R, w13_EF2D, w2_EDF, late=late, source=source)
    _, hidden, _, width = w13_EF2D.shape
    keeps = source is None and w13_EF2D.requires_grad and torch.is_grad_enabled()
    gemm: QuantizedDeviceSplits | QuantizedHostSplits
    if fits_device_splits(x_RD, counts_E, hidden, recipe):
        gemm = QuantizedDeviceSplits(counts_E, (width, 2 * hidden, hidden), recipe, keeps=keeps)
    else:
        gemm = QuantizedHostSplits(counts_E, recipe, keeps=keeps)
    return by_gemm(gemm, x_RD, weight_R, w13_EF2D, w2_EDF, late=late, source=source)


quantized_experts.EXPERTS["te"] = te_quantized


def quantizer(recipe: Recipe, role: str, *, rows: bool = False, columns: bool = False, group: bool = False) -> Any:
    """TE's quantizer of "x", "w" or "g", the gradient, for copies along rows, columns or both; `group`: for matrices in
    one tensor."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    row, column = {
        "x": (recipe.forward_x, recipe.wgrad_x),
        "w": (recipe.forward_w, recipe.dgrad_w),
        "g": (recipe.dgrad_g, recipe.wgrad_g),
    }[role]
    assert (row.element, row.scale, row.block, row.hadamard) == (column.element, column.scale, column.block, 0)
    element = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2, "e2m1": DType.kFloat4E2M1}[row.element]
    square = row.block is not None and row.block[0] > 1
    made: Any
    if row.scale == "fp32":
        # Of a single matrix TE's kernel for Hopper makes the columns only together with the rows.
        rows = rows or not group
        made = Float8CurrentScalingQuantizer(element, torch.device("cuda"), rowwise=rows, columnwise=columns)
    elif row.scale == "pow2":
        made = Float8BlockQuantizer(
            element, rowwise=rows, columnwise=columns, force_pow_2_scales=True, block_scaling_dim=2 if square else 1
        )
    elif row.scale == "e8m0":
        made = MXFP8Quantizer(element, rowwise=rows, columnwise=columns)
    else:
        made = NVFP4Quantizer(
            element,
            rowwise=rows,
            columnwise=columns,
            with_rht=column.hadamard > 0,  # TE transforms columns alone
            with_post_rht_amax=column.hadamard > 0,
            with_2d_quantization=square,
            stochastic_rounding=row.stochastic,
        )
    made.internal = True  # plain storage, no tensor subclass
    made.optimize_for_gemm = group  # scales in the order of the tensor cores
    return made


def matrix(recipe: Recipe, role: str, values: Tensor, *, rows: bool = False, columns: bool = False) -> Any:
    """One quantized matrix."""
    import transformer_engine_torch as tex

    return tex.quantize(values.contiguous(), quantizer(recipe, role, rows=rows, columns=columns))


def split_accumulator(recipe: Recipe, layout: str) -> bool:
    """Whether partial sums of FP8 products move on into full fp32 registers, as TE's recipes have it: those of
    gradients, and with scales per block all."""
    return layout != "TN" or recipe.forward_x.scale == "pow2"


class Kept:
    """Copies of x along its columns, as tensors that autograd may keep or move elsewhere until wgrad wants them."""

    def __init__(self, copies: list, width: int) -> None:
        self.width, self.empty, self.there = width, [], []
        self.tensors: list[Tensor] = []
        for one in copies:
            tensors, empty = one.prepare_for_saving()  # leaves it without them
            self.empty.append(empty)
            self.there.append([tensor is not None for tensor in tensors])
            self.tensors += [tensor for tensor in tensors if tensor is not None]

    def again(self, *tensors: Tensor) -> "Columns":
        """The copies. They are new objects: what wgrad has used must not live on in this one."""
        left, restored = list(tensors), []
        for empty, there in zip(self.empty, self.there):
            one = object.__new__(type(empty))  # not copy.copy: TE's __new__ asks for all that the object holds
            vars(one).update(vars(empty))
            assert not one.restore_from_saved([left.pop(0) if this else None for this in there])
            restored.append(one)
        return Columns(restored, self.width)


class Columns(NamedTuple):
    """x, of so many columns, quantized along them: for each expert, or once for all."""

    copies: list
    width: int


class _Quantized:
    """What the two below share: that x is quantized once, in forward."""

    recipe: Recipe
    keeps: bool
    _made: Any = None

    def forward_x(self, x_RI: Tensor) -> list:
        """x for `forward`. x comes first; h, of which nothing is kept, comes later."""
        keeps, self.keeps = self.keeps, False
        copies = self.quantized("x", x_RI, rows=True, columns=keeps)
        self._made = copies if keeps else None
        return copies

    def keep(self, x_RI: Tensor) -> tuple[Callable[..., Columns], list[Tensor]]:
        """What makes the argument of `wgrad`, and what of."""
        copies, self._made = self._made or self.quantized("x", x_RI, columns=True), None
        for one in copies:
            self.drop_rows(one)
        kept = Kept(copies, x_RI.shape[1])
        return kept.again, kept.tensors

    def wgrad_x(self, x_RI: Tensor | Columns) -> Columns:
        if isinstance(x_RI, Columns):
            return x_RI
        return Columns(self.quantized("x", x_RI, columns=True), x_RI.shape[1])

    def precise(self, layout: str) -> bool:
        return split_accumulator(self.recipe, layout)

    def quantized(self, role: str, rows_RI: Tensor, *, rows: bool = False, columns: bool = False) -> list:
        raise NotImplementedError

    def drop_rows(self, one: Any) -> None:
        raise NotImplementedError


class QuantizedHostSplits(_Quantized, HostSplits):
    """A GEMM for each expert. Slabs are quantized one by one, in one call."""

    def __init__(self, counts_E: Tensor, recipe: Recipe, *, keeps: bool = False) -> None:
        super().__init__(counts_E)
        self.recipe, self.keeps = recipe, keeps

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        y_RO = x_RI.new_empty(x_RI.shape[0], w_EOI.shape[1])
        self._multiply(self._weights(w_EOI, rows=True), self.forward_x(x_RI), [y_RO], "TN", grad=False)
        return y_RO

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        grad_RI = grad_RO.new_empty(grad_RO.shape[0], w_EOI.shape[2])
        grads = self.quantized("g", grad_RO, rows=True)
        self._multiply(self._weights(w_EOI, columns=True), grads, [grad_RI], "NN", grad=True)
        return grad_RI

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor | Columns) -> Tensor:
        x = self.wgrad_x(x_RI)
        grad_EOI = grad_RO.new_empty(len(self.counts), grad_RO.shape[1], x.width)
        grads = self.quantized("g", grad_RO, columns=True)
        self._multiply(x.copies, grads, list(grad_EOI.unbind()), "NT", grad=True)
        return grad_EOI

    def quantized(self, role: str, rows_RI: Tensor, *, rows: bool = False, columns: bool = False) -> list:
        import transformer_engine_torch as tex

        made = quantizer(self.recipe, role, rows=rows, columns=columns)
        return tex.split_quantize(rows_RI[: self.rows].contiguous(), self.counts, [made] * len(self.counts))

    def drop_rows(self, one: Any) -> None:
        one.update_usage(rowwise_usage=False, columnwise_usage=True)

    def _weights(self, w_EOI: Tensor, *, rows: bool = False, columns: bool = False) -> list:
        return [matrix(self.recipe, "w", w_OI, rows=rows, columns=columns) for w_OI in w_EOI]


class QuantizedDeviceSplits(_Quantized, DeviceSplits):
    """One GEMM for all experts. Slabs and rows are multiples of 128."""

    def __init__(self, counts_E: Tensor, widths: tuple[int, ...], recipe: Recipe, *, keeps: bool = False) -> None:
        super().__init__(counts_E, widths)
        self.recipe, self.keeps = recipe, keeps

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        y_RO = x_RI.new_empty(x_RI.shape[0], w_EOI.shape[1])
        (x,) = self.forward_x(x_RI)
        self._multiply(self._weights(w_EOI, rows=True), x, self._slabs(y_RO), "TN")
        return y_RO

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        grad_RI = grad_RO.new_empty(grad_RO.shape[0], w_EOI.shape[2])
        (grads,) = self.quantized("g", grad_RO, rows=True)
        self._multiply(self._weights(w_EOI, columns=True), grads, self._slabs(grad_RI), "NN")
        return grad_RI

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor | Columns) -> Tensor:
        (x,), width = self.wgrad_x(x_RI)
        (grads,) = self.quantized("g", grad_RO, columns=True)
        grad_EOI = grad_RO.new_empty(len(self.counts_E), grad_RO.shape[1], width)
        self._multiply(x, grads, self._equal(grad_EOI), "NT")
        return grad_EOI

    def quantized(self, role: str, rows_RI: Tensor, *, rows: bool = False, columns: bool = False) -> list:
        made = quantizer(self.recipe, role, rows=rows, columns=columns, group=True)
        return [self._group(rows_RI, made, self.counts_E, self.offsets[rows_RI.shape[1]])]

    def drop_rows(self, one: Any) -> None:
        if one.columnwise_data is not None:  # on Blackwell FP8 with a scale per tensor has one copy for both
            one.rowwise_data = one.scale_inv = None

    def _weights(self, w_EOI: Tensor, *, rows: bool = False, columns: bool = False) -> Any:
        if self.recipe.forward_w.two_level:
            return [matrix(self.recipe, "w", w_OI, rows=rows, columns=columns) for w_OI in w_EOI]
        return self._group(w_EOI.flatten(0, 1), quantizer(self.recipe, "w", rows=rows, columns=columns, group=True))

    def _group(self, rows: Tensor, made: Any, counts_E: Tensor | None = None, begins: Tensor | None = None) -> Any:
        """Packed matrices; without counts they are equal."""
        import transformer_engine_torch as tex

        return tex.group_quantize(rows.contiguous(), made, len(self.counts_E), counts_E, tensor_offsets=begins)
