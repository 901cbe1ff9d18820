"""The doctor's checks: what each rank measures, and what rank 0 makes of the answers.

A check is a pair of functions. `measure` runs on every rank, at the same time, and returns something that JSON can
hold; what it raises becomes that rank's answer too. `judge` gets all answers and returns findings: "ok", "slow" or
"wrong" with the value, what was expected, and the way out; "note" for what could not be judged.

A rate is slow against the median of all ranks, which shows one sick rank among healthy ones, or against the data
sheet (plan/hardware.py), which shows when all are: SHARES and FLOORS say how far.
"""

import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from scripts import setup_env
from titan_moe import doctor_bench, mesh_check, placement, run_folder
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.moe import te
from titan_moe.plan.hardware import Hardware, of_device

SHARES = {"cuda": 0.9, "cpu": 0.4}
"""Of the median, below which a rank is slow. GPUs of one kind differ by a few percent; processes on CPUs share cores,
caches and memory with each other and with whatever else runs"""

FLOORS = {
    "GEMM": ("bf16_tflops", 1e0, 0.5),
    "memory copy": ("hbm_tb_s", 1e3, 0.5),
    "host copy": ("host_gb_s", 1.0, 0.5),
    "all-reduce inside": ("nvlink_gb_s", 1.0, 0.37),  # half of what 8 B200 reached (plan/kernels.py): 0.742
    "all-to-all inside": ("nvlink_gb_s", 1.0, 0.3),  # and 0.597
    "all-reduce across": ("nic_gb_s", 1.0, 0.5),
    "all-to-all across": ("nic_gb_s", 1.0, 0.5),
}
"""Of which rate of the data sheet (its unit in ours) a healthy machine reaches which share at least"""

PROCESS_GIB = 2.0
"""Host memory of one training process, at least: the debug model on a CPU takes so much"""


class Finding(NamedTuple):
    state: Literal["ok", "note", "slow", "wrong"]
    check: str
    text: str


@dataclass
class Examined:
    """This rank, the ranks around it, and what the run is to be. `place` is what the others learn about it."""

    config: Config
    asked: bool
    """A configuration was given: `config` is what the run will be, and not just the defaults"""
    device: torch.device
    store: dist.Store
    """For answers, and for process groups to find each other"""
    rank: int
    world_size: int
    per_node: int
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """"inside": the ranks of this node; "across": one rank of each node, at the same place"""
    places: dict[int, dict[str, str]] = field(default_factory=dict)
    """On rank 0, by rank: host, device and NVLink domain; filled by the first check"""

    @property
    def hardware(self) -> Hardware | None:
        return of_device(self.places[0]["device"])

    def name(self, rank: int) -> str:
        place = self.places.get(rank)
        return f"rank {rank} ({place['host']})" if place else f"rank {rank} (node {rank // self.per_node})"


class Check(NamedTuple):
    name: str
    measure: Callable[[Examined], Any]
    judge: Callable[[Examined, dict[int, Any]], list[Finding]]
    together: bool = False
    """Ranks measure it with each other: if one fails, none can go on"""
    patience: float = 1.0
    """In doctor_bench.LIMIT_SECONDS: how long answers may take"""


def checks(device: torch.device, nodes: int, per_node: int) -> list[Check]:
    """Those that apply to such a machine, in order."""
    cuda = device.type == "cuda"
    # Ranks come late to the first one: nodes read torch from a shared disk at different speeds.
    found = [Check("ranks", _place, _judge_places, patience=3.0), Check("packages", _packages, _judge_packages)]
    if cuda:
        found.append(Check("driver", _driver, _judge_driver))
        found.append(Check("NCCL", lambda at: list(torch.cuda.nccl.version()), _judge_nccl))
    found += [
        Check("Transformer Engine", _transformer_engine, _judge_transformer_engine),
        Check("host memory", _host_memory, _judge_host_memory),
        Check("run folder", _run_folder, _judge_run_folder),
        _rate("GEMM", "TFLOP/s", lambda at: doctor_bench.gemm(at.device))
        if cuda
        else _rate("GEMM", "GFLOP/s", lambda at: 1e3 * doctor_bench.gemm(at.device)),
        _rate("memory copy", "GB/s", lambda at: doctor_bench.memory_copy(at.device)),
    ]
    if cuda:
        found.append(_rate("host copy", "GB/s", lambda at: doctor_bench.host_copy(at.device)))
    if nodes * per_node > 1:
        found.append(Check("connection", _connect, _judge_connection, together=True))
    for where, ranks in (("inside", per_node), ("across", nodes)):
        if ranks > 1:
            found += [
                _group_rate(f"all-reduce {where}", doctor_bench.all_reduce, where),
                _group_rate(f"all-to-all {where}", doctor_bench.all_to_all, where),
                _group_rate(f"pairs {where}", doctor_bench.pair_exchange, where),
            ]
    return [*found, Check("rank order", lambda at: None, _judge_rank_order)]


