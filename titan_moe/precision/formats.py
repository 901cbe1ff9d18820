"""The numbers themselves: elements of 8 and 4 bits, and the scales of blocks and tensors.

An element format is a grid. Between 2^e and 2^(e+1) its numbers are 2^(e-M) apart, M the bits of its mantissa, and
below its least normal exponent they are as far apart as just above it. So rounding needs one thing of a number y, the
power of two below it. `round_` takes that from y's bits, p, and lets the fp32 adder round: in y + 1.5 x 2^(23-M) p the
last bit of the sum weighs 2^-M p, so the sum is y rounded to the grid, to nearest and ties to even, and subtracting the
same again is exact. Five passes over memory that vectorize everywhere; torch's float8 casts there and back go number by
number on a CPU and take several times as long.

Scales come in pairs: `encode`, which elements are multiplied with before they are rounded, and `decode`, which takes
them back and is what a tensor stores. The arithmetic is Transformer Engine 2.20.2's, step for step, in fp32, because
where a scale falls on the one or the other side of a rounding decides about a whole block:

- one fp32 scale for a tensor (`tensor_scale`): encode = limit / amax, 1 if amax is zero or not finite;
- a power of two in fp32 (`power_of_two_scale`): the same, mantissa cut off, so rounded towards fewer overflows;
- E8M0 (`e8m0_scale`): decode = amax / limit rounded up to a power of two between 2^-127 and 2^127, as Blackwell's
  conversion instruction does and torchao calls RCEIL. No element overflows. The OCP specification (MX v1.0, 6.3) takes
  the power of two below amax divided by the one below limit instead: half as much where amax lies above the limit times
  a power of two, and there the largest elements saturate, by up to an eighth of their value;
- E4M3 (`e4m3_scale`): decode is relative to a scale of the whole tensor, which is chosen so that the largest block gets
  the largest decode, 448. Rounded to nearest, it may let elements overflow, which saturate; nor can chance make up for
  that: the mean of such an element is the largest one.

What happens to numbers that are none: NaN elements stay NaN in E4M3 and E5M2; E2M1 has none and stores its largest
number, as the hardware does, but the scales do not hide it: a NaN makes the amax NaN, and that makes E8M0 and E4M3
scales NaN. (Transformer Engine's kernels leave a NaN out of the amax; what a GEMM makes of its row is NaN either way.)
Infinity saturates. In E8M0 blocks it comes back as infinity, under two levels as infinity or NaN, but a tensor's or a
power-of-two scale is 1 then, and infinity becomes the largest element: that is what Transformer Engine does.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP32_MAX = torch.finfo(torch.float32).max
EXPONENT_BITS = 0x7F800000  # of an fp32 number
SIGNS = 0b1101_0111_1110_1000
"""Signs of the "random" Hadamard transform, drawn once for all by Transformer Engine (nvfp4_tensor.py): bit i is set
where row i is negative"""


class Element(NamedTuple):
    mantissa: int
    """Bits after the point"""
    min_exponent: int
    """Of the least normal number"""
    limit: float
    """Largest number; beyond it elements saturate"""


ELEMENTS = {"e4m3": Element(3, -6, 448.0), "e5m2": Element(2, -14, 57344.0), "e2m1": Element(1, 0, 6.0)}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def round_(y: Tensor, element: Element, chance: Tensor | None = None) -> Tensor:
    """Rounds fp32 `y` in place to numbers of `element`, saturating; a negative number that becomes zero loses its sign.

    To the nearest, ties to even; or with `chance`, numbers of y's shape uniform in (-1/2, 1/2), to one of the two
    neighbours so that the mean is y: `chance` grid steps are added first.
    """
    y.clamp_(-element.limit, element.limit)
    power = (y.view(torch.int32) & EXPONENT_BITS).view(torch.float32).clamp_min_(2.0**element.min_exponent)
    if chance is not None:
        y.addcmul_(power, chance, value=2.0**-element.mantissa)
    shift = 1.5 * 2.0 ** (23 - element.mantissa)
    return y.add_(power, alpha=shift).sub_(power, alpha=shift)


def chances(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """fp32 numbers (k + 1/2) / 2^16 of 16 random bits k each, in (-1/2, 1/2), shaped `like`. (The hardware uses 8.)"""
    words = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device)
    bits = words.random_(-(2**63), None, generator=generator).view(torch.int16)[: like.numel()]
    return bits.view(like.shape).float().add_(0.5).mul_(2.0**-16)


def encode_e2m1(values: Tensor) -> Tensor:
    """4-bit codes, uint8, of fp32 E2M1 numbers."""
    magnitude = values.abs()
    code = torch.where(magnitude < 2, 2 * magnitude, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    code = torch.where(code <= 7, code, 7)  # NaN
    return code.to(torch.uint8) | torch.signbit(values).to(torch.uint8) << 3


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 numbers of 4-bit E2M1 codes, uint8."""
    magnitude = (codes & 7).int()
    halves = torch.where(magnitude < 2, magnitude, (2 + (magnitude & 1)) << ((magnitude >> 1) - 1).clamp(min=0))
    return torch.where(codes >= 8, -1.0, 1.0) * (halves / 2)


