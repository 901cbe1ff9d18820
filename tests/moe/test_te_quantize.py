"""Experts and linear layers in low precision on Transformer Engine (TE), over doubles of its quantizers and GEMMs.

Shown here: that each operand of each GEMM is quantized in its format and along the axis of that GEMM, slab by slab,
against products of precision/quantize.py's numbers, an expert at a time; that experts as a whole are near to the
emulated ones; what is kept for backward; that with device splits nobody asks the host; and that the doubles notice each
broken rule. Not shown: that a GPU computes the same.

Shape letters: as in titan_moe/moe/experts.py.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor
from torchtitan.models.common import Linear

from tests import te_doubles
from tests.moe.test_experts import assert_close, problem
from tests.sync_free import sync_free
from titan_moe.config import Config
from titan_moe.loss import build_loss
from titan_moe.moe import te
from titan_moe.moe.choices import choose_experts, choose_quantizer, experts_sync_problem
from titan_moe.moe.experts import Source, linear
from titan_moe.moe.quantized_experts import EXPERTS
from titan_moe.moe.te_quantize import QuantizedDeviceSplits, QuantizedHostSplits, matrix, quantizer
from titan_moe.precision import formats
from titan_moe.precision.quantize import round_trip
from titan_moe.precision.recipes import RECIPES, Format, Recipe
from titan_moe.precision.te_linear import TEGemm

MACHINES = {
    "Blackwell": te_doubles.FACTS,
    "Hopper": replace(te_doubles.FACTS, capability=(9, 0), cublaslt=131000),
    "Hopper, as torch brings it": replace(te_doubles.FACTS, capability=(9, 0), cublaslt=130101),
    "Blackwell, as torch brings it": replace(te_doubles.FACTS, cublaslt=130101),
}
BY_DEVICE = {("Blackwell", name) for name in ("fp8_current", "mxfp8", "nvfp4")}
BY_DEVICE |= {("Hopper", name) for name in ("fp8_current", "fp8_block")}
ON_HOPPER = ("fp8_current", "fp8_block")
CASES = [(m, r) for m in MACHINES for r in RECIPES if r in ON_HOPPER or m.startswith("Blackwell")]
D, F, COUNTS = 128, 256, [128, 0, 256]
TOLERANCE = 4e-3  # of one GEMM: its result is rounded to bf16
NEIGHBOURS = {"fp8_current": 5e-2, "fp8_block": 1.5e-2, "mxfp8": 1.5e-2, "nvfp4": 8e-2}  # of three in a row


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    with te_doubles.installed(MACHINES[request.param]):
        yield request.param


@pytest.fixture(autouse=True)
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are rounded to nearest, so that two of them can be compared."""
    monkeypatch.setattr(formats, "chances", lambda like, generator: torch.zeros_like(like))


cases = pytest.mark.parametrize(("machine", "name"), CASES, indirect=["machine"])


def wild(*shape: int, seed: int) -> Tensor:
    """Numbers of which rows and columns differ by up to 2^18, so that a scale of a neighbour, or along another axis,
    loses whole rows or columns."""
    generator = torch.Generator().manual_seed(seed)
    powers = [torch.randint(-9, 10, (shape[axis],), generator=generator).float() for axis in (-2, -1)]
    values = torch.randn(shape, generator=generator) * torch.exp2(powers[0])[:, None] * torch.exp2(powers[1])
    return values.bfloat16()


def difference(got: Tensor, expected: Tensor) -> float:
    """Relative, of the row or column that is furthest off."""
    wrong, right = (got.double() - expected.double()).unflatten(0, (1, -1)), expected.double().unflatten(0, (1, -1))
    rows, columns = (wrong.norm(dim=axis) / right.norm(dim=axis).clamp(min=1e-30) for axis in (-1, -2))
    return max(float(rows.max()), float(columns.max()))


def product(a: Tensor, fmt_a: Format, axis_a: int, b: Tensor, fmt_b: Format, axis_b: int) -> Tensor:
    """a b^T, or a^T b for axes -2, of quantized operands, in float64."""
    (a, a_factor), (b, b_factor) = round_trip(a, fmt_a, axis_a), round_trip(b, fmt_b, axis_b)
    a, b = (t.double() if axis == -1 else t.double().T for t, axis in ((a, axis_a), (b, axis_b)))
    return a @ b.T * (1 if a_factor is None else a_factor) * (1 if b_factor is None else b_factor)


