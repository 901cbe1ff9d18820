"""Balancing the experts: the bias, the auxiliary losses, and forced routing for benchmarks.

The bias (auxiliary-loss-free balancing, arXiv 2408.15664): before each optimizer step b_e += u sign(mean - c_e), where
c_e is how many tokens of the step, over all ranks and microbatches, the router sent to expert e. b is added to the
scores only to choose experts. Counts are integers from the router's own ids: dropped copies count, padding rows do not,
evaluation and recompute do not (`FusedMoE` sees to that), and a step that the guard skips moves no bias.

The sequence-wise loss (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), for one sequence of L tokens:

    f_e = E / (K L) * |{t: e in the top-k of t}|      P_e = 1/L sum_t s_te / sum_j s_tj      loss = sum_e f_e P_e

with the choice the router really made, groups and bias included. The z-loss (arXiv 2202.08906) is the mean over a
sequence's tokens of logsumexp(logits)^2. Both are summed over the sequences here and divided by the number of sequences
in the whole step, of all ranks and microbatches, so that neither value nor gradient depends on how a step is cut.
Ranks that hold parts of the same sequences (context parallelism, tensor parallelism with EP) add up f, which needs no
gradient, and each contributes its tokens' share of P. Ranks that route the same tokens (tensor parallelism without EP)
compute the same loss, and each contributes an equal share of the gradient, which is summed over them.

They enter the gradient where they arise (`with_loss`), as if they had been added to the training loss: that works
because the loss of each microbatch is its share of the step's mean and `backward()` starts from 1.

Shape letters: B batch, L sequence, T tokens, E experts, K top-k, G expert groups, M groups that a token uses, n = E/G
experts of a group.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.distributed import ParallelDims

from titan_moe.moe.health import Health
from titan_moe.torch_helpers import local

if TYPE_CHECKING:
    from titan_moe.moe.layer import FusedMoE


class SequenceRanks(NamedTuple):
    """How the ranks share a sequence: `groups`, one after the other, span those that hold different tokens of it;
    `copies` ranks each hold the same ones."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    copies: int = 1

    @classmethod
    def of(cls, parallel_dims: ParallelDims) -> "SequenceRanks":
        cp_mesh, tp_mesh = parallel_dims.get_optional_mesh("cp"), parallel_dims.get_optional_mesh("tp")
        if parallel_dims.ep == 1:
            return cls(() if cp_mesh is None else (cp_mesh.get_group(),), parallel_dims.tp)
        return cls(tuple(mesh.get_group() for mesh in (cp_mesh, tp_mesh) if mesh is not None))

    @property
    def parts(self) -> int:
        return math.prod(group.size() for group in self.groups)


WHOLE = SequenceRanks()
"""Each rank has whole sequences of its own"""


def sequence_loss(scores_BLE: Tensor, ids_BLK: Tensor, ranks: SequenceRanks = WHOLE) -> Tensor:
    """Sum over the sequences of this rank's share of the sequence-wise loss, before its coefficient. `scores_BLE` are
    all of the router's scores of this rank's tokens, `ids_BLK` its choice."""
    B, tokens, E = scores_BLE.shape
    L = tokens * ranks.parts
    K = ids_BLK.shape[-1]
    ids = ids_BLK.detach().reshape(B, tokens * K)
    counts_BE = scores_BLE.new_zeros(B, E).scatter_add_(1, ids, scores_BLE.new_ones(B, tokens * K))
    for group in ranks.groups:
        dist.all_reduce(counts_BE, group=group)
    f_BE = counts_BE * (E / (K * L))
    # No epsilon in the sum: it would reward a sigmoid router for making all scores small.
    tiny = torch.finfo(scores_BLE.dtype).tiny
    p_BE = (scores_BLE / scores_BLE.sum(-1, keepdim=True).clamp(min=tiny)).sum(1) / L
    return (f_BE * p_BE).sum()


def z_loss(logits_BLE: Tensor, ranks: SequenceRanks = WHOLE) -> Tensor:
    """Sum over the sequences of this rank's share of the mean squared logsumexp."""
    return torch.logsumexp(logits_BLE, dim=-1).square().mean(1).sum() / ranks.parts


def with_loss(x: Tensor, loss: Tensor, ranks: SequenceRanks = WHOLE) -> Tensor:
    """x, whose backward also adds the gradient of `loss`, summed over the ranks."""
    return _WithLoss.apply(x, loss, 1 / ranks.copies)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, share):
        ctx.like = loss.new_full((), share)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, ctx.like, None


