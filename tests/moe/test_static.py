"""Buffers of fixed size: that nothing in the region waits for the host, how large they are, how they grow.

What they compute: tests/distributed/test_dispatch.py; whole trainings: tests/distributed/test_replay.py.

Shape letters: T tokens, D model width, F expert hidden width, E experts, K top-k.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.tools.utils import set_default_dtype

from tests.sync_free import fake_group, sync_free
from titan_moe.moe import alltoall, dedup, exchange, experts, layout, static
from titan_moe.moe.dispatch import Dispatcher, make_dispatcher
from titan_moe.moe.layer import fuse, fused_moe
from titan_moe.moe.region import FusedRoutedExperts
from titan_moe.moe.replay import Replay

T, D, F, E, K, RANKS = 24, 32, 16, 8, 3, 4
FIXED = ["worst_case", 1.25]
DROPS: list[dict[str, Any]] = [{}, {"capacity_factor": 0.8}, {"capacity_factor": 1.0, "drop_policy": "position"}]


def dispatcher_of(name: str, recv_buffer: str | float, group: dist.ProcessGroup | None, **settings) -> Dispatcher:
    sizes = {"num_experts": E, "top_k": K, "alignment": 16, "max_tokens": T}
    return make_dispatcher(name, recv_buffer=recv_buffer, ep_group=group, **{**sizes, **settings})


def moe_config() -> MoE.Config:
    return MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E // RANKS),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=Linear.Config(in_features=D, out_features=E), top_k=K),
    )


def run_region(dispatcher: Dispatcher, device: str, backward: bool) -> None:
    """Forward of FusedRoutedExperts with the code that a GPU runs, and backward, down to every gradient."""
    with torch.device(device):
        with set_default_dtype(torch.bfloat16):
            region = fuse(moe_config(), experts="grouped_mm").routed_experts.build()
        assert isinstance(region, FusedRoutedExperts)
        region.dispatcher = dispatcher
        x = torch.randn(1, T, D, dtype=torch.bfloat16).requires_grad_(backward)
        scores = torch.rand(1, T, K).requires_grad_(backward)
        ids = torch.zeros(1, T, K, dtype=torch.int64)
        with mock.patch.object(experts, "_PiecewiseGemm", experts._GroupedGemm):
            out = region(x, scores, ids, torch.empty(0))
            if backward:
                gradients = torch.autograd.grad(out.sum(), [x, scores, *region.parameters()])
                assert [g.shape for g in gradients] == [x.shape, scores.shape, *(p.shape for p in region.parameters())]


def opened(module, name: str):
    """Calls the Python function of an op in the op's place, so that a mode sees what it does."""
    op = getattr(module, name)
    return mock.patch.object(module, name, op._init_fn)


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("recv_buffer", FIXED)
@pytest.mark.parametrize("name", ["alltoall", "dedup"])
def test_the_region_never_asks_the_host(name, recv_buffer, drop):
    with fake_group(RANKS) as group:
        dispatcher = dispatcher_of(name, recv_buffer, group, **drop)
        assert dispatcher.sync_free
        with sync_free(), opened(static, f"plan_{name}_fixed"):
            run_region(dispatcher, "cpu", backward=True)
        with sync_free(), opened(static, f"plan_{name}_fixed"), torch.no_grad():
            run_region(dispatcher, "cuda", backward=False)


def test_rows_move_without_asking_the_host():
    """What the ops of exchange.py do inside, and their backward, which is the same with the sizes swapped."""
    splits = [3] * RANKS
    with fake_group(RANKS) as group, sync_free(), torch.no_grad():
        x_UD, w_N = torch.randn(13, D, device="cuda"), torch.rand(12, device="cuda")
        how = (splits, splits, splits, splits, group.group_name, True, True)
        tickets = exchange._start_dispatch._init_fn(x_UD, w_N, *how, False)
        x_VD, w_M = exchange._wait_dispatch._init_fn(*tickets, *how)
        assert x_VD.shape == (13, D) and w_M.shape == (12,)
        how = (splits, splits, group.group_name, True, True)
        ticket = exchange._start_combine._init_fn(x_VD, *how, False)
        assert exchange._wait_combine._init_fn(ticket, *how).shape == (13, D)


@pytest.mark.parametrize(("name", "module"), [("alltoall", alltoall), ("dedup", dedup)])
def test_the_harness_catches_exact_sizes(name, module):
    """As an op, which says so; what is in it, which asks for a copy; and the number that it reads."""
    with fake_group(RANKS) as group:
        exact = dispatcher_of(name, "exact", group)
        assert not exact.sync_free
        with sync_free(), pytest.raises(DynamicOutputShapeException):
            run_region(exact, "cpu", backward=True)
        plan = getattr(module, f"_plan_{name}")._init_fn
        arguments = (E, 16, None, group.group_name, *([None, 1] if name == "dedup" else []))
        for device in ("cpu", "cuda"):
            with sync_free(), pytest.raises(AssertionError, match=f"from {device} to cpu"):
                plan(torch.zeros(T, K, dtype=torch.int64, device=device), None, *arguments)
        with sync_free(), pytest.raises(DataDependentOutputException):
            static.exchange(torch.ones(4), [torch.ones(()).item()], [4], group)  # type: ignore[list-item]


