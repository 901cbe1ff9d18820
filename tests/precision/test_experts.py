"""Grouped GEMMs on quantized operands against single ones, bit for bit, and experts against autograd through operands
that a float64 loop quantizes, one expert at a time."""

from dataclasses import replace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from titan_moe.moe import experts
from titan_moe.moe.experts import Source
from titan_moe.moe.quantized_experts import EXPERTS
from titan_moe.precision import gemm as gemm_module
from titan_moe.precision import noise
from titan_moe.precision.gemm import DenseGemm, QuantizedGemm
from titan_moe.precision.quantize import Groups, round_trip
from titan_moe.precision.recipes import RECIPES, Recipe
from titan_moe.precision.report import bytes_per_number

NAMES = list(RECIPES)
# In units of the largest alignment, 128: any split is one that every recipe allows.
SPLITS = {
    "uneven": [1, 0, 3, 2],
    "nobody": [0, 0, 0],
    "first_and_last_empty": [0, 2, 1, 0],
    "one_takes_all": [0, 9, 0],  # more than the largest piece of a CPU's GEMM
    "one_expert": [2],
}
TAIL = 48
D = F = 128  # which all blocks tile


def calm(recipe: Recipe) -> Recipe:
    """Without chance: rounding to nearest everywhere."""
    grads = {role: replace(getattr(recipe, role), stochastic=False) for role in ("dgrad_g", "wgrad_g")}
    return replace(recipe, **grads)


def counts_of(split: str, recipe: Recipe) -> list[int]:
    return [count * max(16, recipe.alignment) for count in SPLITS[split]]


