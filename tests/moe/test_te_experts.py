"""Experts on Transformer Engine's grouped GEMM, over doubles of it that hold our calls to its rules (tests/doubles).

Shown here: right results and gradients for host and device splits, which of the two is chosen and why, that device
splits never ask the host, and that the doubles notice each broken rule. Not shown: that a GPU computes the same.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from tests import te_doubles
from tests.moe.test_experts import SLABS, TOLERANCE, assert_close, oracle, problem, run
from tests.moe.test_layer import layers, tokens
from tests.sync_free import fake_group, sync_free
from titan_moe.moe import te
from titan_moe.moe.choices import choose_experts, experts_sync_problem
from titan_moe.moe.contract import Dispatcher
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.moe.experts import EXPERTS, Source
from titan_moe.moe.te_experts import DeviceSplits

FACTS = te_doubles.FACTS
MACHINES = {
    "device": FACTS,  # cuBLASLt has its own grouped GEMM
    "host": replace(FACTS, capability=(9, 0), cublaslt=130101),  # as torch 2.14.1 brings it
}
HALVES = (torch.bfloat16, torch.float16)
D, F = 24, 40


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The doubles, on a machine of MACHINES; "device" unless the test is parametrized."""
    name = getattr(request, "param", "device")
    with te_doubles.installed(MACHINES[name]):
        yield name


both = pytest.mark.parametrize("machine", MACHINES, indirect=True)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions of TE that are called, with the layout of the GEMM."""
    from transformer_engine.pytorch.cpp_extensions import gemm

    seen: list[str] = []
    for name in ("general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor"):
        original = getattr(gemm, name)

        def spy(*args, _name=name, _original=original, **kwargs):
            seen.append(f"{_name} {kwargs['layout']}")
            return _original(*args, **kwargs)

        monkeypatch.setattr(gemm, name, spy)
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# Results


@both
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_equals_a_loop_over_rows(machine, late, dtype, called):
    for counts in ([16, 0, 32, 48], [0, 16, 16], [32]):
        tensors = problem(counts, dtype, tail=16)
        assert_close(run("te", counts, tensors, late=late), oracle(counts, *tensors), TOLERANCE[dtype])
    on_device = machine == "device" and dtype in HALVES
    expected = "general_grouped_gemm_for_grouped_tensor" if on_device else "general_grouped_gemm"
    assert sorted(called) == sorted(f"{expected} {layout}" for layout in ("TN", "NN", "NT") * 6)


@both
@pytest.mark.parametrize("tail", [0, 48])
@pytest.mark.parametrize("slabs", SLABS)
def test_any_slabs(machine, slabs, tail):
    tensors = problem(SLABS[slabs], torch.float16, tail=tail)
    assert_close(run("te", SLABS[slabs], tensors), oracle(SLABS[slabs], *tensors), TOLERANCE[torch.float16])


@both
def test_more_experts_than_te_takes_in_a_list(machine):
    counts = [16] * 70
    tensors = problem(counts, torch.float16)
    assert_close(run("te", counts, tensors), oracle(counts, *tensors), TOLERANCE[torch.float16])


def test_a_rank_without_rows_uses_host_splits(called):
    """Their mean number of rows would be 0."""
    run("te", [0, 0, 0], problem([0, 0, 0], torch.bfloat16))
    assert {name.split()[0] for name in called} == {"general_grouped_gemm"}


@both
def test_strides_are_not_for_te(machine):
    counts = [16, 32]
    x_RD, weight_R, w13, w2, grad_RD = problem(counts, torch.float16)
    strided = [x_RD.t().contiguous().t(), weight_R, w13, w2.transpose(1, 2).contiguous().transpose(1, 2), grad_RD]
    assert not strided[0].is_contiguous() and not strided[3].is_contiguous()
    expected = run("te", counts, [x_RD, weight_R, w13, w2, grad_RD])
    assert all(torch.equal(a, b) for a, b in zip(run("te", counts, strided), expected, strict=True))


@both
def test_in_the_layer_every_expert_weight_gets_a_gradient(machine):
    """TE's own module once trained none of them, without a word; so the layer is compared, parameter by parameter."""
    gradients, outputs = {}, {}
    for name in ("grouped_mm", "te"):
        _, moe = layers(torch.float16, experts=name)
        x_BLD = tokens(torch.float16)
        outputs[name] = moe(x_BLD)
        outputs[name].square().sum().backward()
        gradients[name] = {"x": x_BLD.grad, **{key: p.grad for key, p in moe.named_parameters()}}
    torch.testing.assert_close(outputs["te"], outputs["grouped_mm"], rtol=5e-3, atol=5e-3)
    assert gradients["te"].keys() == gradients["grouped_mm"].keys()
    for key, gradient in gradients["te"].items():
        expected = gradients["grouped_mm"][key].double()
        assert (gradient.double() - expected).norm() <= 5e-3 * expected.norm(), key
        if key.startswith("routed_experts"):
            assert (gradient.flatten(1).abs().amax(1) > 0).all(), key


