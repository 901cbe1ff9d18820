"""What a recipe's numbers must be, block by block in numpy: independent of titan_moe and of torch.

Elements and 8-bit scales are rounded by `ml_dtypes`; scales that are powers of two are found exactly, in float64; where
Transformer Engine computes a scale with several roundings in fp32, numpy's fp32 does the same ones.
"""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from titan_moe.precision.recipes import Format

LIMITS = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
FP32 = np.float32
FP32_MAX = np.finfo(FP32).max


class Reference(NamedTuple):
    """Per number of the tensor: `elements`, which are its own, and the scales of its block and tensor; float64."""

    elements: np.ndarray
    block_scale: np.ndarray
    tensor_scale: np.ndarray

    @property
    def values(self) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return self.elements * self.block_scale * self.tensor_scale


def quantized(x: np.ndarray, fmt: Format, axis: int, mode: str = "up") -> Reference:
    """fp32 `x` [A, B], one tensor, contracted along `axis` (-1 or -2). `mode`: how E8M0 scales are rounded, "up" or, as
    the OCP specification has it, "floor"."""
    if axis == -2:
        return Reference(*(part.T for part in quantized(x.T, fmt, -1, mode)))
    amax = FP32(np.max(np.abs(x), initial=0))
    if fmt.block is None:
        encode = fp32_encode(amax, LIMITS[fmt.element])
        return Reference(to_elements(x * encode, fmt), np.ones(x.shape), np.full(x.shape, np.float64(1 / encode)))
    tensor_encode, tensor_decode = FP32(1), FP32(1)
    if fmt.scale == "e4m3":
        top = FP32(448 * LIMITS[fmt.element])
        with np.errstate(divide="ignore", over="ignore"):
            tensor_encode = FP32(1) if amax == 0 else np.minimum(top / amax, FP32_MAX)
        tensor_decode = amax * FP32(1 / top)
    m, k = fmt.block
    result = Reference(np.empty(x.shape), np.empty(x.shape), np.full(x.shape, np.float64(tensor_decode)))
    for i in range(0, x.shape[0], m):
        for j in range(0, x.shape[1], k):
            block = x[i : i + m, j : j + k]
            encode, decode = block_scale(np.max(np.abs(block)), fmt, tensor_encode, mode)
            with np.errstate(over="ignore"):
                result.elements[i : i + m, j : j + k] = to_elements(block * encode, fmt)
            result.block_scale[i : i + m, j : j + k] = decode
    return result


def block_scale(amax: np.float32, fmt: Format, tensor_encode: np.float32, mode: str) -> tuple[np.float32, np.float64]:
    """(what elements are multiplied with, what takes them back)."""
    limit = LIMITS[fmt.element]
    if fmt.scale == "pow2":
        encode = FP32(2.0 ** (math.frexp(fp32_encode(amax, limit))[1] - 1))  # rounded down
        return encode, np.float64(1 / encode)
    if fmt.scale == "e8m0":
        exponent = max(-127, exponent_up(amax, limit) if mode == "up" else exponent_floor(amax, limit))
        return FP32(1 if exponent == -127 else 2.0**-exponent), np.float64(2.0**exponent)
    with np.errstate(divide="ignore", over="ignore"):
        wanted = np.minimum(amax * (tensor_encode * FP32(1 / limit)), FP32(448))
        decode = wanted.astype(ml_dtypes.float8_e4m3fn).astype(FP32)
        return np.minimum(FP32(1) / (decode * (FP32(1) / tensor_encode)), FP32_MAX), np.float64(decode)


def fp32_encode(amax: np.float32, limit: float) -> np.float32:
    with np.errstate(divide="ignore", over="ignore"):
        return FP32(1) if amax == 0 or not np.isfinite(amax) else np.minimum(FP32(limit) / amax, FP32_MAX)


def exponent_up(amax: np.float32, limit: float) -> int:
    """The least n with amax <= limit x 2^n. Comparisons of float64 numbers that are exact."""
    if amax == 0:
        return -127
    n = math.frexp(float(amax) / limit)[1] - 2
    while float(amax) > limit * 2.0**n:
        n += 1
    return n


def exponent_floor(amax: np.float32, limit: float) -> int:
    """Exponents of the powers of two below amax and limit, subtracted (OCP MX v1.0, 6.3)."""
    return -127 if amax == 0 else math.frexp(float(amax))[1] - math.frexp(limit)[1]


def to_elements(y: np.ndarray, fmt: Format) -> np.ndarray:
    limit = LIMITS[fmt.element]
    return np.clip(y, -limit, limit).astype(FP32).astype(DTYPES[fmt.element]).astype(np.float64)
