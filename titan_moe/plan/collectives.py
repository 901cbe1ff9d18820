"""Traffic other than expert parallelism's: how long it takes, and how much of that a layer exposes.

Tensor and context parallelism stand between kernels: all of it is exposed. FSDP gathers the next layer and reduces the
last one beside this one's kernels, and offloaded activations leave and come back beside them, so that only what is
longer than the kernels shows.
"""

from titan_moe.plan import activations, kernels, traffic
from titan_moe.plan.job import Job
from titan_moe.plan.layer import Kind, linears


def beside(job: Job, kind: Kind, forward: float, backward: float) -> dict[str, tuple[float, float]]:
    """Exposed seconds (forward, backward) by cause in a layer whose kernels take `forward` and `backward` seconds."""
    found, hw = {}, job.hardware
    if job.tp > 1:
        tp = kernels.collective_seconds(hw, traffic.tp_bytes_per_layer(job, kind != "dense"), across=False)
        found["exposed TP"] = (0.4 * tp, 0.6 * tp)
    if job.cp > 1:
        across = job.tp * job.cp > hw.nvlink_domain
        cp = kernels.collective_seconds(hw, traffic.cp_bytes_per_layer(job), across=across)
        found["exposed CP"] = (cp / 3, cp * 2 / 3)
    if job.sharding == "fsdp" and job.dp_shard > 1:
        gather, reduce = fsdp_seconds(job, kind)
        every = job.pp == 1  # with a pipeline, FSDP keeps gathered parameters and reduces once a step
        again = gather if job.reshard_after_forward else 0.0
        reducing = every * (1.0 if job.reduce_every_microbatch else 1.0 / job.microbatches)  # share of microbatches
        found["exposed FSDP"] = (
            max(gather - forward, 0.0) if every or job.reshard_after_forward else 0.0,
            reducing * max(again + reduce - backward, 0.0) + (1 - reducing) * max(again - backward, 0.0),
        )
    if job.offload:
        seconds = activations.moved(job, activations.layer(job, kind)) / (hw.host_gb_s * 1e9)
        found["exposed offload"] = (max(seconds - forward, 0.0), max(seconds - backward, 0.0))
    return found


def fsdp_seconds(job: Job, kind: Kind) -> tuple[float, float]:
    """Seconds alone to gather one layer's BF16 parameters and to reduce-scatter its FP32 gradients."""
    gather = reduce = 0.0
    for experts in (False, True):
        weights = sum(w.k * w.n * w.groups for w in linears(job, kind) if (w.block == "experts") == experts)
        ranks, stride = (job.edp // job.dp_replicate or 1, job.ep) if experts else (job.dp_shard * job.cp, job.tp)
        gather += sharded_seconds(job, weights * 2.0, ranks, stride)
        reduce += sharded_seconds(job, weights * 4.0, ranks, stride)
        # Replicas of the model add up their shards: a reduce-scatter and a gather.
        reduce += 2 * sharded_seconds(job, weights * 4.0 / max(ranks, 1), job.dp_replicate, max(ranks, 1) * stride)
    return gather, reduce


def sharded_seconds(job: Job, volume: float, ranks: int, stride: int) -> float:
    """Gather or reduce-scatter of `volume` bytes over `ranks` ranks, each `stride` ranks from the next: inside a domain
    first, and then what is left across domains."""
    if ranks <= 1 or volume == 0:
        return 0.0
    near = max(1, min(ranks, traffic.ranks_per_domain(job.hardware) // stride))
    far = ranks // near
    inside = traffic.fsdp_gather_bytes(volume, near, 1)
    across = traffic.fsdp_gather_bytes(volume / near, far, 1)
    return kernels.collective_seconds(job.hardware, inside, across=False) + kernels.collective_seconds(
        job.hardware, across, across=True
    )
