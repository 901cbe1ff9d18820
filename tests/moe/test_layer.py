"""FusedMoE as torchtitan's node: against the stock layer, its counts, its names in checkpoints, as an override."""

from functools import partial
from typing import Any

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models import deepseek_v3
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from titan_moe import config_file
from titan_moe.model import _draw, build_model, init_weights
from titan_moe.moe import names
from titan_moe.moe.balance import LoadBalancer
from titan_moe.moe.layer import FusedMoE, fuse, moe_layers
from titan_moe.moe.layout import expert_counts
from titan_moe.moe.region import FusedRoutedExperts
from titan_moe.optimizer import Optimizers
from titan_moe.recompute import kept_ops

D, F, E, K, B, L = 64, 48, 8, 3, 2, 40


def stock_config() -> MoE.Config:
    def linear(inputs: int, outputs: int) -> Linear.Config:
        return Linear.Config(in_features=inputs, out_features=outputs)

    return MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=E, gate=linear(D, E), top_k=K, num_expert_groups=4, num_limited_groups=2, route_norm=True
        ),
        shared_experts=FeedForward.Config(w1=linear(D, F), w2=linear(F, D), w3=linear(D, F)),
    )


def layers(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> tuple[MoE, FusedMoE]:
    """Stock and ours with the same weights."""
    torch.manual_seed(0)
    stock, ours = stock_config().build(), fuse(stock_config(), **settings).build()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.2)
    assert ours.load_state_dict(stock.state_dict(), strict=True)
    return stock.to(dtype), ours.to(dtype)