@both
def test_rows_that_can_be_gathered_again_are_not_kept(machine):
    counts, rows = [32, 48], torch.randint(0, 40, (80,))
    _, weight_R, w13, w2, grad_RD = problem(counts, torch.bfloat16)
    x_TD = torch.randn(40, D).bfloat16()
    gradients = []
    for source in (None, Source(x_TD, lambda x: x[rows])):
        seen: set[int] = set()
        x = x_TD[rows].requires_grad_()
        w = [w13.clone().requires_grad_(), w2.clone().requires_grad_()]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.add(t.data_ptr()), t)[1], lambda t: t):  # noqa: B023
            y = EXPERTS["te"](x, torch.tensor(counts), weight_R, *w, source=source)
        assert (x.data_ptr() in seen) == (source is None)
        gradients.append(torch.autograd.grad(y, [x, *w], grad_RD))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@both
def test_a_split_backward_runs_each_gemm_once(machine, called):
    """As zero-bubble schedules do it: first gradients of inputs, later those of weights."""
    counts = [16, 32]
    x_RD, weight_R, w13, w2, grad_RD = problem(counts, torch.bfloat16)
    x, w = x_RD.requires_grad_(), [nn.Parameter(w13), nn.Parameter(w2)]

    def forward() -> Tensor:
        y = EXPERTS["te"](x * 1, torch.tensor(counts), weight_R, *w) * 1
        called.clear()
        return y

    def layouts() -> list[str]:
        return [name.split()[1] for name in called]

    expected = torch.autograd.grad(forward(), [x, *w], grad_RD)
    (grad_x,), groups = stage_backward_input([forward()], [grad_RD], [x], iter(w))
    assert layouts() == ["NN", "NN"]
    stage_backward_weight(iter(w), groups)
    assert layouts() == ["NN", "NN", "NT", "NT"]
    for got, reference in zip((grad_x, w[0].grad, w[1].grad), expected):
        torch.testing.assert_close(got, reference)


# ---------------------------------------------------------------------------------------------------------------------
# Host syncs


def fake_problem(device: str, requires_grad: bool) -> list[Tensor]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=requires_grad)

    counts_E = torch.full((4,), 16, device=device)
    weight_R = torch.rand(96, device=device, requires_grad=requires_grad)
    return [randn(96, D), counts_E, weight_R, randn(4, F, 2, D), randn(4, D, F)]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_device_splits_never_ask_the_host(late):
    """The second part has no backward, for which autograd wants a device; it runs the three GEMMs of each projection by
    themselves."""
    assert experts_sync_problem("te", "cuda", torch.bfloat16, D, F) is None
    with sync_free():
        EXPERTS["te"](*fake_problem("cpu", requires_grad=True), late=late).sum().backward()
    with sync_free(), torch.no_grad():
        x_RD, counts_E, weight_R, w13_EF2D, w2_EDF = fake_problem("cuda", requires_grad=False)
        EXPERTS["te"](x_RD, counts_E, weight_R, w13_EF2D, w2_EDF, late=late)
        gemm = DeviceSplits(counts_E, (D, F))
        h_RF = gemm.dgrad(x_RD, w2_EDF)
        assert gemm.forward(h_RF, w2_EDF).shape == x_RD.shape and gemm.wgrad(x_RD, h_RF).shape == w2_EDF.shape


@pytest.mark.parametrize("machine", ["host"], indirect=True)
def test_host_splits_ask_once_a_forward_and_are_caught(machine, monkeypatch):
    """So the check above can fail."""
    assert "13.1.1 is older than 13.4.0" in experts_sync_problem("te", "cuda", torch.bfloat16, D, F)
    with sync_free(), pytest.raises(DataDependentOutputException):
        EXPERTS["te"](*fake_problem("cpu", requires_grad=True))
    asked: list[Tensor] = []
    original = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: asked.append(self) or original(self))
    run("te", [16, 32], problem([16, 32], torch.bfloat16))
    assert len(asked) == 1


