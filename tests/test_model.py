"""Our nodes in torchtitan's tree, weights drawn by whole parameters, and what is built from the model."""

import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from titan_moe.attention import DenseAttention
from titan_moe.config import Config
from titan_moe.model import _init_slice, build_model, init_weights
from titan_moe.moe.layer import FusedMoE, RouterGate
from titan_moe.optimizer import NO_WEIGHT_DECAY, apply_hyperparameters, build_lr_schedulers, build_optimizers
from titan_moe.parallel import compile_layers

ONE_RANK = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)


@pytest.fixture(scope="module")
def config() -> Config:
    config = Config()
    config.model.dim, config.model.n_layers, config.training.seq_len = 32, 2, 16
    return config


@pytest.fixture(scope="module")
def model(config):
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, seed=0)
    return model


def test_router_logits_are_fp32_from_bf16_inputs():
    gate = RouterGate.Config(in_features=8, out_features=4).build().to(torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    logits = gate(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(x.float(), gate.weight.float()))


def test_a_slice_of_a_parameter_is_drawn_as_in_the_whole(monkeypatch):
    """Any cut along rows, columns or experts, with blocks that the cut does not respect."""
    from titan_moe import model as module

    monkeypatch.setattr(module, "INIT_BLOCK_ELEMENTS", 24)
    draw = {"initializer": torch.nn.init.trunc_normal_, "seed": 3, "name": "layers.1.w"}
    whole = torch.empty(3, 11, 7)
    _init_slice(whole, **draw)
    for experts, rows, columns in [((0, 3), (4, 9), (0, 7)), ((1, 3), (0, 11), (2, 5)), ((2, 3), (10, 11), (6, 7))]:
        cut = tuple(slice(*bounds) for bounds in (experts, rows, columns))
        part = torch.empty_like(whole[cut]).contiguous()
        monkeypatch.setattr(module, "local_slice", lambda p, part=part, cut=cut: (part, tuple(c.start for c in cut)))
        _init_slice(whole, **draw)
        assert torch.equal(part, whole[cut])
    assert len({expert.sum().item() for expert in whole}) == 3
    assert 0.8 < whole.std() < 1.1


def test_initial_weights_follow_the_seed_and_torchtitans_recipe(config, model):
    again, other = (build_model(config).to_empty(device="cpu") for _ in range(2))
    init_weights(again, seed=0)
    init_weights(other, seed=1)
    for (name, p), q, r in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(p, r) == ("norm" in name), name
    assert model.tok_embeddings.weight.std().item() == pytest.approx(1, rel=0.05)
    assert model.layers["0"].attention.wq_a.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers["1"].moe.expert_bias_E.abs().sum() == 0


def test_mtp_layers_too_are_drawn_from_the_seed(config):
    """Every parameter has an initializer that `init_weights` replaces: torch's own would depend on the mesh."""
    config = deepcopy(config)
    config.model.num_mtp_layers = 2
    model, other = (build_model(config).to_empty(device="cpu") for _ in range(2))
    init_weights(model, seed=0)
    init_weights(other, seed=1)
    assert all(m._param_init is not None for m in model.modules() if list(m.parameters(recurse=False)))
    for layer, further in zip(model.mtp_layers, other.mtp_layers):
        assert isinstance(layer.moe, FusedMoE) and isinstance(layer.attention.inner_attention, DenseAttention)
        assert layer.eh_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert not torch.equal(layer.eh_proj.weight, further.eh_proj.weight)
        for norm in (layer.enorm, layer.hnorm, layer.mtp_norm):
            assert torch.equal(norm.weight, torch.ones(32))
    first, second = (layer.eh_proj.weight for layer in model.mtp_layers)
    assert not torch.equal(first, second)


def test_mtp_layers_too_are_compiled(config):
    config = deepcopy(config)
    config.model.num_mtp_layers = 1
    model = build_model(config)
    compile_layers(model, "eager")
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    parts = ["attention_norm", "attention", "ffn_norm", "moe.shared_experts", "enorm", "hnorm", "eh_proj", "mtp_norm"]
    assert {name for name in compiled if name.startswith("mtp_layers")} == {f"mtp_layers.0.{part}" for part in parts}
    assert "layers.0" in compiled and "layers.1.attention" in compiled


def test_norms_and_biases_have_no_weight_decay(config, model):
    optimizers = build_optimizers(config, [model], ONE_RANK)
    (optimizer,) = optimizers
    plain, decayed = optimizer.param_groups
    assert plain["weight_decay"] == 0 and decayed["weight_decay"] == 0.1
    assert all(name.endswith("norm.weight") for name in plain["param_names"])
    assert not [name for name in decayed["param_names"] if "norm" in name or "bias" in name]
    assert len(plain["params"]) + len(decayed["params"]) == len(list(model.parameters()))
    assert NO_WEIGHT_DECAY.count("|") == 1


def rates(config: Config, model, steps: int) -> list[float]:
    config.training.steps = steps
    optimizers = build_optimizers(config, [model], ONE_RANK)
    schedulers = build_lr_schedulers(config, optimizers)
    seen = []
    for _ in range(steps):
        seen.append(optimizers.optimizers[0].param_groups[0]["lr"] / config.optimizer.lr)
        optimizers.optimizers[0].step()  # without gradients: moves nothing
        schedulers.step()
    return seen


def test_schedules(model):
    config = Config()
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 4, 0.5
    config.lr_scheduler.min_lr_factor = 0.1
    stable = rates(config, model, 20)
    assert stable[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert stable[4:11] == pytest.approx([1.0] * 7)
    assert stable[-1] == pytest.approx(0.1 + 0.9 * 0.1) and stable[10:] == sorted(stable[10:], reverse=True)
    config.lr_scheduler.decay_ratio, config.lr_scheduler.decay_type = None, "cosine"
    cosine = rates(config, model, 20)
    assert cosine[11] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 7 / 16)))


@pytest.mark.parametrize("saved_decay", [0.1, 0.0])
def test_a_resumed_run_follows_its_configuration(config, model, saved_decay):
    """Not the rates saved with the optimizer: the first step after a resume already has the new schedule's."""
    config.optimizer.lr, config.optimizer.weight_decay = 1e-3, saved_decay
    optimizers = build_optimizers(config, [model], ONE_RANK)
    schedulers = build_lr_schedulers(config, optimizers)
    saved_optimizer, saved_schedule = optimizers.state_dict(), {"last_epoch": 300}
    config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.beta2 = 5e-4, 0.3, 0.99
    resumed = build_optimizers(config, [model], ONE_RANK)
    schedulers = build_lr_schedulers(config, resumed)
    resumed.load_state_dict(saved_optimizer)
    schedulers.load_state_dict(saved_schedule)
    apply_hyperparameters(config, resumed, schedulers)
    plain, decayed = resumed.optimizers[0].param_groups
    expected = schedulers.schedulers[0].get_last_lr()[0]
    assert plain["lr"] == decayed["lr"] == expected and 4e-4 < expected <= 5e-4
    assert (plain["weight_decay"], decayed["weight_decay"], decayed["betas"]) == (0, 0.3, (0.9, 0.99))
