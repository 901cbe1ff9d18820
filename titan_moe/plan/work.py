"""How much one rank has to do in one step, phase by phase: arithmetic, memory traffic, operations, bytes on the wire.

The phases are those that a run measures (phases.py), forward and backward together. Unlike the kernels of layer.py
these counts know nothing of a GPU: with seconds for each unit they are the times of any machine, which is what
machine.py does for CPUs. Counts of memory traffic and of operations are rough; what they miss in a phase is a factor
that a run gives.

What is counted is what this trainer does with FSDP and expert parallelism; all else is refused.

Shape letters: T tokens of this rank in a microbatch, D model width, F expert hidden width, K top-k, V vocabulary.
"""

from dataclasses import dataclass

from titan_moe.flavors import Flavor
from titan_moe.plan import parameters, traffic
from titan_moe.plan.job import Job
from titan_moe.plan.layer import linears
from titan_moe.plan.parameters import Kind

NUMBER = 4  # bytes: CPUs compute in float32
BOTH = 3.0
"""Forward and backward over forward: backward has two products for one"""

SWIGLU = {"shared": 14, "experts": 45}
"""Numbers read and written for each of a hidden one, forward and backward: silu(gate) * up in plain autograd; in
moe/experts.py, which splits gate and up, weights by the router, and computes it again in backward"""


@dataclass(frozen=True)
class Work:
    """Of one phase, one rank and one step."""

    flops: float = 0.0
    moved: float = 0.0
    """Bytes read and written in memory"""
    operations: float = 0.0
    """Calls of a kernel, each with a fixed cost"""
    wire: float = 0.0
    """Bytes that come from other ranks"""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self.units, other.units)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * unit for unit in self.units))

    @property
    def units(self) -> tuple[float, float, float, float]:
        return self.flops, self.moved, self.operations, self.wire


PHASES = {
    "embedding": ("embedding",),
    "norms": ("norms",),
    "attention": ("attention",),
    "dense": ("dense",),
    "router": ("router",),
    "experts": ("experts",),
    "shared_expert": ("shared_expert",),
    "loss": ("loss",),
    "dispatch and combine": ("dispatch", "combine"),
    "fsdp": ("fsdp",),
    "clip": ("clip",),
    "optimizer": ("optimizer",),
    "rest": ("data", "logging", "other"),
}
"""What is told apart here, of the phases of metrics.jsonl. Others are no part of a step, or of layouts not counted"""


def refusal(job: Job) -> str | None:
    """Why the work of `job` is not counted here."""
    for name in ("tp", "cp", "pp", "dp_replicate"):
        if getattr(job, name) > 1:
            return f"{name} = {getattr(job, name)}: only FSDP and expert parallelism are counted for CPUs"
    if job.num_mtp_layers:
        return "model.num_mtp_layers: multi-token prediction is not counted for CPUs"
    if job.recompute_mode != "none" or job.recompute or job.offload or job.overlap != "none":
        return "recompute, offload and moe.overlap are not counted for CPUs"
    return None


def of_job(job: Job) -> dict[str, Work]:
    """Work by the keys of PHASES. Raises ValueError for what is not counted."""
    if why := refusal(job):
        raise ValueError(why)
    f, T = job.model, float(job.tokens)
    moe, dense = f.n_layers - f.n_dense_layers, f.n_dense_layers
    each = {
        "embedding": _moved(T * f.dim * 4, 4),
        "norms": _moved(f.n_layers * T * (2 * f.dim + f.q_lora_rank + f.kv_lora_rank) * 10, f.n_layers * 24),
        "attention": _attention(job) * f.n_layers,
        "dense": _feed_forward(job, "dense", "shared") * dense,
        "router": Work(BOTH * 2 * T * f.dim * f.num_experts, NUMBER * T * (3 * f.dim + 40 * f.num_experts), 100) * moe,
        "experts": _feed_forward(job, "moe", "experts") * moe,
        "shared_expert": _feed_forward(job, "moe", "shared") * moe,
        "loss": Work(BOTH * 2 * T * f.dim * f.vocab_size, NUMBER * T * f.vocab_size * 8, 40),
        "dispatch and combine": _exchange(job) * moe,
    }
    work = {name: one * job.microbatches for name, one in each.items()}
    work["fsdp"] = _fsdp(job)
    sharded, tensors = parameters.total(f) / job.dp_shard, _tensors(f)
    work["clip"] = _moved(4 * sharded, 20 * tensors)
    work["optimizer"] = _moved(8 * sharded, 2 * tensors)
    work["rest"] = Work(operations=500.0)
    return work


