"""The fused experts in MXFP8, over doubles of TE's quantizer and cuDNN's kernels that hold our calls to their rules.

Shown here: that what is quantized, in which direction, and what is multiplied is as written in te_mxfp8.py, against
float64 that quantizes by itself and knows neither tiles nor w13's order; that nothing in FP8 lives between forward and
backward; each refusal; and that the doubles notice each broken rule. Not shown: that a GPU computes the same.

Shape letters: R rows of the slabs, E experts, D model width, F expert hidden width.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from tests import te_doubles
from tests.moe.test_experts import assert_close, oracle, problem, run
from tests.sync_free import sync_free
from titan_moe.moe import te, te_fused, te_mxfp8
from titan_moe.moe.choices import choose_experts, experts_sync_problem
from titan_moe.moe.experts import Source
from titan_moe.moe.layout import expert_counts
from titan_moe.moe.quantized_experts import EXPERTS
from titan_moe.moe.region import FusedExperts, FusedRoutedExperts
from titan_moe.precision.recipes import RECIPES

FUSED = partial(EXPERTS["te_fused"], recipe=RECIPES["mxfp8"])
FACTS = te_doubles.FACTS
D, F = 128, 256
MXFP8_ERROR = 0.08  # of a chain of three products of numbers with 3 mantissa bits
KERNELS = [f"grouped_gemm_{name}_wrapper_sm100" for name in ("glu", "quant", "dglu", "wgrad")]


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    with te_doubles.installed():
        yield


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called, in order."""
    import cudnn

    seen: list[str] = []

    def watch(name: str) -> None:
        original = getattr(cudnn, name)
        monkeypatch.setattr(
            cudnn, name, lambda **arguments: (seen.append(name.split("_")[2]), original(**arguments))[1]
        )

    for name in KERNELS:
        watch(name)
    return seen


def small(counts: list[int], tail: int = 0) -> list[Tensor]:
    return problem(counts, torch.bfloat16, tail=tail, D=D, F=F)


# ---------------------------------------------------------------------------------------------------------------------
# Results


def mxfp8(values: Tensor, dim: int) -> Tensor:
    """Rounded in float64: 32 numbers along `dim` share a power of two, with which the largest is at most 448; then 4
    significant bits, or the step of the smallest normal number, 2^-9."""
    blocks = values.double().movedim(dim, -1).unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448)))
    blocks = blocks / scale
    step = torch.exp2(torch.floor(torch.log2(blocks.abs().clamp(min=2.0**-6))) - 3)
    return (torch.round(blocks / step) * step * scale).flatten(-2).movedim(-1, dim)


def rounded(values: Tensor) -> Tensor:
    return values.bfloat16().double()


def as_it_is(values: Tensor, dim: int = 0) -> Tensor:
    return values


def reference(counts: list[int], x_RD, weight_R, w13_EF2D, w2_EDF, grad_RD, q=mxfp8, rounded=rounded) -> list[Tensor]:
    """y, gradients of x, weight, w13 and w2: expert by expert in float64, `q` of all that is multiplied."""
    results: list[list[Tensor]] = []
    end = sum(counts)
    parts = [tensor[:end].double().split(counts) for tensor in (x_RD, weight_R[:, None], grad_RD)]
    for x, weight, dy, w13, w2 in zip(*parts, w13_EF2D.double(), w2_EDF.double()):
        gate, up = (q(x, 1) @ q(w, 1).T for w in w13.unbind(1))
        y = q(gate * gate.sigmoid() * up * weight, 1) @ q(w2, 1).T
        gate, up = rounded(gate), rounded(up)  # as they are kept
        silu, sigmoid = gate * gate.sigmoid(), gate.sigmoid()
        dh = q(dy, 1) @ q(w2, 0)
        dweight = (dh * silu * up).sum(1)
        dgate, dup = dh * weight * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * weight * silu
        dx = sum(q(d, 1) @ q(w, 0) for d, w in zip((dgate, dup), w13.unbind(1)))
        dw13 = torch.stack([q(d, 0).T @ q(x, 0) for d in (dgate, dup)], 1)
        results.append([y, dx, dweight, dw13, q(dy, 0).T @ q(rounded(silu * up * weight), 0)])
    y, dx, dweight, dw13, dw2 = zip(*results)
    return [torch.cat(y), torch.cat(dx), torch.cat(dweight), torch.stack(dw13), torch.stack(dw2)]