def tokens(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("experts", ["loop", "grouped_mm"])
@pytest.mark.parametrize("weighting", ["early", "late"])
def test_routed_experts_equal_torchtitans(experts, weighting):
    stock, ours = layers(experts=experts, weighting=weighting)
    found = []
    for layer in (stock.routed_experts, ours.routed_experts):
        x = tokens()
        generator = torch.Generator().manual_seed(1)
        scores, ids = torch.rand(B, L, E, generator=generator).topk(K, dim=-1)
        scores = scores.clone().requires_grad_()
        y = layer(x, scores, ids, expert_counts(ids.flatten(), E))
        y.backward(torch.randn(B, L, D, generator=generator).bfloat16())
        gradients = names.to_stock_names({name: p.grad for name, p in layer.named_parameters()})
        found.append({"y": y, "x": x.grad, "scores": scores.grad, **gradients})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        error = (found[1][name].float() - expected.float()).norm() / expected.float().norm()
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_the_whole_layer_equals_torchtitans():
    """Stock experts compute in bf16 whatever they are given, so the tolerance is bf16's."""
    stock, ours = layers(torch.float32)
    found = []
    for layer in (stock, ours):
        x = tokens(torch.float32)
        y = layer(x)
        y.square().mean().backward()
        gradients = names.to_stock_names({name: p.grad for name, p in layer.named_parameters()})
        found.append({"y": y, "x": x.grad, **gradients})
        assert layer.tokens_per_expert_E.sum() == B * L * K
    assert torch.equal(stock.tokens_per_expert_E.long(), ours.tokens_per_expert_E)
    for name, expected in found[0].items():
        error = (found[1][name].float() - expected.float()).norm() / expected.float().norm()
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_counts_are_whole_and_taken_once():
    _, layer = layers()
    assert layer.tokens_per_expert_E.dtype == torch.int64
    ids = []
    layer.router.register_forward_hook(lambda module, args, output: ids.append(output[1]))
    contexts = partial(create_selective_checkpoint_contexts, list(kept_ops(redispatch=False)))
    checkpoint(layer, tokens(seed=1), use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(ids) == 2, "recomputed once"
    expected = expert_counts(ids.pop(0).flatten(), E)
    ids.clear()
    layer(tokens(seed=2))
    expected += expert_counts(ids[0].flatten(), E)
    assert torch.equal(layer.tokens_per_expert_E, expected)
    layer.eval()
    layer(tokens(seed=3))
    assert torch.equal(layer.tokens_per_expert_E, expected), "evaluation does not count"


@pytest.mark.parametrize("redispatch", [False, True])
def test_recompute_repeats_neither_plan_nor_combine_and_changes_no_bit(redispatch):
    gradients = []
    for recomputes in (False, True):
        _, layer = layers()
        calls = []
        for name in ("plan", "start_combine"):
            monitor(layer.routed_experts.dispatcher, name, calls)
        x = tokens()
        contexts = partial(create_selective_checkpoint_contexts, list(kept_ops(redispatch)))
        y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if recomputes else layer(x)
        y.square().sum().backward()
        assert calls.count("start_combine") == 1
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def monitor(target: Any, name: str, calls: list[str]) -> None:
    original = getattr(target, name)
    setattr(target, name, lambda *args: calls.append(name) or original(*args))


def test_dropped_copies_are_counted_in_training_only():
    _, layer = layers(capacity_factor=1.0)
    layer(tokens())
    balancer = LoadBalancer({"layers.1": layer}, [])
    expected = layer.tokens_per_expert_E.sub(B * L * K // E).clamp(min=0).sum().item() / (B * L * K)
    layer.eval()
    layer(tokens())
    balancer.step()
    assert balancer.health.statistics(0.0)["moe_dropped.layers.1"] == pytest.approx(expected) and expected > 0
    assert layer.routed_experts.dropped is None


def test_auxiliary_losses_reach_the_router_once():
    """The gradient equals that of the losses added to the training loss by hand."""
    from titan_moe.moe import balance

    plain, with_losses = layers(torch.float32)[1], None
    _, with_losses = layers(torch.float32, sequence_loss_coeff=0.1, z_loss_coeff=0.01, sequences_per_step=4)
    kept: dict[str, Any] = {}
    plain.router.register_forward_hook(lambda module, args, output: kept.update(scores=output[2], ids=output[1]))
    plain.router.gate.register_forward_hook(lambda module, args, output: kept.update(logits=output))
    loss = plain(tokens(torch.float32)).square().mean()
    added = balance.sequence_loss(kept["scores"], kept["ids"]) * 0.1 / 4 + balance.z_loss(kept["logits"]) * 0.01 / 4
    (loss + added).backward()
    with_losses(tokens(torch.float32)).square().mean().backward()
    torch.testing.assert_close(with_losses.router.gate.weight.grad, plain.router.gate.weight.grad)
    assert with_losses.take_losses().item() == pytest.approx(added.item(), rel=1e-5)
    assert with_losses.take_losses().item() == 0


@pytest.mark.parametrize("how", ["round_robin", "balanced_random"])
def test_forced_balance(how):
    _, layer = layers(force_balance=how)
    layer(tokens())
    load = layer.tokens_per_expert_E
    assert load.max() - load.min() <= 2


def test_no_tokens():
    _, layer = layers()
    x = torch.randn(B, 0, D).bfloat16().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape and layer.routed_experts.inner_experts.w2_EDF.grad.abs().sum() == 0


def test_state_dicts_have_torchtitans_names_both_ways():
    stock, ours = layers()
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in ours.state_dict().items())
    state = {name: torch.randn_like(value) for name, value in stock.state_dict().items()}
    ours.load_state_dict(state)
    w13 = ours.routed_experts.inner_experts.w13_EF2D
    assert torch.equal(w13[:, :, 1], state["routed_experts.inner_experts.w3_EFD"])


def test_checkpoints_keep_no_copy_of_the_weights():
    """torchtitan's manager keeps what a model's state_dict gave it for as long as the run lasts. A copy of the gates
    and ups of DeepSeek-V3 would take 6.3 GiB of each of 256 GPUs, in fp32."""
    ours = layers()[1]
    kept = ModelWrapper(ours)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*ours.parameters(), *ours.buffers())}
    with torch.no_grad():
        ours.routed_experts.inner_experts.w13_EF2D.fill_(3.0)
    found = kept.state_dict()
    assert {tensor.untyped_storage().data_ptr() for tensor in found.values()} <= own
    assert all((found[f"routed_experts.inner_experts.{name}_EFD"] == 3.0).all() for name in ("w1", "w3"))


