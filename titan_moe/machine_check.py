"""Whether the machine that a run is started on can hold it: told before anything is allocated.

A 671B configuration on a laptop must not die out of memory after minutes. So before torchrun the planner's memory model
(plan/memory.py) is asked about the processes that there really are and the memory that each of them really has: that of
a GPU, or its share of what this machine has left. A run is refused where even a prediction that is a tenth too high
leaves no room; what is closer than that starts, with a warning.

The refusal shows the plan for the hardware that the file names in [plan], what it would take here, and what to do. The
same goes for a file laid out for another number of processes than there are. Imports no torch.
"""

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from titan_moe.config import Config
from titan_moe.config_check import NEEDS_GPU, check, model_flavor
from titan_moe.config_keys import get
from titan_moe.optimizer_check import moments_dtype
from titan_moe.plan import activations, parameters, report
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.memory import GIB, OUTSIDE_GIB, predict_memory
from titan_moe.plan.model_states import BYTES, Entry

PREDICTION_TOO_HIGH = 1.1
"""Peaks were up to 9 % below their prediction (docs/planner.md)"""
PYTHON_GIB = 0.7
"""Python, torch and gloo in a process that has no model yet"""
WIDER_IN_FP32 = ("activations", "gathered parameters", "working set", "dispatcher")
"""Groups of memory that the planner counts in bf16"""
EXAMPLE = "H100"
"""Hardware to plan for where the file names none"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one process of a run has."""

    name: str
    memory: float
    """Bytes, of which the process may take all"""
    gpu: bool


def this_machine(processes: int, gpus: bool) -> Machine | None:
    """What each of so many processes has here; None if nothing tells."""
    if gpus:
        return _gpu()
    available = available_bytes()
    if available is None:
        return None
    shared = f", shared by {processes} processes" if processes > 1 else ""
    return Machine(name=f"a CPU with {available / GIB:,.1f} GiB left{shared}", memory=available / processes, gpu=False)


def _gpu() -> Machine | None:
    """The smallest GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=15).stdout.splitlines()
        mib, name = min((float(line.split(", ", 1)[0]), line.split(", ", 1)[1]) for line in lines)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # a driver that does not answer is not this check's business
    return Machine(name=f"{name} with {mib / 1024:,.1f} GiB", memory=mib * 2**20, gpu=True)


def available_bytes() -> int | None:
    """Memory that this machine, or the container that this is in, has left."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    if found is None:
        return None
    limits = [int(found[1]) * 1024]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no limit ("max"), or no such file
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cache = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        limits.append(limit - used + (int(cache[1]) if cache else 0))  # files that were read can be forgotten
    return max(min(limits), 0)


TE = "transformer_engine"


def without_te(config: Config) -> list[str]:
    """That Transformer Engine is not installed here, said without importing it. Whether it is whole, and the machine
    good enough for it, the backends ask (moe/te.py)."""
    if importlib.util.find_spec(TE) is not None:
        return []
    return [
        f'{key} = "{get(config, key)}": needs Transformer Engine, which is not installed here; scripts/setup_env.py '
        f'installs it on a machine with a GPU and says why if it cannot, or choose "{portable}"'
        for key, (portable, values) in NEEDS_GPU.items()
        if (value := get(config, key)) in values and value.startswith("te")
    ]


# ---------------------------------------------------------------------------------------------------------------------
# What a run needs


def needed_bytes(config: Config, world_size: int, machine: Machine) -> float:
    """Predicted peak of the fullest process, of a configuration that `check` finds nothing wrong with."""
    hardware = replace(HARDWARE["H100"], hbm_gb=machine.memory / 1e9)  # of its rates, memory needs none
    job = Job.from_config(config, world_size, hardware)
    if not machine.gpu:
        job = replace(job, offload=frozenset())  # to the same memory
    memory = predict_memory(job, activations.GPU if machine.gpu else activations.CPU)
    wider = 2 if config.training.mixed_precision_param == "float32" else 1

    def size(entry: Entry) -> float:
        return entry.size * (wider if entry.group in WIDER_IN_FP32 else 1)

    outside = (OUTSIDE_GIB if machine.gpu else PYTHON_GIB) * GIB
    return sum(size(entry) for entry in memory.entries if entry.name != "CUDA context, NCCL, cuBLAS") + outside


def least_bytes(config: Config, world_size: int) -> float:
    """Parameters, gradients and moments of one process, if they could be cut evenly."""
    moments = 1 if config.optimizer.name == "Muon" else 2  # of nearly all parameters
    each = 2 * BYTES[config.training.dtype] + moments * BYTES[moments_dtype(config)]
    return each * parameters.total(model_flavor(config)) / world_size