def test_the_reference_is_right_where_it_does_not_quantize():
    tensors = problem([16, 0, 32], torch.float64)
    assert_close(reference([16, 0, 32], *tensors, q=as_it_is, rounded=as_it_is), oracle([16, 0, 32], *tensors), 1e-12)


@pytest.mark.parametrize(
    ("counts", "tail", "late", "width"),
    [
        ([256, 0, 512], 256, False, 2 * D),  # tiles of scales in both directions
        ([512, 256], 0, True, D),
        ([256], 0, False, D),
        ([0, 0, 0], 256, False, D),
    ],
    ids=str,
)
def test_multiplies_what_it_should_have_quantized(counts, tail, late, width):
    """Only roundings to bf16 are between the two."""
    tensors = problem(counts, torch.bfloat16, tail=tail, D=width, F=F)
    tensors[0][: counts[0]] *= 100  # slabs and columns of other magnitude, so that a scale of a neighbour shows
    tensors[0][:, 32:64] *= 1e-3
    tensors[3][:, ::7] *= 30
    expected = reference(counts, *tensors)
    if late:  # y is not weighted before it is quantized, and after that it is, rounded
        unweighted = reference(counts, tensors[0], torch.ones_like(tensors[1]), *tensors[2:])[0]
        expected[0] = unweighted * tensors[1][: sum(counts), None].double()
    assert_close(run(FUSED, counts, tensors, late=late), expected, 4e-3)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_is_near_to_the_same_without_quantization(late):
    tensors = small([256, 0, 256], tail=256)
    expected = reference([256, 0, 256], *tensors, q=as_it_is, rounded=as_it_is)
    assert_close(run(FUSED, [256, 0, 256], tensors, late=late), expected, MXFP8_ERROR)


def test_a_rank_without_rows(called):
    """It has nothing to quantize; gradients of its weights are zero."""
    tensors = small([0, 0])
    assert_close(run(FUSED, [0, 0], tensors), oracle([0, 0], *tensors), 0)
    assert called == []


def test_the_fused_order_of_rows_and_back():
    """As TE writes it down: gate[0:32], up[0:32], gate[32:64], up[32:64], ..."""
    w13_EF2D = torch.randn(3, 96, 2, 5)
    w_E2FD = te_fused.interleave(w13_EF2D)
    blocks = [w13_EF2D[:, first : first + 32, half] for first in (0, 32, 64) for half in (0, 1)]
    assert torch.equal(w_E2FD, torch.cat(blocks, 1)) and torch.equal(te_fused.deinterleave(w_E2FD), w13_EF2D)


def routed(backend: str) -> FusedRoutedExperts:
    torch.manual_seed(0)
    module = FusedRoutedExperts.Config(
        inner_experts=FusedExperts.Config(
            dim=D, hidden_dim=F, num_experts=4, backend=backend, recipe="mxfp8" if backend == "te_fused" else None
        ),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=4, top_k=2),
    ).build()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.bfloat16()


