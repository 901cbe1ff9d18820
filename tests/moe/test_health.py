"""The routers' numbers against NumPy, recounted from the ids and scores that the routers gave; what must not move them;
and the sampling floor against simulations."""

import titan_moe.runtime  # noqa: F401

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.moe.test_balance import Layer
from tests.moe.test_layer import layers, tokens
from tests.sync_free import fake_group, sync_free
from titan_moe.guards import discard
from titan_moe.moe import health
from titan_moe.moe.balance import LoadBalancer
from titan_moe.moe.health import DEAD_AFTER, PARTS, maxvio_floor


class Watched:
    """A small FusedMoE and what its router said in each forward."""

    def __init__(self) -> None:
        _, self.layer = layers(torch.float32)
        self.balancer = LoadBalancer({"layers.1": self.layer}, [])
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.layer.router.register_forward_hook(lambda _, args, out: self.seen.append((out[1], out[2].detach())))

    def told(self, done: float = 0.0) -> dict:
        self.balancer.step()
        return self.balancer.health.statistics(done)


def recount(seen: list[tuple[torch.Tensor, torch.Tensor]]) -> dict:
    """In float64, one token after the other."""
    scores = np.concatenate([s.double().numpy().reshape(-1, s.shape[-1]) for _, s in seen])
    ids = np.concatenate([ids.numpy().reshape(-1, ids.shape[-1]) for ids, _ in seen])
    load = [int((ids == e).sum()) for e in range(scores.shape[-1])]
    entropies, largest = [], []
    for row in scores:
        p = row / row.sum()
        entropies.append(-sum(x * np.log(x) for x in p if x > 0) / np.log(len(p)))
        largest.append(p.max())
    mean = sum(load) / len(load)
    return {
        "moe_load": load,
        "moe_max/mean": pytest.approx(max(load) / mean, rel=1e-12),
        "moe_maxvio": pytest.approx((max(load) - mean) / mean, rel=1e-12),
        "moe_dead": load.count(0),
        "moe_entropy": pytest.approx(float(np.mean(entropies)), rel=1e-6),
        "moe_confidence": pytest.approx(float(np.mean(largest)), rel=1e-6),
    }


def of_layer(told: dict) -> dict:
    return {key.removesuffix(".layers.1"): value for key, value in told.items() if key.endswith(".layers.1")}


def test_numbers_equal_a_recount_over_accumulated_microbatches():
    watched = Watched()
    for seed in range(3):
        torch.manual_seed(seed)
        watched.layer(torch.randn_like(tokens(torch.float32)))
    told = watched.told()
    expected = recount(watched.seen)
    assert {key: of_layer(told)[key] for key in expected} == expected
    assert sum(expected["moe_load"]) == 3 * tokens().shape[:2].numel() * watched.layer.router.top_k


@pytest.mark.parametrize("what", ["recompute", "evaluation", "discarded"])
def test_what_does_not_count(what):
    """The same numbers with and without it."""
    watched = Watched()
    x = tokens(torch.float32)
    if what == "recompute":
        checkpoint(watched.layer, x, use_reentrant=False).sum().backward()
        assert len(watched.seen) == 2 and torch.equal(watched.seen[0][0], watched.seen[1][0])
        watched.seen.pop()
    else:
        if what == "evaluation":
            watched.layer.eval()
        watched.layer(-3 * x)
        watched.layer.train()
        if what == "discarded":
            discard([watched.layer])
        watched.seen.clear()
        watched.layer(x)
    expected = recount(watched.seen)
    told = of_layer(watched.told())
    assert {key: told[key] for key in expected} == expected


def test_each_step_tells_its_own_numbers_once():
    watched = Watched()
    for seed in range(2):
        watched.seen.clear()
        torch.manual_seed(seed)
        watched.layer(torch.randn_like(tokens(torch.float32)))
        told = watched.told(done=seed / 10)
        expected = recount(watched.seen)
        del expected["moe_dead"]  # of a window
        assert {key: of_layer(told)[key] for key in expected} == expected
    assert watched.balancer.health.statistics(0.5) == {}


def test_entropy_and_confidence_at_their_ends():
    even, sure = torch.full((1, 2, 8), 0.3), torch.eye(8)[None, :2]
    assert health.decisions(even).tolist() == pytest.approx([2.0, 0.25])
    assert health.decisions(sure).tolist() == pytest.approx([0.0, 2.0])
    assert health.decisions(even * 1e-30).tolist() == pytest.approx([2.0, 0.25], rel=1e-5)
    assert health.decisions(torch.zeros(1, 1, 8)).isfinite().all(), "a router whose scores all underflowed"


def test_a_step_that_is_not_logged_does_not_wait_for_the_device():
    with fake_group(2) as group, sync_free():
        layer = Layer(8)
        layer.tokens_per_expert_E, layer.expert_bias_E = (
            torch.zeros(8, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.float32)
        )
        layer.forget = lambda: torch.zeros((), device="cuda")
        balancer = LoadBalancer({"layers.1": layer}, [group])
        for _ in range(2):
            layer.decisions_2 = health.decisions(torch.rand(1, 16, 8, device="cuda"))
            balancer.step(kwargs={"skip": torch.zeros((), device="cuda")})
        assert balancer.health.sums_N3.shape == (1, 3) and balancer.health.sums_N3.device.type == "cuda"