def problem(counts: list[int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """x_RD, weight_R, w13, w2, gradient of y. Rows differ in size, and experts by more, so that a scale for all of them
    would show. Padding rows are zero, the tail is NaN."""
    generator = torch.Generator().manual_seed(3)
    E, R = len(counts), sum(counts) + TAIL

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 2.0 ** torch.randint(
            -4, 5, (*shape[:-1], 1), generator=generator
        )

    size_R = torch.tensor([16.0 ** (e % 3) for e, count in enumerate(counts) for _ in range(count)] + [1.0] * TAIL)
    x_RD, grad_RD = randn(R, D) / size_R[:, None], randn(R, D) * size_R[:, None]
    weight_R = torch.rand(R, generator=generator)
    for e, end in enumerate(torch.tensor(counts).cumsum(0).tolist()):
        if counts[e]:
            x_RD[end - 3 : end] = weight_R[end - 3 : end] = 0.0
    x_RD[sum(counts) :] = grad_RD[sum(counts) :] = weight_R[sum(counts) :] = float("nan")
    w13_EF2D, w2_EDF = randn(E, 2 * F, D).view(E, F, 2, D) * 0.05, randn(E, D, F) * 0.05
    return [x_RD.to(dtype), weight_R, w13_EF2D.to(dtype), w2_EDF.to(dtype), grad_RD.to(dtype)]


class InFloat64:
    """A GEMM in float64, where sums of products of short numbers are exact: their order does not matter."""

    def __init__(self, gemm) -> None:
        self.gemm = gemm

    def __getattr__(self, name: str):
        return lambda a, b: getattr(self.gemm, name)(a.double(), b.double()).to(a.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_a_grouped_gemm_is_single_ones_bit_for_bit(name):
    """Forward, dgrad and wgrad, for any slabs."""
    recipe = calm(RECIPES[name])
    single = QuantizedGemm(InFloat64(DenseGemm()), recipe)
    for split in SPLITS:
        counts = counts_of(split, recipe)
        x_RD, _, w13, _, grad_RD = problem(counts)
        w_EOI, grad_RO = w13.flatten(1, 2), torch.cat([grad_RD, grad_RD.flip(1)], 1)
        groups = Groups.of_slabs(torch.tensor(counts), len(x_RD))
        grouped = QuantizedGemm(InFloat64(experts.grouped_gemm(torch.tensor(counts))), recipe, groups)
        got = [grouped.forward(x_RD, w_EOI), grouped.dgrad(grad_RO, w_EOI), grouped.wgrad(grad_RO, x_RD)]
        slabs = [slice(end - count, end) for count, end in zip(counts, torch.tensor(counts).cumsum(0).tolist())]
        for e, slab in enumerate(slabs):
            assert torch.equal(got[0][slab], single.forward(x_RD[slab], w_EOI[e])), (split, e)
            assert torch.equal(got[1][slab], single.dgrad(grad_RO[slab], w_EOI[e])), (split, e)
            assert torch.equal(got[2][e], single.wgrad(grad_RO[slab], x_RD[slab])), (split, e)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["_PiecewiseGemm", "_GroupedGemm"])
def test_grouped_experts_are_the_loop(name, backend, monkeypatch):
    """bf16, as trained, on what a CPU and on what a GPU runs: up to the order of a GEMM's sums, and what that moves
    across a rounding."""
    recipe = calm(RECIPES[name])
    monkeypatch.setattr(experts, "_PiecewiseGemm", getattr(experts, backend))
    for split, late in (("uneven", False), ("first_and_last_empty", True), ("nobody", False), ("one_expert", False)):
        counts = counts_of(split, recipe)
        tensors = problem(counts)
        if backend == "_GroupedGemm":  # on a CPU torch's wants every row in a slab
            tensors = [t[: sum(counts)] if len(t) == sum(counts) + TAIL else t for t in tensors]
        found = {}
        for which in ("grouped_mm", "loop"):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors[:4]]
            x_RD, weight_R, w13, w2 = leaves
            y_RD = EXPERTS[which](x_RD, torch.tensor(counts), weight_R, w13, w2, recipe=recipe, late=late)
            y_RD.backward(tensors[4].nan_to_num(0.0) if which == "loop" else tensors[4])
            rows = slice(0, sum(counts))
            found[which] = [y_RD.detach()[rows], x_RD.grad[rows], weight_R.grad[rows], w13.grad, w2.grad]
        for what, got, expected in zip(("y", "x", "weight", "w13", "w2"), *found.values(), strict=True):
            assert got.isfinite().all(), what
            # Late, the loop quantizes gradients that are weighted already, and `by_gemm` those that are not yet.
            tolerance = 0.3 if late and what != "y" else 1e-3
            assert (got - expected).norm() <= tolerance * expected.norm(), what


class _Straight(torch.autograd.Function):
    """A GEMM a b^T whose backward has operands of its own, in float64: what the three GEMMs of a layer should be."""

    @staticmethod
    def forward(ctx, x, w, recipe):
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        return dequantized(x, recipe.forward_x, -1) @ dequantized(w, recipe.forward_w, -1).T

    @staticmethod
    def backward(ctx, grad):
        (x, w), recipe = ctx.saved_tensors, ctx.recipe
        grad_x = dequantized(grad, recipe.dgrad_g, -1) @ dequantized(w, recipe.dgrad_w, -2)
        grad_w = dequantized(grad, recipe.wgrad_g, -2).T @ dequantized(x, recipe.wgrad_x, -2)
        return grad_x, grad_w, None


def dequantized(x: Tensor, fmt, axis: int) -> Tensor:
    values, factor = round_trip(x.float(), fmt, axis)
    return values.double() * (1.0 if factor is None else factor.double())


def check_gradients(recipe: Recipe, backend: str, late: bool = False) -> None:
    """Against a float64 loop over experts that quantizes each operand explicitly. fp32 compute, so that what is left is
    the order of sums, and elements that these move across a rounding of the format.

    Late, `by_gemm` has the backward of early weighting: the gradient is quantized as it comes, and h weighted."""
    counts = counts_of("uneven", recipe)
    tensors = problem(counts, torch.float32)
    rows = slice(0, sum(counts))
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:4]]
    source = Source(leaves[0].detach(), lambda x: x)
    y_RD = EXPERTS[backend](leaves[0], torch.tensor(counts), *leaves[1:], recipe=recipe, source=source, late=late)
    y_RD.backward(tensors[4] if backend == "grouped_mm" else tensors[4].nan_to_num(0.0))
    got = [y_RD.detach()[rows], leaves[0].grad[rows], leaves[1].grad[rows], leaves[2].grad, leaves[3].grad]

    oracle = [tensor.double().requires_grad_() for tensor in (tensors[0][rows], tensors[1][rows], *tensors[2:4])]
    x, weight, w13, w2 = oracle
    y = []
    for e, (x_e, weight_e) in enumerate(zip(x.split(counts), weight.split(counts))):
        gate, up = _Straight.apply(x_e, w13[e].flatten(0, 1), recipe).unflatten(1, (-1, 2)).unbind(-1)
        h = gate * torch.sigmoid(gate) * up
        weighted_h, weighted_y = h * weight_e[:, None], _Straight.apply(h, w2[e], recipe) * weight_e[:, None]
        if late and backend == "loop":
            y.append(weighted_y)
        else:
            y.append(_Straight.apply(weighted_h, w2[e], recipe))
            y[-1] = y[-1] + (weighted_y - y[-1]).detach() if late else y[-1]
    y = torch.cat(y)
    expected = [y.detach(), *torch.autograd.grad(y, oracle, tensors[4][rows].double())]
    for what, value, reference in zip(("y", "x", "weight", "w13", "w2"), got, expected, strict=True):
        error = (value.double() - reference).norm() / reference.norm()
        assert error <= 2e-3, f"{what}: {error:.1e}"


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_through_quantized_operands(name, late):
    for backend in ("loop", "grouped_mm"):
        check_gradients(calm(RECIPES[name]), backend, late)


