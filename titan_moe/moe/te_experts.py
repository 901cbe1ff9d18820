"""Routed experts on Transformer Engine's (TE's) grouped GEMM, driven from the stacked parameters.

TE's own modules hold one parameter per expert, or one that cannot be sharded; FSDP wants one stacked parameter for each
projection. So only TE's functions are called here, as a `GroupedGemm` under the autograd Functions of experts.py: dgrad
and wgrad stay apart, and nothing of TE's outlives a call, no weight copy least of all.

TE has two grouped GEMMs, which differ in who knows where a slab ends:

- host splits: lists of matrices, a cuBLAS GEMM for each. Runs wherever TE runs, but the host has to read the counts:
  it waits for the device once per layer.
- device splits: one GEMM over packed tensors that come with their counts and offsets on the device. The host learns
  nothing, so it fits a CUDA graph; but cuBLASLt must be new enough. The stacked weight is such a packed tensor as it
  is, of E equal matrices. TE also takes the weights as a list, of at most 64.

`device_splits_problem` tells which. TE names the operands as column-major BLAS does: of y = x w^T, A is w and B is x.
Both functions write only the rows of the slabs: what lies beyond is undefined. Under a low-precision recipe both take
quantized operands (te_quantize.py).

Shape letters: as in experts.py.
"""

import torch
from torch import Tensor

from titan_moe.moe import te
from titan_moe.moe.experts import EXPERTS, Source, by_gemm
from titan_moe.precision import support
from titan_moe.precision.recipes import Recipe

CUBLASLT_CORRUPT = range(130700, 130801)  # TE warns of corrupt results of grouped GEMMs


def te_grouped(
    x_RD: Tensor,
    counts_E: Tensor,
    weight_R: Tensor,
    w13_EF2D: Tensor,
    w2_EDF: Tensor,
    *,
    late: bool = False,
    source: Source | None = None,
) -> Tensor:
    """y_RD by TE; the rows beyond the last slab are undefined."""
    _, hidden, _, width = w13_EF2D.shape
    if fits_device_splits(x_RD, counts_E, hidden):
        gemm = DeviceSplits(counts_E, (width, 2 * hidden, hidden))
    else:
        gemm = HostSplits(counts_E)
    return by_gemm(gemm, x_RD, weight_R, w13_EF2D, w2_EDF, late=late, source=source)


def fits_device_splits(x_RD: Tensor, counts_E: Tensor, hidden: int, recipe: Recipe | None = None) -> bool:
    """Whether the slab sizes may stay on the device."""
    # TE tells cuBLASLt the mean number of rows, a whole number, to choose an algorithm by, and 0 says that there is
    # nothing to do. Only exact sizes, which the host knows anyway, can be so few rows.
    rows, width = x_RD.shape
    return rows >= len(counts_E) and device_splits_problem(te.facts(), x_RD.dtype, width, hidden, recipe) is None


EXPERTS["te"] = te_grouped


