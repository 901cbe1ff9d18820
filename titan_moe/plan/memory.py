"""What one GPU has to hold at the worst moment of a step, item by item, and whether it can.

The worst moment is as a backward pass begins on the pipeline rank that holds most: every microbatch in flight has its
activations, one layer is being differentiated (and recomputed), or the loss head is. So

    peak = states + gathered parameters and gradients + activations in flight + the larger of two working sets + buffers

with FSDP's sharded gradients in the place of the activations where they take more, at the end of backward.

States, gathered parameters and gradients come from model_states.py, activations from activations.py, what a working set
holds from the kernels as they are here: a grouped GEMM's backward around an unfused SwiGLU in FP32. Not PyTorch's
allocator's, so in no "peak allocated": buffers of the fused dispatchers, and OUTSIDE_GIB for CUDA context, NCCL and
cuBLAS. Fragmentation is a margin, ALLOCATOR_MARGIN of what is allocated.

Sizes in bytes; GiB = 2**30. Imports no torch.
"""

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, replace

from titan_moe import te_ep_check
from titan_moe.plan import activations, nccl_ep, schedule, traffic
from titan_moe.plan.activations import GPU, Kernels
from titan_moe.plan.job import Job
from titan_moe.plan.model_states import Entry, gathered, layers_of, states, summed_gradients
from titan_moe.plan.parameters import Kind, of_head
from titan_moe.plan.stages import Stage
from titan_moe.plan.within_layer import WITHIN

GIB = 2**30
ALLOCATOR_MARGIN = 0.04
OUTSIDE_GIB = 3.0
OUTSIDE = "outside the allocator"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The pipeline rank that needs most. Sizes in bytes."""

    rank: int
    entries: tuple[Entry, ...]
    margin: float
    """Fragmentation"""
    capacity: float
    allocated_by_rank: tuple[float, ...]
    """Peak of every pipeline rank"""

    @property
    def allocated(self) -> float:
        """Peak of PyTorch's allocator, what a run reports as allocated."""
        return self.allocated_by_rank[self.rank]

    @property
    def needed(self) -> float:
        return sum(entry.size for entry in self.entries) + self.margin

    @property
    def free(self) -> float:
        """What is left; negative when it does not fit."""
        return self.capacity - self.needed

    @property
    def fits(self) -> bool:
        return self.free >= 0

    def by_group(self) -> dict[str, float]:
        """Bytes of each group, largest first."""
        sums: dict[str, float] = defaultdict(float)
        for entry in self.entries:
            sums[entry.group] += entry.size
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def predict_memory(job: Job, kernels: Kernels = GPU) -> Memory:
    ranks = [entries_of_rank(job, rank, kernels) for rank in range(job.pp)]
    allocated = [sum(entry.size for entry in entries if entry.group != OUTSIDE) for entries in ranks]
    worst = allocated.index(max(allocated))
    return Memory(
        rank=worst,
        entries=tuple(entry for entry in ranks[worst] if entry.size),
        margin=allocated[worst] * ALLOCATOR_MARGIN,
        capacity=job.hardware.hbm_gb * 1e9,
        allocated_by_rank=tuple(allocated),
    )


def entries_of_rank(job: Job, rank: int, kernels: Kernels = GPU, *, keeps: bool = True) -> list[Entry]:
    """What pipeline rank `rank` holds at its worst moment; without `keeps`, all but activations."""
    stages = job.stages_of_rank(rank)
    found = [*states(job, rank), *_buffers(job, stages), *_received(job, rank)]
    found += _largest(_working_sets(job, stages, kernels))
    kept = activations_held(job, rank, kernels) if keeps else []
    if job.sharding == "zero1":
        return [*found, *kept]
    if job.microbatches > 1 and job.reduce_every_microbatch:
        return [*found, *gathered(job, stages), *kept]  # those of the microbatches before are there all the time
    # FSDP2 makes a layer's sharded gradient as backward frees its activations (and the whole one that was summed up
    # over microbatches): the first of them have gone when the last of those comes.
    gradients = [entry for entry in found if entry.group == "gradients"]
    found = [entry for entry in found if entry.group != "gradients"]
    summed = [summed_gradients(job, stages)] if job.microbatches > 1 else []
    return [*found, *gathered(job, stages), *_largest([[*summed, *kept], gradients])]


def _largest(choices: list[list[Entry]]) -> list[Entry]:
    return max(choices, key=lambda entries: sum(entry.size for entry in entries))


# ---------------------------------------------------------------------------------------------------------------------
# Activations


def in_flight(job: Job, rank: int) -> Set[tuple[int, ...]]:
    """Microbatches whose activations a pipeline rank holds, of each of its stages, at its fullest moments. Hiding
    all-to-all behind another microbatch keeps one more alive."""
    ahead = int(job.overlap not in ("none", *WITHIN))
    if job.pp == 1:
        return {(min(job.microbatches, 1 + ahead),) * job.vp}
    return schedule.held(job.schedule, rank, job.pp, job.vp, job.microbatches, ahead)


def activations_held(job: Job, rank: int, kernels: Kernels = GPU) -> list[Entry]:
    """What pipeline rank `rank` keeps for backward of all microbatches in flight, at the worst moment."""
    each = [_of_microbatch(job, index, kernels) for index in job.stage_indices(rank)]
    whole = [sum(sizes.values()) for sizes in each]
    fullest = max(sorted(in_flight(job, rank)), key=lambda held: sum(n * size for n, size in zip(held, whole)))
    names = dict.fromkeys(name for sizes in each for name in sizes)  # in an order that does not change
    sums = {name: sum(n * sizes.get(name, 0.0) for n, sizes in zip(fullest, each, strict=True)) for name in names}
    if kernels.values_are_padded:
        sums["document mask"] = 1.0 * job.tokens * job.seq_len
    return [Entry("activations", name, size) for name, size in sorted(sums.items(), key=lambda item: -item[1])]