def tensor_scale(amax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(encode, decode) with encode = limit / amax; fp32, as `amax`."""
    encode = torch.div(amax.new_full((), limit), amax).clamp(max=FP32_MAX)  # (limit / amax is limit * (1 / amax))
    encode = torch.where((amax > 0) & (amax < torch.inf), encode, 1.0)
    return encode, encode.reciprocal()


def power_of_two_scale(amax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(encode, decode) with encode = limit / amax rounded down to a power of two; fp32, as `amax`."""
    encode, _ = tensor_scale(amax, limit)
    encode = (encode.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return encode, encode.reciprocal()


def e8m0_scale(amax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(encode, decode) with decode = amax / limit rounded up to a power of two of E8M0; fp32, as `amax`.

    The least, 2^-127, is an amax of zero's too, and its encode is 1: such small numbers become zeros.
    """
    ratio = amax * (1 / limit)
    power = ((ratio.view(torch.int32) + 0x7FFFFF) & EXPONENT_BITS).view(torch.float32)
    decode = torch.maximum(power, ratio).clamp_(2.0**-126, 2.0**127)  # (the larger one is NaN where one of them is)
    least = ratio <= 2.0**-127
    return decode.reciprocal().masked_fill_(least, 1.0), decode.masked_fill_(least, 2.0**-127)


def e4m3_scale(amax: Tensor, limit: float, tensor_encode: Tensor) -> tuple[Tensor, Tensor]:
    """(encode, decode) of blocks, decode an E4M3 number, under a tensor's `tensor_encode` (broadcast over `amax`)."""
    decode = round_(amax * (tensor_encode * (1 / limit)), ELEMENTS["e4m3"])
    return (decode * tensor_encode.reciprocal()).reciprocal_().clamp_(max=FP32_MAX), decode


def two_level_scale(amax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(encode, decode) of a whole tensor whose blocks have `e4m3_scale`s; fp32, as `amax`."""
    top = ELEMENTS["e4m3"].limit * limit
    encode = torch.div(amax.new_full((), top), amax).clamp(max=FP32_MAX)
    return torch.where((amax == 0) | (encode == 0), 1.0, encode), amax * (1 / top)


def hadamard_matrix(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The orthonormal `size` x `size` matrix diag(signs) H / sqrt(size), for sizes up to 16. H is Sylvester's Hadamard
    matrix: -1 where i and j have an odd number of bits in common, else 1.

    Made on the device, because a copy from the host would be waited for, and anew each time, because a fake tensor that
    was kept would meet real ones.
    """
    index = torch.arange(size, device=device)
    common = index[:, None] & index
    odd = (common ^ common >> 1 ^ common >> 2 ^ common >> 3 ^ (SIGNS >> index)[:, None]) & 1
    return (1 - 2 * odd).to(dtype) * size**-0.5


def hadamard(x: Tensor, size: int, axis: int) -> Tensor:
    """`x`, each run of `size` numbers along `axis` (-1 or -2) multiplied with the transform, rounded to x's dtype."""
    matrix = hadamard_matrix(size, x.device, x.dtype)
    blocks = x.unflatten(axis, (x.shape[axis] // size, size))
    return (blocks @ matrix).flatten(-2) if axis == -1 else (matrix.T @ blocks).flatten(-3, -2)
