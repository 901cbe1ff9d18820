"""Elements against ml_dtypes' casts, scales against exact arithmetic, chance against its standard error."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.precision import reference
from titan_moe.precision import formats
from titan_moe.precision.quantize import quantize, round_trip
from titan_moe.precision.recipes import RECIPES

NVFP4 = RECIPES["nvfp4"]


def neighbourhood(element: formats.Element, dtype: type) -> np.ndarray:
    """Every number of the format, every midpoint of two, and the fp32 numbers next to each of both; both signs."""
    codes = np.arange(16 if dtype is ml_dtypes.float4_e2m1fn else 256, dtype=np.uint8)
    numbers = np.unique(codes.view(dtype).astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, -np.float32(np.inf))]
    )
    beyond = element.limit * np.array([1 + 2.0**-23, 1.03, 1.07, 1.2, 2, 2.0**20, 2.0**100, np.inf])
    return np.concatenate([points, beyond, -beyond, [0.0, -0.0, 1e-30, -1e-30, 1e-45]]).astype(np.float32)


@pytest.mark.parametrize("name", formats.ELEMENTS)
def test_rounds_as_ml_dtypes_casts(name):
    """At every number, at every tie and beside both; beyond the largest number, where the casts of ml_dtypes overflow,
    the largest."""
    element, dtype = formats.ELEMENTS[name], reference.DTYPES[name]
    y = neighbourhood(element, dtype)
    expected = np.clip(y, -element.limit, element.limit).astype(dtype).astype(np.float32)
    own = formats.round_(torch.from_numpy(y.copy()), element)
    np.testing.assert_array_equal(own.numpy(), expected)
    random = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * element.limit / 2
    random = torch.ldexp(random, torch.randint(-20, 2, random.shape)).clamp_(-element.limit, element.limit)
    np.testing.assert_array_equal(
        formats.round_(random.clone(), element).numpy(), random.numpy().astype(dtype).astype(np.float32)
    )
    assert formats.round_(torch.tensor([torch.nan, 1.0]), element).isnan().tolist() == [True, False]


def test_e2m1_codes():
    """As ml_dtypes has them; what is no number becomes the largest."""
    values = torch.from_numpy(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    codes = formats.encode_e2m1(values)
    assert codes.dtype == torch.uint8 and codes.tolist() == list(range(16))
    assert torch.equal(formats.decode_e2m1(codes), values)
    assert formats.encode_e2m1(torch.tensor([torch.nan, torch.inf, -torch.inf])).tolist() == [7, 7, 15]


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_e8m0_scales_are_rounded_up_over_the_whole_range(limit):
    """The least power of two that lets no element overflow: at limit x 2^n, above it and below it, for every n. By the
    specification's floor it would be another one above."""
    n = np.arange(-126, 111 - int(math.log2(limit)) + 8)
    at = (limit * 2.0**n).astype(np.float32)
    for amax, exponents in (
        (at, n),
        (np.nextafter(at, np.float32(0)), n),
        (np.nextafter(at, np.float32(np.inf)), n + 1),
    ):
        encode, decode = formats.e8m0_scale(torch.from_numpy(amax), limit)
        np.testing.assert_array_equal(decode.numpy(), 2.0**exponents)
        np.testing.assert_array_equal(encode.numpy(), 2.0**-exponents)
        assert exponents.tolist() == [reference.exponent_up(a, limit) for a in amax]
    assert [reference.exponent_floor(a, limit) for a in np.nextafter(at, np.float32(np.inf))] == n.tolist()


def test_e8m0_scales_at_the_ends():
    """Zero and what is too small get 2^-127 and are not scaled; infinity 2^127; NaN NaN. The fp32 product with 1 / 448
    is Transformer Engine's too, and exact enough everywhere but for one number: above 448 x 2^-127 it rounds down."""
    above = np.nextafter(np.float32(448 * 2.0**-127), np.float32(1))
    amax = torch.tensor([0.0, 1e-45, 448 * 2.0**-127, above, np.nextafter(above, np.float32(1)), torch.inf, torch.nan])
    encode, decode = formats.e8m0_scale(amax, 448.0)
    assert decode[:6].tolist() == [2.0**-127] * 4 + [2.0**-126, 2.0**127]
    assert encode[:6].tolist() == [1.0] * 4 + [2.0**126, 2.0**-127]
    assert encode[6].isnan() and decode[6].isnan()
    assert decode.to(torch.float8_e8m0fnu).view(torch.uint8).tolist() == [0, 0, 0, 0, 1, 254, 255]


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_scales_of_tensors_and_their_powers_of_two(limit):
    amax = torch.tensor([limit, limit * 2.0**-3, 3.0, 1e-38, 1e-45, 3e38, 0.0, torch.inf, torch.nan])
    encode, decode = formats.tensor_scale(amax, limit)
    exact = [1.0, 8.0, np.float32(limit) / np.float32(3), formats.FP32_MAX, formats.FP32_MAX]
    np.testing.assert_array_equal(encode[:5].numpy(), np.float32(exact))
    assert encode[6:].tolist() == decode[6:].tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_array_equal(decode.numpy(), 1 / encode.numpy())
    power, inverse = formats.power_of_two_scale(amax, limit)
    np.testing.assert_array_equal(power.numpy(), 2.0 ** np.floor(np.log2(encode.double().numpy())))
    np.testing.assert_array_equal((power * inverse).numpy(), np.ones(len(amax), dtype=np.float32))


