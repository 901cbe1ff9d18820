"""Routed experts: one SwiGLU feed-forward per expert over its slab of rows.

Shape letters (torchtitan's): E experts (of this rank), R rows received, sorted by expert, P those rows with every
expert's slab padded, F expert hidden width, D model width.
"""

from dataclasses import dataclass

import titan_moe.runtime  # noqa: F401

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts

# On a CPU a kernel is compiled for each number of rows it meets. Slabs in multiples of 16 rows meet few of them again
# and again; the token counts themselves almost never repeat, and a step took 1.6 times as long.
CPU_SLAB_ROWS = 16


class Experts(GroupedExperts):
    """torchtitan's grouped experts, computing in the dtype of the rows: torchtitan casts to bf16 whatever the
    configuration says, so that `mixed_precision_param = "float32"` would not reach the experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1_EFD, w2_EDF, w3_EFD = (
            (w.to_local() if isinstance(w, DTensor) else w).to(x_RD.dtype)
            for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        if x_RD.dtype == torch.float32 and x_RD.device.type == "cuda":
            # torch._grouped_mm takes only 16-bit types on a GPU. One host sync per layer: fp32 is for checking numbers.
            counts = num_tokens_per_expert_E.tolist()
            slabs = zip(torch.split(x_RD, counts), w1_EFD, w2_EDF, w3_EFD, strict=True)
            return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in slabs])
        if x_RD.device.type == "cuda":
            offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
            return self._swiglu(x_RD, w1_EFD, w2_EDF, w3_EFD, offsets_E)
        row_R, offsets_E = _padded_layout(num_tokens_per_expert_E, x_RD.shape[0])
        padded_rows = x_RD.shape[0] + CPU_SLAB_ROWS * w1_EFD.shape[0]
        x_PD = x_RD.new_zeros(padded_rows, x_RD.shape[1]).index_copy(0, row_R, x_RD)
        return self._swiglu(x_PD, w1_EFD, w2_EDF, w3_EFD, offsets_E).index_select(0, row_R)

    def _swiglu(self, x_RD, w1_EFD, w2_EDF, w3_EFD, offsets_E: torch.Tensor) -> torch.Tensor:
        gate_RF = self._grouped_mm(A=x_RD, B_t=w1_EFD.transpose(-2, -1), offs=offsets_E)
        up_RF = self._grouped_mm(A=x_RD, B_t=w3_EFD.transpose(-2, -1), offs=offsets_E)
        return self._grouped_mm(A=F.silu(gate_RF) * up_RF, B_t=w2_EDF.transpose(-2, -1), offs=offsets_E)


def _padded_layout(counts_E: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each of the `rows` rows goes when every slab is padded, int64 [R], and where the padded slabs end, int32
    [E]."""
    padded_E = (counts_E + CPU_SLAB_ROWS - 1) // CPU_SLAB_ROWS * CPU_SLAB_ROWS
    shift_E = torch.cumsum(padded_E - counts_E, dim=0) - (padded_E - counts_E)
    row_R = torch.arange(rows, device=counts_E.device)
    row_R = row_R + torch.repeat_interleave(shift_E, counts_E, output_size=rows)
    return row_R, torch.cumsum(padded_E, dim=0, dtype=torch.int32)