@pytest.mark.parametrize("copy", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: torch.empty(1).copy_(x)])
def test_the_harness_catches_copies(copy):
    with sync_free(), pytest.raises(AssertionError, match="from cuda to cpu"):
        copy(torch.ones(1, device="cuda"))


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


@pytest.mark.parametrize(("factor", "slabs"), [(1.0, 1), (1.25, 1.25), (2, 2), (1.1, 1.1)])
def test_static_rows_are_a_multiple_of_the_mean(factor, slabs):
    """A mean slab, padded, times the factor, padded."""
    rows = layout.static_rows(factor, tokens=1000, top_k=8, local_experts=4, alignment=128, ranks=64)
    assert rows == -(-round(slabs * 4 * 2048, 6) // 128) * 128  # 1000 x 8 / 4 = 2000, padded 2048


def test_static_rows_end_at_the_worst_case():
    sizes = {"tokens": 100, "top_k": 2, "local_experts": 2, "alignment": 16, "ranks": 2}
    worst = layout.worst_rows(**sizes)
    assert layout.static_rows(None, **sizes) == layout.static_rows(50.0, **sizes) == worst
    assert layout.static_rows(1.0, **sizes) == 224 < worst  # 100 x 2 / 2 = 100, padded 112


def deepseek(name: str, recv_buffer: str | float) -> static.FixedSizes:
    with fake_group(8) as group:
        dispatcher = make_dispatcher(
            name,
            num_experts=256,
            top_k=8,
            alignment=128,
            ep_group=group,
            recv_buffer=recv_buffer,
            max_tokens=4096,
        )
        return static.fixed_sizes(dispatcher)


def test_slots_per_destination():
    """DeepSeek-V3's router on 8 ranks. A token of balanced, ungrouped routing goes to 5.3 of them."""
    assert deepseek("alltoall", "worst_case")[:2] == (8 * 4096, 4096)
    copies, rows, slab_rows = deepseek("dedup", 1.25)
    assert copies == 1.25 * 4096
    assert rows == pytest.approx(1.25 * 4096 * layout_unique_ranks() / 8, rel=3e-3)
    assert slab_rows == 1.25 * 32 * 1024


def layout_unique_ranks() -> float:
    """Mean number of ranks that hold one of 8 experts drawn from 256, by drawing."""
    ids = torch.rand(100_000, 256, generator=torch.Generator().manual_seed(0)).topk(8, dim=-1).indices
    return layout.destinations(ids // 32, 8).sum(1).double().mean().item()


def test_sizes_do_not_depend_on_this_ranks_tokens_or_routing():
    """A capacity, which does, only limits what is sent."""
    with fake_group(RANKS) as group:
        for drop in DROPS:
            dispatcher = dispatcher_of("alltoall", 1.25, group, **drop)
            before = static.fixed_sizes(dispatcher)
            with sync_free():
                for tokens in (0, 3, T):
                    plan = dispatcher.plan(torch.zeros(tokens, K, dtype=torch.int64), torch.rand(tokens, K))
                    assert plan.rows.source_R.shape == (before.slab_rows,)
                    assert plan.hops[0].row_splits == ([before.copies] * RANKS,) * 2
                    assert plan.hops[0].copies.index.shape == (before.copies * RANKS,)


def test_more_tokens_than_the_buffer_is_made_for():
    with fake_group(RANKS) as group, pytest.raises(ValueError, match=f"brought 25 tokens.* made for {T}: raise"):
        dispatcher_of("dedup", 1.25, group).plan(torch.zeros(25, K, dtype=torch.int64))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recv_buffer": 0.9}, ["recv_buffer = 0.9", "at least 1"]),
        ({"recv_buffer": float("inf")}, ["recv_buffer = inf", "finite"]),
        ({"recv_buffer": float("nan")}, ["recv_buffer = nan", "finite"]),
        ({"recv_buffer": "worst"}, ["recv_buffer = 'worst'", "'exact', 'worst_case'", "factor"]),
        ({"recv_buffer": 1.5, "max_tokens": None}, ["recv_buffer = 1.5", "max_tokens"]),
        ({"recv_buffer": "worst_case", "max_tokens": 0}, ["max_tokens"]),
        ({"recv_buffer": 1.5, "ranks_per_node": 2}, ["ranks_per_node = 2", "by node", "'exact'"]),
    ],
)
def test_refused(settings, said):
    with fake_group(RANKS) as group, pytest.raises(ValueError) as error:
        dispatcher_of("dedup", **{"recv_buffer": "exact", "group": group, **settings})
    for words in said:
        assert words in str(error.value)


