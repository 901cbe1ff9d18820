"""Activation checkpointing: what backward recomputes instead of keeping.

It repeats a block's forward inside backward, and token dispatch is what must not be repeated: the plan costs a host
sync and an exchange of counts, the rows cost the wire. Both are ops (moe/dispatch.py), so that torchtitan's policies,
which save by op, can keep what they return; recompute stops early, before combine, because nothing after it is needed
again. `moe.redispatch` trades the kept rows back for traffic; the plan stays kept.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import titan_moe.runtime  # noqa: F401

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from titan_moe.config import Config
from titan_moe.moe.dispatch import PLAN_OPS


def checkpointing(config: Config) -> FullAC.Config | SelectiveAC.Config | None:
    """torchtitan's activation checkpointing config for `activation_checkpoint.mode`; None: nothing is recomputed."""
    redispatch = config.moe.redispatch
    return {
        "none": None,
        "selective": SelectiveCheckpointing.Config(redispatch=redispatch),
        "full": FullCheckpointing.Config(redispatch=redispatch),
    }[config.activation_checkpoint.mode]


def kept_ops(redispatch: bool) -> set:
    """What no recompute repeats: the router's choice, which could fall differently on ties, the plan, the rows."""
    return {
        torch.ops.aten.topk.default,
        *PLAN_OPS,
        *(() if redispatch else (torch.ops.titan_moe.dispatch_rows.default,)),
    }


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's selective recompute, which also keeps `kept_ops` and stops when it has all that it needs."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        redispatch: bool = False

    def get_save_ops(self) -> set:
        return super().get_save_ops() | kept_ops(cast("SelectiveCheckpointing.Config", self.config).redispatch)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped = super()._wrap_block(module, base_fqn=base_fqn)
        assert isinstance(wrapped, CheckpointWrapper)
        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, early_stop=True)
        return wrapped


class FullCheckpointing(FullAC):
    """Recompute of whole blocks except for `kept_ops`, until it has all that it needs."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        redispatch: bool = False

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        ops = list(kept_ops(cast("FullCheckpointing.Config", self.config).redispatch))
        return checkpoint_wrapper(
            module,
            context_fn=partial(create_selective_checkpoint_contexts, ops),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=True,
            debug=self.config.debug,
        )
