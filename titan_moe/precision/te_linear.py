"""Linear layers on Transformer Engine's (TE's) GEMM of quantized matrices.

TE's own modules own their parameters; here FSDP and tensor parallelism do. So only TE's functions are called, as a GEMM
under the autograd Functions of moe/experts.py, in the place of precision/gemm.py's: dgrad and wgrad stay apart, weights
are quantized again in backward, and of x the copy along its columns is kept, once for all layers that take the same x.
Which copy each GEMM wants, and how it is made, is in moe/te_quantize.py.

The wgrad adds up over the rows, so that these too have to be whole blocks. Where tokens are not, rows of zeros fill
them up, and change neither a block's largest number nor a sum.

Shape letters: R rows, that is, tokens, I and O input and output width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.moe.te_quantize import Columns, Kept, matrix, split_accumulator
from titan_moe.precision.once import once
from titan_moe.precision.recipes import Recipe
from titan_moe.rebuild import has_anyway

ROWS = 32  # multiples of it are whole blocks of 16 and 32 numbers, and 16 bytes of any format
ROWS_OF_BLOCK = 128  # the same of fp8_block


class TEGemm:
    """y = x w^T of one weight, which has no E: [O, I]. `keeps_input` as of precision/gemm.py's."""

    def __init__(self, recipe: Recipe, *, keeps_input: bool = False) -> None:
        self.recipe, self.keeps_input = recipe, keeps_input
        self.rows = ROWS_OF_BLOCK if recipe.forward_x.scale == "pow2" else ROWS

    def forward(self, x_RI: Tensor, w_EOI: Tensor) -> Tensor:
        x = once(x_RI, ("te", self.recipe.forward_x, -1), partial(self._quantized, "x", x_RI, rows=True))
        w = matrix(self.recipe, "w", w_EOI, rows=True)
        return self._multiply(w, x, "TN", x_RI.dtype)[: len(x_RI)]

    def dgrad(self, grad_RO: Tensor, w_EOI: Tensor) -> Tensor:
        grad, w = self._quantized("g", grad_RO, rows=True), matrix(self.recipe, "w", w_EOI, columns=True)
        return self._multiply(w, grad, "NN", grad_RO.dtype)[: len(grad_RO)]

    def wgrad(self, grad_RO: Tensor, x_RI: Tensor | Columns) -> Tensor:
        x = x_RI.copies[0] if isinstance(x_RI, Columns) else self._quantized("x", x_RI, columns=True)
        return self._multiply(x, self._quantized("g", grad_RO, columns=True), "NT", grad_RO.dtype)

    def blocks(self, width: int) -> list[slice]:
        return [slice(None)]

    def keep(self, x_RI: Tensor) -> tuple[Callable[..., Columns] | None, list[Tensor]]:
        """As precision/gemm.py's."""
        if self.keeps_input or has_anyway(x_RI):
            return None, [x_RI]
        kept: Kept = once(x_RI, ("te", self.recipe.wgrad_x, -2), partial(self._kept, x_RI))
        return kept.again, kept.tensors

    def _kept(self, x_RI: Tensor) -> Kept:
        x = self._quantized("x", x_RI, columns=True)
        x.update_usage(rowwise_usage=False, columnwise_usage=True)
        return Kept([x], x_RI.shape[1])

    def _quantized(self, role: str, values: Tensor, *, rows: bool = False, columns: bool = False) -> Any:
        missing = -len(values) % self.rows
        values = F.pad(values, (0, 0, 0, missing)) if missing else values
        return matrix(self.recipe, role, values, rows=rows, columns=columns)

    def _multiply(self, a: Any, b: Any, layout: str, dtype: torch.dtype) -> Tensor:
        from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm

        out, *_ = general_gemm(
            a,
            b,
            out_dtype=dtype,
            layout=layout,
            use_split_accumulator=split_accumulator(self.recipe, layout),
            grad=layout != "TN",
        )
        return out
