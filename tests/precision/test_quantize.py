"""Quantized tensors against a block-by-block reference in numpy; experts, odd shapes and odd numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.precision import inputs, reference
from titan_moe.precision.quantize import Groups, quantize, round_trip
from titan_moe.precision.recipes import RECIPES, Format

ROLES = ("forward_x", "forward_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
FORMATS = {
    fmt: f"{recipe.name} {role}" for recipe in RECIPES.values() for role in ROLES for fmt in [getattr(recipe, role)]
}
DETERMINISTIC = [fmt for fmt in FORMATS if not fmt.stochastic and not fmt.hadamard]
MXFP8, NVFP4 = RECIPES["mxfp8"].forward_x, RECIPES["nvfp4"].forward_x


def named(fmt: Format) -> str:
    return FORMATS[fmt].replace(" ", "_")


def as_numpy(x: Tensor) -> np.ndarray:
    return x.float().numpy()


def factor_of(result) -> Tensor:
    return torch.ones(()) if result.factor is None else result.factor


def assert_equals_reference(x: Tensor, fmt: Format, axis: int) -> None:
    """Stored elements, stored scales, dequantized numbers, and round trips to fp32 and bf16."""
    expected = reference.quantized(as_numpy(x), fmt, axis)
    stored = quantize(x, fmt, axis)
    blocks = (1, 1) if fmt.block is None else fmt.block if axis == -1 else fmt.block[::-1]
    if fmt.block is None:
        assert float(stored.scale) == expected.tensor_scale.flat[0]
        assert stored.tensor_scale is None
    else:
        scale = stored.scale.float().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1).numpy()
        np.testing.assert_array_equal(scale, expected.block_scale)
        assert (stored.tensor_scale is None) == (fmt.scale != "e4m3")
        assert stored.tensor_scale is None or float(stored.tensor_scale) == expected.tensor_scale.flat[0]
    elements = unpacked(stored.data, axis) if fmt.element == "e2m1" else stored.data.float()
    np.testing.assert_array_equal(elements.numpy(), expected.elements)
    np.testing.assert_array_equal(np.signbit(elements.numpy()), np.signbit(as_numpy(x)), err_msg="signs of zeros")

    with np.errstate(over="ignore"):
        values = np.float32(np.float32(expected.elements * expected.block_scale) * np.float32(expected.tensor_scale))
    np.testing.assert_array_equal(stored.dequantize(torch.float32).numpy(), values)
    for dtype in (torch.float32, torch.bfloat16):
        seen = round_trip(x, fmt, axis, dtype=dtype)
        exact = expected.elements * expected.block_scale
        assert seen.values.dtype == dtype
        np.testing.assert_array_equal(as_numpy(seen.values), as_numpy(torch.from_numpy(exact).to(dtype)))
        assert float(factor_of(seen)) == expected.tensor_scale.flat[0]


def unpacked(data: Tensor, axis: int) -> Tensor:
    """Two E2M1 numbers per byte, along `axis`, by a table and a loop of its own."""
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor(table + [-value for value in table])
    rows = data if axis == -1 else data.T
    out = torch.stack([torch.stack([values[byte % 16], values[byte // 16]], -1).flatten() for byte in rows.long()])
    return out if axis == -1 else out.T


@pytest.mark.parametrize("fmt", DETERMINISTIC, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_the_reference_bit_for_bit(fmt, dtype):
    size = {128: 128, 32: 64, 16: 32}[fmt.block[1] if fmt.block else 32]
    for kind in inputs.KINDS:
        assert_equals_reference(inputs.tensor(kind, size, 2 * size, dtype), fmt, -1)
        assert_equals_reference(inputs.tensor(kind, 2 * size, size, dtype), fmt, -2)
    if fmt.block is None or fmt.block[0] == 1:
        assert_equals_reference(inputs.tensor("tiles", 1, 256, dtype), fmt, -1)  # one row


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(DETERMINISTIC),
    st.sampled_from(sorted(inputs.KINDS)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([-1, -2]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 2**20),
)
def test_equals_the_reference_for_other_shapes(fmt, kind, dtype, axis, blocks, seed):
    m, k = (16, 16) if fmt.block is None else fmt.block
    across, along = max(m, 2) * blocks[0], k * blocks[1]
    rows, columns = (across, along) if axis == -1 else (along, across)
    assert_equals_reference(inputs.tensor(kind, rows, columns, dtype, seed), fmt, axis)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", DETERMINISTIC, ids=named)
def test_every_bf16_number(fmt):
    """Each finite one in three random orders, and so in blocks of different scales."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = torch.cat([numbers[numbers.isfinite()], torch.zeros(256, dtype=torch.bfloat16)])
    for seed in range(3):
        order = torch.randperm(2**16, generator=torch.Generator().manual_seed(seed))
        for sort in (False, True):  # sorted: blocks of numbers of a like size, among them the smallest
            x = numbers[order] if not sort else numbers[order].sort().values
            assert_equals_reference(x.view(256, 256), fmt, -1 - seed % 2)


