"""What the routers of a run do, in numbers: who gets the tokens, how unevenly, and how sure a router is.

Of the last step, per MoE layer, over all ranks and microbatches (c_e: copies that the router sent to expert e):

    load            c_e, integers from the router's own ids; dropped copies count, they were routed
    max/mean        max_e c_e / mean_e c_e
    MaxVio          max/mean - 1 (arXiv 2408.15664)
    MaxVio's floor  what MaxVio would be in expectation if a router chose uniformly at random (`maxvio_floor`)
    dead            experts without a token in the last 100 steps, or since the start while that is shorter
    entropy         mean over tokens of -sum_e p_e ln p_e / ln E, p = scores / sum(scores): 1 if all are alike, 0 if one
                    has all the score
    confidence      mean over tokens of max_e p_e: between 1/E and 1
    bias            smallest and largest, after the step
    dropped         share of the copies that the drop policy dropped

p comes from the scores without the bias, which only helps to choose. Sigmoid scores are not made to sum to one, so p of
an undecided sigmoid router is flat, and its entropy is near 1 for a good while.

All is summed on the device where it arises: by `FusedMoE`, in training forwards that are not recomputes, which forgets
it when a step is thrown away (`FusedMoE.forget`). Ranks add it up and the host reads it on logged steps only; but the
load is added up in every step, for the bias, and so the window of the dead is counted in every step too. A step that
the guard skips is told like any other, but does not enter that window.

A layer's own numbers, its load above all, are much for each logged line: 58 layers of 256 experts write 160 kB. So a
run is cut into 500 equal parts, and the first line in each has the layers; all lines have what the layers come to.

Shape letters: B batch, L sequence, E experts, N MoE layers of this rank.
"""

import math
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.torch_helpers import local

if TYPE_CHECKING:
    from titan_moe.moe.layer import FusedMoE

DEAD_AFTER = 100
"""Steps without a token"""

PARTS = 500
"""Of a run, of each of which one line has the numbers of every layer: as many columns as a heat map can show"""


@torch.no_grad()
def decisions(scores_BLE: Tensor) -> Tensor:
    """Float64 [2], summed over the tokens: entropy of a token's scores, as a share of ln E, and the largest score's
    share of their sum. The scores are fp32 and not negative."""
    total_BL = scores_BLE.sum(-1).clamp(min=torch.finfo(scores_BLE.dtype).tiny)
    entropy_BL = torch.special.entr(scores_BLE).sum(-1) / total_BL + total_BL.log()  # of s / S, without a tensor of it
    share_BL = scores_BLE.amax(-1) / total_BL
    most = math.log(max(scores_BLE.shape[-1], 2))
    return torch.stack([entropy_BL.sum(dtype=torch.float64) / most, share_BL.sum(dtype=torch.float64)])


@cache
def maxvio_floor(tokens: int, top_k: int, experts: int) -> float:
    """Expected MaxVio if each of `tokens` tokens drew its K of E experts uniformly at random. A balanced router cannot
    be told from it; one below it is evener than chance.

    Each c_e is binomial, T draws with p = K/E, mean m = T p. If they were normal and tied by their sum alone, the
    largest would lie mu_E sqrt((E - K) / ((E - 1) m)) means above the mean, mu_E being the expected maximum of E
    standard normals. Skewness and kurtosis of the binomial enter by the expansion of Cornish and Fisher, which with few
    tokens matters: within 3 % of simulations from one token per expert on.
    """
    mean, p = tokens * top_k / experts, top_k / experts
    if mean == 0 or top_k >= experts:
        return 0.0
    z = torch.linspace(-9, 9, 1801, dtype=torch.float64)
    weight = torch.special.ndtr(z).pow(experts).diff()  # of the largest of E standard normals
    z = (z[1:] + z[:-1]) / 2
    variance = mean * (1 - p)
    skewness, kurtosis = (1 - 2 * p) / math.sqrt(variance), (1 - 6 * p * (1 - p)) / variance
    x = z + skewness / 6 * (z**2 - 1) + kurtosis / 24 * (z**3 - 3 * z) - skewness**2 / 36 * (2 * z**3 - 5 * z)
    return math.sqrt((experts - top_k) / (experts - 1) / mean) * (weight @ x).item()


