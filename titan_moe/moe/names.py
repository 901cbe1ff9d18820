"""State under torchtitan's parameter names, whatever they are called here: `w13_EF2D` is stored as w1_EFD and w3_EFD.

Weights are renamed by hooks of `FusedExperts`. torchtitan keeps optimizer state in one flat dict, with keys such as
`state.layers.1.moe.routed_experts.inner_experts.w13_EF2D.exp_avg`, so for that the whole dict is rewritten here. What
belongs to the parameter element by element is cut in two like it; everything else (the step, the learning rate) holds
for both.

Shape letters: E experts, F expert hidden width, D model width.
"""

from typing import Any

import torch
from torch import Tensor

FUSED, GATE, UP = "w13_EF2D", "w1_EFD", "w3_EFD"


def split_w13(w13_EF2D: Tensor) -> dict[str, Tensor]:
    """torchtitan's two weights, as views."""
    return {GATE: w13_EF2D[:, :, 0], UP: w13_EF2D[:, :, 1]}


def merge_w13(w1_EFD: Tensor, w3_EFD: Tensor) -> Tensor:
    return torch.stack([w1_EFD, w3_EFD], dim=2)


def to_stock_names(state: dict[str, Any]) -> dict[str, Any]:
    """A flat state dict under torchtitan's names."""
    renamed: dict[str, Any] = {}
    for key, value in state.items():
        if FUSED not in key.split("."):
            renamed[key] = value
        elif isinstance(value, Tensor) and value.ndim == 4:
            renamed |= {key.replace(FUSED, name): half.contiguous() for name, half in split_w13(value).items()}
        else:
            renamed |= {key.replace(FUSED, name): value for name in (GATE, UP)}
    return renamed


def to_stored_names(state: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `to_stock_names`."""
    renamed: dict[str, Any] = {}
    for key, value in state.items():
        parts = key.split(".")
        if GATE in parts and (up := key.replace(GATE, UP)) in state:
            whole = merge_w13(value, state[up]) if isinstance(value, Tensor) and value.ndim == 3 else value
            renamed[key.replace(GATE, FUSED)] = whole
        elif UP not in parts or key.replace(UP, GATE) not in state:
            renamed[key] = value
    return renamed