def test_in_the_layer_slabs_are_aligned_and_every_expert_weight_gets_a_gradient():
    generator = torch.Generator().manual_seed(1)
    tokens, weight = torch.randn(2, 50, D, generator=generator), torch.randn(2, 50, D, generator=generator)
    scores, ids = torch.rand(2, 50, 4, generator=generator).topk(2, dim=-1)
    found = {}
    for backend in ("grouped_mm", "te_fused"):
        module, x = routed(backend), tokens.bfloat16().requires_grad_()
        leaf = scores.clone().requires_grad_()
        y = module(x, leaf, ids, expert_counts(ids.flatten(), 4))
        y.backward(weight.bfloat16())
        found[backend] = {"y": y, "x": x.grad, "scores": leaf.grad, **{k: p.grad for k, p in module.named_parameters()}}
    assert module.dispatcher.alignment == te_mxfp8.ALIGNMENT == 256
    assert issubclass(FusedRoutedExperts, RoutedExperts) and issubclass(FusedExperts, GroupedExperts)
    for name, expected in found["grouped_mm"].items():
        error = (found["te_fused"][name].double() - expected.double()).norm() / expected.double().norm()
        assert error < MXFP8_ERROR, f"{name}: {error:.1e}"
        if "inner_experts" in name:
            assert (found["te_fused"][name].flatten(1).abs().amax(1) > 0).all(), name


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and when it is computed


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is there before the test is not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def fp8_tensors() -> int:
    """How many hold memory."""
    gc.collect()
    bytewise = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    found = [thing for thing in gc.get_objects() if type(thing) is Tensor and thing.dtype in bytewise]
    return len({tensor.untyped_storage().data_ptr() for tensor in found})


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_only_what_is_not_quantized_is_kept_for_backward(late):
    """And of the weights no copies, which FSDP could not free."""
    x_RD, weight_R, w13, w2, grad_RD = small([256, 256])
    leaves = [t.requires_grad_() for t in (x_RD, weight_R, w13, w2)]
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        y = FUSED(x_RD, torch.tensor([256, 256]), weight_R, w13, w2, late=late)
    gate_up = [t for pointer, t in kept.items() if pointer not in {leaf.data_ptr() for leaf in leaves}]
    assert [(tuple(t.shape), t.dtype) for t in gate_up] == [((512, 2 * F), torch.bfloat16)]
    assert kept.keys() == {t.data_ptr() for t in (*leaves, *gate_up)}
    assert fp8_tensors() == 0, "after forward"
    gradients = torch.autograd.grad(y, leaves, grad_RD, retain_graph=True)
    assert fp8_tensors() == 0, "after backward"
    assert all(torch.equal(a, b) for a, b in zip(gradients, torch.autograd.grad(y, leaves, grad_RD)))


def test_rows_that_can_be_gathered_again_are_not_kept():
    counts, rows = [256, 256], torch.randint(0, 40, (512,))
    _, weight_R, w13, w2, grad_RD = small(counts)
    x_TD = torch.randn(40, D).bfloat16()
    gradients = []
    for source in (None, Source(x_TD, lambda x: x[rows])):
        seen: set[int] = set()
        x = x_TD[rows].requires_grad_()
        w = [w13.clone().requires_grad_(), w2.clone().requires_grad_()]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.add(t.data_ptr()), t)[1], lambda t: t):  # noqa: B023
            y = FUSED(x, torch.tensor(counts), weight_R, *w, source=source)
        assert (x.data_ptr() in seen) == (source is None)
        gradients.append(torch.autograd.grad(y, [x, *w], grad_RD))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.usefixtures("fresh")
def test_a_split_backward_runs_each_kernel_once(called):
    """As zero-bubble schedules do it: first gradients of inputs, later those of weights."""
    x_RD, weight_R, w13, w2, grad_RD = small([256, 256])
    x, w = x_RD.requires_grad_(), [nn.Parameter(w13), nn.Parameter(w2)]

    def forward() -> Tensor:
        y = FUSED(x * 1, torch.tensor([256, 256]), weight_R, *w) * 1
        assert called == ["glu", "quant"]
        called.clear()
        return y

    expected = torch.autograd.grad(forward(), [x, *w], grad_RD)
    assert sorted(called) == ["dglu", "quant", "wgrad", "wgrad"]
    called.clear()
    (grad_x,), groups = stage_backward_input([forward()], [grad_RD], [x], iter(w))
    assert called == ["dglu", "quant"]
    assert fp8_tensors() == 2, "the gradient of gate_up, for the wgrad of w13 to come"
    stage_backward_weight(iter(w), groups)
    assert called == ["dglu", "quant", "wgrad", "wgrad"] and fp8_tensors() == 0
    assert all(torch.equal(a, b) for a, b in zip((grad_x, w[0].grad, w[1].grad), expected, strict=True))


