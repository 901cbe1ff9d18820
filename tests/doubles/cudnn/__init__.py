"""Stands in for the grouped GEMMs for SM100 in cuDNN's frontend; see tests/te_doubles.py. What they leave undefined is
NaN here. Fake tensors are checked, but not computed."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformer_engine_torch.mxfp8 import _numbers, _quantized, _tiled

_FP8, _SCALE = torch.float8_e4m3fn, torch.float8_e8m0fnu
_GROUP = 32  # rows of w13 that are all gate or all up


def grouped_gemm_glu_wrapper_sm100(
    a_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    bias_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: Tensor | None = None,
    prob_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    c_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    generate_c: bool = False,
    sf_fp8_dtype_override: Literal["e5m3"] | None = None,
    *,
    scheduler_counter_tensor: Tensor | None = None,
) -> dict[str, Any]:
    """C = A B^T, and D = SwiGLU(C) * prob quantized in both directions."""
    assert act_func == "swiglu" and d_dtype == _FP8 and c_dtype == torch.bfloat16
    R, n_full, slabs = _check(a_tensor, sfa_tensor, b_tensor, sfb_tensor, padded_offsets, alpha_tensor, sf_vec_size)
    _check_quantizing(norm_const_tensor, discrete_col_sfd)
    assert n_full % 64 == 0, "N must be divisible by 64 for GLU"
    assert prob_tensor is None or prob_tensor.shape == (R, 1, 1)
    c, d = a_tensor.new_full((R, n_full), float("nan"), dtype=torch.float32), None
    for rows, a, b in _operands(slabs, a_tensor, sfa_tensor, b_tensor, sfb_tensor):
        c[rows] = a @ b.T
    gate, up = c.unflatten(1, (-1, 2, _GROUP)).unbind(2)
    d = (torch.nn.functional.silu(gate) * up).flatten(1)
    if prob_tensor is not None:
        d = d * prob_tensor.float().view(-1, 1)
    return {"c_tensor": _matrix(c.to(c_dtype)), "amax_tensor": None, **_quantize(d, slabs, "d_tensor")}


def grouped_gemm_quant_wrapper_sm100(
    a_tensor: Tensor,
    sfa_tensor: Tensor,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    bias_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: Tensor | None = None,
    prob_tensor: Tensor | None = None,
    row_scale_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    d_tensor: Tensor | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: Literal["e5m3"] | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    *,
    generate_amax: bool = True,
    scheduler_counter_tensor: Tensor | None = None,
) -> dict[str, Any]:
    """D = A B^T, not quantized."""
    assert norm_const_tensor is None and prob_tensor is None and bias_tensor is None and row_scale_tensor is None
    R, n_out, slabs = _check(a_tensor, sfa_tensor, b_tensor, sfb_tensor, padded_offsets, alpha_tensor, sf_vec_size)
    assert d_dtype == torch.bfloat16 == d_tensor.dtype
    _check_major(d_tensor, (R, n_out, 1), "n")
    if not isinstance(a_tensor, FakeTensor):
        d_tensor.fill_(float("nan"))
    for rows, a, b in _operands(slabs, a_tensor, sfa_tensor, b_tensor, sfb_tensor):
        d_tensor[rows, :, 0] = (a @ b.T).to(d_dtype)
    return {"d_tensor": d_tensor}


def grouped_gemm_dglu_wrapper_sm100(
    a_tensor: Tensor,
    c_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    beta_tensor: Tensor,
    prob_tensor: Tensor | None,
    dprob_tensor: Tensor | None,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    generate_dbias: bool = False,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: Literal["e5m3"] | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    epilogue_op: str | None = None,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    round_dgrad_to_input_dtype: bool = False,
    activation_tensor: Tensor | None = None,
    deterministic: bool = False,
) -> dict[str, Any]:
    """D = the gradient of C, of which SwiGLU(C) * prob has the gradient A B^T; D is quantized in both directions. The
    gradient of prob is added to dprob_tensor."""
    assert act_func == "dswiglu" and d_dtype == _FP8 and not generate_dbias and activation_tensor is None
    R, n_half, slabs = _check(a_tensor, sfa_tensor, b_tensor, sfb_tensor, padded_offsets, alpha_tensor, sf_vec_size)
    _check_quantizing(norm_const_tensor, discrete_col_sfd)
    assert c_tensor.dtype == torch.bfloat16 and beta_tensor.shape == alpha_tensor.shape
    _check_major(c_tensor, (R, 2 * n_half, 1), "n")
    for values in (prob_tensor, dprob_tensor):
        assert values.shape == (R, 1, 1) and values.dtype == torch.float32, "Prob and Dprob must be float32"
    if not isinstance(a_tensor, FakeTensor):
        assert not dprob_tensor.any(), "Gradient of probability (output, must be zero-initialized)"
    gradient = c_tensor.new_full((R, 2 * n_half), float("nan"), dtype=torch.float32)
    for rows, a, b in _operands(slabs, a_tensor, sfa_tensor, b_tensor, sfb_tensor):
        gate, up = c_tensor[rows, :, 0].float().unflatten(1, (-1, 2, _GROUP)).unbind(2)
        of_h = (a @ b.T).unflatten(1, (-1, _GROUP))
        sigmoid = gate.sigmoid()
        dprob_tensor[rows] += (of_h * gate * sigmoid * up).flatten(1).sum(-1)[:, None, None]
        of_h = of_h * prob_tensor[rows]
        pair = of_h * up * sigmoid * (1 + gate * (1 - sigmoid)), of_h * gate * sigmoid
        gradient[rows] = torch.stack(pair, 2).flatten(1)
    outputs = _quantize(gradient, slabs, "d_row_tensor")
    return {"dprob_tensor": dprob_tensor, "dbias_tensor": None, "amax_tensor": None, **outputs}


def grouped_gemm_wgrad_wrapper_sm100(
    a_tensor: Tensor,
    b_tensor: Tensor,
    sfa_tensor: Tensor,
    sfb_tensor: Tensor,
    offsets_tensor: Tensor,
    output_mode: str = "dense",
    wgrad_tensor: Tensor | None = None,
    wgrad_ptrs: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    wgrad_dtype: torch.dtype | None = None,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: Literal["e5m3"] | None = None,
    accumulate_on_output: bool = False,
    input_order: Any = "tensor2d",
    current_stream: Any = None,
    *,
    descriptor_workspace: Tensor | None = None,
) -> dict[str, Any]:
    """A B for each slab of A's columns and B's rows; scales are tiled slab by slab."""
    assert output_mode == "dense" and sf_vec_size == 32 and not accumulate_on_output
    (M, R), N, E = a_tensor.shape, b_tensor.shape[1], len(offsets_tensor)
    assert b_tensor.shape[0] == R and wgrad_tensor.shape == (E, M, N) and wgrad_tensor.dtype == wgrad_dtype
    assert wgrad_tensor.is_contiguous() and wgrad_dtype in (torch.bfloat16, torch.float16, torch.float32)
    for values, scales, width in ((a_tensor, sfa_tensor, M), (b_tensor, sfb_tensor, N)):
        assert values.dtype == _FP8 and scales.dtype == _SCALE, "e4m3 with e8m0"
        assert scales.shape == (width, R // 32) and width % 128 == 0, "whole tiles of scales"
    assert a_tensor.stride() == (1, M) and b_tensor.stride() == (N, 1), "both as their columnwise data lie"
    for expert, rows in enumerate(_slabs(offsets_tensor, R)):
        tiles = [
            scales.reshape(-1)[rows.start * width // 32 : rows.stop * width // 32]
            for scales, width in ((sfa_tensor, M), (sfb_tensor, N))
        ]
        wgrad_tensor[expert] = _numbers(a_tensor[:, rows], tiles[0]) @ _numbers(b_tensor[rows].T, tiles[1]).T
    return {"wgrad_tensor": wgrad_tensor}


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _check(a, sfa, b, sfb, offsets, alpha, sf_vec_size) -> tuple[int, int, list[slice]]:
    """(rows, n, slabs)"""
    assert not torch.is_grad_enabled() or not any(t.requires_grad for t in (a, b)), "no autograd in here"
    assert sf_vec_size == 32, "one scale for 32 numbers of FP8"
    (R, K, _), (N, _, E) = a.shape, b.shape
    assert a.dtype == b.dtype == _FP8 and sfa.dtype == sfb.dtype == _SCALE, "e4m3 with e8m0"
    _check_major(a, (R, K, 1), "k")
    assert b.shape == (N, K, E) and b.stride() in ((K, 1, N * K), (1, N, N * K)), "B must have k- or n-major layout"
    assert sfa.shape == (32, 4, R // 128, 4, K // 128, 1) and sfb.shape == (32, 4, N // 128, 4, K // 128, E)
    assert all(size % 128 == 0 for size in (R, N, K)), "whole tiles of scales"
    assert alpha.shape == (E,) and offsets.shape == (E,)
    return R, N, _slabs(offsets, R)


def _check_quantizing(norm_const: Tensor | None, discrete_col_sfd: bool) -> None:
    assert norm_const is not None and norm_const.shape == (1,) and norm_const.dtype == torch.float32
    assert discrete_col_sfd, "wgrad wants columnwise scales slab by slab"


def _check_major(tensor: Tensor, shape: tuple[int, int, int], major: str) -> None:
    assert tensor.shape == shape and tensor.stride() == (shape[1], 1, shape[0] * shape[1]), f"{major}-major layout"


def _slabs(offsets: Tensor, R: int) -> list[slice]:
    """Rows of each expert; none known of fake tensors."""
    assert offsets.dtype == torch.int32 and offsets.dim() == 1, "int32 ends"
    if isinstance(offsets, FakeTensor):
        return []
    ends = offsets.tolist()
    slabs = [slice(start, end) for start, end in zip([0, *ends], ends)]
    for slab in slabs:
        assert 0 <= slab.start <= slab.stop <= R, f"ends {ends} in {R} rows"
        assert (slab.stop - slab.start) % 256 == 0, (
            f"slabs must be multiples of 256, or tiles of rows cross them: {ends}"
        )
    return slabs


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def _operands(slabs: list[slice], a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor):
    """(rows, A, B) of each expert, in fp32."""
    tiles_a, tiles_b = (scales.permute(5, 2, 4, 0, 1, 3) for scales in (sfa, sfb))
    for expert, rows in enumerate(slabs):
        first, last = rows.start // 128, rows.stop // 128
        numbers = _numbers(a[rows, :, 0], tiles_a[0, first:last]), _numbers(b[:, :, expert], tiles_b[expert])
        yield rows, *numbers


def _quantize(values: Tensor, slabs: list[slice], name: str) -> dict[str, Tensor]:
    """In both directions, under the names of a kernel's results."""
    R, N = values.shape
    rows, columns = (values.new_full((R, N), 0xFF, dtype=torch.uint8) for _ in range(2))
    row_tiles = values.new_full((1, R // 128, N // 128, 32, 4, 4), 0xFF, dtype=torch.uint8)
    column_tiles = values.new_full((1, N // 128, R // 128, 32, 4, 4), 0xFF, dtype=torch.uint8)
    for slab in slabs:
        data, scales = _quantized(values[slab])
        rows[slab], row_tiles[0, slab.start // 128 : slab.stop // 128] = data, _tiled(scales)
        data, scales = _quantized(values[slab].T)
        columns[slab] = data.T
        column_tiles.view(-1)[slab.start * N // 32 : slab.stop * N // 32] = _tiled(scales).reshape(-1)
    order = (3, 4, 1, 5, 2, 0)
    return {
        name: _matrix(rows.view(_FP8)),
        "d_col_tensor": _matrix(columns.view(_FP8)),
        "sfd_row_tensor": row_tiles.view(_SCALE).permute(order),
        "sfd_col_tensor": column_tiles.view(_SCALE).permute(order),
    }


def _matrix(values: Tensor) -> Tensor:
    return values.unsqueeze(0).permute(1, 2, 0)
