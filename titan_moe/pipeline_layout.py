"""Which layers, embedding and head each pipeline stage holds, and which rank holds which stages.

A schedule fixes how many stages there are: one per rank (1F1B), several per rank, dealt out in rounds (interleaved
schedules: rank r holds stages r, r + pp, ...), or two per rank in the shape of a V (ZBVZeroBubble, DualPipeV: rank r
holds stages r and 2 pp - 1 - r, so that the first rank also has the last stage).

Every microbatch goes through every stage, so the slowest one sets the pace. Layers are not alike: a dense layer, an MoE
layer and the head (1.4 MoE layers in 671B at 4,096 tokens) cost different FLOPs, the embedding none. The
default layout is, of all contiguous ones, one whose slowest stage is the fastest possible. Many tie, because every
stage but the slowest has room: among them it takes the one that is easiest on memory. Stage s of S keeps the
activations of up to S - s microbatches (1F1B), so early stages get fewer layers.

Only the last stage may have no layers: it still has norm and head. torchtitan's optimizer wants parameters of every
kind on each stage, and the embedding has no norm. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from titan_moe.config import Config
from titan_moe.flavors import Flavor
from titan_moe.plan import flops

ONE_STAGE = ("1F1B",)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with one stage per rank, and with exactly two in the shape of a V; the others take two or more"""


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Layers of each stage, and the FLOPs per token that each of them takes."""

    schedule: str
    pp: int
    layers: tuple[int, ...]
    flops: tuple[float, ...]
    num_mtp_layers: int = 0

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def modules(self) -> list[list[str]]:
        """Names of each stage's modules, as torchtitan's `module_fqns_per_model_part` wants them."""
        stages, first = [], 0
        for count in self.layers:
            stages.append([f"layers.{i}" for i in range(first, first + count)])
            first += count
        stages[0].insert(0, "tok_embeddings")
        stages[-1] += ["norm", "lm_head", *(f"mtp_layers.{i}" for i in range(self.num_mtp_layers))]
        return stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pipeline rank `rank` holds, in the order a microbatch meets them."""
        if self.schedule in V_SHAPED:
            return rank, self.num_stages - 1 - rank
        return tuple(range(rank, self.num_stages, self.pp))

    def slowest_stage(self) -> float:
        """FLOPs of the slowest stage over the mean of all: how much slower than perfectly balanced."""
        return max(self.flops) * self.num_stages / sum(self.flops)

    def slowest_rank(self) -> float:
        """The same of ranks: what limits a full pipeline when ranks hold several stages."""
        by_rank = [sum(self.flops[stage] for stage in self.stages_of(rank)) for rank in range(self.pp)]
        return max(by_rank) * self.pp / sum(by_rank)

    def report(self) -> str:
        """For the start-up report: E is the embedding, H the head, numbers are layers."""
        stages = [str(count) for count in self.layers]
        stages[0] = f"E+{stages[0]}"
        stages[-1] += f"+{self.num_mtp_layers} MTP+H" if self.num_mtp_layers else "+H"
        ranks = f", slowest rank x {self.slowest_rank():.2f}" if self.num_stages > self.pp else ""
        return (
            f"Pipeline: {self.num_stages} stages on {self.pp} ranks ({self.schedule}): {' | '.join(stages)}; "
            f"slowest stage x {self.slowest_stage():.2f} of the mean{ranks}"
        )


def pipeline_layout(config: Config, flavor: Flavor) -> PipelineLayout:
    """The layout that the configuration asks for, or the balanced one. mesh_check.py has found nothing wrong."""
    p = config.parallelism
    recompute = config.activation_checkpoint.mode == "full"
    layers = p.pipeline_parallel_layers_per_stage or balanced_layers(
        flavor,
        default_stages(p.pipeline_parallel_schedule, p.pipeline_parallel_degree),
        config.training.seq_len,
        recompute=recompute,
    )
    return PipelineLayout(
        schedule=p.pipeline_parallel_schedule,
        pp=p.pipeline_parallel_degree,
        layers=tuple(layers),
        flops=tuple(stage_flops(flavor, layers, config.training.seq_len, recompute=recompute)),
        num_mtp_layers=flavor.num_mtp_layers,
    )


