"""The GEMMs of the fused experts: Transformer Engine (TE) quantizes to MXFP8, kernels of cuDNN's frontend multiply.

MXFP8 is FP8 (e4m3) with a scale, a power of two (e8m0), for each 32 numbers that follow each other in the direction in
which a GEMM adds up. So what meets two GEMMs is quantized twice, along its rows or along its columns:

    kernel   computes                                       A, B and the direction of their scales
    up       gate_up = x w13^T, h = SwiGLU(gate_up)         x, w13: rows
    down     y = h w2^T                                     h, w2: rows
    dswiglu  grad_gate_up = dSwiGLU(dy w2)                  dy: rows, w2: columns
    dgrad    grad_x = grad_gate_up w13                      grad_gate_up: rows, w13: columns
    wgrad    grad_w2 = dy^T h, grad_w13 = grad_gate_up^T x  columns, that is, along the rows of a slab

`up` and `dswiglu` return h and grad_gate_up quantized already, from the fp32 accumulator: `up` along the rows,
`dswiglu` in both directions. Columnwise data are not transposed.

Scales lie in the order in which tensor cores read them: tiles of 128 x 4 scales, and in a tile the scale [i, j] at
[i % 32, i // 32, j]. TE writes this order; the kernels want it seen as a tensor of six dimensions (`_tiles`), and take
A as [rows, columns, 1], B as [n, k, E], with strides that say how they lie. Columnwise scales of rows that are cut into
slabs are tiled slab by slab.

The kernels are of SM100, and compiled when shapes are first met; for wgrad the host then reads the slab sizes, once.
Where slabs end is otherwise known on the device alone. Tiles of 256 rows must not cross slabs: those have to be
multiples of 256, or the result is silently wrong. Rows beyond the last slab are not read, and in results undefined.

Shape letters: R rows of the slabs, E experts, D model width, F expert hidden width, I and O columns of any matrix.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.moe.te_quantize import quantizer
from titan_moe.precision.recipes import RECIPES

ALIGNMENT = 256  # of slabs; FIX_PAD_SIZE in the kernels' source
BLOCK = 32  # numbers with one scale

FP8, SCALE = torch.float8_e4m3fn, torch.float8_e8m0fnu

# What all kernels are told.
MXFP8: dict[str, Any] = {"acc_dtype": torch.float32, "sf_vec_size": BLOCK}
ROWS: dict[str, Any] = {**MXFP8, "cd_major": "n", "use_dynamic_sched": True}
FUSED: dict[str, Any] = {**ROWS, "d_dtype": FP8, "discrete_col_sfd": True}  # columnwise scales slab by slab


class Quantized(NamedTuple):
    """`data` in FP8 and `scales`, as the kernel to come wants to see them."""

    data: Tensor
    scales: Tensor


class Gemms:
    """Those of one forward and its backward, which share the slabs. Nothing in FP8 is kept in here."""

    def __init__(self, counts_E: Tensor, width: int, hidden: int) -> None:
        import transformer_engine_torch as tex

        self.width, self.hidden = width, hidden
        # Where slabs end in rows, and begin in elements.
        self.counts_E, (self.ends_E, *begins) = tex.splits_to_offsets_multi(
            counts_E,
            counts_E.device,
            strides=[1, width, hidden],
            include_leading_zero=[False, True, True],
            dtypes=[torch.int32, torch.int64, torch.int64],
            bulk_allocate=True,
        )
        self.begins = dict(zip((width, hidden), begins))
        self.ones_E = torch.ones(len(counts_E), device=counts_E.device)

    def up(self, x_RD: Tensor, w13_E2FD: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Quantized]:
        """gate_up_R2F in the order of w13's rows (32 of gate, 32 of up, ...), and h_RF, weighted if told so."""
        from cudnn import grouped_gemm_glu_wrapper_sm100

        x, w13 = self._slabs(x_RD), _weights(w13_E2FD)
        out = grouped_gemm_glu_wrapper_sm100(
            a_tensor=x.data,
            sfa_tensor=x.scales,
            padded_offsets=self.ends_E,
            alpha_tensor=self.ones_E,
            b_tensor=w13.data,
            sfb_tensor=w13.scales,
            norm_const_tensor=self.ones_E[:1],
            prob_tensor=None if weight_R is None else weight_R.view(-1, 1, 1),
            c_dtype=x_RD.dtype,
            act_func="swiglu",
            **FUSED,
        )
        return out["c_tensor"].squeeze(-1), Quantized(out["d_tensor"], out["sfd_row_tensor"])

    def down(self, h_RF: Quantized, w2_EDF: Tensor) -> Tensor:
        """y_RD."""
        return self._multiply(h_RF, _weights(w2_EDF), w2_EDF.dtype)

    def dgrad(self, grad_R2F: Quantized, w13_E2FD: Tensor) -> Tensor:
        """grad_x_RD."""
        return self._multiply(grad_R2F, _weights(w13_E2FD, columnwise=True), w13_E2FD.dtype)

    def _multiply(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        from cudnn import grouped_gemm_quant_wrapper_sm100

        out = a.data.new_empty(a.data.shape[0], b.data.shape[0], dtype=dtype)
        grouped_gemm_quant_wrapper_sm100(
            a_tensor=a.data,
            sfa_tensor=a.scales,
            padded_offsets=self.ends_E,
            alpha_tensor=self.ones_E,
            b_tensor=b.data,
            sfb_tensor=b.scales,
            d_dtype=dtype,
            d_tensor=_as_a(out),
            **ROWS,
        )
        return out

    def dswiglu(
        self, grad_RD: Tensor, w2_EDF: Tensor, gate_up_R2F: Tensor, weight_R: Tensor
    ) -> tuple[Quantized, Quantized, Tensor]:
        """Gradients of gate_up, for `dgrad` and for `wgrad_of`, and of weight_R."""
        from cudnn import grouped_gemm_dglu_wrapper_sm100

        grad, w2 = self._slabs(grad_RD), _weights(w2_EDF, columnwise=True)
        grad_weight_R = torch.zeros_like(weight_R)  # the kernel adds to it
        out = grouped_gemm_dglu_wrapper_sm100(
            a_tensor=grad.data,
            c_tensor=_as_a(gate_up_R2F),
            sfa_tensor=grad.scales,
            padded_offsets=self.ends_E,
            alpha_tensor=self.ones_E,
            beta_tensor=self.ones_E,
            prob_tensor=weight_R.view(-1, 1, 1),
            dprob_tensor=grad_weight_R.view(-1, 1, 1),
            b_tensor=w2.data,
            sfb_tensor=w2.scales,
            norm_const_tensor=self.ones_E[:1],
            act_func="dswiglu",
            deterministic=True,
            **FUSED,
        )
        rows = Quantized(out["d_row_tensor"], out["sfd_row_tensor"])
        columns = Quantized(out["d_col_tensor"].squeeze(-1), _flat(out["sfd_col_tensor"]))
        return rows, columns, grad_weight_R

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
        """grad_EOI."""
        return self.wgrad_of(self._columns(grad_RO), x_RI)

    def wgrad_of(self, grad_RO: Quantized, x_RI: Tensor) -> Tensor:
        """grad_EOI, with the first operand quantized along the rows of each slab already."""
        from cudnn import grouped_gemm_wgrad_wrapper_sm100

        x = self._columns(x_RI)
        out_EOI = x_RI.new_empty(len(self.counts_E), grad_RO.data.shape[1], x_RI.shape[1])
        grouped_gemm_wgrad_wrapper_sm100(
            a_tensor=grad_RO.data.t(),
            b_tensor=x.data,
            sfa_tensor=grad_RO.scales.view(out_EOI.shape[1], -1),
            sfb_tensor=x.scales.view(out_EOI.shape[2], -1),
            offsets_tensor=self.ends_E,
            wgrad_tensor=out_EOI,
            wgrad_dtype=out_EOI.dtype,
            **MXFP8,
        )
        return out_EOI

    def _slabs(self, rows_RI: Tensor) -> Quantized:
        """Along the rows, as A."""
        data, scales = _quantize(rows_RI, len(self.counts_E), self.counts_E, self.begins[rows_RI.shape[1]])
        return Quantized(_as_a(data), _tiles(scales, 1, *data.shape))

    def _columns(self, rows_RI: Tensor) -> Quantized:
        """Along the rows of each slab, as `wgrad_of` wants it."""
        begins = self.begins[rows_RI.shape[1]]
        return _quantize(rows_RI, len(self.counts_E), self.counts_E, begins, columnwise=True)


def _weights(w_EOI: Tensor, *, columnwise: bool = False) -> Quantized:
    """E equal matrices as B: for x w^T with scales along the rows, for grad w with scales along the columns."""
    experts, outputs, inputs = w_EOI.shape
    data, scales = _quantize(w_EOI.flatten(0, 1), experts, columnwise=columnwise)
    data_EOI = data.view(w_EOI.shape)
    if columnwise:
        return Quantized(data_EOI.permute(2, 1, 0), _tiles(scales, experts, inputs, outputs))
    return Quantized(data_EOI.permute(1, 2, 0), _tiles(scales, experts, outputs, inputs))


def _quantize(
    rows: Tensor,
    matrices: int,
    counts_E: Tensor | None = None,
    begins: Tensor | None = None,
    *,
    columnwise: bool = False,
) -> Quantized:
    """Packed matrices in FP8, and their scales in one dimension. Without counts they are equal."""
    import transformer_engine_torch as tex

    made = quantizer(RECIPES["mxfp8"], "x", rows=not columnwise, columns=columnwise, group=True)
    out = tex.group_quantize(rows.contiguous(), made, matrices, counts_E, tensor_offsets=begins)
    data, scales = (out.columnwise_data, out.columnwise_scale_inv) if columnwise else (out.rowwise_data, out.scale_inv)
    return Quantized(data.view(FP8).view(rows.shape), scales.view(SCALE).view(-1))


def _as_a(rows_RI: Tensor) -> Tensor:
    """[R, I, 1]. The kernels check the stride of the 1 too."""
    return rows_RI.unsqueeze(0).permute(1, 2, 0)


def _tiles(scales: Tensor, matrices: int, rows: int, columns: int) -> Tensor:
    """Scales of packed matrices, along their rows, for a kernel: [32, 4, rows / 128, 4, columns / 128, matrices]."""
    return scales.view(matrices, rows // 128, columns // 128, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def _flat(tiles: Tensor) -> Tensor:
    """`_tiles` undone."""
    return tiles.permute(5, 2, 4, 0, 1, 3).reshape(-1)