def test_chances_are_uniform_symmetric_and_never_a_half():
    chance = formats.chances(torch.empty(2**18 + 3), torch.Generator().manual_seed(1))
    assert chance.shape == (2**18 + 3,) and chance.dtype == torch.float32
    assert 0.499 < float(chance.max()) < 0.5 and -0.5 < float(chance.min()) < -0.499
    counts = torch.histc(chance, 64, -0.5, 0.5)
    expected = len(chance) / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * math.sqrt(2 * 63)  # chi squared
    assert not torch.equal(chance[:1000], formats.chances(torch.empty(1000), torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("name", formats.ELEMENTS)
def test_stochastic_rounding_is_unbiased_and_takes_a_neighbour(name):
    """Means of many draws within 4.5 standard errors, at places all over the range, of which ones on the grid stay."""
    element = formats.ELEMENTS[name]
    places = np.array([0.0, 1.0, 0.1, 0.49, 0.5, 0.75, 1.25, 1.9, 2.3, 3.0, 3.999, 4.5, 5.0, 5.9]) * element.limit / 6
    places = np.concatenate([places, -places, [2.0**element.min_exponent * f for f in (0.01, 0.3, 0.9, 1.01)]])
    places = np.float32(places)
    draws = 2**14
    y = torch.from_numpy(places)[:, None].expand(-1, draws).contiguous()
    rounded = formats.round_(y.clone(), element, formats.chances(y, torch.Generator().manual_seed(3))).double()
    codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8).view(reference.DTYPES[name]).astype(np.float64)
    grid = np.unique(codes[np.isfinite(codes)])
    for place, row in zip(places.astype(np.float64), rounded):
        low, high = grid[grid <= place].max(), grid[grid >= place].min()
        assert set(row.unique().tolist()) == ({low} if low == high else {low, high}), place
        share = (place - low) / (high - low) if high > low else 0.0
        error = (high - low) * math.sqrt(share * (1 - share) / draws)
        # 16 random bits know shares to one in 2^16.
        assert abs(float(row.mean()) - place) <= 4.5 * error + (high - low) * 2.0**-16, place


def test_stochastic_rounding_of_a_gradient():
    """Unbiased with its scales too, but for what saturates because its block's scale was rounded down; and as a whole,
    where rounding to the nearest is not."""
    g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    stored = quantize(g.expand(200, 64, 64), NVFP4.dgrad_g, -1, generator=torch.Generator().manual_seed(5))
    draws = stored.dequantize(torch.float32)  # 200 times the same tensor
    stored = quantize(g, NVFP4.dgrad_g, -1)
    largest = 6 * (stored.scale.float() * stored.tensor_scale).repeat_interleave(16, -1)
    inside = g.abs() <= largest
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, torch.inf], dtype=torch.float64)
    place = (g.abs() / largest * 6).double()
    above = torch.searchsorted(grid, place, right=True).clamp(max=7)
    step = grid[above] - grid[above - 1]
    share = ((place - grid[above - 1]) / step).clamp(max=1)
    error = step * (share * (1 - share) / len(draws)).sqrt()
    deviation = (draws.double().mean(0).abs() / largest * 6 - place).abs()
    # 3 / draws: where a share is far less than one in the number of draws, a hit is many standard errors
    assert bool((deviation <= 5.5 * error + step * (2.0**-16 + 3 / len(draws)))[inside].all())
    assert float(inside.float().mean()) > 0.95
    torch.testing.assert_close(draws[0].abs()[~inside], largest[~inside], rtol=2e-7, atol=0)
    total = float((error * largest / 6)[inside].square().sum().sqrt())
    assert abs(float((draws.double().mean(0) - g)[inside].sum())) < 5 * total
    assert abs(float((stored.dequantize(torch.float32).double() - g)[inside].sum())) > 5 * total


def test_a_generator_repeats_its_draws():
    """And round trips draw what stored tensors draw."""
    g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    one, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    draws = [quantize(g, NVFP4.dgrad_g, -1, generator=one).dequantize(torch.float32) for _ in range(2)]
    assert not torch.equal(*draws)
    for draw in draws:
        seen = round_trip(g, NVFP4.dgrad_g, -1, generator=other)
        torch.testing.assert_close(seen.values * seen.factor, draw, rtol=2e-7, atol=0)


def test_the_hadamard_transform_is_orthonormal_and_leaves_products_alone():
    matrix = formats.hadamard_matrix(16, torch.device("cpu"), torch.float64)
    assert torch.equal(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    g_RO, x_RI = (torch.randn(64, n, generator=generator, dtype=torch.float64) for n in (24, 40))
    transformed = formats.hadamard(g_RO, 16, -2), formats.hadamard(x_RI, 16, -2)
    torch.testing.assert_close(transformed[0].T @ transformed[1], g_RO.T @ x_RI, rtol=0, atol=1e-12)
    assert not torch.allclose(transformed[0], g_RO)
    for run in range(0, 64, 16):  # along rows, 16 by 16
        torch.testing.assert_close(transformed[1][run : run + 16], matrix.T @ x_RI[run : run + 16], rtol=0, atol=1e-12)
    torch.testing.assert_close(formats.hadamard(x_RI.T, 16, -1), transformed[1].T, rtol=0, atol=1e-12)


def test_the_hadamard_transform_spreads_an_outlier():
    x = torch.zeros(16, 1)
    x[5] = 8.0
    assert formats.hadamard(x, 16, -2).abs().unique().tolist() == [2.0]
