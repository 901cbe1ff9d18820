"""The local dispatcher against a loop over tokens, that it never waits for the host, and what all dispatchers refuse.

Dispatchers between ranks: tests/distributed/test_dispatch.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sync_free import fake_group, sync_free
from titan_moe.moe import dispatch
from titan_moe.moe.dispatch import PLAN_OPS, make_dispatcher

NAN = float("nan")
DROPS = [{}, {"capacity_factor": 0.8}, {"capacity_factor": 1.0, "drop_policy": "position"}]


def local(num_experts=6, top_k=3, alignment=4, **kwargs):
    return make_dispatcher("local", num_experts=num_experts, top_k=top_k, alignment=alignment, **kwargs)


def route(tokens, num_experts, top_k, seed=0):
    return torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(seed)).topk(top_k, dim=-1).indices


@settings(deadline=None, max_examples=120)
@given(
    st.integers(1, 7).flatmap(lambda E: st.tuples(st.just(E), st.integers(1, E))),
    st.integers(0, 17),
    st.integers(1, 5),
    st.sampled_from([1, 2, 5, 16]),
    st.sampled_from([*DROPS, {"capacity_factor": 0.3}]),
    st.integers(0, 2**20),
)
def test_local_equals_a_loop(sizes, T, D, alignment, drop, seed):
    """Values and gradients, with NaN in whatever is no copy of a token: padding rows and tail, forward and backward."""
    E, K = sizes
    dispatcher = local(E, K, alignment, **drop)
    torch.manual_seed(seed)
    x_TD = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    w_TK = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
    maps = torch.randn(E, D, D, dtype=torch.float64)
    grad = torch.randn(T, D, dtype=torch.float64)
    ids_TK = route(T, E, K, seed)

    plan = dispatcher.plan(ids_TK, w_TK)
    received = dispatcher.dispatch(x_TD, w_TK, plan)
    kept = torch.ones(T, K, dtype=torch.bool) if plan.kept_TK is None else plan.kept_TK
    counts = [int((ids_TK[kept] == expert).sum()) for expert in range(E)]
    padded = [-(-n // alignment) * alignment for n in counts]
    assert received.counts_e.tolist() == plan.padded_counts_e.tolist() == padded
    assert received.x_RD.shape == (dispatcher.max_rows(T), D) and sum(padded) <= dispatcher.max_rows(T)
    assert torch.equal(dispatcher.regather(x_TD, plan), received.x_RD)
    expert_R = torch.full((dispatcher.max_rows(T),), -1)
    start = 0
    for expert, (n, rows) in enumerate(zip(counts, padded)):
        expert_R[start : start + n] = expert
        assert not received.x_RD[start + n : start + rows].any()
        assert not received.weight_R[start + n : start + rows].any()
        start += rows
    real_R = expert_R >= 0
    received.x_RD.register_hook(lambda grad: torch.where(real_R[:, None], grad, NAN))
    received.weight_R.register_hook(lambda grad: torch.where(real_R, grad, NAN))
    x_RD = torch.where(real_R[:, None], received.x_RD, 0)
    y_RD = torch.einsum("rd,rdf->rf", x_RD, maps[expert_R]) * received.weight_R[:, None]
    out_TD = dispatcher.combine(torch.where(real_R[:, None], y_RD, NAN), received.state)
    got = (out_TD, *torch.autograd.grad(out_TD, [x_TD, w_TK], grad))

    expected_TD = torch.zeros(T, D, dtype=torch.float64) + 0 * x_TD + 0 * w_TK.sum()
    for t, k in kept.nonzero().tolist():
        row = w_TK[t, k] * (x_TD[t] @ maps[ids_TK[t, k]])
        expected_TD = expected_TD.index_add(0, torch.tensor([t]), row[None])
    expected = (expected_TD, *torch.autograd.grad(expected_TD, [x_TD, w_TK], grad))
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("drop", DROPS)
def test_local_combine_is_the_transpose(drop):
    dispatcher = local(**drop)
    ids_TK, w_TK = route(50, 6, 3), torch.rand(50, 3)
    x_TD = torch.randn(50, 4, dtype=torch.float64)
    plan = dispatcher.plan(ids_TK, w_TK)
    received = dispatcher.dispatch(x_TD, w_TK, plan)
    y_RD = torch.randn(received.x_RD.shape, dtype=torch.float64)
    back_TD = dispatcher.combine(y_RD, received.state)
    rows = int(received.counts_e.sum())
    torch.testing.assert_close((received.x_RD * y_RD)[:rows].sum(), (x_TD * back_TD).sum(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_combine_adds_in_fp32_and_rounds_once(dtype):
    """256 + 1 + 1 + 1 is 256 in bf16 when added one by one."""
    dispatcher = local(num_experts=4, top_k=4, alignment=1)
    big = 256.0 if dtype == torch.bfloat16 else 2048.0 if dtype == torch.float16 else 2.0**24
    plan = dispatcher.plan(torch.tensor([[0, 1, 2, 3]]))
    y_RD = torch.tensor([[big], [1.0], [1.0], [2.0]], dtype=dtype).expand(4, 8)
    out_TD = dispatcher.combine(y_RD, plan)
    assert out_TD.dtype == dtype
    if dtype != torch.float32:
        assert torch.equal(out_TD, torch.full((1, 8), big + 4, dtype=dtype))


def test_dtypes():
    dispatcher = local()
    w_TK = torch.rand(9, 3, dtype=torch.bfloat16, requires_grad=True)
    x_TD = torch.randn(9, 4, dtype=torch.bfloat16, requires_grad=True)
    received = dispatcher.dispatch(x_TD, w_TK, dispatcher.plan(route(9, 6, 3)))
    assert received.x_RD.dtype == torch.bfloat16 and received.weight_R.dtype == torch.float32
    gradients = torch.autograd.grad([received.x_RD.sum(), received.weight_R.sum()], [x_TD, w_TK])
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.bfloat16]


def test_gradients_of_stride_zero():
    """What `.sum().backward()` makes."""
    dispatcher = local()
    x_TD = torch.randn(9, 4, requires_grad=True)
    received = dispatcher.dispatch(x_TD, torch.ones(9, 3), dispatcher.plan(route(9, 6, 3)))
    dispatcher.combine(received.x_RD, received.state).sum().backward()
    torch.testing.assert_close(x_TD.grad, torch.full((9, 4), 3.0))


def region(dispatcher, device, requires_grad):
    x_TD = torch.randn(8, 4, device=device, requires_grad=requires_grad)
    w_TK = torch.rand(8, 3, device=device, requires_grad=requires_grad)
    ids_TK = torch.zeros(8, 3, device=device, dtype=torch.int64)
    received = dispatcher.dispatch(x_TD, w_TK, dispatcher.plan(ids_TK, w_TK))
    return dispatcher.combine(received.x_RD * received.weight_R[:, None], received.state)


@pytest.mark.parametrize("drop", DROPS)
def test_local_never_asks_the_host(drop, monkeypatch):
    """The plan is its own fake kernel, so it is run for real here. The second part has no backward, for which autograd
    wants a device; it runs the same gather and sum. That the harness catches others: test_static.py."""
    assert local().sync_free
    with sync_free():
        region(local(**drop), "cpu", requires_grad=True).sum().backward()
    monkeypatch.setattr(dispatch, "plan_local", dispatch._plan_local)  # what an op does inside, a mode does not see
    with sync_free(), torch.no_grad():
        region(local(**drop), "cuda", requires_grad=False)


@pytest.fixture
def group():
    with fake_group(4) as group:
        yield group


@pytest.mark.parametrize("capacity", [None, 3])
def test_plan_is_a_proper_op(capacity):
    arguments = (route(9, 6, 3), torch.rand(9, 3), 6, 4, capacity, local().max_rows(9))
    torch.library.opcheck(PLAN_OPS[0], arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"top_k": 7}, ["top_k = 7", "6 experts", "lower top_k"]),
        ({"top_k": 0}, ["top_k = 0"]),
        ({"capacity_factor": 0.0}, ["capacity_factor = 0.0", "above 0", "absent"]),
        ({"capacity_factor": -1.0}, ["capacity_factor = -1.0"]),
        ({"capacity_factor": NAN}, ["capacity_factor = nan"]),
        ({"drop_policy": "prob"}, ["drop_policy = 'prob'", "probs, position"]),
        ({"alignment": 0}, ["alignment = 0"]),
        ({"ranks_per_node": 2}, ["ranks_per_node", "use dedup"]),
        ({"top_k": 7, "capacity_factor": 0.0}, ["top_k = 7", "capacity_factor = 0.0"]),
    ],
)
def test_refused_arguments(arguments, said):
    with pytest.raises(ValueError) as error:
        local(**arguments)
    for words in said:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("local", {}, ["local", "4 ranks", "use alltoall or dedup"]),
        ("alltoall", {"num_experts": 6}, ["6 experts", "4 expert-parallel ranks", "divisor of num_experts"]),
        ("alltoall", {"ep_group": None}, ["alltoall", "use local"]),
        ("alltoall", {"ranks_per_node": 2}, ["ranks_per_node", "use dedup"]),
        ("dedup", {"hop_chunks": 2}, ["hop_chunks = 2", "only with ranks_per_node"]),
        ("dedup", {"hop_chunks": 0, "ranks_per_node": 2}, ["hop_chunks = 0", "at least 1"]),
        ("dedup", {"ranks_per_node": 3}, ["ranks_per_node = 3", "4 expert-parallel ranks", "divisor"]),
    ],
)
def test_refused_arguments_of_several_ranks(name, arguments, said, group):
    with pytest.raises(ValueError) as error:
        make_dispatcher(name, **({"num_experts": 8, "top_k": 3, "alignment": 4, "ep_group": group} | arguments))
    for words in said:
        assert words in str(error.value)


def test_unknown_dispatcher():
    with pytest.raises(ValueError, match="'alltoal' is not one of local, alltoall, dedup"):
        make_dispatcher("alltoal")


def test_dropping_by_weight_needs_weights():
    with pytest.raises(ValueError, match="topk_weights_TK"):
        local(capacity_factor=1.0).plan(route(9, 6, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("drop", DROPS)
def test_local_on_a_gpu(drop):
    """No sync there, which the driver sees best, and the CPU's numbers."""
    ids_TK, w_TK, x_TD, grad_TD = route(50, 6, 3), torch.rand(50, 3), torch.randn(50, 8), torch.randn(50, 8)
    results = []
    for device in ("cpu", "cuda"):
        ids, w, x, grad = (t.to(device) for t in (ids_TK, w_TK, x_TD, grad_TD))
        w.requires_grad_()
        x.requires_grad_()
        dispatcher = local(**drop)
        region(dispatcher, device, requires_grad=True).sum().backward()  # loading kernels may sync
        torch.cuda.set_sync_debug_mode("error")
        try:
            received = dispatcher.dispatch(x, w, dispatcher.plan(ids, w))
            out = dispatcher.combine(received.x_RD * received.weight_R[:, None], received.state)
            out.backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([t.cpu() for t in (out.detach(), x.grad, w.grad)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)
