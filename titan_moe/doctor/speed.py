"""How much and how fast: host memory, the run folder's disk, and the rates of bench.py.

A rate is slow against the median of all ranks, which shows one sick rank among healthy ones, or against the data
sheet (plan/hardware.py), which shows when all are: SHARES and FLOORS say how far.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_moe import machine_check, run_folder
from titan_moe.doctor import bench
from titan_moe.doctor.contract import Check, Examined, Finding, count, few
from titan_moe.plan.memory import GIB

SHARES = {"cuda": 0.9, "cpu": 0.4}
"""Of the median, below which a rank is slow. GPUs of one kind differ by a few percent; processes on CPUs share cores,
caches and memory with each other and with whatever else runs"""

FLOORS = {
    "GEMM": ("bf16_tflops", 1e0, 0.5),
    "memory copy": ("hbm_tb_s", 1e3, 0.5),
    "host copy": ("host_gb_s", 1.0, 0.5),
    "all-reduce inside": ("nvlink_gb_s", 1.0, 0.37),  # half of what NCCL was measured to reach on 8 B200: 0.742
    "all-to-all inside": ("nvlink_gb_s", 1.0, 0.3),  # and 0.597
    "all-reduce across": ("nic_gb_s", 1.0, 0.5),
    "all-to-all across": ("nic_gb_s", 1.0, 0.5),
}
"""Of which rate of the data sheet (its unit in ours) a healthy machine reaches which share at least"""

PROCESS_GIB = 2.0
"""Host memory of one training process, at least: the debug model on a CPU takes half of it"""


def host_memory(at: Examined) -> float | None:
    """GiB that processes could still take on this node."""
    available = machine_check.available_bytes()
    return None if available is None else available / GIB


def judge_host_memory(at: Examined, answers: dict[int, float | None]) -> list[Finding]:
    nodes = {rank: gib for rank, gib in answers.items() if rank % at.per_node == 0 and gib is not None}
    if not nodes:
        return [Finding("note", "host memory", "unknown on this system")]
    need = at.per_node * PROCESS_GIB
    low = [f"{at.name(rank)} {gib:.1f}" for rank, gib in nodes.items() if gib < need]
    expected = f"{count(at.per_node, 'process', 'es')} x {PROCESS_GIB} = {need:.0f} GiB"
    if low:
        text = f"free GiB: {few(low)}; expected at least {expected}; end other programs, or start fewer processes"
        return [Finding("wrong", "host memory", text)]
    return [Finding("ok", "host memory", f"{min(nodes.values()):.1f} GiB free and more; expected at least {expected}")]


def disk(at: Examined) -> float | None:
    """GB/s that the first rank of a node writes with."""
    folder = run_folder.choose(at.config, {"RUN_ID": "doctor"})
    return bench.disk_write(folder) if at.rank % at.per_node == 0 else None


def judge_disk(at: Examined, answers: dict[int, float | None]) -> list[Finding]:
    rates = {rank: rate for rank, rate in answers.items() if rate is not None}
    folder = run_folder.choose(at.config, {"RUN_ID": "doctor"})
    return judge_rates(at, "run folder", f"GB/s written to {folder.parent}", rates, share=0.5)


def connect(at: Examined) -> float:
    """Seconds until all ranks have found each other."""
    start = time.perf_counter()
    # NCCL ends a process whose collective takes too long; long before, bench has given it up.
    cuda, limit = at.device.type == "cuda", bench.LIMIT_SECONDS
    timeout = timedelta(seconds=10 * limit if cuda else limit)
    store, backend = dist.PrefixStore("connection", at.store), "nccl" if cuda else "gloo"
    device = at.device if cuda else None
    dist.init_process_group(
        backend, store=store, rank=at.rank, world_size=at.world_size, timeout=timeout, device_id=device
    )
    ranks = torch.arange(at.world_size).view(-1, at.per_node)  # a row for each node
    for where, groups in (("inside", ranks), ("across", ranks.T)):
        if groups.shape[1] > 1:
            group, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            at.groups[where] = group
    return time.perf_counter() - start


def judge_connection(at: Examined, answers: dict[int, float]) -> list[Finding]:
    return [Finding("ok", "connection", f"{dist.get_backend()}, in {max(answers.values()):.1f} s")]


def rate(name: str, unit: str, measure: Callable[[Examined], float]) -> Check:
    def judge(at: Examined, answers: dict[int, float]) -> list[Finding]:
        return judge_rates(at, name, unit, answers, SHARES.get(at.device.type, 0.9))

    return Check(name, measure, judge)


def group_rate(name: str, measure: Callable[[dist.ProcessGroup, torch.device], float], where: str) -> Check:
    def run(at: Examined) -> float:
        return measure(at.groups[where], at.device)

    return rate(name, "GB/s", run)._replace(together=True)


def judge_rates(at: Examined, name: str, unit: str, rates: Mapping[int, float], share: float) -> list[Finding]:
    """Ranks below `share` of the median, by name; and the median against the data sheet, if the check is in FLOORS."""
    median = statistics.median(rates.values())
    numbers = f"median {median:.3g} {unit}, {min(rates.values()):.3g} to {max(rates.values()):.3g}"
    slow = {rank: rate for rank, rate in rates.items() if rate < share * median}
    found = [
        Finding(
            "slow",
            name,
            f"{at.name(rank)}: {rate:.3g} {unit}, {rate / median:.2f} of the median {median:.3g}; "
            f"expected at least {share}; leave its node out, or find what else it runs",
        )
        for rank, rate in slow.items()
    ]
    expected = f"each at least {share} of the median"
    if name in FLOORS and (hardware := at.hardware) is not None:
        field_name, scale, part = FLOORS[name]
        peak = getattr(hardware, field_name) * scale
        expected += f", and {part} of the {peak:,.0f} of a {hardware.name}"
        if median < part * peak:
            text = f"{numbers}; expected {expected}; all ranks are slow: look at clocks, links and drivers"
            found.append(Finding("slow", name, text))
    return found or [Finding("ok", name, f"{numbers}; expected {expected}")]