def default_stages(schedule: str, pp: int) -> int:
    """Stages when no list of layers says how many."""
    return pp if schedule in ONE_STAGE else 2 * pp


# ---------------------------------------------------------------------------------------------------------------------
# Cost


@lru_cache(maxsize=64)
def _costs(flavor: Flavor, seq_len: int, recompute: bool) -> tuple[tuple[float, ...], float]:
    """FLOPs per token of each layer, and of all that the last stage has besides layers."""

    def layer(dense: bool) -> float:
        once = flops.of_layer(flavor, seq_len, dense=dense)
        return once + once // 3 if recompute else once  # the forward again: 8 FLOPs where there were 6; whole, for ties

    terms = flops.per_token(flavor, seq_len, num_mtp_layers=flavor.num_mtp_layers)
    last = terms["logits"] + terms["MTP projection"] + flavor.num_mtp_layers * layer(dense=False)
    return tuple(layer(dense=i < flavor.n_dense_layers) for i in range(flavor.n_layers)), last


def stage_flops(flavor: Flavor, layers: list[int], seq_len: int, *, recompute: bool = False) -> list[float]:
    """FLOPs per token of each stage. `recompute`: of whole layers; the head is never recomputed."""
    per_layer, last = _costs(flavor, seq_len, recompute)
    found, first = [], 0
    for count in layers:
        found.append(sum(per_layer[first : first + count]))
        first += count
    found[-1] += last
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Balance


def balanced_layers(flavor: Flavor, num_stages: int, seq_len: int, *, recompute: bool = False) -> list[int]:
    """Layers of each stage: the slowest stage is as fast as can be, then the fullest one as empty as can be."""
    return list(_balanced(flavor, num_stages, seq_len, recompute))


@lru_cache(maxsize=1024)
def _balanced(flavor: Flavor, num_stages: int, seq_len: int, recompute: bool) -> tuple[int, ...]:
    per_layer, last = _costs(flavor, seq_len, recompute)
    before = [0.0]  # FLOPs of the layers in front of each layer
    for cost in per_layer:
        before.append(before[-1] + cost)

    def time(stage: int, first: int, end: int) -> float:
        if first == end and stage < num_stages - 1:
            return inf
        return before[end] - before[first] + (last if stage == num_stages - 1 else 0)

    fastest, _ = _minimax(len(per_layer), num_stages, time)

    def memory(stage: int, first: int, end: int) -> float:
        return (num_stages - stage) * (end - first) if time(stage, first, end) <= fastest else inf

    _, layers = _minimax(len(per_layer), num_stages, memory)
    return tuple(layers)


def _minimax(n: int, num_stages: int, weight: Callable[[int, int, int], float]) -> tuple[float, list[int]]:
    """The contiguous partition of n layers whose largest weight(stage, first, end) is smallest: that weight, and the
    layers of each stage; of several the one with the fewest layers in front."""
    # best[s][i]: the largest weight at best, when stages s and after hold layers i and after.
    best = [[inf] * (n + 1) for _ in range(num_stages + 1)]
    best[num_stages][n] = 0
    for s in reversed(range(num_stages)):
        for i in range(n + 1):
            best[s][i] = min(max(weight(s, i, j), best[s + 1][j]) for j in range(i, n + 1))
    smallest, layers, i = best[0][0], [], 0
    assert smallest < inf, f"{n} layers do not fill {num_stages} stages"
    for s in range(num_stages):
        j = next(j for j in range(i, n + 1) if max(weight(s, i, j), best[s + 1][j]) <= smallest)
        layers.append(j - i)
        i = j
    return smallest, layers
