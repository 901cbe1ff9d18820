"""What torch knows, but has no short public word for."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_backward() -> bool:
    """Whether the caller runs inside a backward. A forward that does repeats an earlier one, for activation
    checkpointing."""
    return torch._C._current_graph_task_id() != -1