class Health:
    """Keeps the last step's numbers of this rank's layers on the device, and tells them when asked.

    One per run; all ranks must call its methods together. Arguments as of `LoadBalancer`, which feeds it.
    """

    def __init__(
        self, layers: dict[str, "FusedMoE"], groups: list[dist.ProcessGroup], pp_group: dist.ProcessGroup | None
    ) -> None:
        self.layers, self.groups, self.pp_group = layers, groups, pp_group
        self.load_NE: Tensor | None = None  # int64, over all ranks
        self.dropped_N: Tensor | None = None  # int64, over all ranks
        self.sums_N3: Tensor | None = None  # float64, of this rank: auxiliary losses, `decisions`
        self.idle_NE: Tensor | None = None  # steps since an expert's last token
        self.seen: Tensor | None = None  # steps that the window has seen
        self.part = -1  # of the run, whose layers have been told

    def observe(self, load_NE: Tensor, dropped_N: Tensor, sums_N3: Tensor, skip: Tensor | None) -> None:
        """A step's numbers. `skip`: scalar on the device, 1 if the step was skipped."""
        self.load_NE, self.dropped_N, self.sums_N3 = load_NE, dropped_N, sums_N3
        if self.idle_NE is None or self.seen is None:
            self.idle_NE, self.seen = torch.zeros_like(load_NE), load_NE.new_zeros(())
        one = torch.ones_like(self.seen) if skip is None else 1 - skip.to(torch.int64)
        self.idle_NE = torch.where((load_NE > 0) & (one > 0), 0, self.idle_NE + one)
        self.seen = self.seen + one

    def statistics(self, done: float) -> dict[str, Any]:
        """The last step's numbers: of all layers together and, if this is the first call in a 500th of the run, of each
        layer under NAME.LAYER. `done` is the share of the run that is done. Empty if no step has been observed since
        the last call."""
        layers = self._of_layers()
        if self.pp_group is not None:
            stages: list[Any] = [None] * self.pp_group.size()
            dist.all_gather_object(stages, layers, group=self.pp_group)
            layers = {name: numbers for stage in stages for name, numbers in stage.items()}
        if not layers:
            return {}
        for key in ("moe_dropped", "moe_aux_loss"):
            if not any(numbers[key] for numbers in layers.values()):  # nothing to tell
                layers = {name: {k: v for k, v in numbers.items() if k != key} for name, numbers in layers.items()}
        found = together(list(layers.values()))
        if (part := int(done * PARTS)) != self.part:
            self.part = part
            found |= {f"{key}.{name}": value for name, numbers in layers.items() for key, value in numbers.items()}
        return found

    def _of_layers(self) -> dict[str, dict[str, Any]]:
        """By layer of this rank's stages."""
        if self.load_NE is None or self.dropped_N is None or self.sums_N3 is None:
            return {}
        assert self.idle_NE is not None and self.seen is not None
        for group in self.groups:
            dist.all_reduce(self.sums_N3, group=group)
        dead_N = (self.idle_NE >= self.seen.clamp(1, DEAD_AFTER)).sum(1)
        biases = {n: local(moe.expert_bias_E) for n, moe in self.layers.items() if moe.expert_bias_E is not None}
        ranges_2 = [torch.stack(bias_E.aminmax()) for bias_E in biases.values()]
        ranges = dict(zip(biases, torch.stack(ranges_2).tolist())) if biases else {}
        loads, dropped, sums, dead = (x.tolist() for x in (self.load_NE, self.dropped_N, self.sums_N3, dead_N))
        self.load_NE = None
        found = {}
        for i, (name, moe) in enumerate(self.layers.items()):
            found[name] = _of_layer(loads[i], moe.router.top_k, dropped[i], sums[i], dead[i])
            found[name] |= dict(zip(("moe_bias_min", "moe_bias_max"), ranges.get(name, ())))
        return found


def _of_layer(load_E: list[int], top_k: int, dropped: int, sums_3: list[float], dead: int) -> dict[str, Any]:
    copies = sum(load_E)
    tokens = max(copies // top_k, 1)
    ratio = max(load_E) * len(load_E) / max(copies, 1)
    loss, entropy, confidence = sums_3
    return {
        "moe_load": load_E,
        "moe_max/mean": ratio,
        "moe_maxvio": ratio - 1,
        "moe_maxvio_floor": maxvio_floor(tokens, top_k, len(load_E)),
        "moe_dead": dead,
        "moe_entropy": entropy / tokens,
        "moe_confidence": confidence / tokens,
        "moe_dropped": dropped / max(copies, 1),
        "moe_aux_loss": loss,
    }


def together(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """What the layers come to: the most uneven one's balance, the sum of dead experts and of losses, means, and the
    range of all biases."""
    worst = max(layers, key=lambda numbers: numbers["moe_max/mean"])
    found: dict[str, Any] = {key: worst[key] for key in ("moe_max/mean", "moe_maxvio", "moe_maxvio_floor")}
    for key, summary in (
        ("moe_dead", sum),
        ("moe_entropy", fmean),
        ("moe_confidence", fmean),
        ("moe_bias_min", min),
        ("moe_bias_max", max),
        ("moe_dropped", fmean),
        ("moe_aux_loss", sum),
    ):
        if values := [numbers[key] for numbers in layers if key in numbers]:
            found[key] = summary(values)
    return found
