"""A matrix in MXFP8, with scales in compact order: what NCCL EP sends."""

import torch
from torch import Tensor

from transformer_engine.pytorch.constants import DType


class MXFP8TensorStorage:
    def __new__(
        cls,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype,
        quantizer,
        with_gemm_swizzled_scales: bool,
        *args,
        fake_dtype: torch.dtype | None = None,
        **kwargs,
    ):
        """Only what rows with compact scales need."""
        assert rowwise_data is not None and rowwise_scale_inv is not None and fp8_dtype is DType.kFloat8E4M3
        assert columnwise_data is columnwise_scale_inv is quantizer is None and not (args or kwargs)
        assert not with_gemm_swizzled_scales, "cannot be dequantized"
        rows, width = rowwise_data.shape
        assert rowwise_data.dtype == rowwise_scale_inv.dtype == torch.uint8 and rowwise_data.is_contiguous()
        assert rowwise_scale_inv.shape == (rows, width // 32) and rowwise_scale_inv.is_contiguous()
        self = object.__new__(cls)
        self._rowwise_data, self._rowwise_scale_inv, self._dtype = rowwise_data, rowwise_scale_inv, fake_dtype
        return self

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        rows, scales = self._rowwise_data, self._rowwise_scale_inv
        assert dtype is not None and rows.shape[0] % 128 == 0, "scales are padded to 128 rows"
        numbers = rows.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 32))
        return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(1).to(dtype)