def test_recompute_changes_nothing(called):
    x_RD, weight_R, w13, w2, grad_RD = small([256, 256])
    leaves = [t.requires_grad_() for t in (x_RD, weight_R, w13, w2)]
    arguments = x_RD, torch.tensor([256, 256]), weight_R, w13, w2
    expected = torch.autograd.grad(FUSED(*arguments), leaves, grad_RD)
    called.clear()
    y = checkpoint(FUSED, *arguments, use_reentrant=False)
    gradients = torch.autograd.grad(y, leaves, grad_RD)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected))
    assert called[:4] == ["glu", "quant"] * 2


@pytest.mark.parametrize("frozen", ["x", "w13", "w2", "weights"])
def test_what_needs_no_gradient_gets_none(frozen):
    x_RD, weight_R, w13, w2, grad_RD = small([256])
    leaves = {"x": x_RD, "routing": weight_R, "w13": w13, "w2": w2}
    without = {"w13", "w2"} if frozen == "weights" else {frozen}
    gradients = []
    for skipped in (set(), without):
        asked = {name: tensor.detach().clone() for name, tensor in leaves.items()}
        for name, tensor in asked.items():
            tensor.requires_grad_(name not in skipped)
        x, routing, *weights = asked.values()
        FUSED(x, torch.tensor([256]), routing, *weights).backward(grad_RD)
        gradients.append({name: tensor.grad for name, tensor in asked.items()})
    for name, gradient in gradients[1].items():
        assert gradient is None if name in without else torch.equal(gradient, gradients[0][name]), name


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_the_host_is_never_asked(late):
    """The second part has no backward, for which autograd wants a device, but the kernels that it would call."""
    assert experts_sync_problem("te_fused", "cuda", torch.bfloat16, D, F) is None

    def fake(device: str, requires_grad: bool) -> list[Tensor]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=requires_grad)

        weight_R = torch.rand(512, device=device, requires_grad=requires_grad)
        return [randn(512, D), torch.full((2,), 256, device=device), weight_R, randn(2, F, 2, D), randn(2, D, F)]

    with sync_free():
        FUSED(*fake("cpu", True), late=late).sum().backward()
    with sync_free(), torch.no_grad():
        x_RD, counts_E, weight_R, w13, w2 = fake("cuda", False)
        FUSED(x_RD, counts_E, weight_R, w13, w2, late=late)
        gemms = te_mxfp8.Gemms(counts_E, D, F)
        gate_up, _ = gemms.up(x_RD, te_fused.interleave(w13), weight_R)
        rows, columns, _ = gemms.dswiglu(x_RD, w2, gate_up, weight_R)
        assert gemms.dgrad(rows, te_fused.interleave(w13)).shape == x_RD.shape
        assert gemms.wgrad_of(columns, x_RD).shape == (2, 2 * F, D)
        assert gemms.wgrad(x_RD, te_fused.weighted_h(gate_up, weight_R)).shape == w2.shape


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("changes", "sizes", "said"),
    [
        ({"version": None}, {}, ["not installed", "pytorch]==2.20.2"]),
        ({"capability": None}, {}, ["needs a CUDA device"]),
        ({"capability": (9, 0)}, {}, ["compute capability 10.0 to 10.6", "has 9.0"]),
        ({"capability": (10, 7)}, {}, ["10.0 to 10.6", "has 10.7"]),
        ({"capability": (12, 0)}, {}, ["10.0 to 10.6", "has 12.0"]),
        ({"cudnn_frontend": None}, {}, ["nvidia-cudnn-frontend is not installed", "nvidia-cudnn-frontend>=1.32.0'"]),
        ({"cudnn_frontend": "1.31.0"}, {}, ["nvidia-cudnn-frontend is 1.31.0", ">=1.32.0'"]),
        ({}, {"dtype": torch.float32}, ["not torch.float32"]),
        ({}, {"dim": 192}, ["D = 192 or F = 256 % 128 != 0"]),
        ({}, {"hidden": 96}, ["D = 128 or F = 96 % 128 != 0"]),
        ({}, {"local_experts": 65}, ["quantizes 64 matrices", "has 65 experts", "expert_parallel_degree"]),
    ],
)
def test_refused_with_the_way_out(changes, sizes, said):
    te.facts = lambda: replace(FACTS, **changes)
    arguments = {"dtype": torch.bfloat16, "dim": D, "hidden": F, "local_experts": 64} | sizes
    with pytest.raises(ValueError) as error:
        choose_experts("te_fused", "cpu", **arguments)
    for part in ('moe.experts = "te_fused"', 'available here: "grouped_mm"', *said):
        assert part in str(error.value)


