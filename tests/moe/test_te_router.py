"""The router on Transformer Engine's fused kernel, of which tests/doubles has a double in torch: the same choice,
weights and gradients as ours where it is allowed, and other ones where it is refused."""

from functools import partial
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.models.common.linear import Linear

from tests import te_doubles
from tests.moe.test_layer import stock_config
from titan_moe import config_check, config_file, te_router_check
from titan_moe.flavors import FLAVORS
from titan_moe.moe import te
from titan_moe.moe.layer import fuse
from titan_moe.moe.router import Router, RouterGate
from titan_moe.moe.te_router import CHOICE_OP, TERouter
from titan_moe.recompute import kept_ops

B, L, D, E = 2, 24, 32, 16


@pytest.fixture
def installed(monkeypatch):
    """The double, in this test alone; its calls."""
    with te_doubles.installed():
        from transformer_engine.pytorch import router

        calls, original = [], router.fused_topk_with_score_function

        def counted(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        monkeypatch.setattr(router, "fused_topk_with_score_function", counted)
        yield calls


def flavor(**changes):
    """What of a flavor a router is made from."""
    names = {"top_k": 1, "score_func": "sigmoid", "route_norm": False, "route_scale": 1.0, "scores_per_group": 2}
    return SimpleNamespace(**{**names, "num_expert_groups": 1, "num_limited_groups": 1, **changes})


def routed(kind: type[Router], f, bias_E, dtype=torch.float32) -> list[torch.Tensor]:
    """Weights as [T, E] with zeros for what was not chosen, all scores, and the gradients of input and gate."""
    grouped = f.num_expert_groups > 1
    gate = Linear.Config(in_features=D, out_features=E)
    router = kind.Config(
        num_experts=E,
        gate=RouterGate.Config(**{name: getattr(gate, name) for name in ("in_features", "out_features", "bias")}),
        top_k=f.top_k,
        score_func=f.score_func,
        route_norm=f.route_norm,
        route_scale=f.route_scale,
        num_expert_groups=f.num_expert_groups if grouped else None,
        num_limited_groups=f.num_limited_groups if grouped else None,
        scores_per_group=f.scores_per_group,
    ).build()
    generator = torch.Generator().manual_seed(3)
    weight = router.gate.weight
    weight.data = torch.randn(weight.shape, generator=generator).to(dtype)
    x_BLD = torch.randn(B, L, D, generator=generator).to(dtype).requires_grad_()
    weights_BLK, ids_BLK, scores_BLE = router(x_BLD, bias_E)
    assert weights_BLK.dtype == scores_BLE.dtype == torch.float32 and ids_BLK.dtype == torch.int64
    dense_BLE = torch.zeros(B, L, E).scatter(-1, ids_BLK, weights_BLK)
    assert (torch.zeros(B, L, E).scatter_add(-1, ids_BLK, torch.ones_like(weights_BLK)) <= 1).all()
    loss = (dense_BLE * torch.randn(B, L, E, generator=generator)).sum() + scores_BLE.square().sum()
    return [dense_BLE.detach(), scores_BLE.detach(), *torch.autograd.grad(loss, [x_BLD, weight])]


MATCHING = {
    "sigmoid": (flavor(top_k=4, route_norm=True, route_scale=2.5), True),
    "sigmoid, no bias": (flavor(top_k=4, route_norm=True), False),
    "sigmoid, one expert": (flavor(top_k=1), True),
    "sigmoid, groups": (flavor(top_k=4, route_norm=True, num_expert_groups=4, num_limited_groups=2), True),
    "sigmoid, groups by their best": (
        flavor(top_k=2, route_norm=True, num_expert_groups=4, num_limited_groups=2, scores_per_group=1),
        True,
    ),
    "softmax": (flavor(top_k=3, score_func="softmax", route_scale=16.0), False),
    "softmax, one expert": (flavor(score_func="softmax"), False),
    "softmax, normalized": (flavor(top_k=3, score_func="softmax", route_norm=True), False),
    "softmax, groups": (flavor(top_k=4, score_func="softmax", num_expert_groups=4, num_limited_groups=2), False),
}
DIFFERENT = {
    "sigmoid, not normalized": (flavor(top_k=4), True),
    "sigmoid, one expert, normalized": (flavor(route_norm=True), True),
    "groups by their best 1": (flavor(top_k=2, route_norm=True, num_expert_groups=4, num_limited_groups=2), True),
    "groups by their best 3, not 1": (
        flavor(top_k=6, route_norm=True, num_expert_groups=4, num_limited_groups=2, scores_per_group=1),
        True,
    ),
    "groups by their best 4": (flavor(top_k=4, route_norm=True, num_expert_groups=2, num_limited_groups=1), True),
    "softmax, groups, normalized": (
        flavor(top_k=4, score_func="softmax", route_norm=True, num_expert_groups=4, num_limited_groups=2),
        False,
    ),
}


def problems(f, bias: bool) -> list[str]:
    moe = SimpleNamespace(router="te", force_balance="none", load_balance_coeff=1e-3 if bias else 0.0)
    return te_router_check.check(SimpleNamespace(moe=moe), f)


def bias(given: bool):
    return torch.randn(E, generator=torch.Generator().manual_seed(5)) * 0.2 if given else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MATCHING)
