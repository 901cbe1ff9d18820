"""Device, process group, meshes and seeds: the one place that knows a CPU from a GPU.

torchtitan 0.3.0 trains on a CPU with gloo once four things are put right; each has its function here and its reason:

1. `use_available_device`: without an accelerator torchtitan falls back to "cuda" for its module-level `device_type`.
2. `prepare_for_backend`: FSDP2 scales gradients by a premultiplied sum, which gloo does not have.
3. `set_timeouts`: torchtitan's own passes device ids to the barrier, which gloo refuses.
4. `DeviceMemory` (device_memory.py): torchtitan's memory monitor asks the device for a name and statistics that a CPU
   does not have.

Attention on a CPU is in `attention.py`, the all-to-all that gloo can do in `moe/dispatch.py`.

Import this module before torchtitan, which reads the device type once: the first function runs at import. The linter
keeps it in front.
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import titan_moe.processes  # noqa: F401 - before torch, whose import takes seconds

gc.disable()  # until all is imported: a fifth of that time went into looking for garbage where there is none

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def use_available_device() -> str:
    """Make torchtitan, which reads the device type once at import, see the CPU when there is no accelerator."""
    accelerator = torch._utils._get_available_device_type()
    if accelerator is None:
        torch._utils._get_available_device_type = lambda: "cpu"
        # The router asks autocast for fp32 around its gate, which a CPU cannot do; our gate casts by itself (model.py).
        warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
        # DTensor's own random numbers repeat on every rank of a CPU mesh; nothing here draws from them
        # (model.init_weights).
        warnings.filterwarnings(
            "ignore", message="DTensor (random operators|manual_seed\\(\\)) may not have complete support"
        )
    return accelerator or "cpu"


DEVICE_TYPE = use_available_device()

# torchtitan's collectives go by torch's former names.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)

from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.tools import utils as titan_utils  # noqa: E402

from titan_moe.config import Config  # noqa: E402
from titan_moe.run_folder import new_run_id  # noqa: E402


def leave_flex_attention_uncompiled() -> None:
    """Import torchtitan's attention without torch.compile, which it calls on FlexAttention there and then. That loads
    torch's code generator, 0.7 s for what has no backward on a CPU, and attention.py takes the place of."""
    compile_, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[bad-assignment]
    try:
        import torchtitan.models.common.attention  # noqa: F401
    finally:
        torch.compile = compile_


if DEVICE_TYPE == "cpu":
    leave_flex_attention_uncompiled()

gc.freeze()  # what is imported by now stays, and need not be looked at again
gc.enable()

T = TypeVar("T")

assert titan_utils.device_type == DEVICE_TYPE, "import titan_moe.runtime before torchtitan"


def default_environment(argv: list[str]) -> None:
    """What torchrun and run_train.sh would have set, for a plain `python train.py` in a debugger: one process."""
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("RUN_ID"):
        torchrun_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        os.environ["RUN_ID"] = new_run_id(argv[0] if argv else "run") if torchrun_id == "none" else torchrun_id


def init_process_group(config: Config, run_folder: Path) -> torch.device:
    """Join the process group that torchrun describes in the environment; returns this rank's device."""
    device = torch.device("cpu") if DEVICE_TYPE == "cpu" else titan_utils.get_local_device()
    titan_utils.device_module.set_device(device)
    comm = CommConfig(
        init_timeout_seconds=config.comm.init_timeout_seconds,
        train_timeout_seconds=config.comm.train_timeout_seconds,
        trace_buf_size=config.comm.trace_buf_size if DEVICE_TYPE == "cuda" else 0,  # the flight recorder is NCCL's
    )
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)  # torchrun's value; torchtitan warns before setting its own
    if config.moe.dispatcher == "te_ep":
        # A kernel of NCCL EP that waits for another rank gives up by itself, and the CUDA context is lost. 100 s, which
        # it would wait, may be too short for a first step in which ranks compile.
        limit = max(config.comm.init_timeout_seconds, config.comm.train_timeout_seconds)
        os.environ.setdefault("NCCL_EP_TIMEOUT_MS", str(1000 * limit))
    dist_utils.init_distributed(comm, base_folder=str(run_folder))
    return device


SAVING = "saving"
"""Description of the process groups of checkpoints, in which ranks may wait for each other for long"""

_watchdog: Any = None  # of this process


def start_watchdog(config: Config, folder: Path) -> None:
    """Watch, from now until the process group is left, that no rank keeps the others waiting. Not one process without
    torchrun: a debugger holds all of its threads for as long as it likes."""
    global _watchdog
    from titan_moe.watchdog import Watchdog

    if config.comm.hang_seconds and (dist.get_world_size() > 1 or "TORCHELASTIC_RUN_ID" in os.environ):
        limits = config.comm.init_timeout_seconds, config.comm.train_timeout_seconds
        _watchdog = Watchdog(folder, limits, config.comm.hang_seconds)


