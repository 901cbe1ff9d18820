"""Activation checkpointing: what backward recomputes instead of keeping.

Modes "selective" and "full" repeat a block's forward inside backward, and token dispatch is what must not be repeated:
the plan costs a host sync and an exchange of counts, the rows cost the wire. Both are ops (moe/dispatch.py), so that
torchtitan's policies, which save by op, can keep what they return; recompute stops early, before combine, because
nothing after it is needed again. `moe.redispatch` trades the kept rows back for traffic; the plan stays kept.

With mode "none", `recompute` names parts of a block whose activations are made again one by one (block.py, rebuild.py).

What they keep goes through saved_tensors_hooks around the block, so that it can be offloaded (offload.py).

All of them go for every block: the layers and those of multi-token prediction, which torchtitan's loop leaves out.

Pipeline schedules that split backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) first ask a block for its
input's gradient, later for its weights', so it is recomputed twice. Two things make that work:

- torch drops a kept result when recompute first uses it, and a second recompute fails ("Trying to backward an extra
  time"). Here kept results stay until the graph goes (`lasting`).
- torch's weight pass calls autograd once for each group of weights, 15 times for one MoE block, and each call would
  recompute the block. They are told that they belong together (`share_recompute`).

No gradient is computed twice either way: each dgrad and wgrad GEMM runs once, recompute only repeats forward.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, cast

import titan_moe.runtime  # noqa: F401

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.pipelining import stage
from torch.utils.checkpoint import GraphExecGroup, create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

from titan_moe.config import Config
from titan_moe.moe.dispatch import PLAN_OPS, RECEIVE_OPS
from titan_moe.moe.region import kept_as_it_is
from titan_moe.moe.te_router import CHOICE_OP
from titan_moe.moe.titan_dispatchers import dispatch_ops
from titan_moe.pipeline_check import SPLIT_BACKWARD
from titan_moe.rebuild import rebuilding


def checkpointing(config: Config) -> Any:
    """torchtitan's activation checkpointing config (one of the classes below) for the section of that name, or None."""
    chosen, p = config.activation_checkpoint, config.parallelism
    splits = p.pipeline_parallel_degree > 1 and p.pipeline_parallel_schedule in SPLIT_BACKWARD
    if chosen.mode == "none":
        parts: list[str] = sorted(set(chosen.recompute))
        return PartsCheckpointing.Config(parts=parts, splits_backward=splits) if parts else None
    mode = {"selective": SelectiveCheckpointing, "full": FullCheckpointing}[chosen.mode]
    return mode.Config(redispatch=config.moe.redispatch, splits_backward=splits)


def kept_ops(redispatch: bool) -> set:
    """What no recompute repeats: the router's choice, which could fall differently on ties, the plan, the rows."""
    return {
        torch.ops.aten.topk.default,
        CHOICE_OP,
        *PLAN_OPS,
        *dispatch_ops(),  # these plan too
        *(() if redispatch else RECEIVE_OPS),
    }


class _EveryBlock(ActivationCheckpointing):
    def apply(self, model: nn.Module) -> None:
        super().apply(model)
        if self.config.splits_backward:  # type: ignore[attr-defined]
            share_recompute()
        for name, block in mtp_blocks(model):
            # An MTP block ends with a norm behind its MoE layer: recompute would have to combine again to get at what
            # it keeps. Out of activation checkpointing's sight that stays as it is, the size of the block's input.
            norm = cast("nn.Module", block.mtp_norm)
            norm.forward = wrapped_in(norm.forward, kept_as_it_is)
            wrapped = self._wrap_block(block, base_fqn=f"mtp_layers.{name}")
            model.get_submodule("mtp_layers").register_module(name, wrapped)


def mtp_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and block of each multi-token prediction layer; of a model without them, nothing."""
    mtp_layers = getattr(model, "mtp_layers", None)
    if mtp_layers is not None:
        yield from list(cast("nn.Module", mtp_layers).named_children())


class SelectiveCheckpointing(_EveryBlock, SelectiveAC):
    """torchtitan's selective recompute, which also keeps `kept_ops` and stops when it has all that it needs."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        redispatch: bool = False
        splits_backward: bool = False

    def get_save_ops(self) -> set:
        return super().get_save_ops() | kept_ops(cast("SelectiveCheckpointing.Config", self.config).redispatch)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        config = cast("SelectiveCheckpointing.Config", self.config)
        wrapped = super()._wrap_block(module, base_fqn=base_fqn)
        assert isinstance(wrapped, CheckpointWrapper)
        changes: dict[str, Any] = {"early_stop": True, "respect_saved_tensors_hooks": True}
        if config.splits_backward:
            changes["context_fn"] = partial(lasting, wrapped.checkpoint_fn.keywords["context_fn"])
        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, **changes)
        return wrapped


class FullCheckpointing(_EveryBlock, FullAC):
    """Recompute of whole blocks except for `kept_ops`, until it has all that it needs."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        redispatch: bool = False
        splits_backward: bool = False

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        config = cast("FullCheckpointing.Config", self.config)
        contexts = partial(create_selective_checkpoint_contexts, list(kept_ops(config.redispatch)))
        return checkpoint_wrapper(
            module,
            context_fn=partial(lasting, contexts) if config.splits_backward else contexts,
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            early_stop=True,
            respect_saved_tensors_hooks=True,
            debug=config.debug,
        )


class PartsCheckpointing(_EveryBlock):
    """Nothing is recomputed but the named parts of each block."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        parts: list[str] = field(default_factory=list)
        splits_backward: bool = False

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        parts = cast("PartsCheckpointing.Config", self.config).parts
        module.forward = wrapped_in(module.forward, partial(rebuilding, parts))
        return module


def wrapped_in(forward: Callable[..., Any], context: Callable[[], Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_in_context(*args, **kwargs):
        with context():
            return forward(*args, **kwargs)

    return forward_in_context


def lasting(contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """The two contexts of a selective checkpoint, whose kept results can be used by more than one backward pass."""
    forward, recompute = contexts()
    forward.storage = recompute.storage = defaultdict(_WrittenOnce)
    return forward, recompute


class _WrittenOnce(dict):
    """Recompute marks a kept result as used by writing over it."""

    def __setitem__(self, key, value) -> None:
        self.setdefault(key, value)


def share_recompute() -> None:
    """Let the autograd calls of one weight pass of a pipeline stage share what the first of them recomputed."""
    stage.stage_backward_weight = _backward_weight


_stage_backward_weight = stage.stage_backward_weight


def _backward_weight(*args, **kwargs):
    with GraphExecGroup():
        return _stage_backward_weight(*args, **kwargs)