def test_local_takes_any_buffer():
    """Its shapes follow the tokens alone, whatever is asked for."""
    for recv_buffer in ("exact", *FIXED):
        dispatcher = make_dispatcher("local", num_experts=E, top_k=K, alignment=16, recv_buffer=recv_buffer)
        assert dispatcher.sync_free and not dispatcher.can_overflow
        assert dispatcher.plan(torch.zeros(T, K, dtype=torch.int64)).overflow is None


def test_stock_torchtitan_gets_no_buffer_that_may_overflow():
    with pytest.raises(ValueError, match="does not repeat"):
        fused_moe(moe_config(), recv_buffer=1.5, max_tokens=T)
    assert fused_moe(moe_config(), recv_buffer="worst_case", max_tokens=T).routed_experts.max_tokens == T


# ---------------------------------------------------------------------------------------------------------------------
# Growth and replay


def test_growth_has_a_bound():
    with fake_group(8) as group:
        dispatcher = make_dispatcher(
            "dedup", num_experts=64, top_k=2, alignment=16, ep_group=group, recv_buffer=1.25, max_tokens=64
        )
        factors = []
        for _ in range(4):
            dispatcher.grow()
            factors.append(dispatcher.factor)
        assert factors == [1.25 * 1.5, 1.25 * 1.5**2, 1.25 * 1.5**3, 5.0] and dispatcher.can_overflow
        with pytest.raises(ValueError, match=r"moe.recv_buffer = 1.25: .* 4 growths, and 4 x 1.25 is the bound"):
            dispatcher.grow()


def test_nothing_overflows_once_the_buffer_is_the_worst_case():
    with fake_group(2) as group:
        dispatcher = dispatcher_of("alltoall", 1.0, group)
        while dispatcher.can_overflow:
            before = static.fixed_sizes(dispatcher)
            dispatcher.grow()
            assert all(new >= old for new, old in zip(static.fixed_sizes(dispatcher), before))
        assert static.fixed_sizes(dispatcher) == static.fixed_sizes(dispatcher_of("alltoall", "worst_case", group))
        assert dispatcher.factor is not None and dispatcher.factor < 4


class Layer(nn.Module):
    """What Replay sees of a FusedMoE."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        dispatcher = make_dispatcher(
            "dedup", num_experts=64, top_k=2, alignment=16, ep_group=group, recv_buffer=1.25, max_tokens=64
        )
        self.routed_experts = SimpleNamespace(dispatcher=dispatcher, overflow=None)


@pytest.fixture
def replay(monkeypatch):
    """A Replay of two layers on one rank whose dispatchers think they are of eight."""
    with fake_group(8) as group:
        layers = {"layers.1": Layer(group), "layers.2": Layer(group)}
        monkeypatch.setattr("titan_moe.moe.replay.moe_layers", lambda part: layers)
        monkeypatch.setattr(dist, "all_gather_object", lambda found, mine: found.__setitem__(0, mine))
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
        yield Replay(1.25, [nn.Module()], torch.device("cpu"))


def test_a_replay_draws_the_same_random_numbers(replay):
    """As forced random routing does. What is left behind is discarded each time."""
    drawn, discarded = [], []

    def compute() -> dict[str, torch.Tensor]:
        drawn.append(torch.rand(()))
        too_small = len(drawn) <= 2
        replay.layers["layers.2"].routed_experts.overflow = torch.tensor(too_small)
        return {"loss": drawn[-1]}

    assert replay.until_it_fits(compute, "step 7", lambda: discarded.append(len(drawn))) == {"loss": drawn[0]}
    assert drawn == [drawn[0]] * 3 and discarded == [1, 2]
    assert [layer.routed_experts.dispatcher.factor for layer in replay.layers.values()] == [1.25 * 1.5**2] * 2
    assert torch.rand(()) != drawn[0], "the generator goes on after the last pass"


def test_a_replay_asks_once_per_step(replay, monkeypatch):
    """One all-reduce, however many layers; none where nothing can overflow."""
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda flags, op: reduced.append(flags.shape))
    for region in (layer.routed_experts for layer in replay.layers.values()):
        region.overflow = torch.tensor(False)
    result = {"loss": torch.ones(())}
    assert replay.until_it_fits(lambda: result, "step 1") is result and reduced == [(3,)]
    for recv_buffer in ("exact", "worst_case"):
        replay = Replay(recv_buffer, [nn.Module()], torch.device("cpu"))
        assert replay.until_it_fits(lambda: result, "step 1") is result
    assert reduced == [(3,)]


def test_nothing_grows_for_a_loss_that_is_not_finite(replay):
    """Tokens that are no numbers all go to the same experts; the guard skips such a step."""
    for layer in replay.layers.values():
        layer.routed_experts.overflow = torch.tensor(True)
    result = {"loss": torch.tensor(float("nan"))}
    assert replay.until_it_fits(lambda: result, "step 1") is result
    assert [layer.routed_experts.dispatcher.factor for layer in replay.layers.values()] == [1.25] * 2
