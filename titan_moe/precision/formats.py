"""The numbers themselves: E4M3, E5M2 and E2M1 elements, E8M0 scales, and the 16 x 16 Hadamard transform."""

import functools

import torch
from torch import Tensor

MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""Largest finite element"""
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's signs of the random Hadamard transform, drawn once for all"""


def round_e2m1(y: Tensor) -> Tensor:
    """fp32 `y` in [-6, 6], rounded to the nearest E2M1 number, ties to even; fp32."""
    magnitude = y.abs()
    step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    return torch.round(y / step) * step


def round_e2m1_stochastic(y: Tensor, generator: torch.Generator | None) -> Tensor:
    """fp32 `y` in [-6, 6], rounded to one of its two E2M1 neighbours, with `y` as the mean; fp32."""
    magnitude = y.abs()
    step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    chance = torch.rand(y.shape, generator=generator, device=y.device)
    return torch.copysign(torch.floor(magnitude / step + chance) * step, y)


def encode_e2m1(values: Tensor) -> Tensor:
    """4-bit codes, uint8, of fp32 E2M1 numbers."""
    magnitude = values.abs()
    code = torch.where(magnitude < 2, 2 * magnitude, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    return code.to(torch.uint8) + 8 * torch.signbit(values).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 numbers of 4-bit E2M1 codes."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes.device)
    return table[codes.long()]


def e8m0_round_up(value: Tensor) -> Tensor:
    """The E8M0 code, uint8, of the least power of two that is not below fp32 `value` >= 0."""
    bits = value.view(torch.int32)
    code = (bits + 0x7FFFFF) >> 23
    return torch.where(bits <= 0x400000, 0, code).clamp(max=254).to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """fp32 2^(code - 127)."""
    return torch.ldexp(torch.ones((), device=code.device), code.int() - 127)


@functools.lru_cache
def hadamard_matrix(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The orthonormal `size` x `size` matrix diag(signs) H / sqrt(size), H the Sylvester Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor(SIGNS, dtype=torch.float32)
    return (signs[:, None] * matrix / size**0.5).to(device, dtype)


def hadamard(x: Tensor, size: int, axis: int) -> Tensor:
    """`x` with each run of `size` numbers along `axis` (-1 or -2) multiplied by the transform; of x's dtype."""
    matrix = hadamard_matrix(size, x.device, x.dtype)
    if axis == -1:
        return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2)
    return (matrix.T @ x.unflatten(-2, (-1, size))).flatten(-3, -2)
