"""Grouped GEMM on a CPU, under TE's rules. What TE leaves undefined is NaN here."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

LAYOUTS = ("TN", "NN", "NT")


def general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad=False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output=False,
) -> tuple[Any, ...]:
    """A GEMM for each pair of matrices. `single_output`: the results are consecutive rows of out[0]."""
    assert layout in LAYOUTS and grad == (layout != "TN"), f"layout {layout} with grad={grad}"
    assert not (gelu or use_bias or accumulate or D_dtype), "the double does not do these"
    assert type(A) is list and type(B) is list and type(out) is list, "matrices come in lists"
    assert type(m_splits) is list and all(type(rows) is int for rows in m_splits), "m_splits is a list of Python ints"
    assert len(A) == len(B) == len(m_splits) == len(quantization_params) > 0, "one of each per expert"
    assert not any(quantization_params) and out_dtype == out[0].dtype
    a, b = (_operands(side, layout, first) for side, first in ((A, True), (B, False)))
    _check_accumulator([*A, *B], layout, use_split_accumulator)
    for matrix in out:
        _check_plain(matrix)
    plain = [matrix.dtype for matrix in (*A, *B, *out) if not _is_quantized(matrix)]
    assert len({*plain}) == 1, "one dtype for all"
    results = [_product(*pair, layout) for pair in zip(a, b)]
    rows = [matrix.shape[0] for matrix in b]
    assert rows == m_splits, f"{m_splits} are not the rows of B, {rows}"
    if single_output:
        assert layout != "NT" and len(out) == 1, "single_output wants one tensor for all rows"
        assert out[0].shape[0] >= sum(m_splits), f"{sum(m_splits)} rows overrun the output of {out[0].shape[0]}"
        out[0].fill_(float("nan"))
        out[0][: sum(m_splits)] = torch.cat(results)
    else:
        assert len(out) == len(A)
        for matrix, result in zip(out, results):
            assert matrix.shape == result.shape, f"{tuple(matrix.shape)} for a result of {tuple(result.shape)}"
            matrix.copy_(result)
    return out, [], []


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub=None,
    ub_type=None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
):
    """One GEMM of quantized matrices."""
    assert layout in LAYOUTS and grad == (layout != "TN"), f"layout {layout} with grad={grad}"
    assert quantization_params is gelu_in is beta is out is bias is ub is ub_type is extra_output is None
    assert alpha == 1.0 and not (gelu or accumulate or bulk_overlap), "the double does not do these"
    assert out_dtype is not None and _is_quantized(A) and _is_quantized(B), "of quantized matrices it is not told"
    (a,), (b,) = (_operands([side], layout, first) for side, first in ((A, True), (B, False)))
    _check_accumulator([A, B], layout, use_split_accumulator)
    return _product(a, b, layout).to(out_dtype), None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Operands


def _is_quantized(operand: Any) -> bool:
    return hasattr(operand, "_numbers")


def _operands(matrices: list[Any], layout: str, first: bool) -> list[Tensor]:
    """What is multiplied. A of a transposed layout, and B of one that is not, is read along its rows."""
    columns = (layout[0] == "N") if first else (layout[1] == "T")
    for matrix in matrices:
        if _is_quantized(matrix):
            _check_widths(matrix, matrix._shape)
        else:
            _check_plain(matrix)
    return [matrix._numbers(columns) if _is_quantized(matrix) else matrix for matrix in matrices]


def _check_plain(matrix: Tensor) -> None:
    assert matrix.dtype in (torch.bfloat16, torch.float16, torch.float32), f"TE has no type for {matrix.dtype}"
    assert matrix.dim() == 2 and matrix.is_contiguous(), "TE reads memory and does not look at strides"
    assert not (torch.is_grad_enabled() and matrix.requires_grad), "no autograd in here"


def _check_widths(matrix: Any, shape: tuple[int, ...]) -> None:
    """Rows of a matrix begin at 16 bytes, in either direction."""
    quantizer = getattr(matrix, "_quantizer", None) or matrix.quantizer
    multiple = 32 if hasattr(quantizer, "with_rht") else 16
    assert shape[1] % multiple == 0, f"a width of {shape[1]} is no multiple of {multiple}"


def _check_accumulator(matrices: list[Any], layout: str, use_split_accumulator: bool) -> None:
    """As TE's recipes have it: gradients are added up in full fp32, and with scales per block everything."""
    quantized = [matrix for matrix in matrices if _is_quantized(matrix)]
    if not quantized:
        return
    quantizer = getattr(quantized[0], "_quantizer", None) or quantized[0].quantizer
    always = hasattr(quantizer, "block_scaling_dim")
    assert use_split_accumulator == (always or layout != "TN"), f"split accumulator in {layout}"