def expected_gemms(recipe: Recipe, counts: list[int], x_RI: Tensor, w_EOI: Tensor, grad_RO: Tensor) -> list[Tensor]:
    """y, dx and dw, an expert at a time."""
    y, dx, dw = [], [], []
    end = sum(counts)
    for x, w, g in zip(x_RI[:end].split(counts), w_EOI, grad_RO[:end].split(counts)):
        if len(x) == 0:
            dw.append(torch.zeros(w.shape, dtype=torch.float64))
            continue
        y.append(product(x, recipe.forward_x, -1, w, recipe.forward_w, -1))
        dx.append(product(g, recipe.dgrad_g, -1, w, recipe.dgrad_w, -2))
        dw.append(product(g, recipe.wgrad_g, -2, x, recipe.wgrad_x, -2))
    return [torch.cat(y), torch.cat(dx), torch.stack(dw)]


# ---------------------------------------------------------------------------------------------------------------------
# Results


@cases
def test_each_gemm_multiplies_what_it_should_have_quantized(machine, name):
    recipe = RECIPES[name]
    x_RD, w_EOI = wild(sum(COUNTS) + 128, D, seed=1), wild(len(COUNTS), 2 * F, D, seed=2)
    grad_RO = wild(len(x_RD), 2 * F, seed=3)
    x_RD[sum(COUNTS) :] = grad_RO[sum(COUNTS) :] = float("nan")
    expected, counts, end = expected_gemms(recipe, COUNTS, x_RD, w_EOI, grad_RO), torch.tensor(COUNTS), sum(COUNTS)
    for keeps in (False, True):
        if (machine, name) in BY_DEVICE:
            gemm = QuantizedDeviceSplits(counts, (D, 2 * F), recipe, keeps=keeps)
        else:
            gemm = QuantizedHostSplits(counts, recipe, keeps=keeps)
        y, dx = gemm.forward(x_RD, w_EOI), gemm.dgrad(grad_RO, w_EOI)
        again, kept = gemm.keep(x_RD)
        got = [y[:end], dx[:end], gemm.wgrad(grad_RO, x_RD)]
        for result, reference in zip(got, expected, strict=True):
            assert difference(result, reference) < TOLERANCE
        assert torch.equal(gemm.wgrad(grad_RO, again(*kept)), got[2])
        assert torch.equal(gemm.wgrad(grad_RO, again(*kept)), got[2])  # a graph that is retained
        numbers = {"nvfp4": 0.5 + 1 / 16}.get(name, 1 + 1 / 32) * x_RD.numel()
        assert sum(t.nbytes for t in kept if t.numel() > 8) <= numbers, "no more than the copy by columns"


@pytest.mark.parametrize("machine", ["Blackwell"], indirect=True)
def test_what_recipes_mean_to_te(machine):
    """As TE's recipes of these names have it by default; tests/gpu compares with those. Chance is for gradients, the
    Hadamard transform for what wgrad multiplies, squares are for weights."""
    from transformer_engine.pytorch.constants import DType

    made = {(name, role): quantizer(RECIPES[name], role, columns=True) for name in RECIPES for role in "xwg"}
    chance = {key for key, one in made.items() if getattr(one, "stochastic_rounding", False)}
    transformed = {key for key, one in made.items() if getattr(one, "with_rht", False)}
    squares = {key for key, one in made.items() if getattr(one, "with_2d_quantization", False)}
    squares |= {key for key, one in made.items() if getattr(one, "block_scaling_dim", 1) == 2}
    assert chance == {("nvfp4", "g")} and transformed == {("nvfp4", "x"), ("nvfp4", "g")}
    assert squares == {("nvfp4", "w"), ("fp8_block", "w")}
    wide = {key for key, one in made.items() if one.dtype is DType.kFloat8E5M2}
    assert wide == {("fp8_current", "g")} and made["nvfp4", "x"].dtype is DType.kFloat4E2M1


def test_a_wrong_axis_would_show():
    """Of the formats with scales along an axis: the bound above is far below what exchanging axes does."""
    x, w = wild(128, D, seed=1), wild(128, D, seed=2)
    for name in ("fp8_block", "mxfp8", "nvfp4"):
        recipe = RECIPES[name]
        right = product(x, recipe.forward_x, -1, w, recipe.forward_w, -1)
        values, factor = round_trip(x, recipe.forward_x, -2)
        other, other_factor = round_trip(w, recipe.forward_w, -1)
        wrong = values.double() @ other.double().T * (1 if factor is None else factor * other_factor)
        assert difference(wrong, right) > 0.5, name


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@cases
def test_experts_are_near_to_the_emulated_ones(machine, name, late):
    """The emulation rounds results of GEMMs more often, which moves some numbers to their neighbour in FP8 or FP4."""
    made, results = problem(COUNTS, torch.bfloat16, tail=128, D=D, F=F), []
    for backend in ("grouped_mm", "te"):
        leaves = [t.clone().requires_grad_() for t in made[:4]]
        run = partial(EXPERTS[backend], recipe=RECIPES[name])
        y = run(leaves[0], torch.tensor(COUNTS), *leaves[1:], late=late)
        gradients = torch.autograd.grad(y, leaves, made[4].nan_to_num(0.0))
        end = sum(COUNTS)
        results.append([t.detach()[:end] for t in (y, *gradients[:2])] + list(gradients[2:]))
    assert_close(results[1], [t.double() for t in results[0]], NEIGHBOURS[name])


