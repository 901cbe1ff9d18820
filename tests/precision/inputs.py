"""Tensors to quantize that reach every corner of a format."""

import numpy as np
import torch
from torch import Tensor

BOUNDARY_EXPONENTS = (-120, -60, -9, -1, 0, 1, 7, 60, 110)


def tensor(kind: str, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[rows, columns] of `dtype`. Kinds are the keys of KINDS."""
    return KINDS[kind](rows, columns, dtype, torch.Generator().manual_seed(seed))


def normal(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator).to(dtype)


def wide(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Magnitudes over 60 powers of two, so that a block's small numbers are subnormal elements or zero."""
    exponents = torch.randint(-40, 20, (rows, columns), generator=generator)
    return torch.ldexp(torch.randn(rows, columns, generator=generator), exponents).to(dtype)


def tiles(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every 16 x 16 tile has a magnitude of its own, over 30 powers of two; some are zero."""
    exponents = torch.randint(-24, 6, (-(-rows // 16), -(-columns // 16)), generator=generator)
    scale = torch.exp2(exponents.float()) * (exponents != 0)
    scale = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


def boundaries(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every 16 x 16 tile has its largest number at, one step below or one step above a limit times a power of two."""
    x = torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 2 - 1
    choose = np.random.default_rng(int(torch.randint(1 << 30, (), generator=generator)))
    spread = bool(choose.integers(2))  # all over the range, or all near one exponent, as tensors with one scale need
    for i in range(0, rows, 16):
        for j in range(0, columns, 16):
            tile = x[i : i + 16, j : j + 16]
            limit = float(choose.choice([448.0, 6.0, 57344.0])) * 2.0 ** float(
                choose.choice(BOUNDARY_EXPONENTS if spread else (-2, -1, 0))
            )
            top = torch.tensor(limit).to(dtype)
            towards = torch.tensor([0.0, limit, torch.inf][choose.integers(3)]).to(dtype)
            tile *= limit / 2
            # One in each run of 16 numbers, along either axis, so that it is its block's largest whatever the block.
            tile.diagonal().copy_(torch.nextafter(top, towards).double() * float(choose.choice([-1, 1])))
    return x.to(dtype)


def ties(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Halfway between two elements nearly everywhere: multiples of 1/32 up to 6, where the largest is 6, 448 or 57344
    (whose scale is then a power of two) times a power of two."""
    x = torch.randint(-192, 193, (rows, columns), generator=generator) / 32
    x[::16, ::16] = 6.0
    tile = x.unflatten(0, (-1, 16)) if rows % 16 == 0 else x[None]
    tile.diagonal(dim1=-2, dim2=-1).copy_(torch.tensor(7.0))
    exponents = torch.randint(-3, 4, (rows, 1), generator=generator)
    return torch.ldexp(x, exponents).to(dtype)


def tiny(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Around the least normal fp32 number, and zeros of both signs."""
    exponents = torch.randint(-149, -118, (rows, columns), generator=generator)
    x = torch.ldexp(torch.ones(rows, columns, dtype=torch.float64), exponents)
    return (x * torch.randint(-1, 2, (rows, columns), generator=generator)).to(dtype)


def huge(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Up to the largest number of the type."""
    x = torch.randn(rows, columns, generator=generator).clamp(-1, 1).double() * torch.finfo(dtype).max
    return x.to(dtype)


KINDS = {f.__name__: f for f in (normal, wide, tiles, boundaries, ties, tiny, huge)}
