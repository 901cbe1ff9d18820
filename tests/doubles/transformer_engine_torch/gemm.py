"""The functions of TE's extension that grouped GEMM needs."""

import torch
from torch import Tensor


def get_cublasLt_version() -> int:
    return 131000


def splits_to_offsets_multi(
    split_sizes: Tensor,
    device: torch.device,
    *,
    strides: list[int],
    include_leading_zero: list[bool],
    dtypes: list[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The counts as int64, and for each stride where the slabs begin in units of 1 / stride rows."""
    assert split_sizes.dim() == 1 and split_sizes.is_contiguous() and split_sizes.device == device
    assert len(strides) == len(include_leading_zero) == len(dtypes), "one of each per output"
    split_sizes = split_sizes.long()
    outputs = []
    for stride, zero, dtype in zip(strides, include_leading_zero, dtypes):
        offsets = split_sizes.cumsum(0) * stride
        outputs.append(torch.cat([offsets.new_zeros(int(zero)), offsets]).to(dtype))
    return split_sizes, outputs