def region(dispatcher: Dispatcher) -> Tensor:
    """Plan, dispatch, experts and combine of 8 tokens, without values."""
    x_TD = torch.randn(8, D, dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.rand(8, 3, requires_grad=True)
    received = dispatcher.dispatch(x_TD, weights_TK, dispatcher.plan(torch.zeros(8, 3, dtype=torch.int64), weights_TK))
    *_, w13_EF2D, w2_EDF = fake_problem("cpu", requires_grad=True)
    y_RD = EXPERTS["te"](received.x_RD, received.counts_e, received.weight_R, w13_EF2D, w2_EDF)
    return dispatcher.combine(y_RD, received.state)


@both
@pytest.mark.parametrize("recv_buffer", ["exact", "worst_case", 1.5])
def test_the_whole_region_asks_the_host_unless_all_its_parts_are_static(machine, recv_buffer):
    """Forward and backward on one of 4 ranks."""
    sizes = {"num_experts": 16, "top_k": 3, "alignment": 16, "max_tokens": 8}
    with fake_group(4) as group:
        dispatcher = make_dispatcher("alltoall", ep_group=group, recv_buffer=recv_buffer, **sizes)
        experts_wait = experts_sync_problem("te", "cuda", torch.bfloat16, D, F) is not None
        assert dispatcher.sync_free == (recv_buffer != "exact") and experts_wait == (machine == "host")
        if dispatcher.sync_free and not experts_wait:
            with sync_free():
                region(dispatcher).sum().backward()
        else:
            with sync_free(), pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                region(dispatcher)


def test_backends_say_whether_the_host_waits():
    asks = {name: experts_sync_problem(name, "cuda", torch.bfloat16, D, F) for name in ("loop", "grouped_mm", "te")}
    assert asks["loop"] is not None and asks["grouped_mm"] is None and asks["te"] is None
    assert "float32" in experts_sync_problem("te", "cuda", torch.float32, D, F)


# ---------------------------------------------------------------------------------------------------------------------
# Choices and refusals


def test_the_package_imports_without_te():
    assert "transformer_engine" not in sys.modules and "te" in EXPERTS


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [
        ({"version": None}, torch.bfloat16, ["not installed", "pytorch]==2.20.2"]),
        ({"version": "2.9.0"}, torch.bfloat16, ["2.9.0 is too old", "2.20.2"]),
        ({"extension": "ImportError: no"}, torch.bfloat16, ["not its torch extension (ImportError: no)", "build it"]),
        ({"capability": None}, torch.bfloat16, ["needs a CUDA device"]),
        ({}, torch.float64, ["bfloat16, float16 and float32, not torch.float64"]),
    ],
)
def test_refused_with_the_way_out(changes, dtype, said):
    te.facts = lambda: replace(FACTS, **changes)
    with pytest.raises(ValueError) as error:
        choose_experts("te", "cpu", dtype, 64, 64)
    assert all(part in str(error.value) for part in ['moe.experts = "te"', 'available here: "grouped_mm"', *said])


@pytest.mark.parametrize(
    ("changes", "dtype", "hidden", "said"),
    [
        ({"cublaslt": 130101}, torch.bfloat16, 64, ["13.1.1 is older than 13.3.0", "nvidia-cublas>=13.8.1"]),
        ({"cublaslt": 130300}, torch.bfloat16, 64, None),
        ({"cublaslt": 130300, "capability": (9, 0)}, torch.bfloat16, 64, ["13.3.0 is older than 13.4.0"]),
        ({"cublaslt": 130400, "capability": (9, 0)}, torch.bfloat16, 64, None),
        ({"cublaslt": 130700}, torch.bfloat16, 64, ["13.7.0 can return corrupt results"]),
        ({"cublaslt": 130800}, torch.bfloat16, 64, ["13.8.0 can return corrupt results"]),
        ({"cublaslt": 130801}, torch.bfloat16, 64, None),
        ({"capability": (8, 9)}, torch.bfloat16, 64, ["9.0 to 11.0", "has 8.9"]),
        ({"capability": (12, 0)}, torch.bfloat16, 64, ["9.0 to 11.0", "has 12.0"]),
        ({}, torch.bfloat16, 60, ["multiples of 8", "60 = 7 x 8 + 4"]),
        ({}, torch.float32, 64, ["not torch.float32", "TF32"]),
    ],
)
def test_the_report_says_where_slab_sizes_are_read_and_why(changes, dtype, hidden, said):
    te.facts = lambda: replace(FACTS, **changes)
    name, why = choose_experts("te", "cpu", dtype, 64, hidden)
    assert name == "te"
    if said is None:
        assert why == "as configured; slab sizes stay on the device"
    else:
        assert all(part in why for part in ["the host reads the slab sizes, because", *said]), why


