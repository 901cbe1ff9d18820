"""The machine's ceilings, measured, and the floor that they put under a phase.

A phase that computes f FLOPs and moves b bytes cannot take less than max(f / matmul peak, b / bandwidth) seconds. Peak
and bandwidth are the best that this machine showed for one large matrix product and for one large copy, not what its
data sheet says; so a phase may reach a little more than all of it. Bytes are those that must move at least once:
inputs, outputs and weights, each once. Where everything fits into caches the bandwidth is no floor, and a share of more
than 100 % says so.
"""

import time
from functools import cache

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIDES = {"cpu": (768, 1024, 1536, 2048), "cuda": (4096, 8192)}
COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
REPETITIONS = 5


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def best(call, device: str) -> float:
    """Seconds of the fastest call."""
    found = []
    for _ in range(REPETITIONS + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


@cache
def square_products(dtype: torch.dtype, device: str = "cpu") -> dict[int, float]:
    """FLOP/s by side."""
    rates = {}
    for side in SIDES[device]:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates[side] = 2 * side**3 / best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)
    return rates


def matmul_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """FLOP/s of the fastest square product."""
    return max(square_products(dtype, device).values())


def best_side(dtype: torch.dtype, device: str = "cpu") -> int:
    rates = square_products(dtype, device)
    return max(rates, key=rates.__getitem__)


@cache
def bandwidth(device: str = "cpu") -> float:
    """Bytes per second, read and written, of a copy that fits into no cache."""
    source = torch.empty(COPY_BYTES[device] // 4, device=device)
    source.fill_(1.0)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source), device)


def floor(flops: float, moved: float, dtype: torch.dtype, device: str = "cpu") -> float:
    """Seconds that nothing on this machine can do it in."""
    return max(flops / matmul_peak(dtype, device) if flops else 0.0, moved / bandwidth(device))
