"""Our low-precision GEMMs through Transformer Engine's (TE's) own Python, by test_quantized.py in a process of its own.

What is compiled is replaced: quantizers leave TE's own storages with numbers that nobody made, in the shapes and with
the copies that the extension would (csrc/quantizer.cpp, csrc/extensions/cast.cpp), and the GEMMs check that each
operand has the copy that its layout reads.
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import titan_moe.runtime  # noqa: F401

import torch

from tests.te.wheel_python import install
from titan_moe.precision.recipes import RECIPES

COUNTS, D, F = [128, 0, 256], 128, 256
ROWS = sum(COUNTS) + 128
CAPABILITIES = ((8, 9), (9, 0), (10, 0), (12, 0))


def numbers(wanted: bool, *shape: int) -> torch.Tensor | None:
    return torch.zeros(shape, dtype=torch.uint8) if wanted else None


def storage(tensor: torch.Tensor, quantizer: Any) -> Any:
    """One matrix, as the extension makes it of internal quantizers."""
    from transformer_engine.pytorch.tensor.storage import float8_blockwise_tensor_storage as blockwise
    from transformer_engine.pytorch.tensor.storage import float8_tensor_storage as per_tensor
    from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage as mxfp8
    from transformer_engine.pytorch.tensor.storage import nvfp4_tensor_storage as nvfp4
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    assert quantizer.internal and (quantizer.rowwise_usage or quantizer.columnwise_usage)
    R, K = tensor.shape
    rows, columns, kind = quantizer.rowwise_usage, quantizer.columnwise_usage, type(quantizer).__name__
    if kind == "Float8CurrentScalingQuantizer":
        one_copy = is_non_tn_fp8_gemm_supported()
        return per_tensor.Float8TensorStorage(
            data=numbers(rows or one_copy, R, K),
            fp8_scale_inv=torch.ones(1),
            fp8_dtype=quantizer.dtype,
            data_transpose=numbers(columns and not one_copy, K, R),
            quantizer=quantizer,
        )
    transposed = (R, K) if kind == "MXFP8Quantizer" else (K, R)
    made = numbers(rows, R, K), numbers(rows, 1, 1), numbers(columns, *transposed), numbers(columns, 1, 1)
    if kind == "MXFP8Quantizer":
        return mxfp8.MXFP8TensorStorage(*made, quantizer.dtype, quantizer, quantizer.optimize_for_gemm)
    if kind == "Float8BlockQuantizer":
        square = quantizer.block_scaling_dim == 2
        return blockwise.Float8BlockwiseQTensorStorage(*made, quantizer.dtype, quantizer, square)
    largest = numbers(rows, 1), numbers(columns, 1)
    return nvfp4.NVFP4TensorStorage(*made, *largest, quantizer.dtype, quantizer, False)


def group(tensor, quantizer, num_tensors, first_dims, last_dims=None, tensor_offsets=None, noop_flag=None, output=None):
    """Packed matrices, in flat tensors."""
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    assert quantizer.internal and last_dims is noop_flag is output is None
    rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    if type(quantizer).__name__ == "Float8CurrentScalingQuantizer" and is_non_tn_fp8_gemm_supported():
        rows, columns = True, False
    return GroupedTensorStorage(
        tuple(tensor.shape),
        tensor.dtype,
        num_tensors=num_tensors,
        quantizer=quantizer,
        data=numbers(rows, tensor.numel()),
        columnwise_data=numbers(columns, tensor.numel()),
        scale_inv=numbers(rows, 1),
        columnwise_scale_inv=numbers(columns, 1),
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        with_gemm_swizzled_scales=quantizer.optimize_for_gemm,
    )


def offsets(split_sizes, device, *, strides, include_leading_zero, dtypes, bulk_allocate=False):
    assert all(include_leading_zero)
    ends = torch.cat([split_sizes.new_zeros(1), split_sizes.cumsum(0)])
    return split_sizes, [ends * stride for stride in strides]


def check_copy(one: Any, columns: bool) -> None:
    """That a GEMM finds what it reads."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    if isinstance(one, torch.Tensor):
        return
    if hasattr(one, "_transpose"):
        columns = columns and not is_non_tn_fp8_gemm_supported()
        found = one._transpose if columns else one._data
    elif hasattr(one, "num_tensors"):
        if type(one.quantizer).__name__ == "Float8CurrentScalingQuantizer":
            columns = columns and not is_non_tn_fp8_gemm_supported()
        found = one.columnwise_data if columns else one.rowwise_data
    else:
        found = one._columnwise_data if columns else one._rowwise_data
    assert found is not None, f"{type(one).__name__} has no copy by {'columns' if columns else 'rows'}"


