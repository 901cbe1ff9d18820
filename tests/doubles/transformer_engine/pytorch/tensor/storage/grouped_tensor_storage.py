"""Packed matrices with their sizes beside them: what TE's GEMM with device splits takes."""

from typing import Any

import torch
from torch import Tensor


class GroupedTensorStorage:
    def __new__(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        num_tensors: int,
        shapes: list[tuple[int, ...]] | None = None,
        quantizer: Any = None,
        data: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        scale_inv: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        amax: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
        scale: Tensor | None = None,
        first_dims: Tensor | None = None,
        last_dims: Tensor | None = None,
        tensor_offsets: Tensor | None = None,
        offsets: list[int] | None = None,
        scale_inv_offsets: list[int] | None = None,
        columnwise_scale_inv_offsets: list[int] | None = None,
        requires_grad: bool = False,
        stride: list[int] | None = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
    ):
        """Only what unquantized matrices of one width need."""
        assert type(shape) is tuple and len(shape) == 2 and num_tensors > 0
        assert quantizer is None and last_dims is None and columnwise_data is None, "the double knows no such thing"
        assert data is not None and data.dtype == dtype, "the data has another dtype than the group"
        assert data.dim() == 1 and data.is_contiguous(), "data is flat and contiguous"
        assert data.numel() == shape[0] * shape[1], f"{data.numel()} elements for {shape}"
        if first_dims is None:
            assert shapes is not None and len(shapes) == num_tensors and len({*shapes}) == 1
            assert shape == (num_tensors * shapes[0][0], shapes[0][1]), f"{shape} is not {num_tensors} x {shapes[0]}"
        else:
            assert tensor_offsets is not None
            for values, length in ((first_dims, num_tensors), (tensor_offsets, num_tensors + 1)):
                assert values.dtype == torch.int64 and values.shape == (length,), f"want int64 [{length}]: {values}"
                assert values.is_contiguous() and values.device == data.device, "sizes live beside the data"
        self = object.__new__(cls)
        self.logical_shape, self.num_tensors, self.tensor_shapes = shape, num_tensors, shapes
        self.rowwise_data, self.first_dims, self.tensor_offsets = data, first_dims, tensor_offsets
        return self
