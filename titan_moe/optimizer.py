"""Optimizer and learning-rate schedule through torchtitan's containers."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import ParallelDims

from titan_moe.adamw import Bf16MomentsAdamW
from titan_moe.config import Config
from titan_moe.moe.balance import LoadBalancer
from titan_moe.moe.layer import moe_layers
from titan_moe.moe.names import to_stock_names, to_stored_names
from titan_moe.muon import Muon
from titan_moe.optimizer_check import NOT_MUON, moments_dtype

# Norm gains and biases. The router bias is a buffer, moved by the balancing hook alone.
NO_WEIGHT_DECAY = r"norm\.weight$|\.bias$"


class Optimizers(OptimizersContainer):
    """torchtitan's container, whose state has torchtitan's parameter names, like the weights: a checkpoint does not
    show that gate and up are one parameter. `balancer` moves the router biases before each step.

    `step(skip=...)` takes a float32 scalar on the device: 1 to leave everything as it is, 0 otherwise. Optimizers that
    know `found_inf`, as fused AdamW, read it there; for others the host waits for it."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    balancer: LoadBalancer

    def step(self, *, skip: Tensor | None = None) -> None:  # type: ignore[override]  # hooks see `skip`, no closures
        for optimizer in self.optimizers:
            if _knows_found_inf(optimizer):
                optimizer.found_inf = skip  # type: ignore[attr-defined]
                optimizer.step()
                optimizer.found_inf = None  # type: ignore[attr-defined]
            elif skip is None or not skip.item():
                optimizer.step()

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        ours = {each.__name__: each for each in (Bf16MomentsAdamW, Muon)}
        return ours.get(name) or OptimizersContainer._resolve_optimizer_factory(name)

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """Without the groups that a pipeline stage has no parameters for, which torchtitan takes for a mistake."""
        first = {
            next(i for i, group in enumerate(param_group_configs) if re.search(group.pattern, name))
            for name, _ in model.named_parameters()
        }
        there = [param_group_configs[i] for i in sorted(first)]
        return OptimizersContainer._build_param_groups(model, there, impl_kwargs)

    def state_dict(self) -> dict[str, Any]:
        return to_stock_names(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(to_stored_names(state_dict))


def _knows_found_inf(optimizer: Optimizer) -> bool:
    """torch marks those that were told to be fused as a whole; torchtitan tells each parameter group."""
    marked = getattr(optimizer, "_step_supports_amp_scaling", False)
    return marked or all(group.get("fused") for group in optimizer.param_groups)


def build_optimizers(config: Config, model_parts: Sequence[nn.Module], parallel_dims: ParallelDims) -> Optimizers:
    """AdamW's parameters without and with weight decay, with Muon its own besides, and the balancer of the MoE layers.

    Muon's are the matrices of layers: of attention, feed-forwards and experts."""
    o = config.optimizer
    adamw = Bf16MomentsAdamW.__name__ if moments_dtype(config) != config.training.dtype else "AdamW"
    rest = NOT_MUON if o.name == "Muon" else "."
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=adamw, optimizer_kwargs=_adamw_settings(config, decay))
        for pattern, decay in ((NO_WEIGHT_DECAY, 0.0), (rest, o.weight_decay))
    ]
    if o.name == "Muon":
        groups.append(ParamGroupConfig(pattern=".", optimizer_name="Muon", optimizer_kwargs=_muon_settings(config)))
    optimizers = Optimizers.Config(
        param_groups=groups,
        implementation=o.implementation,
        optimizer_factory_kwargs_by_name={"Muon": {"dtype": getattr(torch, config.training.mixed_precision_param)}},
    ).build(model_parts=list(model_parts))
    meshes = [parallel_dims.get_optional_mesh("loss")]
    if parallel_dims.ep_enabled and parallel_dims.tp > 1:
        meshes.append(parallel_dims.get_optional_mesh("tp"))  # with EP, ranks along TP route different tokens
    groups = [mesh.get_group() for mesh in meshes if mesh is not None]
    pp_mesh = parallel_dims.get_optional_mesh("pp")
    pp_group = None if pp_mesh is None else pp_mesh.get_group()
    layers = {name: moe for part in model_parts for name, moe in moe_layers(part).items()}
    optimizers.balancer = LoadBalancer(layers, groups, pp_group, centred=config.moe.load_balance_centred)
    optimizers.register_step_pre_hook(optimizers.balancer.step)
    return optimizers


def _adamw_settings(config: Config, decay: float) -> dict[str, Any]:
    o = config.optimizer
    return {"lr": o.lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": decay}


def _muon_settings(config: Config) -> dict[str, Any]:
    o = config.optimizer
    return {"lr": o.lr, "momentum": o.momentum, "weight_decay": o.weight_decay}


def build_lr_schedulers(config: Config, optimizers: OptimizersContainer) -> LRSchedulersContainer:
    """Linear warm-up, a constant stretch if `decay_ratio` leaves one, decay."""
    s = config.lr_scheduler
    return LRSchedulersContainer.Config(
        warmup_steps=s.warmup_steps,
        total_steps=s.total_steps,
        decay_ratio=s.decay_ratio,
        decay_type=s.decay_type,
        min_lr_factor=s.min_lr_factor,
    ).build(optimizers=optimizers, training_steps=config.training.steps)


def apply_hyperparameters(
    config: Config, optimizers: OptimizersContainer, lr_schedulers: LRSchedulersContainer
) -> None:
    """After loading a checkpoint: the configuration decides, not the values that were saved with the optimizer state,
    so that a run can be extended or continued with another schedule, and its first step already has the right rate."""
    decays = (0.0, config.optimizer.weight_decay)  # every stage of a pipeline has norms
    for optimizer, scheduler in zip(optimizers, lr_schedulers, strict=True):
        if isinstance(optimizer, Muon):
            settings = [_muon_settings(config)]
        else:
            settings = [_adamw_settings(config, decay) for decay, _ in zip(decays, optimizer.param_groups)]
        rates = zip(scheduler.get_last_lr(), scheduler.base_lrs, strict=True)
        for group, values, (lr, base_lr) in zip(optimizer.param_groups, settings, rates, strict=True):
            group.update(values | {"lr": lr, "initial_lr": base_lr})
