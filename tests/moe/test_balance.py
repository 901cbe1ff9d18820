"""Load balancing against NumPy, and on a toy router."""

import titan_moe.runtime  # noqa: F401

import numpy as np
import pytest
import torch
from torch import nn

from titan_moe.moe import balance
from titan_moe.moe.balance import LoadBalancer
from titan_moe.moe.layout import expert_counts


class Layer(nn.Module):
    """What LoadBalancer sees of a FusedMoE."""

    def __init__(self, experts: int, coeff: float | None = 1e-3) -> None:
        super().__init__()
        self.tokens_per_expert_E = torch.zeros(experts, dtype=torch.int64)
        self.decisions_2 = None
        self.router = nn.Module()
        self.router.top_k = 1
        self.expert_bias_E = None if coeff is None else torch.zeros(experts)
        self.load_balance_coeff = coeff
        self.routed_experts = nn.Module()
        self.routed_experts.dropped = None

    def forget(self) -> torch.Tensor:
        self.tokens_per_expert_E.zero_()
        self.decisions_2 = None
        self.routed_experts.dropped = None
        return torch.tensor(0.25)


def sequence_loss_numpy(scores_BLE: np.ndarray, ids_BLK: np.ndarray) -> float:
    """Eq. 17-20 of the DeepSeek-V3 report, one sequence after the other."""
    total = 0.0
    B, L, E = scores_BLE.shape
    K = ids_BLK.shape[-1]
    for b in range(B):
        for e in range(E):
            f = E / (K * L) * sum(e in ids_BLK[b, t] for t in range(L))
            p = sum(scores_BLE[b, t, e] / scores_BLE[b, t].sum() for t in range(L)) / L
            total += f * p
    return total