def check_gemms(recipe: Recipe) -> None:
    """Forward, dgrad and wgrad against operands that are quantized here. Rows and columns span more octaves than an
    element does, and in nvfp4 fewer than a block's scale: a block along the wrong axis loses the small ones. Sums stay
    balanced, and most of the result's rows and columns must be right, each by its own size."""
    generator = torch.Generator().manual_seed(5)

    def randn(rows: Tensor, columns: Tensor) -> Tensor:
        return torch.randn(len(rows), len(columns), generator=generator) * rows.exp2()[:, None] * columns.exp2()

    octaves = 4 if recipe.forward_x.two_level else 18
    sizes = (256, 128, 128)
    r, i, o = (torch.randint(-octaves, octaves + 1, (size,), generator=generator).float() for size in sizes)
    x_RI, w_OI, grad_RO = randn(-r, i), randn(-o, -i), randn(r, o)
    gemm = QuantizedGemm(DenseGemm(), recipe)
    results = {
        "forward": (gemm.forward(x_RI, w_OI), (x_RI, "forward_x", -1), (w_OI.T, "forward_w", -2)),
        "dgrad": (gemm.dgrad(grad_RO, w_OI), (grad_RO, "dgrad_g", -1), (w_OI, "dgrad_w", -2)),
        "wgrad": (gemm.wgrad(grad_RO, x_RI), (grad_RO.T, "wgrad_g", -1), (x_RI, "wgrad_x", -2)),
    }
    for what, (got, *operands) in results.items():
        a, b = (dequantized(x.contiguous(), getattr(recipe, role), axis) for x, role, axis in operands)
        for axis in (0, 1):
            error = (got - a @ b).norm(dim=axis) / (a @ b).norm(dim=axis).clamp(min=1e-300)
            assert error.quantile(0.8) <= 1e-3, f"{what}: {error.quantile(0.8):.1e}"


@pytest.mark.parametrize("name", NAMES)
def test_operands_are_quantized_along_the_contracted_axis(name):
    check_gemms(calm(RECIPES[name]))