def test_everything_is_said_at_once():
    te.facts = lambda: te.Facts()
    with pytest.raises(ValueError) as error:
        choose_experts("te_fused", "cpu", torch.float32, 60, 64, 128)
    for part in (
        "Transformer Engine is not installed",
        "nvidia-cudnn-frontend",
        "torch.float32",
        "D = 60",
        "128 experts",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_taken_where_it_can_run(capability):
    te.facts = lambda: replace(FACTS, capability=capability)
    sizes = (torch.bfloat16, 7168, 2048, 64)
    assert choose_experts("te_fused", "cpu", *sizes, recipe="mxfp8") == ("te_fused", "as configured")
    for other in (None, "fp8_current"):
        with pytest.raises(ValueError, match='computes in mxfp8; set precision.recipe = "mxfp8"'):
            choose_experts("te_fused", "cpu", *sizes, recipe=other)


def test_more_rows_than_the_kernels_count():
    with FakeTensorMode():
        x_RD, w13, w2 = torch.empty(2**20, 2048), torch.empty(2, 1024, 2, 2048), torch.empty(2, 2048, 1024)
        with pytest.raises(ValueError) as error:
            FUSED(x_RD, torch.zeros(2).long(), torch.empty(2**20), w13, w2)
    assert "1,048,576 rows x max(D, 2 F) = 2,048" in str(error.value) and 'moe.experts = "te"' in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# The doubles notice what the kernels forbid, and what they would silently compute wrong


def quantize(tensor: Tensor | None = None, matrices: int = 2, counts: Tensor | None = None, **changes):
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    quantizer = MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)
    quantizer.optimize_for_gemm = quantizer.internal = True
    tensor = torch.ones(512, 128).bfloat16() if tensor is None else tensor
    return tex.group_quantize(tensor, changes.pop("quantizer", quantizer), matrices, counts, **changes)


def plain_quantizer():
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    return MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)


def multiply(kernel: int = 0, **changes):
    """The gradient of w13 by calls that are right but, of one of KERNELS, for `changes`."""
    import cudnn

    gemms = te_mxfp8.Gemms(torch.tensor([256, 256]), 128, 128)
    original, name = getattr(cudnn, KERNELS[kernel]), KERNELS[kernel]

    def call(**arguments):
        if callable(change := changes.pop("change", None)):
            arguments |= change(arguments)
        return original(**arguments | changes)

    x_RD, weight_R, w13, w2, grad_RD = problem([256, 256], torch.bfloat16, D=128, F=128)
    setattr(cudnn, name, call)
    try:
        gate_up, h = gemms.up(x_RD, te_fused.interleave(w13), weight_R)
        gemms.down(h, w2)
        _, columns, _ = gemms.dswiglu(grad_RD, w2, gate_up, weight_R)
        return gemms.wgrad_of(columns, x_RD)
    finally:
        setattr(cudnn, name, original)


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