def balanced_random_ids(tokens: int, top_k: int, num_experts: int, groups: int, kept: int, *, device) -> Tensor:
    """Random ids [T, K], as even as whole numbers allow, that respect group-limited routing: a token's K experts lie in
    `kept` of the `groups` groups.

    Tokens in random order take the next `kept` groups of a random cycle of groups, and from each the next experts of
    a random cycle of its experts.
    """
    n, order_T = num_experts // groups, torch.randperm(tokens, device=device)
    slot_TM = torch.arange(tokens * kept, device=device).view(tokens, kept)
    group_TM = torch.randperm(groups, device=device)[slot_TM % groups]
    # K experts over the token's groups; who gets one more than the others changes with each turn of the cycle.
    turn_T1 = slot_TM[:, :1] // groups
    more_TM = (torch.arange(kept, device=device) + turn_T1) % kept < top_k % kept
    share_TM = top_k // kept + more_TM.long()
    # How many experts of its group the slots before this one took: slots of one group are `groups` apart.
    turns = torch.nn.functional.pad(share_TM.flatten(), (0, -tokens * kept % groups)).view(-1, groups)
    taken_TM = (turns.cumsum(0) - turns).flatten()[: tokens * kept].view(tokens, kept)
    end_TM = share_TM.cumsum(1)
    k_TK = torch.arange(top_k, device=device).expand(tokens, top_k).contiguous()
    m_TK = torch.searchsorted(end_TM, k_TK, right=True)
    group_TK = group_TM.gather(1, m_TK)
    place_TK = (taken_TM - end_TM + share_TM).gather(1, m_TK) + k_TK
    ids_TK = group_TK * n + torch.rand(groups, n, device=device).argsort(1)[group_TK, place_TK % n]
    return torch.empty_like(ids_TK).index_copy_(0, order_T, ids_TK)


class LoadBalancer:
    """Moves the biases of all MoE layers, multi-token prediction's included, and hands the step's numbers to `health`.

    One instance per run; `step` is the optimizer's pre-step hook. All ranks must call it.

    Arguments:
        layers: the MoE layers by name.
        groups: process groups whose ranks see different tokens: of the loss mesh; with EP under TP, of TP as well.
        pp_group: process group of the pipeline, whose ranks have other layers; they share only statistics.
        centred: torchtitan's variant, which also takes the mean off the change of the bias.
    """

    def __init__(
        self,
        layers: dict[str, "FusedMoE"],
        groups: list[dist.ProcessGroup],
        pp_group: dist.ProcessGroup | None = None,
        centred: bool = False,
    ) -> None:
        self.layers, self.groups, self.centred = layers, groups, centred
        self.health = Health(layers, groups, pp_group)

    @torch.no_grad()
    def step(self, optimizer: Any = None, args: tuple = (), kwargs: dict[str, Any] | None = None) -> None:
        """`kwargs` of the optimizer's step may have `skip`, a scalar on the device: 1 to leave the biases alone."""
        if not self.layers:
            return
        skip = (kwargs or {}).get("skip")
        layers = self.layers.values()
        counts = torch.stack([local(moe.tokens_per_expert_E) for moe in layers])
        zero = counts.new_zeros(())
        dropped = torch.stack([zero if (d := moe.routed_experts.dropped) is None else d for moe in layers])
        counts = torch.cat([counts, dropped[:, None]], dim=1)
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        load_NE, dropped_N = counts[:, :-1], counts[:, -1]
        for moe, load_E in zip(layers, load_NE):
            if moe.load_balance_coeff is not None and moe.expert_bias_E is not None:
                # In whole numbers: E c < sum(c) is exact where a float mean of large counts is not.
                sign_E = torch.sign(load_E.sum() - load_E * load_E.numel()).float()
                delta_E = moe.load_balance_coeff * (sign_E - sign_E.mean() if self.centred else sign_E)
                if skip is not None:
                    delta_E = torch.where(skip.bool(), 0, delta_E)
                local(moe.expert_bias_E).add_(delta_E)  # in place: the checkpoint holds this very tensor
        none_2 = torch.zeros(2, dtype=torch.float64, device=counts.device)
        decisions_N2 = torch.stack([none_2 if moe.decisions_2 is None else moe.decisions_2 for moe in layers])
        self.health.observe(load_NE, dropped_N, torch.cat([self.discard()[:, None], decisions_N2], dim=1), skip)

    def discard(self) -> Tensor:
        """Forget what was collected since the last step. Returns this rank's auxiliary losses, by layer."""
        return torch.stack([moe.forget() for moe in self.layers.values()])