def test_the_inputs_tell_apart_what_must_not_be_confused():
    """Scales rounded up and OCP's floor; the two axes; ties to even and away from zero."""
    x = as_numpy(inputs.tensor("boundaries", 128, 128, torch.float32))
    up, floor, other = (reference.quantized(x, MXFP8, *how) for how in ((-1, "up"), (-1, "floor"), (-2, "up")))
    assert np.mean(up.block_scale != floor.block_scale) > 0.1
    assert np.mean(up.values != other.values) > 0.1
    x = as_numpy(inputs.tensor("ties", 128, 128, torch.float32))
    even = reference.quantized(x, MXFP8, -1)
    y = np.abs(x / even.block_scale)
    step = 2.0 ** np.floor(np.log2(y.clip(2.0**-6)) - 3)
    assert np.mean(np.abs(even.elements) != np.floor(y / step + 0.5) * step) > 0.02


@pytest.mark.parametrize("fmt", DETERMINISTIC, ids=named)
def test_weights_are_quantized_expert_by_expert(fmt):
    w_EOI = torch.stack([inputs.tensor("tiles", 128, 256, torch.float32, seed) * 8.0**seed for seed in range(3)])
    for axis in (-1, -2, 1, 2):
        stored, seen = quantize(w_EOI, fmt, axis), round_trip(w_EOI, fmt, axis)
        for e, w_OI in enumerate(w_EOI):
            alone = axis if axis < 0 else axis - 3
            assert torch.equal(
                stored.dequantize(torch.float32)[e], quantize(w_OI, fmt, alone).dequantize(torch.float32)
            )
            one = round_trip(w_OI, fmt, alone)
            assert torch.equal(seen.values[e], one.values)
            assert one.factor is None if seen.factor is None else torch.equal(seen.factor[e], one.factor)
    one, other = (round_trip(w_EOI, fmt, axis).values for axis in (-1, -2))
    for_both_gemms = fmt.block is None or fmt.block[0] == fmt.block[1]
    assert torch.equal(one, other) == for_both_gemms


@st.composite
def slabs(draw):
    """(counts of rows per expert, rows of the buffer): multiples of 128, zeros among them, and a tail."""
    counts = [128 * n for n in draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))]
    return counts, sum(counts) + 128 * draw(st.integers(0, 1))


@settings(deadline=None, max_examples=40)
@given(
    slabs(),
    st.sampled_from([fmt for fmt in FORMATS if fmt.block is None or fmt.block[0] == 1]),
    st.sampled_from([-1, -2]),
    st.integers(0, 2**20),
)
def test_rows_of_several_experts_equal_each_expert_alone(slab, fmt, axis, seed):
    """Also with nothing but NaN in the tail, and with experts without rows."""
    fmt = replace(fmt, stochastic=False)
    counts, rows = slab
    x_RD = inputs.tensor("tiles", max(rows, 1), 128, torch.bfloat16, seed)[:rows]
    x_RD[sum(counts) :] = torch.nan
    groups = Groups.of_slabs(torch.tensor(counts), rows)
    stored, seen = quantize(x_RD, fmt, axis, groups=groups), round_trip(x_RD, fmt, axis, groups=groups)
    start = 0
    for e, count in enumerate(counts):
        slab_RD = slice(start, start := start + count)
        alone, one = quantize(x_RD[slab_RD], fmt, axis), round_trip(x_RD[slab_RD], fmt, axis)
        assert torch.equal(stored.dequantize(torch.float32)[slab_RD], alone.dequantize(torch.float32))
        assert torch.equal(seen.values[slab_RD], one.values)
        assert one.factor is None if seen.factor is None else torch.equal(seen.factor[e], one.factor)


def test_slabs_are_found_without_their_sizes_on_the_host():
    groups = Groups.of_slabs(torch.tensor([2, 0, 3]), 7)
    assert groups.of_row.tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert groups.count == 3
    assert Groups(torch.tensor([0, 1, -1, 5]), 2).of_block(1).tolist() == [0, 1, 2, 2]


def test_a_block_that_spans_two_experts_is_refused():
    x_RD = torch.randn(128, 64)
    groups = Groups.of_slabs(torch.tensor([48, 80]), 128)
    with pytest.raises(
        ValueError, match=r"row 48 starts another expert inside a block of 32 rows \(48 = 1 x 32 \+ 16\)"
    ):
        quantize(x_RD, MXFP8, -2, groups=groups)
    with pytest.raises(ValueError, match="slabs must be multiples of 32 rows"):
        round_trip(x_RD, MXFP8, -2, groups=groups)
    round_trip(x_RD, MXFP8, -1, groups=groups)  # along D nothing spans anything
    round_trip(x_RD, NVFP4, -2, groups=groups)  # 48 = 3 x 16