def test_optimizer_state_has_torchtitans_names_both_ways():
    def trained(layer: nn.Module) -> Optimizers:
        from torchtitan.components.optimizer import default_adamw

        config = default_adamw(lr=1e-2)
        optimizers = Optimizers.Config(param_groups=config.param_groups, implementation="for-loop").build(
            model_parts=[layer]
        )
        layer(tokens()).square().mean().backward()
        optimizers.step()
        return optimizers

    stock, ours = layers()
    stock_state, our_state = trained(stock).state_dict(), trained(ours).state_dict()
    assert our_state.keys() == stock_state.keys()
    assert {k: getattr(v, "shape", None) for k, v in our_state.items()} == {
        k: getattr(v, "shape", None) for k, v in stock_state.items()
    }
    other = trained(layers()[1])
    other.load_state_dict(stock_state)
    for name, value in other.state_dict().items():
        assert (
            torch.equal(torch.as_tensor(value), torch.as_tensor(stock_state[name])) if torch.is_tensor(value) else True
        )
    moments = [name for name in our_state if name.endswith("w3_EFD.exp_avg")]
    assert moments and torch.equal(other.state_dict()[moments[0]], stock_state[moments[0]])


def test_fused_weights_start_as_w1_and_w3_would():
    config = config_file.load(["train_configs/debug_model.toml", "--model.n_layers=2", "--training.seq_len=64"])
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, seed=5)
    (layer,) = moe_layers(model).values()
    experts = layer.routed_experts.inner_experts
    initializers = deepseek_v3._depth_experts_init(1)
    for name, half in names.split_w13(experts.w13_EF2D).items():
        expected = torch.empty(half.shape)
        whole = "layers.1.moe.routed_experts.inner_experts." + name
        _draw(expected, (0, 0, 0), half.shape[1:], initializer=initializers[name], seed=5, name=whole)
        assert torch.equal(half, expected), name


def test_as_an_override_of_torchtitans_own_model():
    """The stock debug model with one MTP layer: every MoE is replaced, and a step trains every expert that got a
    token."""
    spec = deepseek_v3.model_registry("debugmodel", attn_backend="flex", num_mtp_layers=1)
    settings = {"experts": "grouped_mm", "sequence_loss_coeff": 1e-4}
    apply_overrides(OverrideConfig(imports=[("titan_moe.moe.layer.fused_moe", settings)]), spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    found = moe_layers(model)
    assert list(found) == [f"layers.{i}" for i in range(1, 6)] + ["mtp_layers.0"]
    layer = found["mtp_layers.0"]
    assert isinstance(layer.routed_experts, FusedRoutedExperts)
    layer.to_empty(device="cpu")
    layer.init_states()
    assert layer.tokens_per_expert_E.dtype == torch.int64
    before = layer.routed_experts.inner_experts.w13_EF2D.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.randn(2, 32, 256)).square().sum().backward()
    load = layer.tokens_per_expert_E.clone()
    balancer = LoadBalancer(found | {}, [])
    assert balancer.layers["mtp_layers.0"] is layer
    optimizer.step()
    changed = (layer.routed_experts.inner_experts.w13_EF2D != before).flatten(1).any(1)
    assert torch.equal(changed, load > 0)


def test_other_experts_are_refused():
    config = stock_config()

    class Other(GroupedExperts.Config):
        pass

    config.routed_experts.inner_experts = Other(dim=D, hidden_dim=F, num_experts=E)
    with pytest.raises(ValueError, match="GroupedExperts, not .*Other"):
        fuse(config)
