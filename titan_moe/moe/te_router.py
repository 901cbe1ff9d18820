"""The router's choice by Transformer Engine (TE): score, bias, groups, top-k, weights in one kernel instead of a dozen.

What the kernel computes, for the logits l of one token:

    s = sigmoid(l), or softmax(l)
    choose the K experts of largest s + bias, among those of the best groups
    w = scale * s[chosen], divided by its sum as te_router_check.py says

The logits are fp32. With bf16 ones the weights, from which TE takes the bias off again, would be off by the rounding of
s + bias.

It is one op, because a kernel called from Python is not an op that activation checkpointing can keep, and a second
choice could fall differently on ties. TE's own backward belongs to weights of all experts, [T, E], of which K are not
zero; ours is that of the K weights, computed once more by torch.

Shape letters: B batch, L sequence, T = B*L tokens, E experts, K top-k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_moe.moe import te
from titan_moe.moe.router import Router

EPSILON = 1e-20  # TE's and ours, under a sum of scores


class TERouter(Router):
    """Our router with TE's choice. Raises ValueError where TE cannot run."""

    @dataclass(kw_only=True, slots=True)
    class Config(Router.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        if (problem := te.problem(te.facts())) is not None:
            raise ValueError(f'moe.router = "te": {problem}; or choose "torch"')

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits_BLE = self.gate(x_BLD)
        weights_TK, ids_TK = torch.ops.titan_moe.te_route(
            logits_BLE.flatten(0, 1).contiguous(),
            expert_bias_E,
            self.top_k,
            self.num_expert_groups,
            self.num_limited_groups if self.num_expert_groups is not None else None,
            self.score_func,
            self.route_norm,
            self.route_scale,
        )
        scores_BLE = logits_BLE.sigmoid() if self.score_func == "sigmoid" else logits_BLE.softmax(-1)
        B, L, _ = logits_BLE.shape
        return weights_TK.view(B, L, -1), ids_TK.view(B, L, -1), scores_BLE


@torch.library.custom_op("titan_moe::te_route", mutates_args=())
def _te_route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    groups: int | None,
    limited: int | None,
    score_func: str,
    normalizes: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Weights and expert ids of each token, [T, K]."""
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    ids_TK = torch.empty(len(logits_TE), top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TE, _ = fused_topk_with_score_function(
        logits_TE.detach(),
        top_k,
        use_pre_softmax=score_func == "softmax" and not normalizes,
        num_groups=groups,
        group_topk=limited,
        scaling_factor=scale,
        score_function=score_func,
        expert_bias=bias_E,
        topk_indices=ids_TK,
    )
    return weights_TE.gather(1, ids_TK), ids_TK


@_te_route.register_fake
def _(logits_TE, bias_E, top_k, groups, limited, score_func, normalizes, scale):
    shape = (logits_TE.shape[0], top_k)
    return logits_TE.new_empty(shape), logits_TE.new_empty(shape, dtype=torch.int64)


def _setup(ctx, inputs, output):
    logits_TE, *_, score_func, normalizes, scale = inputs
    _, ids_TK = output
    ctx.mark_non_differentiable(ids_TK)
    ctx.save_for_backward(logits_TE, ids_TK)
    ctx.how = (score_func, normalizes, scale)


def _backward(ctx, grad_TK, _):
    logits_TE, ids_TK = ctx.saved_tensors
    with torch.enable_grad():
        logits_TE = logits_TE.detach().requires_grad_()
        weights_TK = weights_of(logits_TE, ids_TK, *ctx.how)
    return (*torch.autograd.grad(weights_TK, logits_TE, grad_TK), *(None,) * 7)


def weights_of(logits_TE: Tensor, ids_TK: Tensor, score_func: str, normalizes: bool, scale: float) -> Tensor:
    """The weights of chosen experts, [T, K], by torch."""
    if score_func == "sigmoid":
        scores_TK = logits_TE.gather(1, ids_TK).sigmoid()
    else:
        scores_TK = logits_TE.softmax(-1).gather(1, ids_TK)
    if normalizes:
        scores_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + EPSILON)
    return scores_TK * scale


_te_route.register_autograd(_backward, setup_context=_setup)

CHOICE_OP = torch.ops.titan_moe.te_route.default
"""For recompute to keep, as it keeps torch's top-k"""