def _product(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """Accumulated in float32. The letters say which of A, B a column-major BLAS would transpose."""
    a, b = a.float(), b.float()
    if layout == "NT":
        return b.T @ a
    return b @ (a.T if layout == "TN" else a)


def general_grouped_gemm_for_grouped_tensor(
    A,
    B,
    out,
    *,
    layout: str = "TN",
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    bias=None,
    bias_scale: Tensor | None = None,
    grad: bool = False,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> Any:
    """One GEMM over packed matrices whose sizes only the device knows. Fake tensors are checked, but not computed."""
    assert layout in LAYOUTS, f"GEMM layout {layout} not supported."
    if grad:
        raise NotImplementedError("grad is not supported for grouped_tensor GEMM yet.")
    if isinstance(A, list) and isinstance(out, list):
        raise ValueError("Both A and out are discrete. This is not supported yet.")
    assert not accumulate and bias is None and bias_scale is None, "the double does not do these"
    sides = [*(A if isinstance(A, list) else [A]), B, out]
    quantized = _is_quantized(B)
    assert isinstance(out, GroupedTensorStorage) and not isinstance(B, list), "the double takes only weights as a list"
    if isinstance(A, list):
        assert len(A) == B.num_tensors <= 64 and all(map(_is_quantized, A)), "discrete weights: at most 64"
    for group in (A, B, out):
        if isinstance(group, list):
            continue
        assert group.num_tensors == B.num_tensors, "A, B and out have the same number of matrices"
        assert group.logical_shape[1] % 8 == 0, "rows are multiples of 16 bytes"
        if group is out or not quantized:
            assert group.rowwise_data.dtype in (torch.bfloat16, torch.float16), "cuBLASLt groups two-byte types only"
            assert quantized or group.rowwise_data.dtype == B.rowwise_data.dtype, "one dtype for all"
        else:
            assert _is_quantized(group), "both operands are quantized, or none"
            _check_widths(group, group.logical_shape)
    _check_accumulator(sides, layout, use_split_accumulator)
    slabs, equal = ((A, B), out) if layout == "NT" else ((B, out), A)
    assert all(group.first_dims is not None for group in slabs), "sizes of " + layout
    assert isinstance(equal, list) or equal.first_dims is None, "sizes of " + layout
    assert slabs[0].logical_shape[0] == slabs[1].logical_shape[0], "as many rows out as in"
    if isinstance(out.rowwise_data, FakeTensor):
        return out
    plain = [group for group in (A, B, out) if isinstance(group, GroupedTensorStorage)]
    assert all(group.rowwise_data.data_ptr() % 16 == 0 for group in plain), "data starts at 16 bytes"
    if layout != "NT":
        out.rowwise_data.fill_(float("nan"))
    for a, b, matrix in zip(_side(A, layout, True), _side(B, layout, False), _matrices(out), strict=True):
        result = _product(a, b, layout)
        assert matrix.shape == result.shape, f"{tuple(matrix.shape)} for a result of {tuple(result.shape)}"
        matrix.copy_(result)
    return out


def _side(side: Any, layout: str, first: bool) -> list[Tensor]:
    if isinstance(side, list):
        return _operands(side, layout, first)
    columns = (layout[0] == "N") if first else (layout[1] == "T")
    return side._numbers(columns) if _is_quantized(side) else _matrices(side)


def _matrices(group: GroupedTensorStorage) -> list[Tensor]:
    """Views, found by the offsets."""
    width, data = group.logical_shape[1], group.rowwise_data
    if group.first_dims is None:
        return list(data.view(group.num_tensors, -1, width))
    counts, offsets = group.first_dims.tolist(), group.tensor_offsets.tolist()
    assert sum(counts) <= group.logical_shape[0], f"{counts} rows do not fit into {group.logical_shape[0]}"
    ends = [start + count * width for start, count in zip(offsets, counts)]
    assert offsets == [0, *ends], f"{offsets} are not where slabs of {counts} rows begin, in elements"
    return [data[start:end].view(-1, width) for start, end in zip(offsets, ends)]