# ---------------------------------------------------------------------------------------------------------------------
# What is said


def refusal(
    config: Config, argv: Sequence[str], world_size: int, machine: Machine | None, accelerator: bool
) -> str | None:
    """Why this many processes here cannot train `config`, which `argv` asks for, file first, with its plan and the way
    out; None if they can, or if it has mistakes of its own, which are told elsewhere."""
    if check(config, world_size, accelerator=accelerator):
        planned = config.plan.gpus
        if planned is None or planned == world_size or check(config, planned):
            return None
        wrong = f"is laid out for {planned:,} GPUs (plan.gpus), and {_processes(world_size)} cannot be laid out so"
        needs = f"at least {least_bytes(config, world_size) / GIB:,.1f} GiB, of weights, gradients and optimizer alone"
    else:
        if machine is None:
            return None
        needed = needed_bytes(config, world_size, machine)
        if _fits(needed, machine):
            return None
        wrong = f"does not fit into the memory of {_processes(world_size)} here"
        needs = f"{needed / GIB:,.1f} GiB"
    here = machine.name if machine else "unknown memory"
    told = f"Here     {_processes(world_size)} on {here}; each needs {needs}"
    remedies = _remedies(config, shlex.join(argv), world_size)
    return "\n".join([f"{argv[0]}: {wrong}", "", *_plan(config), told, "", *remedies])


def occupied(config: Config, world_size: int, machine: Machine) -> str | None:
    """Why a GPU that has only `machine.memory` left cannot take its part of the run, which `refusal` let pass."""
    needed = needed_bytes(config, world_size, machine)
    if _fits(needed, machine):
        return None
    return (
        f"{machine.name} has {machine.memory / GIB:,.1f} GiB left, but the planner expects this run to need "
        f"{needed / GIB:,.1f} GiB of it; end what else runs there, or lower training.local_batch_size, or recompute "
        f"more ([activation_checkpoint]){_or_bound_rows(config)}"
    )


def _fits(needed: float, machine: Machine) -> bool:
    return needed <= PREDICTION_TOO_HIGH * machine.memory


def warning(config: Config, world_size: int, machine: Machine | None) -> str | None:
    """About a run that may just fit. For a sound configuration that is not refused."""
    if machine is None or (needed := needed_bytes(config, world_size, machine)) <= machine.memory:
        return None
    return (
        f"this run may not fit: the planner expects {needed / GIB:,.1f} GiB per process, on {machine.name}; "
        f"lower training.local_batch_size, or recompute more ([activation_checkpoint]){_or_bound_rows(config)}"
    )


def _or_bound_rows(config: Config) -> str:
    """Another remedy, where there is one."""
    if config.moe.dispatcher != "te_ep" or config.moe.recv_buffer != "exact":
        return ""
    return ", or set moe.recv_buffer to a factor: with exact sizes NCCL EP makes room for all tokens on one rank"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count:,} processes"


def _plan(config: Config) -> list[str]:
    """The head of --plan's report for the hardware that the file is for."""
    if not config.plan.hardware or config.plan.gpus is None:
        return []
    try:
        return [*report.summary(report.make(config, "")), ""]
    except ValueError:  # overrides that do not fit the file's [plan]: this check is not about them
        return []


def _remedies(config: Config, words: str, world_size: int) -> list[str]:
    """Commands that do something when they are typed as they are here."""
    lines, run = ["What to do"], f"./run_train.sh {words}"
    gpus = config.plan.gpus or world_size
    if config.plan.gpus is not None:
        them = f"{gpus:,} {config.plan.hardware or 'GPUs'}"
        lines += [
            f"  train it on {them}: this command on each node, as docs/cluster.md says",
            f"  see what one of its ranks holds and sends, without a GPU: {run} --comm.mode=fake_backend",
        ]
    return [
        *lines,
        f"  try its structure here, with few and narrow layers: {run} --model.scale_down",
        f"  look for a layout that fits: {plan_command(config, words, world_size)}",
        f"    with other GPUs and degrees, a smaller training.local_batch_size, more recompute, or fewer model.n_layers"
        f"{_or_bound_rows(config)}",
    ]


def plan_command(config: Config, words: str, world_size: int) -> str:
    """The command that plans what `words`, quoted for a shell, train: for the file's hardware, or for an example."""
    hardware, gpus = config.plan.hardware or EXAMPLE, config.plan.gpus or world_size
    return f"./run_train.sh {words} --plan --plan.hardware={shlex.quote(hardware)} --plan.gpus={gpus}"
