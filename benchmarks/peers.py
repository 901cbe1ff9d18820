"""The routed experts of one rank as others compute them, and routing to compare on.

Every peer takes what torchtitan's RoutedExperts takes, x [1, T, D], scores and ids [1, T, K], counts [E], on the same
weights in bf16: torchtitan's stock class; the experts of transformers' DeepseekV3MoE, by its loop and by its grouped
GEMM; a plain loop over experts.

Shape letters: T tokens, D model width, F expert hidden width, E experts, K top-k.
"""

from typing import NamedTuple

import titan_moe.runtime  # noqa: F401

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from titan_moe.moe.layer import fuse
from titan_moe.moe.region import FusedRoutedExperts


class Shape(NamedTuple):
    T: int
    D: int
    F: int
    E: int
    K: int

    def __str__(self) -> str:
        return f"T {self.T} D {self.D} F {self.F} E {self.E} K {self.K}"


class PlainLoop(nn.Module):
    """What one would write first: for each expert its tokens, three products, and a weighted sum."""

    def __init__(self, stock: RoutedExperts) -> None:
        super().__init__()
        self.experts = stock.inner_experts

    def forward(self, x_BLD: Tensor, scores_BLK: Tensor, ids_BLK: Tensor, counts_E: Tensor) -> Tensor:
        x_TD, ids_TK, scores_TK = x_BLD.flatten(0, 1), ids_BLK.flatten(0, 1), scores_BLK.flatten(0, 1)
        out_TD = torch.zeros_like(x_TD)
        w = self.experts
        for e in range(len(w.w1_EFD)):
            token, k = torch.where(ids_TK == e)
            x = x_TD[token]
            h = F.silu(x @ w.w1_EFD[e].T) * (x @ w.w3_EFD[e].T)
            y = (h @ w.w2_EDF[e].T) * scores_TK[token, k, None]
            out_TD = out_TD.index_add(0, token, y.to(out_TD.dtype))
        return out_TD.view_as(x_BLD)


class Transformers(nn.Module):
    """The experts of its DeepseekV3MoE, on the routing that is given."""

    def __init__(self, stock: RoutedExperts, implementation: str) -> None:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

        super().__init__()
        w = stock.inner_experts
        E, hidden, D = w.w1_EFD.shape
        config = DeepseekV3Config(
            hidden_size=D, moe_intermediate_size=hidden, n_routed_experts=E, experts_implementation=implementation
        )
        self.experts = DeepseekV3Experts(config).to(w.w1_EFD)
        with torch.no_grad():
            self.experts.gate_up_proj.copy_(torch.cat([w.w1_EFD, w.w3_EFD], dim=1))
            self.experts.down_proj.copy_(w.w2_EDF)

    def forward(self, x_BLD: Tensor, scores_BLK: Tensor, ids_BLK: Tensor, counts_E: Tensor) -> Tensor:
        return self.experts(x_BLD.flatten(0, 1), ids_BLK.flatten(0, 1), scores_BLK.flatten(0, 1)).view_as(x_BLD)


def stock_config(s: Shape, local_experts: int | None = None) -> MoE.Config:
    """torchtitan's MoE node; `local_experts` of a rank, if not all."""
    experts = GroupedExperts.Config(dim=s.D, hidden_dim=s.F, num_experts=local_experts or s.E)
    return MoE.Config(
        num_experts=s.E,
        routed_experts=RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=LocalTokenDispatcher.Config(num_experts=s.E, top_k=s.K)
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=s.E, gate=Linear.Config(in_features=s.D, out_features=s.E), top_k=s.K
        ),
    )


def build(s: Shape, device: str = "cpu") -> tuple[RoutedExperts, FusedRoutedExperts]:
    """torchtitan's and ours, with the same weights."""
    config = stock_config(s)
    with torch.device(device):
        stock = config.routed_experts.build().to(torch.bfloat16)
        ours = fuse(config).routed_experts.build().to(torch.bfloat16)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.02)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def peers(stock: RoutedExperts) -> dict[str, nn.Module]:
    """By name, all but torchtitan's and ours."""
    return {
        "plain loop": PlainLoop(stock),
        "transformers, eager": Transformers(stock, "eager"),
        "transformers, grouped_mm": Transformers(stock, "grouped_mm"),
    }


def even(s: Shape, device: str) -> Tensor:
    """Each expert has as many tokens as any other, one more at most, and so again in the next draw."""
    start_T = torch.randperm(s.T, device=device) * s.K
    return (start_T[:, None] + torch.arange(s.K, device=device)) % s.E


def balanced(s: Shape, device: str) -> Tensor:
    """All experts are equally popular; how many tokens each has is chance."""
    return torch.rand(s.T, s.E, device=device).topk(s.K, dim=-1).indices


def natural(s: Shape, device: str) -> Tensor:
    """Sigmoid scores, some experts more popular than others, as a router has them that biases hold together."""
    logits_TE = torch.randn(s.T, s.E, device=device) + 0.5 * torch.randn(s.E, device=device)
    return logits_TE.topk(s.K, dim=-1).indices


def skewed(s: Shape, device: str) -> Tensor:
    """The i-th most popular expert is drawn with odds of 1/i."""
    popularity_E = -torch.arange(1, s.E + 1, device=device).float().log()[torch.randperm(s.E, device=device)]
    noise_TE = -torch.empty(s.T, s.E, device=device).exponential_().log()
    return (popularity_E + noise_TE).topk(s.K, dim=-1).indices


ROUTING = {"natural": natural, "balanced": balanced, "skewed": skewed, "even": even}


def draw(s: Shape, routing: str = "natural", device: str = "cpu") -> tuple[Tensor, ...]:
    """Tokens, scores, ids, counts as RoutedExperts takes them; tokens and scores are leaves."""
    ids_TK = ROUTING[routing](s, device)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=s.E)
    x_BLD = torch.randn(1, s.T, s.D, device=device).bfloat16().requires_grad_()
    return x_BLD, torch.rand(1, s.T, s.K, device=device).requires_grad_(), ids_TK[None], counts_E