def gemm(A, transa, B, transb, *others, **options):
    for side, columns in ((A, not transa), (B, transb)):
        for one in side if isinstance(side, list) else [side]:
            check_copy(one, columns)
    return torch.zeros(0), None, None, None


def machine(tex: Any, capability: tuple[int, int]) -> ExitStack:
    """TE's Python on such a GPU, whose memory is the host's."""
    from transformer_engine.pytorch.cpp_extensions import gemm as te_gemm

    stack = ExitStack()
    for owner, name, value in (
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.cuda, "current_device", lambda: "cpu"),
        (te_gemm, "get_sm_count", lambda: 132),
        (te_gemm, "get_cublas_workspace", lambda device, ub, grouped: [torch.empty(1)] if grouped else torch.empty(1)),
        (te_gemm, "_empty_tensor", lambda: torch.empty(0)),
        (te_gemm, "_get_grouped_gemm_setup_workspace", lambda device, matrices: torch.empty(1)),
        (te_gemm, "_get_grouped_cublas_workspace", lambda device, layout: torch.empty(1)),
        (te_gemm, "_get_fp32_ones_tensor", lambda n, device: mock.Mock(is_cuda=True)),
        (te_gemm, "_get_fp32_zeros_tensor", lambda n, device: mock.Mock(is_cuda=True)),
    ):
        stack.enter_context(mock.patch.object(owner, name, value))
    tex.quantize = lambda tensor, quantizer: storage(tensor, quantizer)
    tex.split_quantize = lambda tensor, counts, quantizers: [
        storage(part, one) for part, one in zip(tensor.split(counts), quantizers, strict=True)
    ]
    tex.group_quantize, tex.splits_to_offsets_multi = group, offsets
    tex.te_general_grouped_gemm = tex.generic_gemm = gemm
    tex.te_general_grouped_gemm_for_grouped_tensor = tex.te_general_grouped_gemm_for_discrete_in = gemm
    return stack


def run(tex: Any, name: str, capability: tuple[int, int]) -> int:
    """Each GEMM of a recipe on each path that this GPU has; wgrad twice, as of a graph that is retained."""
    from titan_moe.moe.te_quantize import QuantizedDeviceSplits, QuantizedHostSplits
    from titan_moe.precision import support
    from titan_moe.precision.te_linear import TEGemm

    recipe, counts = RECIPES[name], torch.tensor(COUNTS)
    x, w, grad = (torch.zeros(s, dtype=torch.bfloat16) for s in ((ROWS, D), (len(COUNTS), F, D), (ROWS, F)))
    gemms: list[tuple[Any, torch.Tensor]] = []
    if support.find(name, "linears", capability):
        gemms.append((TEGemm(recipe), w[0]))
    for keeps in (False, True):
        if support.find(name, "host splits", capability):
            gemms.append((QuantizedHostSplits(counts, recipe, keeps=keeps), w))
        if support.find(name, "device splits", capability):
            gemms.append((QuantizedDeviceSplits(counts, (D, F), recipe, keeps=keeps), w))
    with machine(tex, capability):
        for one, weight in gemms:
            one.forward(x, weight)
            one.dgrad(grad, weight)
            again, kept = one.keep(x)
            for _ in range(2):
                one.wgrad(grad, again(*kept))
            one.wgrad(grad, x)
    return len(gemms)


if __name__ == "__main__":
    extension = install()
    for capability in CAPABILITIES:
        for recipe in RECIPES:
            print(recipe, *capability, run(extension, recipe, capability))