# ---------------------------------------------------------------------------------------------------------------------
# What there is


def _place(at: Examined) -> dict[str, str]:
    if at.device.type == "cpu" and os.environ.get("GPUS", "0") != "0":
        raise RuntimeError(
            f"nvidia-smi shows GPUs, but torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees none; "
            "install a driver that runs this CUDA"
        )
    device = torch.cuda.get_device_name(at.device) if at.device.type == "cuda" else "CPU"
    return {"host": platform.node(), "device": device, "domain": _nvlink_domain()}


def _nvlink_domain() -> str:
    script = Path(setup_env.__file__).with_name("nvlink_domain.sh")
    return subprocess.run([script], capture_output=True, text=True, check=True).stdout.strip()


def _judge_places(at: Examined, answers: dict[int, dict[str, str]]) -> list[Finding]:
    at.places = answers
    kinds = sorted({place["device"] for place in answers.values()})
    nodes, domains = at.world_size // at.per_node, len({place["domain"] for place in answers.values()})
    text = f"{at.world_size} on {_count(nodes, 'node')} in {_count(domains, 'NVLink domain')}; {', '.join(kinds)}"
    if len(kinds) > 1:
        odd = [at.name(rank) for rank, place in answers.items() if place["device"] != kinds[0]]
        return [Finding("wrong", "ranks", f"{text}: one kind expected, other than {kinds[0]}: {_few(odd)}")]
    return [Finding("ok", "ranks", text)]


def _packages(at: Examined) -> dict[str, Any]:
    versions = run_folder.provenance()["versions"].items()
    shown = ", ".join(f"{package} {version}" for package, version in versions if version)
    return {"versions": shown, "unmet": setup_env.unmet(dev=False)}


def _judge_packages(at: Examined, answers: dict[int, dict[str, Any]]) -> list[Finding]:
    way_out = "remove .venv and start again, or install what pyproject.toml asks for"
    wrong = {at.name(rank): answer["unmet"] for rank, answer in answers.items() if answer["unmet"]}
    found = [
        Finding("wrong", "packages", f"{who} lacks {', '.join(unmet)}, as in requirement (installed); {way_out}")
        for who, unmet in wrong.items()
    ]
    return found or [_same(at, "packages", {rank: answer["versions"] for rank, answer in answers.items()})]


