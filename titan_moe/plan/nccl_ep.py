"""What NCCL EP (the dispatcher te_ep) holds on a GPU, in bytes.

By its public source: version 0.2, in the mode that Transformer Engine uses it in, where a token is staged once for each
rank that it goes to and copied into slabs on arrival. Not measured: no GPU has run it here.

    set up once     rows staged for dispatch and for combine, S T each way; for each of N slots, room for scales as
                    large as a row, and twice a probability for every expert of the NVLink domain
    each routing    for each of N slots, K places and K weights and a flag for each local expert; for each of the S T
                    tokens of all ranks, where it goes

N, the slots, is R of a receive buffer of fixed size. With exact sizes NCCL EP knows no bound and assumes S T K: all
copies of all ranks on one. That is what the host sync is paid with beside time, and a factor saves most of it.

More than one NVLink domain needs more for what passes between them, which is not counted here. Imports no torch.

Letters: T tokens of one rank, D model width, K top-k, E experts, e experts of one rank, S ranks.
"""

from titan_moe.plan.job import Job


def slots(job: Job) -> float:
    """N."""
    ranks, top_k = job.ep, job.model.top_k
    if job.recv_buffer == "exact":
        return float(ranks * job.tokens * top_k)
    worst = float(ranks * job.tokens * min(top_k, job.model.num_experts // ranks))
    return worst if job.recv_buffer == "worst_case" else min(worst, job.recv_buffer * job.tokens * top_k)


def staging(job: Job) -> float:
    """What is set up once, outside PyTorch's allocator."""
    row = 2 * job.model.dim
    near = job.model.num_experts / job.ep * min(job.ep, job.hardware.nvlink_domain)
    return 2 * job.ep * job.tokens * row + slots(job) * (row + 2 * 4 * near)


def routing(job: Job) -> float:
    """One EpBuffer, as `te_ep_check.in_flight` counts them for each MoE layer."""
    f, ranks, tokens = job.model, job.ep, job.tokens
    words = -(-min(ranks, job.hardware.nvlink_domain) // 64)  # a bit for each rank of the domain
    by_slot = slots(job) * (f.num_experts / ranks + 8 * f.top_k)
    return by_slot + ranks * tokens * (4 + 4 + 8 * words) + tokens * (4 * f.num_experts + 8 * f.top_k)
