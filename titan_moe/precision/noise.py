"""Where the chance of stochastic rounding comes from: each rounding has a generator of its own.

Its seed is drawn from torch's default generator on the host, which every step seeds anew (random_state.py), and mixed
with this process's rank. So the same run gives the same bits, after a resume too; a step that is computed twice rounds
the same way twice; and recompute, which repeats forwards, moves nothing, because only gradients are rounded by chance.
Ranks draw differently from each other: with the same numbers the errors of their gradients would go the same way, and
the mean over ranks would have more noise.

On another mesh a rank has other rows in another order, and rounds them by other draws: there the losses of nvfp4 are
those of another chance.
"""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from titan_moe.sources.piece import hashed_bytes


def generator(device: torch.device) -> torch.Generator:
    """For one rounding. Waits for no device."""
    with unset_fake_temporarily():  # a dry run has no numbers
        draw = int(torch.empty((), dtype=torch.int64).random_())
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.Generator(device).manual_seed(int.from_bytes(hashed_bytes(8, "rounding", rank, draw), "little") >> 1)