@pytest.mark.parametrize("machine", ["Blackwell"], indirect=True)
def test_a_rank_without_rows(machine):
    made = problem([0, 0], torch.bfloat16, D=D, F=F)
    leaves = [t.requires_grad_() for t in made[:4]]
    y = EXPERTS["te"](leaves[0], torch.tensor([0, 0]), *leaves[1:], recipe=RECIPES["mxfp8"])
    assert all(not g.any() for g in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize("rows", [64, 40])
@cases
def test_a_linear_layer(machine, name, rows):
    """40 rows are no whole blocks: they are filled up."""
    recipe, generator = RECIPES[name], torch.Generator().manual_seed(3)
    x, w = torch.randn(rows, D, generator=generator).bfloat16(), torch.randn(F, D, generator=generator).bfloat16()
    grad = torch.randn(rows, F, generator=generator).bfloat16()
    leaves = [x.requires_grad_(), w.requires_grad_()]
    y = linear(TEGemm(recipe), *leaves)
    got = [y, *torch.autograd.grad(y, leaves, grad)]
    filled = -rows % 128
    padded = [torch.nn.functional.pad(t.detach(), (0, 0, 0, filled)) for t in (x, grad)]
    y, dx, dw = expected_gemms(recipe, [rows + filled], padded[0], w.detach()[None], padded[1])
    for result, reference in zip(got, (y[:rows], dx[:rows], dw[0]), strict=True):
        assert difference(result.detach(), reference) < TOLERANCE


@pytest.mark.parametrize("machine", ["Blackwell"], indirect=True)
def test_linear_layers_with_one_input_quantize_and_keep_it_once(machine, monkeypatch):
    import transformer_engine_torch as tex

    quantize, quantized = tex.quantize, []
    monkeypatch.setattr(tex, "quantize", lambda values, made: quantized.append(values.shape) or quantize(values, made))
    x, recipe, kept = torch.randn(64, D).bfloat16().requires_grad_(), RECIPES["mxfp8"], []
    weights = [torch.randn(F, D).bfloat16().requires_grad_() for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = sum(linear(TEGemm(recipe), x, w) for w in weights)
    assert quantized.count(x.shape) == 2, "by rows and by columns"
    copies = [t.data_ptr() for t in kept if t.shape == x.shape]
    assert len(copies) == 2 and len({*copies}) == 1
    alone = [linear(TEGemm(recipe), x.detach().clone(), w) for w in weights]
    assert torch.equal(y, sum(alone))
    for got, w in zip(torch.autograd.grad(y.sum(), weights), weights, strict=True):
        other = linear(TEGemm(recipe), x.detach().clone(), w)
        assert torch.equal(got, torch.autograd.grad(other.sum(), w)[0])


@pytest.mark.parametrize("machine", ["Blackwell"], indirect=True)
def test_the_output_head(machine):
    """Named, it is quantized by whom other linear layers are; 40 tokens in pieces of 5, which are filled up."""
    results, made = {}, problem([128], torch.bfloat16, D=256, F=128)[0][:40]
    for backend in ("te", "emulated"):
        config = Config()
        config.precision.recipe, config.precision.backend, config.precision.linears = "mxfp8", backend, ["lm_head"]
        config.training.mixed_precision_param, config.loss.num_chunks = "bfloat16", 8
        head = Linear.Config(in_features=256, out_features=320).build().bfloat16()
        with torch.no_grad():
            head.weight.copy_(torch.randn(320, 256, generator=torch.Generator().manual_seed(5)) / 16)
        loss_fn, h_BLD = build_loss(config, SimpleNamespace(lm_head=head)), made.clone()[None].requires_grad_()
        assert isinstance(loss_fn.gemm, TEGemm) == (backend == "te")
        loss, _ = loss_fn(h_BLD, torch.arange(40)[None], torch.tensor(40))
        loss.backward()
        results[backend] = [loss.detach(), h_BLD.grad, head.weight.grad]
    for got, expected in zip(*results.values(), strict=True):
        assert (got.double() - expected).norm() < TOLERANCE * expected.double().norm()


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and when the host waits


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is there before the test is not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("machine", "name"), [c for c in CASES if c[0].startswith("Blackwell")], indirect=["machine"])
def test_only_the_copy_of_x_by_columns_is_kept_for_backward(machine, name):
    """Of weights nothing quantized lives on, and of x not even its bf16 self, unless its rows can be gathered again:
    then neither."""
    made = problem(COUNTS, torch.bfloat16, tail=128, D=D, F=F)
    for source in (None, Source(made[0].clone(), lambda x: x)):
        leaves = [t.clone().requires_grad_() for t in made[:4]]
        x, saved = leaves[0], []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            options = {"recipe": RECIPES[name], "source": source}
            y = EXPERTS["te"](x, torch.tensor(COUNTS), *leaves[1:], **options)
        assert all(t.data_ptr() != x.data_ptr() for t in saved)
        quantized = sum(t.nbytes for t in saved if t.element_size() == 1)
        assert (quantized > 0) == (source is None) and quantized <= 1.04 * x.numel()
        gc.collect()
        alive = [o for o in gc.get_objects() if type(o).__name__ in ("_Matrix", "_Group")]
        assert all(not holds_data(o) for o in alive)
        y.backward(made[4].nan_to_num(0.0))
        gc.collect()
        alive = [o for o in gc.get_objects() if type(o).__name__ in ("_Matrix", "_Group")]
        assert all(not holds_data(o) for o in alive), "what backward has used lives on"


def holds_data(one) -> bool:
    if hasattr(one, "_made"):
        return any(made is not None and made.data is not None for made in one._made.values())
    return one.rowwise_data is not None or one.columnwise_data is not None


@pytest.mark.parametrize(("machine", "name"), sorted(BY_DEVICE), indirect=["machine"])
def test_device_splits_never_ask_the_host(machine, name):
    assert experts_sync_problem("te", "cuda", torch.bfloat16, D, F, name) is None
    with sync_free():
        shapes = [(256, D), (2, F, 2, D), (2, D, F)]
        x, w13, w2 = (torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
        weight = torch.rand(256, requires_grad=True)
        EXPERTS["te"](x, torch.full((2,), 128), weight, w13, w2, recipe=RECIPES[name]).sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Choices and refusals


@pytest.mark.parametrize(
    ("changes", "recipe", "sizes", "said"),
    [
        ({"capability": (9, 0)}, "mxfp8", (128, 256, 8), ["capability 10.0 to 11.x", "has 9.0", "runs bf16, fp8_c"]),
        ({"capability": (9, 0)}, "nvfp4", (128, 256, 8), ["10.0 and newer", "fp8_current, fp8_block"]),
        ({"capability": (8, 0)}, "fp8_current", (128, 256, 8), ["8.9 and newer", "where it runs bf16"]),
        ({"capability": (12, 0)}, "mxfp8", (128, 256, 8), ["has 12.0", "nvfp4"]),
        ({"capability": None}, "mxfp8", (128, 256, 8), ["needs a CUDA device"]),
        ({"version": None}, "mxfp8", (128, 256, 8), ["not installed"]),
        ({}, "fp8_block", (72, 256, 8), ["multiples of 16", "72 = 4 x 16 + 8"]),
        ({}, "nvfp4", (144, 256, 8), ["multiples of 32", "144 = 4 x 32 + 16"]),
        ({}, "mxfp8", (128, 256, 65), ["64 matrices in one call", "65 experts"]),
    ],
)
def test_refused_with_what_the_hardware_has(monkeypatch, changes, recipe, sizes, said):
    """By either key that asks for TE; and "auto" emulates, for that reason."""
    monkeypatch.setattr(te, "facts", lambda: replace(te_doubles.FACTS, **changes))
    for key, name, by in (('moe.experts = "te"', "te", "auto"), ('precision.backend = "te"', "auto", "te")):
        with pytest.raises(ValueError, match=key) as error:
            choose_experts(name, "cpu", torch.bfloat16, *sizes, recipe, by)
        assert all(part in str(error.value) for part in said), error.value
    backend, why = choose_experts("auto", "cpu", torch.bfloat16, *sizes, recipe=recipe)
    assert backend == "grouped_mm" and "emulated" in why and said[0] in why


def test_chosen_where_the_hardware_has_it(monkeypatch):
    monkeypatch.setattr(te, "facts", lambda: te_doubles.FACTS)
    backend, why = choose_experts("auto", "cpu", torch.bfloat16, 128, 256, 8, recipe="mxfp8")
    assert backend == "te" and why == "mxfp8: Transformer Engine has it here; slab sizes stay on the device"
    backend, why = choose_experts("auto", "cpu", torch.bfloat16, 128, 256, 8, recipe="fp8_block")
    assert backend == "te" and "the host reads the slab sizes, because cuBLASLt's grouped GEMM of fp8_block runs" in why
    assert choose_experts("auto", "cpu", torch.bfloat16, 128, 256, 8, "mxfp8", "emulated")[0] == "grouped_mm"
    assert choose_quantizer("auto", "mxfp8", torch.bfloat16, [128, 96]) == ("te", "Transformer Engine has it here")
    assert "40 = 1 x 32 + 8" in choose_quantizer("auto", "mxfp8", torch.bfloat16, [64, 40])[1]
    with pytest.raises(ValueError, match="from bfloat16 here, not from torch.float32"):
        choose_quantizer("te", "mxfp8", torch.float32, [128])


# ---------------------------------------------------------------------------------------------------------------------
# The doubles notice what TE forbids


def multiply(layout: str = "TN", **changes):
    from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm

    w, x = (matrix(RECIPES["mxfp8"], role, torch.ones(64, 32).bfloat16(), rows=True) for role in ("w", "x"))
    arguments = {"A": w, "B": x, "out_dtype": torch.bfloat16, "layout": layout}
    return general_gemm(**(arguments | {"grad": layout != "TN", "use_split_accumulator": layout != "TN"} | changes))


def group(name: str, rows: int = 128, width: int = 128, matrices: int = 1, role: str = "x", **changes):
    import transformer_engine_torch as tex

    made = quantizer(RECIPES[name], role, rows=True, columns=True, group=True)
    for key, value in changes.items():
        setattr(made, key, value)
    return tex.group_quantize(torch.ones(rows, width).bfloat16(), made, matrices, None)


def split(name: str, role: str, counts: list[int], **changes):
    import transformer_engine_torch as tex

    made = quantizer(RECIPES[name], role, rows=True, **changes)
    return tex.split_quantize(torch.ones(64, 64).bfloat16(), counts, [made] * len(counts))


BROKEN = {
    "a copy that was not made": lambda: multiply("NN"),
    "the accumulator of another GEMM": lambda: multiply(use_split_accumulator=True),
    "another layout": lambda: multiply("TT"),
    "no type of the result": lambda: multiply(out_dtype=None),
    "an operand as it is": lambda: multiply(B=torch.ones(64, 32).bfloat16()),
    "a group of half tiles": lambda: group("mxfp8", width=96),
    "slabs of half tiles": lambda: group("mxfp8", rows=128, matrices=2),
    "more matrices than a call takes": lambda: group("mxfp8", rows=65 * 128, matrices=65),
    "a group whose scales nothing will sort": lambda: group("mxfp8", optimize_for_gemm=False),
    "a group in squares of NVFP4": lambda: group("nvfp4", role="w"),
    "a group in NVFP4 without the transform": lambda: group("nvfp4", with_rht=False),
    "splits in squares of NVFP4": lambda: split("nvfp4", "w", [32, 32]),
    "splits of NVFP4 that leave rows": lambda: split("nvfp4", "x", [32, 16]),
    "splits that are too long": lambda: split("mxfp8", "x", [64, 32]),
    "splits that are no whole blocks": lambda: split("mxfp8", "x", [24, 40]),
    "a copy that cannot be made later": lambda: matrix(
        RECIPES["mxfp8"], "x", torch.ones(32, 32), rows=True
    ).update_usage(columnwise_usage=True),
}


@pytest.mark.parametrize("machine", ["Blackwell"], indirect=True)
@pytest.mark.parametrize("rule", BROKEN)
def test_the_doubles_notice(machine, rule):
    multiply()
    group("mxfp8")
    with pytest.raises(AssertionError):
        BROKEN[rule]()


@pytest.mark.parametrize("machine", ["Hopper"], indirect=True)
def test_the_doubles_notice_what_only_hopper_forbids(machine):
    """One copy in FP8 does not do for both directions there, and none is made of the columns alone."""
    made = quantizer(RECIPES["fp8_current"], "x", columns=True)
    assert made.rowwise_usage
    made.rowwise_usage = False
    import transformer_engine_torch as tex

    with pytest.raises(AssertionError, match="columnwise copy alone"):
        tex.quantize(torch.ones(32, 32).bfloat16(), made)
