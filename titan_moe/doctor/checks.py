"""The doctor's checks, in order, and the one that is about the configuration's layout."""

from typing import Any

import torch

from titan_moe import mesh_check, placement
from titan_moe.config_check import model_flavor
from titan_moe.doctor import bench, software, speed
from titan_moe.doctor.contract import Check, Examined, Finding


def checks(device: torch.device, nodes: int, per_node: int) -> list[Check]:
    """Those that apply to such a machine, in order."""
    cuda = device.type == "cuda"
    # Ranks come late to the first one: nodes read torch from a shared disk at different speeds.
    found = [
        Check("ranks", software.place, software.judge_places, patience=3.0),
        Check("packages", software.packages, software.judge_packages),
    ]
    if cuda:
        found.append(Check("driver", software.driver, software.judge_driver))
        found.append(Check("NCCL", lambda at: list(torch.cuda.nccl.version()), software.judge_nccl))
    found += [
        Check("Transformer Engine", software.transformer_engine, software.judge_transformer_engine),
        Check("host memory", speed.host_memory, speed.judge_host_memory),
        Check("run folder", speed.disk, speed.judge_disk),
        speed.rate("GEMM", "TFLOP/s", lambda at: bench.gemm(at.device))
        if cuda
        else speed.rate("GEMM", "GFLOP/s", lambda at: 1e3 * bench.gemm(at.device)),
        speed.rate("memory copy", "GB/s", lambda at: bench.memory_copy(at.device)),
    ]
    if cuda:
        found.append(speed.rate("host copy", "GB/s", lambda at: bench.host_copy(at.device)))
    if nodes * per_node > 1:
        found.append(Check("connection", speed.connect, speed.judge_connection, together=True))
    for where, ranks in (("inside", per_node), ("across", nodes)):
        if ranks > 1:
            found += [
                speed.group_rate(f"all-reduce {where}", bench.all_reduce, where),
                speed.group_rate(f"all-to-all {where}", bench.all_to_all, where),
                speed.group_rate(f"pairs {where}", bench.pair_exchange, where),
            ]
    return [*found, Check("rank order", lambda at: None, judge_rank_order)]


def judge_rank_order(at: Examined, answers: dict[int, Any]) -> list[Finding]:
    if not at.asked:
        return []
    unfit = mesh_check.check(at.config, at.world_size, model_flavor(at.config))
    if unfit:
        text = f"not checked, as the configuration does not fit these ranks: {unfit[0]}"
        return [Finding("note", "rank order", text)]
    domains = [at.places[rank]["domain"] for rank in range(at.world_size)]
    far = placement.notes(at.config, domains, at.per_node)
    p = at.config.parallelism
    text = (
        f"expert-parallel groups of {p.expert_parallel_degree}, and tensor-parallel ones of "
        f"{p.tensor_parallel_degree}, lie inside NVLink domains; pipeline neighbours are close"
    )
    return [Finding("slow", "rank order", note) for note in far] or [Finding("ok", "rank order", text)]