# ---------------------------------------------------------------------------------------------------------------------
# The doubles notice what TE forbids, and what it would silently compute wrong


def host_call(**changes):
    from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm

    w, x = list(torch.ones(2, 8, 16).unbind()), list(torch.ones(5, 16).split([2, 3]))
    arguments = {"A": w, "B": x, "out": [torch.empty(6, 8)], "quantization_params": [None] * 2}
    arguments |= {"out_dtype": torch.float32, "m_splits": [2, 3], "single_output": True}
    return general_grouped_gemm(**(arguments | changes))


def device_call(layout: str = "TN", w=None, x=None, y=None, **changes):
    from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm_for_grouped_tensor

    return general_grouped_gemm_for_grouped_tensor(
        w or group(), x or slabs(16), y or slabs(8), layout=layout, **changes
    )


def group(**changes):
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

    data = torch.ones(16 * 16).bfloat16()
    arguments = {"shape": (16, 16), "dtype": torch.bfloat16, "num_tensors": 2, "shapes": [(8, 16)] * 2, "data": data}
    return GroupedTensorStorage(**(arguments | changes))


def slabs(width: int, dtype: torch.dtype = torch.bfloat16, **changes):
    counts, data = torch.tensor([2, 3]), torch.ones(6 * width, dtype=dtype)
    sizes = {"first_dims": counts, "tensor_offsets": torch.tensor([0, 2, 5]) * width}
    return group(**({"shape": (6, width), "dtype": dtype, "shapes": None, "data": data} | sizes | changes))


BROKEN = {
    "splits on the device": lambda: host_call(m_splits=torch.tensor([2, 3])),
    "splits as a tuple": lambda: host_call(m_splits=(2, 3)),
    "no splits": lambda: host_call(m_splits=None),
    "splits of other rows": lambda: host_call(m_splits=[3, 2]),
    "too few quantizers": lambda: host_call(quantization_params=[None]),
    "a stacked weight": lambda: host_call(A=torch.ones(2, 8, 16)),
    "a strided weight": lambda: host_call(A=list(torch.ones(2, 16, 8).transpose(1, 2).unbind())),
    "float64": lambda: host_call(A=list(torch.ones(2, 8, 16).double().unbind())),
    "mixed types": lambda: host_call(A=list(torch.ones(2, 8, 16).half().unbind())),
    "an output too short": lambda: host_call(out=[torch.empty(4, 8)]),
    "two outputs as one": lambda: host_call(out=[torch.empty(2, 8), torch.empty(3, 8)]),
    "grad in forward": lambda: host_call(grad=True),
    "another layout": lambda: host_call(layout="TT"),
    "grad with device splits": lambda: device_call(grad=True),
    "lists on both sides": lambda: device_call(w=[torch.ones(8, 16)] * 2, y=[torch.ones(8, 16)] * 2),
    "device splits in another layout": lambda: device_call("NT"),
    "device splits in float32": lambda: device_call(x=slabs(16, torch.float32)),
    "rows that are not 16 bytes": lambda: device_call(y=slabs(4)),
    "data off 16 bytes": lambda: device_call(x=slabs(16, data=torch.ones(97).bfloat16()[1:])),
    "counts of int32": lambda: slabs(16, first_dims=torch.tensor([2, 3], dtype=torch.int32)),
    "offsets in rows": lambda: device_call(x=slabs(16, tensor_offsets=torch.tensor([0, 2, 5]))),
    "offsets without a zero": lambda: slabs(16, tensor_offsets=torch.tensor([32, 80])),
    "more rows than there are": lambda: device_call(x=slabs(16, first_dims=torch.tensor([4, 3]))),
    "data of another shape": lambda: slabs(16, shape=(5, 16)),
    "data in two dimensions": lambda: slabs(16, data=torch.ones(6, 16).bfloat16()),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_doubles_notice(rule):
    with pytest.raises((AssertionError, NotImplementedError, ValueError)):
        BROKEN[rule]()


def test_the_doubles_accept_what_is_right_and_leave_the_rest_undefined():
    out, *_ = host_call()
    assert torch.equal(out[0][:5], torch.full((5, 8), 16.0)) and out[0][5:].isnan().all()
    y = device_call().rowwise_data.view(6, 8)
    assert torch.equal(y[:5], torch.full((5, 8), 16.0).bfloat16()) and y[5:].isnan().all()
