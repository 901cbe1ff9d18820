"""What TE's quantizers share, and how quantized tensors are saved for backward."""

from typing import Any

import torch


class Quantizer:
    """What it is told. The work is done by the extension's quantize, split_quantize and group_quantize."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False


def restore_from_saved(
    tensors: list[Any], saved_tensors: list[torch.Tensor | None], return_saved_tensors: bool = False
):
    """The quantized tensors, with the tensors that prepare_for_saving took from them."""
    assert type(tensors) is list and type(saved_tensors) is list and not return_saved_tensors
    for one in tensors:
        saved_tensors = one.restore_from_saved(saved_tensors)
    assert not saved_tensors, "more tensors were saved than the quantized ones hold"
    return tensors