def _moved(numbers: float, operations: float) -> Work:
    return Work(moved=NUMBER * numbers, operations=operations)


def _products(job: Job, kind: Kind, block: str) -> Work:
    """The linear layers of a block: each reads its input and its weights and writes its output, and again for both
    gradients."""
    work = Work()
    for w in linears(job, kind):
        if w.block == block:
            rows = w.rows * w.groups
            numbers = rows * (w.k + w.n) + w.groups * w.k * w.n
            work += Work(2 * rows * w.k * w.n, NUMBER * numbers, 1) * BOTH
    return work


def _attention(job: Job) -> Work:
    """One layer's. Scores are computed for whole sequences, and written for each softmax."""
    f, T, qk = job.model, float(job.tokens), job.model.qk_nope_head_dim + job.model.qk_rope_head_dim
    scores = T * job.seq_len * f.n_heads
    heads = T * f.n_heads * (2 * qk + f.v_head_dim)
    core = Work(BOTH * 2 * scores * (qk + f.v_head_dim), NUMBER * (6 * scores + 12 * heads), 60)
    return core + _products(job, "dense", "attention")


def _feed_forward(job: Job, kind: Kind, block: str) -> Work:
    """Products and SwiGLU of one layer's feed-forward, shared expert or experts."""
    work = _products(job, kind, block)
    hidden = sum(w.rows * w.groups * w.k for w in linears(job, kind) if w.block == block and w.source == "swiglu")
    return work + _moved(SWIGLU[block] * hidden, 12) if work.flops else work


def _exchange(job: Job) -> Work:
    """One MoE layer's dispatch and combine, forward and backward: rows are gathered and added up in memory, and those
    for other ranks cross over."""
    rows = job.tokens * job.model.top_k * job.model.dim
    near, _ = traffic.ep_copies(job)
    if job.dispatcher != "alltoall":  # dedup counts the own rank
        near *= (job.ep - 1) / job.ep
    return Work(moved=NUMBER * 12.0 * rows, operations=120, wire=4 * NUMBER * near * job.tokens * job.model.dim)


def _held(job: Job) -> dict[str, float]:
    """Parameters of one rank's experts, and of all else, before FSDP shards them."""
    f = job.model
    experts = (f.n_layers - f.n_dense_layers) * parameters.of_layer(f, "moe")["routed experts"]
    return {"others": float(parameters.total(f) - experts), "experts": experts / job.ep}


def _fsdp(job: Job) -> Work:
    """Gathers for forward and backward of each microbatch, and reductions of the gradients, through buffers."""
    held, ways, repeats = _held(job), 1 + job.reshard_after_forward, job.microbatches
    reductions = repeats if job.reduce_every_microbatch else 1
    times = ways * repeats + reductions
    wire = held["others"] * (job.dp_shard - 1) / job.dp_shard + held["experts"] * (job.edp - 1) / job.edp
    layers = job.model.n_layers + 2
    return Work(
        moved=NUMBER * 4 * times * (held["others"] + held["experts"]),
        operations=60.0 * layers * times,
        wire=NUMBER * times * wire,
    )


def _tensors(f: Flavor) -> int:
    """Parameter tensors, about."""
    return 14 * f.n_layers + 3
