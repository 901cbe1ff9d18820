"""Where the chance of stochastic rounding comes from.

Every rounding by chance gets a generator of its own, seeded with (run seed, optimizer step, rank, layer, GEMM, how many
times that GEMM has asked in this step, which is its microbatch). So the same run gives the same bits, after a resume
too, and recompute, which repeats forwards, moves nothing: only gradients are rounded by chance.

On another mesh a rank has other rows in another order, and rounds them by other draws: there the losses of nvfp4 are
those of another seed. Data-parallel ranks draw differently from each other, so that the mean over them has less noise.
"""

import hashlib
from collections import Counter

import torch

_run = 0
_step = 0
_asked: Counter[str] = Counter()


def set_seed(seed: int, rank: int) -> None:
    """Of the run and of this process, once."""
    global _run
    _run = _hash(f"{seed}/{rank}")
    begin_step(0)


def begin_step(step: int) -> None:
    """From now on rounding belongs to this optimizer step."""
    global _step
    _step = step
    _asked.clear()


def generator(gemm: str, device: torch.device) -> torch.Generator:
    """For the next rounding of `gemm`, a name such as "layers.1.attention.wo.dgrad"."""
    _asked[gemm] += 1
    seed = _hash(f"{_run}/{_step}/{gemm}/{_asked[gemm]}")
    return torch.Generator(device).manual_seed(seed)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