def problem(found: te.Facts, dtype: torch.dtype) -> str | None:
    """Why `te_grouped` cannot compute this, or None."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"Transformer Engine multiplies bfloat16, float16 and float32, not {dtype}"
    return te.problem(found)


def recipe_problem(
    found: te.Facts, recipe: Recipe, dtype: torch.dtype, width: int, hidden: int, local_experts: int
) -> str | None:
    """Why `te_grouped` cannot compute this under a low-precision recipe, or None."""
    if why := problem(found, dtype):
        return why
    if dtype != torch.bfloat16:
        return f"Transformer Engine quantizes from bfloat16 here, not from {dtype}"
    if why := support.experts_problem(local_experts):
        return why
    why = support.te_problem(recipe.name, "host splits", found.capability)
    return why or support.width_problem(recipe.name, "host splits", width, hidden)


def device_splits_problem(
    found: te.Facts, dtype: torch.dtype, width: int, hidden: int, recipe: Recipe | None = None
) -> str | None:
    """Why the host has to read the counts, or None. Asks only after `problem` found nothing."""
    assert found.capability is not None and found.cublaslt is not None
    if dtype.itemsize != 2:
        return f"cuBLASLt's grouped GEMM takes bfloat16 and float16, not {dtype}"
    name = "bf16" if recipe is None else recipe.name
    row = support.find(name, "device splits", found.capability)
    if row is None:
        of = "" if recipe is None else f" of {name}"
        spans = support.spans(name, "device splits")
        has = support.dotted(found.capability)
        return f"cuBLASLt's grouped GEMM{of} runs on compute capabilities {spans}, and this device has {has}"
    if why := support.width_problem(name, "device splits", width, hidden):
        return f"in cuBLASLt's grouped GEMM {why}"
    install = "pip install --no-deps 'nvidia-cublas>=13.8.1,<14'"
    here = support.cublaslt_version(found.cublaslt)
    if found.cublaslt < row.cublaslt:
        return f"cuBLASLt {here} is older than {support.cublaslt_version(row.cublaslt)}: {install}"
    if found.cublaslt in CUBLASLT_CORRUPT:
        return f"cuBLASLt {here} can return corrupt results of grouped GEMMs: {install}"
    return None


def how(found: te.Facts, dtype: torch.dtype, width: int, hidden: int, recipe: Recipe | None = None) -> str:
    """What the start-up report says about it."""
    why = device_splits_problem(found, dtype, width, hidden, recipe)
    splits = "slab sizes stay on the device" if why is None else f"the host reads the slab sizes, because {why}"
    return splits if dtype.itemsize == 2 else f"{splits}; TE multiplies float32 with the 10 mantissa bits of TF32"


class HostSplits:
    """A GEMM for each expert, launched by TE from lists of matrices."""

    def __init__(self, counts_E: Tensor) -> None:
        self.counts: list[int] = counts_E.tolist()  # the host sync
        self.rows = sum(self.counts)

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        y_RO = x_RI.new_empty(x_RI.shape[0], w_EOI.shape[1])
        self._multiply(_matrices(w_EOI), self._slabs(x_RI), [y_RO], "TN", grad=False)
        return y_RO

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        grad_RI = grad_RO.new_empty(grad_RO.shape[0], w_EOI.shape[2])
        self._multiply(_matrices(w_EOI), self._slabs(grad_RO), [grad_RI], "NN", grad=True)
        return grad_RI

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
        grad_EOI = grad_RO.new_empty(len(self.counts), grad_RO.shape[1], x_RI.shape[1])
        self._multiply(self._slabs(x_RI), self._slabs(grad_RO), _matrices(grad_EOI), "NT", grad=True)
        return grad_EOI

    def blocks(self, width: int) -> list[slice]:
        """Rows for SwiGLU: those of the slabs."""
        return [slice(0, self.rows)]

    def precise(self, layout: str) -> bool:
        """Whether partial sums of FP8 products move on into full fp32 registers."""
        return False  # nothing here is FP8

    def _slabs(self, rows: Tensor) -> list[Tensor]:
        return list(rows.contiguous()[: self.rows].split(self.counts))

    def _multiply(self, a: list[Tensor], b: list[Tensor], out: list[Tensor], layout: str, *, grad: bool) -> None:
        from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm

        general_grouped_gemm(
            a,
            b,
            out,
            quantization_params=[None] * len(a),
            out_dtype=out[0].dtype,
            layout=layout,
            m_splits=self.counts,
            grad=grad,
            use_split_accumulator=self.precise(layout),
            single_output=layout != "NT",  # the slabs of y and of dx lie in one tensor
        )


def _matrices(stacked: Tensor) -> list[Tensor]:
    return list(stacked.contiguous().unbind())  # contiguous: TE reads memory, and does not look at strides


class DeviceSplits:
    """One GEMM for all experts, without a host sync. `widths` are all the row widths that it will meet."""

    def __init__(self, counts_E: Tensor, widths: tuple[int, ...]) -> None:
        import transformer_engine_torch as tex

        # One kernel for all GEMMs of the layer: where each slab begins, in elements.
        self.counts_E, offsets = tex.splits_to_offsets_multi(
            counts_E,
            counts_E.device,
            strides=list(widths),
            include_leading_zero=[True] * len(widths),
            dtypes=[torch.int64] * len(widths),
            bulk_allocate=True,
        )
        self.offsets = dict(zip(widths, offsets))

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        y_RO = x_RI.new_empty(x_RI.shape[0], w_EOI.shape[1])
        self._multiply(self._equal(w_EOI), self._slabs(x_RI), self._slabs(y_RO), "TN")
        return y_RO

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        grad_RI = grad_RO.new_empty(grad_RO.shape[0], w_EOI.shape[2])
        self._multiply(self._equal(w_EOI), self._slabs(grad_RO), self._slabs(grad_RI), "NN")
        return grad_RI

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
        grad_EOI = grad_RO.new_empty(len(self.counts_E), grad_RO.shape[1], x_RI.shape[1])
        self._multiply(self._slabs(x_RI), self._slabs(grad_RO), self._equal(grad_EOI), "NT")
        return grad_EOI

    def blocks(self, width: int) -> list[slice]:
        """Rows for SwiGLU: all of them, because the host does not know where the last slab ends."""
        return [slice(None)]

    def precise(self, layout: str) -> bool:
        """As `HostSplits.precise`."""
        return False

    def _slabs(self, rows: Tensor):
        """`rows` as E matrices of counts_E rows each."""
        return self._packed(rows, first_dims=self.counts_E, tensor_offsets=self.offsets[rows.shape[1]])

    def _equal(self, stacked: Tensor):
        """E matrices of the same shape."""
        return self._packed(stacked.flatten(0, 1), shapes=[tuple(stacked.shape[1:])] * len(stacked))

    def _packed(
        self,
        rows: Tensor,
        shapes: list[tuple[int, ...]] | None = None,
        first_dims: Tensor | None = None,
        tensor_offsets: Tensor | None = None,
    ):
        from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

        return GroupedTensorStorage(
            tuple(rows.shape),
            rows.dtype,
            num_tensors=len(self.counts_E),
            shapes=shapes,
            data=rows.contiguous().view(-1),
            first_dims=first_dims,
            tensor_offsets=tensor_offsets,
        )

    def _multiply(self, a, b, out, layout: str) -> None:
        from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm_for_grouped_tensor

        general_grouped_gemm_for_grouped_tensor(a, b, out, layout=layout, use_split_accumulator=self.precise(layout))