@pytest.mark.parametrize(
    ("shape", "fmt", "axis", "message"),
    [
        ((4, 100), MXFP8, -1, r"axis -1 of \[4, 100\] is 100 = 3 x 32 \+ 4; make it a multiple of 32"),
        ((100, 4), MXFP8, -2, r"axis -2 of \[100, 4\] is 100 = 3 x 32 \+ 4; make it a multiple of 32"),
        ((4, 24), NVFP4, -1, r"24 = 1 x 16 \+ 8"),
        ((192, 128), RECIPES["fp8_block"].forward_w, -1, r"axis -2 of \[192, 128\] is 192 = 1 x 128 \+ 64"),
        ((2, 16, 24), RECIPES["nvfp4"].forward_w, -2, r"axis -1 of \[2, 16, 24\] is 24 = 1 x 16 \+ 8"),
    ],
)
def test_widths_that_blocks_do_not_tile_are_refused(shape, fmt, axis, message):
    for function in (quantize, round_trip):
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(shape), fmt, axis)


@pytest.mark.parametrize("fmt", FORMATS, ids=named)
def test_empty_tensors(fmt):
    """No rows, as a rank without tokens has, and no experts."""
    for shape in ((0, 128), (0, 128, 128)):
        x = torch.empty(shape, dtype=torch.bfloat16)
        for axis in (-1, -2):
            stored, seen = quantize(x, fmt, axis), round_trip(x, fmt, axis)
            assert stored.dequantize(torch.bfloat16).shape == seen.values.shape == shape
    groups = Groups.of_slabs(torch.zeros(3, dtype=torch.int64), 0)
    seen = round_trip(torch.empty(0, 128), fmt, -1, groups=groups)
    assert seen.factor is None or seen.factor.shape == (3,)


def test_bytes_of_what_is_stored():
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    sizes = {name: quantize(x, recipe.forward_x, -1).nbytes for name, recipe in RECIPES.items()}
    assert sizes == {
        "fp8_current": x.numel() + 4,
        "fp8_block": x.numel() + 4 * x.numel() // 128,
        "mxfp8": x.numel() + x.numel() // 32,
        "nvfp4": x.numel() // 2 + x.numel() // 16 + 4,
    }


def test_numbers_that_are_none():
    """The module docstring of formats.py, sentence by sentence."""
    x = torch.ones(2, 128)
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    for recipe in RECIPES.values():
        row = round_trip(x[:1], recipe.forward_x, -1)
        assert (row.values * factor_of(row)).isnan().any(), recipe.name
        assert quantize(x[:1], recipe.forward_x, -1).dequantize(torch.float32)[0, 0].isnan(), recipe.name
    assert quantize(x[:1], MXFP8, -1).dequantize(torch.float32)[0, :33].isnan().tolist() == [True] * 32 + [False]
    for name, element in (("fp8_current", 448.0), ("fp8_block", 448.0), ("mxfp8", torch.inf), ("nvfp4", torch.inf)):
        stored = quantize(x[1:], RECIPES[name].forward_x, -1).dequantize(torch.float32)
        row = round_trip(x[1:], RECIPES[name].forward_x, -1)
        assert stored[0, 0] == element == (row.values * factor_of(row))[0, 0], name
    assert round_trip(x[1:], RECIPES["fp8_current"].forward_x, -1).values[0, 1] == 1.0


def test_a_transposed_operand_is_what_its_copy_is():
    x = inputs.tensor("tiles", 128, 256, torch.bfloat16)
    for fmt in DETERMINISTIC:
        assert torch.equal(round_trip(x.T, fmt, -1).values, round_trip(x.T.contiguous(), fmt, -1).values)
        assert torch.equal(round_trip(x.T, fmt, -1).values, round_trip(x, fmt, -2).values.T)


def test_the_input_is_left_alone():
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs.tensor("wide", 128, 128, dtype).requires_grad_()
        before = x.detach().clone()
        for fmt in FORMATS:
            quantize(x, fmt, -1)
            assert not round_trip(x, fmt, -1).values.requires_grad
        assert torch.equal(x, before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_asks_the_device_for_a_value(device):
    """Fake tensors have none, so a host sync would raise; and nothing of them is left behind for real ones."""
    nvfp4 = RECIPES["nvfp4"]
    formats_of_rows = [nvfp4.wgrad_g] if device == "cpu" else [RECIPES["fp8_current"].forward_x, MXFP8, nvfp4.wgrad_g]
    with FakeTensorMode():
        x_RD = torch.empty(256, 128, dtype=torch.bfloat16, device=device)
        groups = Groups.of_slabs(torch.empty(2, dtype=torch.int64, device=device), 256)
        for fmt in formats_of_rows:
            values = round_trip(x_RD, fmt, -2, groups=groups).values
            assert (values.shape, values.dtype, values.device) == (x_RD.shape, x_RD.dtype, x_RD.device)
        assert quantize(x_RD, nvfp4.wgrad_g, -2, groups=groups).dequantize(torch.float32).shape == x_RD.shape
        round_trip(x_RD, RECIPES["fp8_block"].forward_w, -1)
    assert type(round_trip(torch.randn(32, 16), nvfp4.wgrad_x, -2).values) is Tensor