# ---------------------------------------------------------------------------------------------------------------------
# Several layers, and steps


def balancer_of(*loads: list[int]) -> tuple[LoadBalancer, list[Layer]]:
    found = [Layer(len(load)) for load in loads]
    return LoadBalancer(dict(zip(("layers.1", "mtp_layers.0"), found)), []), found


def step(balancer: LoadBalancer, layers: list[Layer], *loads: list[int], skip: bool = False) -> None:
    for layer, load in zip(layers, loads):
        layer.tokens_per_expert_E += torch.tensor(load)
    balancer.step(kwargs={"skip": torch.tensor(float(skip))})


def test_layers_come_to_the_worst_the_sum_or_the_mean():
    balancer, found = balancer_of([3, 1], [2, 2])
    found[1].expert_bias_E = None
    found[0].routed_experts.dropped = torch.tensor(1)
    found[0].decisions_2 = torch.tensor([2.0, 3.0], dtype=torch.float64)
    step(balancer, found, [3, 1], [2, 2])
    floor = maxvio_floor(4, 1, 2)
    assert balancer.health.statistics(0.0) == {
        "moe_max/mean": 1.5,
        "moe_maxvio": 0.5,
        "moe_maxvio_floor": floor,
        "moe_dead": 0,
        "moe_entropy": 0.25,
        "moe_confidence": 0.375,
        "moe_bias_min": pytest.approx(-1e-3),
        "moe_bias_max": pytest.approx(1e-3),
        "moe_dropped": 0.125,
        "moe_aux_loss": 0.5,
        "moe_load.layers.1": [3, 1],
        "moe_max/mean.layers.1": 1.5,
        "moe_maxvio.layers.1": 0.5,
        "moe_maxvio_floor.layers.1": floor,
        "moe_dead.layers.1": 0,
        "moe_entropy.layers.1": 0.5,
        "moe_confidence.layers.1": 0.75,
        "moe_bias_min.layers.1": pytest.approx(-1e-3),
        "moe_bias_max.layers.1": pytest.approx(1e-3),
        "moe_dropped.layers.1": 0.25,
        "moe_aux_loss.layers.1": 0.25,
        "moe_load.mtp_layers.0": [2, 2],
        "moe_max/mean.mtp_layers.0": 1.0,
        "moe_maxvio.mtp_layers.0": 0.0,
        "moe_maxvio_floor.mtp_layers.0": floor,
        "moe_dead.mtp_layers.0": 0,
        "moe_entropy.mtp_layers.0": 0.0,
        "moe_confidence.mtp_layers.0": 0.0,
        "moe_dropped.mtp_layers.0": 0.0,
        "moe_aux_loss.mtp_layers.0": 0.25,
    }


def test_a_run_tells_its_layers_once_in_each_part():
    balancer, found = balancer_of([1, 1])
    steps, told = 20 * PARTS, []
    for number in range(10, steps + 1, 10):
        step(balancer, found, [1, 1])
        numbers = balancer.health.statistics(number / steps)
        assert "moe_max/mean" in numbers
        told += [number] if "moe_load.layers.1" in numbers else []
    assert told == [10, *range(20, steps + 1, 20)], "the first line, and the first of each part"


def test_dead_experts_are_those_without_a_token_in_the_window():
    """Expert 1 dies after step 5, comes back for one step, and a skipped step neither ages it nor wakes it."""

    def dead() -> int:
        return balancer.health.statistics(0.0)["moe_dead"]

    balancer, found = balancer_of([1, 0, 0])
    step(balancer, found, [3, 0, 1], skip=True)
    assert dead() == 0, "no step has been seen"
    step(balancer, found, [3, 0, 1])
    assert dead() == 1, "none since the start"
    step(balancer, found, [3, 1, 0])
    assert dead() == 0
    for _ in range(DEAD_AFTER - 1):
        step(balancer, found, [3, 0, 1])
    assert dead() == 0
    step(balancer, found, [3, 5, 1], skip=True)
    step(balancer, found, [3, 0, 1], skip=True)
    assert dead() == 0
    step(balancer, found, [3, 0, 1])
    assert dead() == 1
    step(balancer, found, [3, 1, 1])
    assert dead() == 0


# ---------------------------------------------------------------------------------------------------------------------
# The floor


@pytest.mark.parametrize(
    ("T", "K", "E", "rounds"),
    [(64, 1, 64, 4000), (64, 2, 8, 4000), (32, 8, 256, 2000), (500, 1, 2, 4000), (1024, 8, 64, 400), (128, 7, 8, 2000)],
)
def test_the_floor_is_what_uniform_routing_shows(T, K, E, rounds):
    """Simulated: each token draws K different experts. Within 3 % and three standard errors."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(rounds):
        ids = rng.random((T, E)).argpartition(K - 1, axis=1)[:, :K]
        load = np.bincount(ids.ravel(), minlength=E)
        found.append(load.max() / load.mean() - 1)
    error = 3 * np.std(found) / np.sqrt(rounds)
    assert maxvio_floor(T, K, E) == pytest.approx(np.mean(found), rel=0.03, abs=error)


def test_the_floor_of_everyone_and_of_nobody():
    assert maxvio_floor(100, 8, 8) == maxvio_floor(0, 2, 8) == 0
    assert maxvio_floor(4 * 10**6, 8, 256) == pytest.approx(maxvio_floor(10**6, 8, 256) / 2, rel=0.01)
