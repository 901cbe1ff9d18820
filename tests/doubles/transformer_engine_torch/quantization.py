"""Quantized matrices, single and in groups, under the rules of TE's kernels.

Numbers and scales are those of titan_moe/precision, which has tests of its own against independent references; here it
is about which copies a matrix has, along which axis, and for which GEMM. A group in MXFP8 is quantized by mxfp8.py,
which knows no such thing, and lays scales out as tensor cores read them.

Shape letters: R rows, K columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from titan_moe.moe import te
from titan_moe.precision.quantize import Groups, Quantized
from titan_moe.precision.quantize import quantize as _put
from titan_moe.precision.recipes import Format

from .mxfp8 import _numbers, _parts, _quantized_group

_ELEMENT = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2", DType.kFloat4E2M1: "e2m1"}


def quantize(tensor: Tensor, quantizer: Any, output=None, noop_flag: Tensor | None = None):
    """One matrix."""
    assert output is None and noop_flag is None, "the double does not do these"
    return _Matrix(tensor.contiguous(), quantizer)


def split_quantize(
    tensor: Tensor, split_sections: list[int], quantizer_list: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Rows cut into matrices."""
    assert len(quantizer_list) == len(split_sections), f"Expected {len(split_sections)} quantizers"
    assert sum(split_sections) <= tensor.shape[0], "Attempted to split tensor along dim 0"
    first = quantizer_list[0]
    assert not getattr(first, "with_2d_quantization", False), "NVFP4 split-quantize does not support 2D quantization"
    if isinstance(first, NVFP4Quantizer):
        assert sum(split_sections) == tensor.shape[0], "its kernel for all splits takes all rows"
    parts = tensor.contiguous()[: sum(split_sections)].split(split_sections)
    return [_Matrix(part, one) for part, one in zip(parts, quantizer_list)]


