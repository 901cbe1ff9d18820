"""What one GPU holds of parameters, gradients and optimizer states, and what FSDP2 gathers of them meanwhile.

With P parameters of which a rank stores P/s:

- Megatron's distributed optimizer ("zero1"): BF16 weights and FP32 gradients of all P, FP32 master weights and moments
  of P/s: 6 + 12/s bytes. With FP8 weights their row- and column-wise copies take the place of the BF16 ones.
- FSDP2 ("fsdp"): parameters, gradients and two moments of P/s in the stored dtype (4 + 4 + 8 in FP32; with Muon, of
  the layers' matrices, 4 + 4 + 4), and while a layer computes, gathered BF16 copies of it and of the next one, the
  all-gather's buffer, its gradients in BF16 and the FP32 input of their reduction. Pipelines do not free gathered
  parameters. With more than one microbatch the gradients of *all* layers are kept unsharded in FP32 until the last one,
  often the largest item, unless each is reduced.

Sizes in bytes. Imports no torch.
"""

from functools import cache
from typing import NamedTuple

from titan_moe.flavors import Flavor
from titan_moe.plan.job import Job
from titan_moe.plan.layer import linears
from titan_moe.plan.parameters import KEPT_BY_ADAMW, REPLICATED_BY_TP, Kind, of_embedding, of_head, of_layer
from titan_moe.plan.stages import Stage

BYTES = {"float32": 4, "bfloat16": 2}
FP8_WEIGHT_BYTES = 2 * (1 + 1 / 32)
"""A row-wise and a column-wise copy, with a scale byte per 32 elements"""


class Entry(NamedTuple):
    group: str
    name: str
    size: float
    """Bytes"""


class Weights(NamedTuple):
    """Parameters of a piece of the model on one rank before FSDP shards them, and how many ranks shard each sort."""

    dense: float
    experts: float


def _layer_weights(job: Job, kind: Kind) -> Weights:
    return _weights(job.model, kind, job.ep, job.tp)


@cache
def _weights(model: Flavor, kind: Kind, ep: int, tp: int) -> Weights:
    parts = of_layer(model, kind)
    experts = parts.pop("routed experts", 0) / (ep if ep > 1 else tp)
    return Weights(sum(n / (1 if part in REPLICATED_BY_TP else tp) for part, n in parts.items()), experts)


def layers_of(stages: list[Stage]) -> dict[Kind, int]:
    return {"dense": sum(s.dense for s in stages), "moe": sum(s.moe for s in stages), "mtp": sum(s.mtp for s in stages)}


def _ends(job: Job, stages: list[Stage]) -> Weights:
    """Embedding and head, where a stage has them. An MTP layer on another rank than the embedding has a copy."""
    embeddings = any(s.embedding for s in stages) or any(s.mtp for s in stages)
    head = any(s.head for s in stages)
    return Weights((embeddings * of_embedding(job.model) + head * of_head(job.model)) / job.tp, 0.0)


def _rank_weights(job: Job, stages: list[Stage]) -> tuple[Weights, Weights]:
    """(layers, ends): all layers of the rank together, and embedding and head."""
    each = [(number, _layer_weights(job, kind)) for kind, number in layers_of(stages).items()]
    layers = Weights(sum(n * w.dense for n, w in each), sum(n * w.experts for n, w in each))
    return layers, _ends(job, stages)


def _shards(job: Job) -> Weights:
    """Ranks over which dense and expert parameters (or with zero1 their optimizer states) are cut."""
    if job.sharding == "zero1":
        return Weights(job.dp * job.cp, job.edp if job.ep > 1 else job.dp * job.cp)
    shard = job.dp_shard * job.cp
    return Weights(shard, shard * job.tp / job.ep if job.ep > 1 else shard)


def states(job: Job, rank: int) -> list[Entry]:
    """Parameters, gradients (as after backward) and optimizer states of pipeline rank `rank`."""
    stages = job.stages_of_rank(rank)
    layers, ends = _rank_weights(job, stages)
    shards = _shards(job)
    whole = sum(layers) + sum(ends)
    stored = (layers.dense + ends.dense) / shards.dense + (layers.experts + ends.experts) / shards.experts
    moments, gradient = 2 * BYTES[job.moment_dtype], BYTES[job.grad_dtype]
    saved = BYTES[job.moment_dtype] * _of_muon(job, stages) if job.muon else 0.0
    if job.sharding == "zero1":
        weight = 2 if job.precision == "bf16" else FP8_WEIGHT_BYTES
        return [
            Entry("parameters", "weights", weight * sum(layers) + 2 * sum(ends)),
            Entry("gradients", "gradients", gradient * whole),
            Entry("optimizer", "master weights, sharded", 4 * stored),
            Entry("optimizer", "moments, sharded", moments * stored),
        ]
    return [
        Entry("parameters", "parameters, sharded", BYTES[job.param_dtype] * stored),
        Entry("gradients", "gradients, sharded", gradient * stored),
        Entry("optimizer", "moments, sharded", moments * stored - saved),
    ]


def _of_muon(job: Job, stages: list[Stage]) -> float:
    """Parameters of a rank's shard that have one momentum: matrices of layers but the router's."""
    layers, shards, others = _rank_weights(job, stages)[0], _shards(job), 0.0
    for kind, number in layers_of(stages).items():
        parts = of_layer(job.model, kind)
        others += number * sum(parts.get(part, 0) for part in KEPT_BY_ADAMW)  # which no tensor parallelism cuts
    return (layers.dense - others) / shards.dense + layers.experts / shards.experts


def summed_gradients(job: Job, stages: list[Stage]) -> Entry:
    layers, ends = _rank_weights(job, stages)
    return Entry("unreduced gradients", "gradients of all microbatches, FP32", 4 * (sum(layers) + sum(ends)))


def gathered(job: Job, stages: list[Stage]) -> list[Entry]:
    """What FSDP2 has gathered or not yet reduced."""
    layers, ends = _rank_weights(job, stages)
    number = sum(layers_of(stages).values())
    unit = max((sum(_layer_weights(job, kind)) for kind, n in layers_of(stages).items() if n), default=0.0)
    held = min(1 + job.prefetch_layers, number) * unit if job.reshard_after_forward else sum(layers)
    entries = [
        Entry("gathered parameters", "gathered layers", 2 * held),
        Entry(
            "gathered parameters", "gathered embedding and head", 0.0 if job.reshard_after_forward else 2 * sum(ends)
        ),
        Entry("gathered parameters", "all-gather buffer", 2 * unit),
        Entry("unreduced gradients", "gradients of a layer, BF16", 2 * unit),
        Entry("unreduced gradients", "gradient reduction buffer, FP32", 4 * unit),
    ]
    low = max((_low_precision_weights(job, kind) for kind, n in layers_of(stages).items() if n), default=0.0)
    entries.append(Entry("gathered parameters", "low-precision copies", FP8_WEIGHT_BYTES * min(2, number) * low))
    return entries


def _low_precision_weights(job: Job, kind: Kind) -> float:
    """Weights of a layer that are quantized, before FSDP cuts them."""
    if job.precision == "bf16":
        return 0.0
    return sum(w.k * w.n * w.groups for w in linears(job, kind) if w.precision(job) != "bf16")