def routing(B=3, L=7, E=8, K=3, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.sigmoid(torch.randn(B, L, E, generator=generator, dtype=torch.float64))
    return scores, (scores + torch.rand(E, generator=generator)).topk(K, dim=-1).indices


def test_sequence_loss_equals_numpys():
    scores, ids = routing()
    expected = sequence_loss_numpy(scores.numpy(), ids.numpy())
    assert balance.sequence_loss(scores, ids).item() == pytest.approx(expected, rel=1e-12)


def test_sequence_loss_of_an_even_load_is_one_and_ignores_the_scores_scale():
    scores = torch.full((1, 8, 8), 0.3, dtype=torch.float64)
    ids = torch.arange(8 * 2).view(1, 8, 2) % 8
    assert balance.sequence_loss(scores, ids).item() == pytest.approx(1.0, rel=1e-12)
    scores, ids = routing()
    whole, small = balance.sequence_loss(scores, ids), balance.sequence_loss(scores * 1e-9, ids)
    assert whole.item() == pytest.approx(small.item(), rel=1e-9), "a router could lower the loss by small scores"


@pytest.mark.parametrize("loss", [balance.sequence_loss, lambda scores, ids: balance.z_loss(scores)])
def test_losses_do_not_depend_on_how_a_batch_is_cut(loss):
    scores, ids = routing(B=4)
    whole = scores.clone().requires_grad_()
    loss(whole, ids).backward()
    pieces = scores.clone().requires_grad_()
    for rows in (slice(0, 1), slice(1, 4)):
        loss(pieces[rows], ids[rows]).backward()
    torch.testing.assert_close(pieces.grad, whole.grad)


def test_with_loss_adds_the_gradient_and_nothing_else():
    x = torch.randn(5, requires_grad=True)
    y = balance.with_loss(x, x.square().sum() * 0.1)
    assert torch.equal(y, x)
    (y * 3).sum().backward()
    torch.testing.assert_close(x.grad, 3 + 0.2 * x.detach())


def test_bias_moves_by_the_sign_of_the_exact_difference():
    """40,001 against 40,000 tokens: bf16 counts would be 256 apart, and a float mean of large counts rounds."""
    layer = Layer(4)
    layer.tokens_per_expert_E += torch.tensor([40_001, 40_000, 40_000, 39_999])
    bias = layer.expert_bias_E
    balancer = LoadBalancer({"layers.1": layer}, [])
    balancer.step()
    assert bias is layer.expert_bias_E, "the checkpoint holds this tensor"
    torch.testing.assert_close(bias, torch.tensor([-1e-3, 0.0, 0.0, 1e-3]))
    assert layer.tokens_per_expert_E.sum() == 0
    assert balancer.health.statistics(0.0)["moe_max/mean"] == pytest.approx(40_001 / 40_000)


def test_centred_bias_keeps_its_mean():
    layer = Layer(4)
    layer.tokens_per_expert_E += torch.tensor([10, 1, 1, 0])
    LoadBalancer({"layers.1": layer}, [], centred=True).step()
    assert layer.expert_bias_E.sum().item() == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(layer.expert_bias_E, 1e-3 * (torch.tensor([-1.0, 1, 1, 1]) - 0.5))


def test_a_skipped_step_forgets_and_moves_nothing():
    layer = Layer(4)
    layer.tokens_per_expert_E += torch.tensor([10, 0, 0, 0])
    LoadBalancer({"layers.1": layer}, []).discard()
    assert layer.expert_bias_E.abs().sum() == 0 and layer.tokens_per_expert_E.sum() == 0


@pytest.mark.parametrize(
    ("tokens", "K", "E", "groups", "kept"),
    [(512, 8, 64, 8, 4), (512, 6, 64, 1, 1), (100, 3, 8, 4, 2), (7, 5, 12, 3, 3), (0, 2, 8, 1, 1), (64, 8, 8, 4, 4)],
)
def test_balanced_random_routing(tokens, K, E, groups, kept):
    ids = balance.balanced_random_ids(tokens, K, E, groups, kept, device="cpu")
    assert ids.shape == (tokens, K)
    assert all(len(set(row)) == K and set(row) <= set(range(E)) for row in ids.tolist())
    assert all(len({e // (E // groups) for e in row}) <= kept for row in ids.tolist())
    load = expert_counts(ids.flatten(), E)
    assert load.max() - load.min() <= 2
    assert tokens < 64 or not torch.equal(ids, balance.balanced_random_ids(tokens, K, E, groups, kept, device="cpu"))


def violation(rate: float, steps: int, tail: int) -> float:
    """Mean over the last `tail` steps of (max - mean) / mean, for a router whose experts differ in popularity."""
    E, K, T = 64, 8, 2048
    generator = torch.Generator().manual_seed(0)
    skew_E = 0.1 * torch.randn(E, generator=generator)
    layer = Layer(E, rate)
    balancer = LoadBalancer({"layers.1": layer}, [])
    found = []
    for step in range(steps):
        scores = torch.sigmoid(torch.randn(T, E, generator=generator) * 0.5 + skew_E)
        ids = (scores + layer.expert_bias_E).topk(K, dim=-1, sorted=False).indices
        layer.tokens_per_expert_E += expert_counts(ids.flatten(), E)
        balancer.step()
        if step >= steps - tail:
            found.append(balancer.health.statistics(0.0)["moe_max/mean"] - 1)
    return sum(found) / len(found)


def test_the_bias_balances_a_skewed_router():
    """1e-3 comes down to what sampling T tokens leaves, 1e-2 keeps swinging above it."""
    E, K, T = 64, 8, 2048
    loads = [expert_counts(torch.rand(T, E).topk(K, dim=-1).indices.flatten(), E) for _ in range(20)]
    floor = float(np.mean([load.max() / (T * K / E) - 1 for load in loads]))
    unbalanced, slow, fast = violation(0.0, 20, 20), violation(1e-3, 250, 50), violation(1e-2, 250, 50)
    assert slow < 1.5 * floor < fast < unbalanced, (floor, slow, fast, unbalanced)