def group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
    noop_flag: Tensor | None = None,
    output=None,
):
    """Packed matrices of one width. Rows beyond the last are not written."""
    assert tensor.dim() == 2 and tensor.is_contiguous(), "the kernel reads memory and does not look at strides"
    assert tensor.dtype == torch.bfloat16, "the double quantizes from bf16"
    assert not (torch.is_grad_enabled() and tensor.requires_grad), "no autograd in here"
    assert last_dims is None and noop_flag is None and output is None, "the double does not do these"
    assert 1 <= num_tensors <= 64, "Number of tensors in a group must be between 1 and 64."
    assert quantizer.internal and (quantizer.rowwise_usage or quantizer.columnwise_usage)
    if isinstance(quantizer, NVFP4Quantizer):
        assert not quantizer.with_2d_quantization, "2D scaling grouped quant kernel is not ready yet"
        assert quantizer.with_rht, "graph safe grouped quant kernel for non-RHT path is not ready yet"
    R, K = tensor.shape
    tile = 16 if isinstance(quantizer, Float8CurrentScalingQuantizer) else 128
    assert R % tile == 0 and K % tile == 0, f"{R} x {K}: no multiples of {tile}"
    if first_dims is None:
        assert tensor_offsets is None and R % num_tensors == 0 and R // num_tensors % tile == 0, "equal matrices"
        counts = [R // num_tensors] * num_tensors
    else:
        for values, length in ((first_dims, num_tensors), (tensor_offsets, num_tensors + 1)):
            assert values is not None and values.dtype == torch.int64 and values.shape == (length,)
            assert values.is_contiguous()
        counts = [] if isinstance(tensor, FakeTensor) else first_dims.tolist()
    if not isinstance(tensor, FakeTensor):
        assert all(count % tile == 0 for count in counts) and sum(counts) <= R, f"slabs of {counts} rows in {R}"
        if tensor_offsets is not None:
            begins = [sum(counts[:n]) * K for n in range(num_tensors + 1)]
            assert tensor_offsets.tolist() == begins, "where slabs begin, in elements"
    return _Group(tensor, quantizer, num_tensors, counts, first_dims)


# ---------------------------------------------------------------------------------------------------------------------
# What comes out


class _Whole:
    """As TE's: made from what it holds, or not at all. So copy.copy, which calls `__new__` alone, fails."""

    def __new__(cls, values_RK: Tensor, *others: Any):
        return object.__new__(cls)


class _Matrix(_Whole):
    """A matrix quantized along its rows, its columns or both."""

    def __init__(self, values_RK: Tensor, quantizer: Any) -> None:
        assert values_RK.dim() == 2 and not (torch.is_grad_enabled() and values_RK.requires_grad)
        R, K = values_RK.shape
        block = {MXFP8Quantizer: 32, NVFP4Quantizer: 16}.get(type(quantizer), 1)
        assert R % block == 0 and K % block == 0, f"{R} x {K}: dims must be divisible by {block}"
        if isinstance(quantizer, NVFP4Quantizer) and quantizer.optimize_for_gemm and quantizer.with_rht:
            assert R % 64 == 0 and K % 128 == 0, "RHT-unfused fallback path does not support swizzled scales"
        if isinstance(quantizer, NVFP4Quantizer) and quantizer.with_rht:
            assert values_RK.dtype == torch.bfloat16, "RHT is only supported for bfloat16 input"
        if isinstance(quantizer, Float8CurrentScalingQuantizer) and not _one_copy():
            assert quantizer.rowwise_usage, "a columnwise copy alone is not what TE makes of one matrix here"
        self._shape, self._quantizer = (R, K), quantizer
        self._made = {
            columns: _put(_padded(values_RK, quantizer), _format(quantizer, columns), -2 if columns else -1)
            if wanted and values_RK.numel()
            else None
            for columns, wanted in ((False, quantizer.rowwise_usage), (True, quantizer.columnwise_usage))
        }
        if isinstance(quantizer, Float8CurrentScalingQuantizer) and _one_copy() and values_RK.numel():
            self._made[False] = self._made[False] or self._made[True]
            self._made[True] = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a copy. None can be made later."""
        if isinstance(self._quantizer, Float8CurrentScalingQuantizer) and _one_copy():
            return
        for columns, wanted in ((False, rowwise_usage), (True, columnwise_usage)):
            if wanted is False:
                self._made[columns] = None
            assert not wanted or self._made[columns] or not self._shape[0], "Cannot generate a copy from the other"

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "_Matrix"]:
        tensors: list[Tensor | None] = []
        for made in self._made.values():
            tensors += [made.data, made.scale, made.tensor_scale] if made else [None] * 3
            if made:
                made.data = made.scale = made.tensor_scale = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        made = {}
        for columns, old in self._made.items():
            data, scale, tensor_scale, *tensors = tensors
            made[columns] = old and Quantized(data, scale, tensor_scale, old.format, old.axis, None)
        self._made = made
        return tensors

    def _numbers(self, columns: bool) -> Tensor:
        """What a GEMM reads, [R, K] in fp32."""
        if not self._shape[0]:
            return torch.zeros(self._shape)
        if isinstance(self._quantizer, Float8CurrentScalingQuantizer) and _one_copy():
            columns = False
        made = self._made[columns]
        assert made is not None, f"no copy along its {'columns' if columns else 'rows'}"
        return made.dequantize(torch.float32)[: self._shape[0], : self._shape[1]]


class _Group(_Whole):
    """Packed matrices."""

    def __init__(
        self, values_RK: Tensor, quantizer: Any, num_tensors: int, counts: list[int], first_dims: Tensor | None
    ) -> None:
        self.num_tensors, self.logical_shape, self.quantizer = num_tensors, tuple(values_RK.shape), quantizer
        self.first_dims, self._counts = first_dims, counts
        self.rowwise_data = self.scale_inv = self.amax = None
        self.columnwise_data = self.columnwise_scale_inv = self.columnwise_amax = None
        rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
        if isinstance(quantizer, Float8CurrentScalingQuantizer) and _one_copy():
            rows, columns = True, False
        if rows:
            self.rowwise_data, self.scale_inv, self.amax = self._put(values_RK, columns=False)
        if columns:
            self.columnwise_data, self.columnwise_scale_inv, self.columnwise_amax = self._put(values_RK, columns=True)

    def _put(self, values_RK: Tensor, *, columns: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        if isinstance(self.quantizer, MXFP8Quantizer):
            assert self.quantizer.optimize_for_gemm, "grouped scales are not swizzled later for all operands"
            return *_quantized_group(values_RK, self._counts, columns), None
        made_for_gemm = isinstance(self.quantizer, NVFP4Quantizer)
        assert self.quantizer.optimize_for_gemm or not made_for_gemm, "nothing swizzles NVFP4's grouped scales later"
        if isinstance(values_RK, FakeTensor):
            return values_RK.new_empty(values_RK.numel(), dtype=torch.uint8), values_RK.new_empty(1), None
        fmt = _format(self.quantizer, columns)
        made = _put(values_RK[: sum(self._counts)], fmt, -2 if columns else -1, groups=self._groups())
        return made.data, made.scale, made.tensor_scale

    def _groups(self) -> Groups:
        return Groups.of_slabs(torch.tensor(self._counts), sum(self._counts))

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "_Group"]:
        names = self._tensors()
        tensors = [getattr(self, name) for name in names]
        for name in names:
            setattr(self, name, None)
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        names = self._tensors()
        for name, tensor in zip(names, tensors):
            setattr(self, name, tensor)
        return tensors[len(names) :]

    def _tensors(self) -> list[str]:
        return [
            *("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv"),
            *("amax", "columnwise_amax", "first_dims"),
        ]

    def _numbers(self, columns: bool) -> list[Tensor]:
        """What a GEMM reads, matrix by matrix, in fp32."""
        if isinstance(self.quantizer, Float8CurrentScalingQuantizer) and _one_copy():
            columns = False
        data, scale = (
            (self.columnwise_data, self.columnwise_scale_inv) if columns else (self.rowwise_data, self.scale_inv)
        )
        assert data is not None and scale is not None, f"no copy along its {'columns' if columns else 'rows'}"
        K = self.logical_shape[1]
        if isinstance(self.quantizer, MXFP8Quantizer):
            parts = zip(*_parts(data, scale, self._counts, K))
            return [_matrix(flat.view(-1, K), tiles, columns) for flat, tiles in parts]
        amax = self.columnwise_amax if columns else self.amax
        fmt, axis = _format(self.quantizer, columns), -2 if columns else -1
        made = Quantized(data, scale, amax, fmt, axis, self._groups())
        return list(made.dequantize(torch.float32).split(self._counts))


def _matrix(data_RK: Tensor, tiles: Tensor, columns: bool) -> Tensor:
    data_RK = data_RK.view(torch.float8_e4m3fn)
    return _numbers(data_RK.T.contiguous(), tiles).T if columns else _numbers(data_RK, tiles)


def _one_copy() -> bool:
    """Blackwell multiplies FP8 with any order of operands, so that there one copy does for rows and columns."""
    capability = te.facts().capability
    return capability is not None and capability >= (10, 0)


def _padded(values_RK: Tensor, quantizer: Any) -> Tensor:
    """Filled up with zeros to whole blocks, where TE's kernel takes others."""
    if not isinstance(quantizer, Float8BlockQuantizer):
        return values_RK
    R, K = values_RK.shape
    return F.pad(values_RK, (0, -K % 128, 0, -R % 128))


def _format(quantizer: Any, columns: bool) -> Format:
    element: Any = _ELEMENT[quantizer.dtype]
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        return Format(element, "fp32")
    if isinstance(quantizer, Float8BlockQuantizer):
        return Format(element, "pow2", (128 if quantizer.block_scaling_dim == 2 else 1, 128))
    if isinstance(quantizer, MXFP8Quantizer):
        return Format(element, "e8m0", (1, 32))
    assert isinstance(quantizer, NVFP4Quantizer)
    square, hadamard = quantizer.with_2d_quantization, 16 if columns and quantizer.with_rht else 0
    return Format(element, "e4m3", (16 if square else 1, 16), quantizer.stochastic_rounding, hadamard)