def _driver(at: Examined) -> list[int]:
    """The newest CUDA that the driver runs."""
    number = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))  # as in 13000
    return [number.value // 1000, number.value % 1000 // 10]


def _judge_driver(at: Examined, answers: dict[int, list[int]]) -> list[Finding]:
    assert torch.version.cuda is not None
    major = int(torch.version.cuda.split(".")[0])
    old = [f"{at.name(rank)} {_dots(version)}" for rank, version in answers.items() if version[0] < major]
    if old:
        text = f"runs CUDA up to: {_few(old)}; torch is built for {torch.version.cuda}; install a newer driver"
        return [Finding("wrong", "driver", text)]
    return [_same(at, "driver", {rank: f"for CUDA {_dots(version)}" for rank, version in answers.items()})]


def _judge_nccl(at: Examined, answers: dict[int, list[int]]) -> list[Finding]:
    return [_same(at, "NCCL", {rank: _dots(version) for rank, version in answers.items()})]


def _same(at: Examined, name: str, shown: Mapping[int, str]) -> Finding:
    other = [f"{at.name(rank)} {text}" for rank, text in shown.items() if text != shown[0]]
    if other:
        return Finding("wrong", name, f"rank 0 has {shown[0]}, but {_few(other)}; give all nodes the same")
    return Finding("ok", name, f"{shown[0]} on all ranks")


def _transformer_engine(at: Examined) -> dict[str, Any]:
    m = at.config.moe
    experts, dispatcher = m.experts in ("te", "te_fused"), m.dispatcher == "te_ep"
    if not experts and not dispatcher:
        return {"asked": [], "problems": []}
    found = te.facts()
    asked = [f'{key} = "{value}"' for key, value in (("moe.experts", m.experts), ("moe.dispatcher", m.dispatcher))]
    shown = {"TE": found.version, "cuBLASLt": found.cublaslt, "NCCL": _dots(found.nccl or ()), "nvcc": found.nvcc}
    return {
        "asked": [text for text, wanted in zip(asked, (experts, dispatcher), strict=True) if wanted],
        "problems": te_problems(found, dispatcher),
        "shown": ", ".join(f"{name} {value}" for name, value in shown.items() if value),
    }


def te_problems(found: te.Facts, expert_parallel: bool) -> list[str]:
    """What keeps TE, and with `expert_parallel` its NCCL EP, from running on what was found; each with the way out."""
    problem = te.problem(found)
    if problem or not expert_parallel:
        return [problem] if problem else []
    build = _dots(te.NCCL_EP_BUILD)
    problems = []
    if not found.nccl_ep:
        problems.append("libnccl_ep.so is not there; build TE with NVTE_WITH_NCCL_EP=1")
    if found.nccl is None or found.nccl < te.NCCL_EP_BUILD:
        now = _dots(found.nccl or ()) or "not found"
        problems.append(f"NCCL is {now}, NCCL EP needs {build}; pip install --no-deps nvidia-nccl-cu13=={build}")
    if found.nvcc is None:
        problems.append("NCCL EP compiles with nvcc when a run starts, and finds none; set NCCL_EP_JIT_NVCC")
    if found.nccl_headers is None:
        problems.append("NCCL EP finds no nccl.h; set NCCL_EP_JIT_BUILD_INCLUDE_DIR, as scripts/cluster_env.sh does")
    return problems


def _judge_transformer_engine(at: Examined, answers: dict[int, dict[str, Any]]) -> list[Finding]:
    name = "Transformer Engine"
    if not answers[0]["asked"]:
        return []
    asked = " and ".join(answers[0]["asked"])
    wrong = [
        Finding("wrong", name, f"{at.name(rank)}, for {asked}: {problem}")
        for rank, answer in answers.items()
        for problem in answer["problems"]
    ]
    return wrong or [Finding("ok", name, f"{answers[0]['shown']}, for {asked}")]


# ---------------------------------------------------------------------------------------------------------------------
# How much and how fast


def _host_memory(at: Examined) -> float | None:
    """GiB that processes could still take on this node."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20


def _judge_host_memory(at: Examined, answers: dict[int, float | None]) -> list[Finding]:
    nodes = {rank: gib for rank, gib in answers.items() if rank % at.per_node == 0 and gib is not None}
    if not nodes:
        return [Finding("note", "host memory", "unknown on this system")]
    need = at.per_node * PROCESS_GIB
    low = [f"{at.name(rank)} {gib:.1f}" for rank, gib in nodes.items() if gib < need]
    expected = f"{at.per_node} processes x {PROCESS_GIB} = {need:.0f} GiB"
    if low:
        text = f"free GiB: {_few(low)}; expected at least {expected}; end other programs, or start fewer processes"
        return [Finding("wrong", "host memory", text)]
    return [Finding("ok", "host memory", f"{min(nodes.values()):.1f} GiB free and more; expected at least {expected}")]


def _run_folder(at: Examined) -> float | None:
    """GB/s that the first rank of a node writes with."""
    folder = run_folder.choose(at.config, {"RUN_ID": "doctor"})
    return doctor_bench.disk_write(folder) if at.rank % at.per_node == 0 else None


def _judge_run_folder(at: Examined, answers: dict[int, float | None]) -> list[Finding]:
    rates = {rank: rate for rank, rate in answers.items() if rate is not None}
    folder = run_folder.choose(at.config, {"RUN_ID": "doctor"})
    return judge_rates(at, "run folder", f"GB/s written to {folder.parent}", rates, share=0.5)


def _connect(at: Examined) -> float:
    """Seconds until all ranks have found each other."""
    start = time.perf_counter()
    # NCCL ends a process whose collective takes too long; long before, doctor_bench has given it up.
    cuda, limit = at.device.type == "cuda", doctor_bench.LIMIT_SECONDS
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


def _judge_connection(at: Examined, answers: dict[int, float]) -> list[Finding]:
    return [Finding("ok", "connection", f"{dist.get_backend()}, in {max(answers.values()):.1f} s")]


def _rate(name: str, unit: str, measure: Callable[[Examined], float]) -> Check:
    def judge(at: Examined, answers: dict[int, float]) -> list[Finding]:
        return judge_rates(at, name, unit, answers, SHARES.get(at.device.type, 0.9))

    return Check(name, measure, judge)


def _group_rate(name: str, measure: Callable[[dist.ProcessGroup, torch.device], float], where: str) -> Check:
    def run(at: Examined) -> float:
        return measure(at.groups[where], at.device)

    return _rate(name, "GB/s", run)._replace(together=True)


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


def _judge_rank_order(at: Examined, answers: dict[int, Any]) -> list[Finding]:
    if not at.asked:
        return []
    unfit = mesh_check.check(at.config, at.world_size, model_flavor(at.config))
    if unfit:
        return [
            Finding("note", "rank order", f"not checked, as the configuration does not fit these ranks: {unfit[0]}")
        ]
    domains = [at.places[rank]["domain"] for rank in range(at.world_size)]
    far = placement.notes(at.config, domains, at.per_node)
    p = at.config.parallelism
    text = (
        f"expert-parallel groups of {p.expert_parallel_degree}, and tensor-parallel ones of "
        f"{p.tensor_parallel_degree}, lie inside NVLink domains; pipeline neighbours are close"
    )
    return [Finding("slow", "rank order", note) for note in far] or [Finding("ok", "rank order", text)]


# ---------------------------------------------------------------------------------------------------------------------
# Words


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _few(words: list[str]) -> str:
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def _dots(version: Any) -> str:
    return ".".join(map(str, version))