@pytest.mark.parametrize("role", ["forward_x", "forward_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x"])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])  # fp8_current has one scale for all axes
def test_a_swapped_axis_is_noticed(name, role, monkeypatch):
    """One operand of one GEMM quantized along the other axis: the test above fails."""
    fmt = replace(getattr(calm(RECIPES[name]), role))  # equal to the others, but another object
    assert fmt.block is not None
    if fmt.block[0] == fmt.block[1]:
        return  # square blocks are the same either way
    original = gemm_module._operand
    swapped = []

    def swapping(x, operand_fmt, axis, groups=None, chance=None):
        if operand_fmt is fmt:
            swapped.append(role)
            axis = -3 - axis
        return original(x, operand_fmt, axis, groups, chance)

    monkeypatch.setattr(gemm_module, "_operand", swapping)
    with pytest.raises(AssertionError, match=role.split("_")[0]):
        check_gemms(replace(calm(RECIPES[name]), **{role: fmt}))
    assert swapped


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_for_the_wgrad_is_smaller_and_gives_the_same_bits(name):
    """Where rows cannot be gathered again: bytes in place of bf16 rows, and no bf16 rows."""
    recipe = calm(RECIPES[name])
    counts = counts_of("uneven", recipe)
    tensors = problem(counts)
    x_RD, R = tensors[0], len(tensors[0])
    kept: dict[str, dict[int, int]] = {}
    grads = {}
    for variant, source in (("kept", None), ("again", Source(x_RD, lambda x: x.clone()))):
        kept[variant] = seen = {}

        def note(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:4]]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = EXPERTS["grouped_mm"](leaves[0], torch.tensor(counts), *leaves[1:], recipe=recipe, source=source)
        assert leaves[0].untyped_storage().data_ptr() not in seen
        grads[variant] = torch.autograd.grad(y, leaves, tensors[4])
    assert torch.equal(grads["kept"][2], grads["again"][2]), "w13"
    rows = R + -R % recipe.alignment
    expected = rows * D * bytes_per_number(recipe.wgrad_x)
    difference = sum(kept["kept"].values()) - (sum(kept["again"].values()) - x_RD.nbytes)
    assert expected <= difference <= expected + 64  # scales of whole experts
    assert difference < 0.6 * x_RD.nbytes


def test_a_split_backward_runs_each_gemm_once(monkeypatch):
    """As zero-bubble schedules do it: first gradients of inputs, later those of weights."""
    calls = []
    for name in ("dgrad", "wgrad"):
        original = getattr(QuantizedGemm, name)
        monkeypatch.setattr(QuantizedGemm, name, lambda *args, _n=name, _o=original: calls.append(_n) or _o(*args))
    recipe = RECIPES["mxfp8"]
    counts = counts_of("uneven", recipe)
    x_RD, weight_R, w13, w2, grad_RD = problem(counts)
    x, w = x_RD.requires_grad_(), [nn.Parameter(w13), nn.Parameter(w2)]

    def forward() -> Tensor:
        return EXPERTS["grouped_mm"](x * 1, torch.tensor(counts), weight_R, *w, recipe=recipe) * 1

    expected = torch.autograd.grad(forward(), [x, *w], grad_RD)
    calls.clear()
    (grad_x,), groups = stage_backward_input([forward()], [grad_RD], [x], iter(w))
    assert calls == ["dgrad", "dgrad"]
    stage_backward_weight(iter(w), groups)
    assert calls == ["dgrad", "dgrad", "wgrad", "wgrad"]
    rows = slice(0, sum(counts))
    assert torch.equal(grad_x[rows], expected[0][rows])
    assert torch.equal(w[0].grad, expected[1]) and torch.equal(w[1].grad, expected[2])


def test_chance_follows_the_default_generator_and_the_rank(monkeypatch):
    """nvfp4's gradients: the same bits when a step is computed again, others in the next microbatch and on another
    rank."""
    recipe = RECIPES["nvfp4"]
    counts = counts_of("uneven", recipe)
    x_RD, weight_R, w13, w2, grad_RD = problem(counts)

    def gradient(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        w = w13.clone().requires_grad_()
        y_RD = EXPERTS["grouped_mm"](x_RD, torch.tensor(counts), weight_R, w, w2, recipe=recipe)
        return torch.autograd.grad(y_RD, w, grad_RD)[0]

    first, second = gradient(1), gradient()
    assert torch.equal(first, gradient(1)) and torch.equal(second, gradient())
    monkeypatch.setattr(noise.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(noise.dist, "get_rank", lambda: 1)
    for other in (second, gradient(1), gradient(2)):
        assert not torch.equal(first, other)
        assert (first - other).norm() <= 0.3 * first.norm()