def test_choice_weights_and_gradients_are_ours(installed, case, dtype):
    f, biased = MATCHING[case]
    assert problems(f, biased) == []
    for ours, its in zip(*(routed(kind, f, bias(biased), dtype) for kind in (Router, TERouter)), strict=True):
        assert (its - ours).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-6) * ours.norm()
        if ours.shape == (B, L, E):
            assert torch.equal(its != 0, ours != 0)
    assert len(installed) == 1


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_is_refused_would_be_another_router(installed, case):
    f, biased = DIFFERENT[case]
    (problem,) = problems(f, biased)
    assert 'moe.router = "te"' in problem and problem.endswith('or choose moe.router = "torch"')
    ours, its = (routed(kind, f, bias(biased))[0] for kind in (Router, TERouter))
    assert (ours - its).abs().max() > 1e-2


def test_a_bias_on_a_softmax_is_refused_by_us_first(installed):
    f = flavor(top_k=3, score_func="softmax")
    assert "moe.load_balance_coeff = 0.001; set it to 0" in problems(f, True)[0]
    with pytest.raises(AssertionError):
        routed(TERouter, f, bias(True))


def test_recompute_does_not_choose_again(installed):
    """In the layer, as `fuse` makes it."""
    settings = {"router": "te", "sequence_loss_coeff": 1e-3}
    config = stock_config()
    config.router.num_limited_groups = 1
    config.router.num_expert_groups = None
    layer = fuse(config, **settings).build()
    assert type(layer.router) is TERouter
    for i, parameter in enumerate(layer.parameters()):
        parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
        parameter.data = parameter.data.bfloat16()
    gradients = []
    for recomputes in (False, True):
        x = torch.randn(B, L, 64, generator=torch.Generator().manual_seed(9)).bfloat16().requires_grad_()
        installed.clear()
        layer.zero_grad()
        contexts = partial(create_selective_checkpoint_contexts, list(kept_ops(redispatch=False)))
        y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if recomputes else layer(x)
        y.square().sum().backward()
        assert len(installed) == 1
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_choice_is_a_proper_op(installed):
    logits_TE = torch.randn(5, E, requires_grad=True)
    arguments = (logits_TE, torch.randn(E), 4, 4, 2, "sigmoid", True, 2.5)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(CHOICE_OP, arguments, test_utils=tests)


def test_where_te_cannot_run_the_router_is_not_built(monkeypatch):
    monkeypatch.setattr(te, "facts", te.Facts)
    with pytest.raises(ValueError, match='moe.router = "te": Transformer Engine is not installed.*or choose "torch"'):
        fuse(stock_config(), router="te").build()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.flavor=671B"], []),
        (["--model.flavor=16B", "--moe.load_balance_coeff=0"], []),
        (["--model.flavor=16B"], ['model.score_func = "softmax"', "moe.load_balance_coeff = "]),
        ([], ["best top_k / num_limited_groups scores, here 3 / 2", "make model.top_k 2 x model.num_limited_groups"]),
        (["--model.flavor=671B", "--model.route_norm=false"], ["model.top_k = 8 and model.route_norm = false"]),
        (["--model.flavor=671B", "--moe.force_balance=round_robin"], ['moe.force_balance = "round_robin"']),
    ],
)
def test_configurations(options, said):
    config = config_file.load(["train_configs/debug_model.toml", "--moe.router=te", *options])
    found = "\n".join(problem for problem in config_check.check(config, 1) if "moe.router" in problem)
    assert all(words in found for words in said), found
    assert said or not found


def test_deepseek_v3_is_the_case_that_it_is_for():
    f = FLAVORS["671B"]
    assert f.top_k == 2 * f.num_limited_groups and f.route_norm and problems(f, True) == []
