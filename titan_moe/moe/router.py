"""torchtitan's router with logits that are fp32 on every device, the z-loss, groups of experts judged as DeepSeek-V2
does too, and forced choices for benchmarks.

Shape letters: B batch, L sequence, T = B*L tokens, D model width, E experts, K top-k, G groups, n = E/G, M groups that
a token may use.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from titan_moe.moe import balance
from titan_moe.rebuild import rebuilt
from titan_moe.torch_helpers import in_backward


class RouterGate(Linear):
    """The router's projection in fp32 (torchtitan asks autocast for it, which a CPU ignores), with the z-loss on its
    logits. `loss` collects the z-loss as FusedMoE's does."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        z_loss_coeff: float = 0.0
        sequences_per_step: int = 1

    def __init__(self, config: Config):
        super().__init__(config)
        self.z_loss_coeff, self.sequences_per_step = config.z_loss_coeff, config.sequences_per_step
        self.loss: Tensor | None = None
        self.sequence_ranks = balance.WHOLE

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        self.sequence_ranks = balance.SequenceRanks.of(parallel_dims)

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(device_type=input.device.type, enabled=False):
            logits_BLE = F.linear(rebuilt(("norms",), torch.Tensor.float, input), self.weight.float())
            if self.z_loss_coeff and self.training:
                loss = balance.z_loss(logits_BLE, self.sequence_ranks) * (self.z_loss_coeff / self.sequences_per_step)
                logits_BLE = balance.with_loss(logits_BLE, loss, self.sequence_ranks)
                self.loss = collect(self.loss, loss)
            return logits_BLE


class Router(TokenChoiceTopKRouter):
    """torchtitan's router. `scores_per_group`: how many of its best scores a group is judged by, which are always 2 in
    torchtitan's. `force_balance` replaces the choice of experts, for benchmarks."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        force_balance: str = "none"
        scores_per_group: int = 2

    gate: RouterGate

    def __init__(self, config: Config):
        super().__init__(config)
        self.force_balance, self.scores_per_group = config.force_balance, config.scores_per_group
        self._debug_force_load_balance = self._debug_force_load_balance or config.force_balance != "none"

    def _get_node_limited_routing_scores(self, scores_for_choice_BLE: Tensor) -> Tensor:
        """The scores, those of groups that a token may not use replaced by -inf."""
        assert self.num_expert_groups is not None and self.num_limited_groups is not None
        scores_BLGn = scores_for_choice_BLE.unflatten(-1, (self.num_expert_groups, -1))
        best_BLG = scores_BLGn.topk(self.scores_per_group, dim=-1).values.sum(-1)
        kept_BLM = best_BLG.topk(self.num_limited_groups, dim=-1, sorted=False).indices
        left_out_BLG = torch.ones_like(best_BLG, dtype=torch.bool).scatter_(-1, kept_BLM, False)
        return scores_BLGn.masked_fill(left_out_BLG[..., None], -torch.inf).flatten(-2)

    def _debug_force_load_balance_routing(self, scores_BLE: Tensor) -> tuple[Tensor, Tensor]:
        if self.force_balance != "balanced_random":
            return super()._debug_force_load_balance_routing(scores_BLE)
        B, L, E = scores_BLE.shape
        groups, kept = self.num_expert_groups or 1, self.num_limited_groups or 1
        ids_TK = balance.balanced_random_ids(B * L, self.top_k, E, groups, kept, device=scores_BLE.device)
        ids_BLK = ids_TK.view(B, L, self.top_k)
        return ids_BLK, scores_BLE.gather(-1, ids_BLK)


def collect(total: Tensor | None, loss: Tensor) -> Tensor | None:
    """`total` plus a training forward's `loss`, counted once under recompute."""
    if in_backward():
        return total
    return loss.detach() if total is None else total + loss.detach()
