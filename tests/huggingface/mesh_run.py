"""What ranks of test_meshes.py do: load, save and export a sharded model; train.

Imports no transformers: each rank is a fork of a server that has imported this."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed import utils as dist_utils

import train
from tests.faults.checkpoint_run import Job
from titan_moe import parallel
from titan_moe.config import Config
from titan_moe.huggingface import export
from titan_moe.huggingface.load import load
from titan_moe.inputs import model_inputs
from titan_moe.model import build_model, init_weights
from titan_moe.moe.names import to_stock_names
from titan_moe.torch_helpers import local

Job.context.set_forkserver_preload([__name__])


def on_mesh(tell: Callable[[Any], None], config: Config, out: Path) -> None:
    """Load into weights that are NaN; leave the whole ones, gathered by DTensor, in OUT/rank-N.pt; save, export. In
    OUT/logits-N.pt is what the model makes of the sequences in OUT/tokens.pt, if no pipeline cuts it."""
    dims = runtime.build_meshes(config)
    parts, _ = parallel.parallelize(build_model(config), config, dims, torch.device("cpu"))
    assert dist.group.WORLD is not None
    for part in parts:
        part.to_empty(device="cpu")
        init_weights(part, seed=3)
        with torch.no_grad():
            for value in part.parameters():
                local(value).fill_(torch.nan)
    load(Path(config.checkpoint.initial_load_path), config, parts, dist.group.WORLD)
    whole = {}
    for part in parts:
        for name, value in [*part.named_parameters(), *part.named_buffers()]:
            if isinstance(value, torch.nn.Parameter) or name.endswith("expert_bias_E"):
                value = value.detach()
                whole[canonical_fqn(name)] = value.full_tensor() if isinstance(value, DTensor) else value
    torch.save(to_stock_names(whole), out / f"rank-{dist.get_rank()}.pt")
    if not dims.pp_enabled:
        (model,), tokens_BL = parts, torch.load(out / "tokens.pt")
        inputs = {"input": tokens_BL, "positions": torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL)}
        tokens_BL, _, kwargs = model_inputs(model.eval(), (inputs, tokens_BL.clone()), dims, "none")
        with torch.no_grad(), dist_utils.get_spmd_context(parallel_dims=dims)():
            torch.save(model(tokens_BL, **kwargs), out / f"logits-{dist.get_rank()}.pt")
    dcp.save({name: v for part in parts for name, v in part.state_dict().items()}, checkpoint_id=out / "step-1")
    export.FILE_BYTES = 100_000
    export.export(config, out / "step-1", out / "hf", None, group=dist.group.WORLD)
    tell("done")


def memory(tell: Callable[[Any], None], config: Config, out: Path) -> None:
    """Tell by how many bytes the process grew, at its peak, over the model that was there: in an export to files of
    60 MB, and in an import of them."""
    export.FILE_BYTES = 60 << 20
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, seed=0)
    dcp.save(model.state_dict(), checkpoint_id=out / "step-1")
    grown = []
    assert dist.group.WORLD is not None
    for work in (
        lambda: export.export(config, out / "step-1", out / "hf", torch.bfloat16),
        lambda: load(out / "hf", config, [model], cast(Any, dist.group.WORLD)),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _resident("VmRSS")
        work()
        grown.append(_resident("VmHWM") - before)
    tell(grown)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kib)


def training(tell: Callable[[Any], None], *argvs: list[str]) -> None:
    """train.py's main, in the process group that is there; once for each of `argvs`."""
    os.environ["RUN_ID"] = "hf"
    runtime.init_process_group = lambda config, run_folder: torch.device("cpu")
    for argv in argvs:
        config = train.config_file.load(argv, dist.get_world_size())
        train.config_file.raise_on_problems(config, dist.get_world_size())
        run = train.build(config)
        try:
            train.train(run)
        finally:
            run.checkpointer.close()
            run.metrics.close()
    tell("done")