def leave_process_group() -> None:
    """The reverse of `init_process_group`; harmless without a group."""
    global _watchdog
    from titan_moe.moe import te_ep_ops

    if _watchdog is not None:
        _watchdog = _watchdog.stop()
    if not dist.is_initialized() or (sys.exception() is not None and te_ep_ops.abandon()):
        return
    te_ep_ops.finalize()  # it has borrowed a communicator of the group's
    dist.destroy_process_group()


def on_rank_0(function: Callable[[], T]) -> T:
    """What `function` returns on rank 0, on every rank; or its ValueError, on every rank."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except ValueError as refusal:
            outcome[0] = refusal
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    return outcome[0]


def titan_parallelism(config: Config) -> ParallelismConfig:
    """The [parallelism] section as torchtitan wants it, but for the pipeline's layout (pipeline.py)."""
    p = config.parallelism
    return ParallelismConfig(
        data_parallel_replicate_degree=p.data_parallel_replicate_degree,
        data_parallel_shard_degree=p.data_parallel_shard_degree,
        fsdp_reshard_after_forward=p.fsdp_reshard_after_forward,
        expert_parallel_degree=p.expert_parallel_degree,
        tensor_parallel_degree=p.tensor_parallel_degree,
        context_parallel_degree=p.context_parallel_degree,
        context_parallel_load_balancer=None if p.context_parallel_load_balancer == "none" else "headtail",
        pipeline_parallel_degree=p.pipeline_parallel_degree,
        pipeline_parallel_schedule=p.pipeline_parallel_schedule,
        pipeline_parallel_microbatch_size=p.pipeline_parallel_microbatch_size,
    )


def build_meshes(config: Config) -> ParallelDims:
    """torchtitan's meshes for the configured degrees: a dense one (PP, HSDP, FSDP, CP, TP) and a sparse one
    (experts)."""
    parallel_dims = ParallelDims.from_config(titan_parallelism(config), dist.get_world_size())
    parallel_dims.build_mesh()
    separate_expert_traffic(parallel_dims)
    dist_utils.set_spmd_backend(parallel_dims.spmd_backend)
    return parallel_dims


def separate_expert_traffic(parallel_dims: ParallelDims) -> None:
    """Give dispatch and combine a process group of their own where all ranks are in it. torch would take the default
    group, which FSDP then has too: they would wait for each other on one communicator."""
    ep_mesh = parallel_dims.get_optional_mesh("ep")
    if ep_mesh is not None and ep_mesh.get_group() is dist.group.WORLD:
        own = dist.new_group(group_desc="mesh_ep")
        assert isinstance(own, dist.ProcessGroup)  # of all ranks
        ep_mesh._dim_group_names = [own.group_name]  # in place: FSDP2 wants all meshes to have the same root
        ep_mesh._get_root_mesh()._pg_registry[own.group_name] = own


def batch_coordinates(parallel_dims: ParallelDims) -> tuple[int, int]:
    """(rank, degree) of this process along the axis that batches are split over."""
    if not parallel_dims.dp_enabled:
        return 0, 1
    mesh = parallel_dims.get_mesh("batch")
    return mesh.get_local_rank(), mesh.size()


def set_seed(config: Config, parallel_dims: ParallelDims, device: torch.device) -> None:
    """Seed torch on every rank alike. Initial weights and data order have seeds of their own and do not depend on
    this."""
    debug = DebugConfig(seed=config.debug.seed, deterministic=config.debug.deterministic)
    dist_utils.set_determinism(parallel_dims, device, debug, distinct_seed_mesh_dims=[])


def prepare_for_backend(model: torch.nn.Module) -> None:
    """Let FSDP2 reduce with a plain sum where the backend has no premultiplied one (gloo)."""
    from torch.distributed.fsdp import FSDPModule

    if dist.get_backend() != "gloo":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def set_timeouts(parallel_dims: ParallelDims, seconds: int) -> None:
    """Tighten every group's time limit once the slow first step is over. All ranks wait for each other first: a rank
    still in the first step must not meet the new limit."""
    from titan_moe.moe.dedup import last_hop_groups

    timeout = timedelta(seconds=seconds)
    if _watchdog is not None:
        _watchdog.training()
    if DEVICE_TYPE != "cpu":
        dist_utils.set_pg_timeouts(timeout, parallel_dims)
    else:
        dist.barrier()
        for mesh in parallel_dims.get_all_one_dimensional_meshes().values():
            dist.set_timeout(timeout, mesh.get_group())
        dist.set_timeout(timeout, None)
    for group in last_hop_groups():
        dist.set_timeout(timeout, group)