def _of_microbatch(job: Job, index: int, kernels: Kernels) -> dict[str, float]:
    """What a stage keeps of one microbatch."""
    stage, hidden_states = job.stages[index], 2.0 * job.tokens * job.model.dim
    sums: dict[str, float] = defaultdict(float)
    for kind, number in layers_of([stage]).items():
        for item in activations.kept(job, activations.layer(job, kind, kernels)) if number else []:
            sums[item.name] += number * item.size
    if "layer_input" in job.offload and not stage.embedding and stage.dense + stage.moe:
        sums["layer input"] += hidden_states  # that of its first layer is the pipeline's
    if stage.head:
        sums["final norm"] += hidden_states * (2 if kernels.norm_is_fused else 5)
    elif job.sharding == "fsdp" and job.pp > 1:  # torch's stages keep it until the backward that begins with it
        sums["stage output"] += hidden_states
    return sums


def _working_sets(job: Job, stages: list[Stage], kernels: Kernels) -> list[list[Entry]]:
    """What lives only while one layer, or the head, is differentiated."""
    f, layers = job.model, layers_of(stages)
    kind: Kind = "moe" if layers["moe"] or layers["mtp"] else "dense"
    everything = activations.layer(replace(job, recompute_mode="none"), kind, kernels)
    again = sum(item.size for item in everything) - sum(
        item.size for item in activations.kept(job, activations.layer(job, kind, kernels))
    )
    # Those of one layer more than the one that computes: of the last in forward, or of the next in backward.
    moved = activations.moved(job, activations.layer(job, kind, kernels))
    under_way = [Entry("working set", "offloaded, on its way", moved)]
    again = max(again, 0.0)
    sets = [[Entry("working set", "recomputed layer", again), *under_way, *_layer_backward(job, kind, kernels)]]
    if any(stage.head for stage in stages):
        chunk = job.tokens / job.loss_chunks * f.vocab_size / job.tp
        # Logits, and in FP32 logits, log-probabilities and their gradient; Megatron works in place.
        per_logit = 6 if job.sharding == "zero1" else 2 + 4 + 4 + 4 + 2
        head = [Entry("working set", "logits", per_logit * chunk), *under_way]
        if job.sharding == "fsdp":  # gathered in BF16, a BF16 gradient, and its sum over chunks in FP32
            summed_already = job.microbatches > 1 and not job.reduce_every_microbatch
            size = (2 if job.reshard_after_forward else 0) + 2 + (0 if summed_already else 4)
            head.append(Entry("working set", "head and its gradient", size * of_head(f) / job.tp))
        if job.loss_chunks > 1:
            head.append(Entry("working set", "gradient of the last hidden states, FP32", 4.0 * job.tokens * f.dim))
        sets.append(head)
    return sets


def _layer_backward(job: Job, kind: Kind, kernels: Kernels) -> list[Entry]:
    f = job.model
    if kind == "dense":
        return [
            Entry("working set", "gradients in the layer", 2.0 * job.tokens * (f.dim + 3 * f.dense_hidden_dim / job.tp))
        ]
    rows = activations.local_rows(job, kernels) if job.ep == 1 else activations.expert_rows(job, kernels.row_alignment)
    gradients = [Entry("working set", "gradients of the experts", 2.0 * rows * (f.dim + 4 * f.moe_hidden_dim))]
    if job.sharding == "fsdp" and kernels.norm_is_fused:  # a CPU goes over the rows in small blocks
        gradients.append(Entry("working set", "SwiGLU backward, FP32", 6 * 4.0 * rows * f.moe_hidden_dim))
    return gradients


def _received(job: Job, rank: int) -> list[Entry]:
    """What comes from other stages before it is computed with. (From then on hidden states are a layer's input.)"""
    if job.pp == 1 or job.sharding == "zero1":
        return []
    ahead = schedule.received_ahead(job.schedule, rank, job.pp, job.microbatches)
    return [Entry("pipeline's buffers", "received between stages", ahead * traffic.pp_bytes(job))]


def _buffers(job: Job, stages: list[Stage]) -> list[Entry]:
    """Of expert-parallel transfers, rows sent and rows received while one is under way; and what nobody allocates
    through PyTorch."""
    outside = [Entry(OUTSIDE, "CUDA context, NCCL, cuBLAS", OUTSIDE_GIB * GIB)]
    if job.ep == 1:
        return outside
    row = 2.0 * job.model.dim
    if job.dispatcher == "te_ep":
        layers = layers_of(stages)
        routings = (layers["moe"] + layers["mtp"]) * te_ep_check.buffers_per_layer(
            job.schedule, job.pp, job.microbatches
        )
        return [
            *outside,
            Entry(OUTSIDE, "te_ep staging", nccl_ep.staging(job)),
            Entry("dispatcher", "te_ep routings", routings * nccl_ep.routing(job)),
        ]
    if job.dispatcher == "hybridep":
        # Room for every token of every rank: at 64 ranks and 4,096 tokens of DeepSeek-V3 3.76 GB.
        return [*outside, Entry(OUTSIDE, f"{job.dispatcher} buffers", job.ep * job.tokens * row)]
    if job.dispatcher == "deepep":
        return [*outside, Entry(OUTSIDE, "deepep buffers", 1.0 * GIB)]  # its default for NVLink and RDMA
    return [*outside, Entry("dispatcher", "rows sent and received", 2 * activations.wire_rows(job) * row)]