GLU, QUANT, DGLU, WGRAD = range(4)
BROKEN = {
    "strides": lambda: quantize(torch.ones(128, 512).bfloat16().t()),
    "float32": lambda: quantize(torch.ones(512, 128)),
    "a width that is no multiple of 128": lambda: quantize(torch.ones(512, 96).bfloat16()),
    "too many matrices": lambda: quantize(torch.ones(65 * 128, 128).bfloat16(), 65),
    "scales not in tiles": lambda: quantize(quantizer=plain_quantizer()),
    "counts without offsets": lambda: quantize(counts=torch.tensor([256, 256])),
    "offsets in rows": lambda: quantize(counts=torch.tensor([256, 256]), tensor_offsets=torch.tensor([0, 256, 512])),
    "slabs that are no multiples of 128": lambda: quantize(
        counts=torch.tensor([64, 64]), tensor_offsets=torch.tensor([0, 64 * 128, 128 * 128])
    ),
    "slabs that are no multiples of 256": lambda: multiply(GLU, padded_offsets=ends(128, 512)),
    "ends in int64": lambda: multiply(GLU, padded_offsets=torch.tensor([256, 512])),
    "ends beyond the rows": lambda: multiply(QUANT, padded_offsets=ends(256, 768)),
    "scales of 16 numbers": lambda: multiply(GLU, sf_vec_size=16),
    "scales as they are written": lambda: multiply(GLU, change=lambda a: {"sfa_tensor": a["sfa_tensor"].flatten()}),
    "A without its third dimension": lambda: multiply(GLU, change=lambda a: {"a_tensor": a["a_tensor"].squeeze(-1)}),
    "A with another stride of it": lambda: multiply(
        GLU, change=lambda a: {"a_tensor": a["a_tensor"].squeeze(-1).unsqueeze(-1)}
    ),
    "A as bytes": lambda: multiply(GLU, change=lambda a: {"a_tensor": a["a_tensor"].view(torch.uint8)}),
    "B expert by expert": lambda: multiply(GLU, change=lambda a: {"b_tensor": a["b_tensor"].permute(2, 0, 1)}),
    "no scale for what is quantized": lambda: multiply(GLU, norm_const_tensor=None),
    "columnwise scales across slabs": lambda: multiply(GLU, discrete_col_sfd=False),
    "a result of another shape": lambda: multiply(QUANT, d_tensor=torch.empty(512, 64, 1).bfloat16()),
    "a result of another type": lambda: multiply(QUANT, d_tensor=torch.empty(512, 128, 1)),
    "routing weights in bf16": lambda: multiply(DGLU, prob_tensor=torch.ones(512, 1, 1).bfloat16()),
    "a gradient that is not zero before": lambda: multiply(DGLU, dprob_tensor=torch.ones(512, 1, 1)),
    "gate_up as a matrix": lambda: multiply(DGLU, c_tensor=torch.ones(512, 256).bfloat16()),
    "wgrad of transposed data": lambda: multiply(
        WGRAD, change=lambda a: {"b_tensor": a["b_tensor"].t().contiguous().t()}
    ),
    "wgrad of scales in another shape": lambda: multiply(
        WGRAD, change=lambda a: {"sfb_tensor": a["sfb_tensor"].flatten()}
    ),
    "wgrad into another type": lambda: multiply(WGRAD, wgrad_tensor=torch.empty(2, 256, 128)),
}


def test_the_doubles_accept_what_is_right():
    """Otherwise those that notice might notice everything."""
    assert quantize() is not None
    assert all(multiply(kernel).isfinite().all() for kernel in range(len(KERNELS)))


@pytest.mark.parametrize("rule", BROKEN)
def test_the_doubles_notice(rule):
    with pytest.raises((AssertionError, ValueError)):
        BROKEN[rule]()
