"""What ranks of test_muon.py do: steps of the configured optimizer with made-up gradients, on several meshes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from tests.faults.checkpoint_run import Job
from titan_moe import parallel
from titan_moe.config import Config
from titan_moe.model import build_model, init_weights, local_slice
from titan_moe.moe.names import to_stock_names
from titan_moe.optimizer import Optimizers, build_optimizers

Job.context.set_forkserver_preload([__name__])


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """The whole one of a parameter."""
    seed = int.from_bytes(hashlib.blake2b(f"{name}/{step}".encode(), digest_size=7).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def take_steps(parts: list[nn.Module], optimizers: Optimizers, steps: range, skip: int = -1) -> None:
    """`skip`: a step whose gradients are not finite, and which is to be left out."""
    for step in steps:
        for part in parts:
            for name, parameter in part.named_parameters():
                local, offset = local_slice(parameter)
                index = tuple(slice(at, at + size) for at, size in zip(offset, local.shape))
                part_of_it = gradient(canonical_fqn(name), parameter.shape, step)[index].contiguous()
                if step == skip:
                    part_of_it.fill_(torch.nan)
                if isinstance(parameter, DTensor):
                    mesh, cut = parameter.device_mesh, parameter.placements
                    like = {"shape": parameter.shape, "stride": parameter.stride()}
                    part_of_it = DTensor.from_local(part_of_it, mesh, cut, run_check=False, **like)
                parameter.grad = part_of_it
        optimizers.step(skip=torch.tensor(float(step == skip)))
        optimizers.zero_grad()


def whole(parts: list[nn.Module]) -> dict[str, Tensor]:
    """All parameters of this rank's stages, gathered by DTensor, under checkpoints' names."""
    found = {}
    for part in parts:
        for name, value in part.named_parameters():
            value = value.detach()
            found[canonical_fqn(name)] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return to_stock_names(found)


def on_meshes(tell: Callable[[Any], None], configs: dict[str, Config], out: Path) -> None:
    """On each mesh two steps, one that is skipped, a save, another step: OUT/<mesh>/rank-N.pt has the weights. Where
    the same model was on a mesh before, its optimizer's state is loaded in place of the own one before the last
    step."""
    saved: dict[str, Path] = {}
    for name, config in configs.items():
        dims = runtime.build_meshes(config)
        parts, _ = parallel.parallelize(build_model(config), config, dims, torch.device("cpu"))
        for part in parts:
            part.to_empty(device="cpu")
            init_weights(part, seed=3)
        optimizers = build_optimizers(config, parts, dims)
        optimizers._optimizer_step_pre_hooks.clear()  # no balancing: nothing was routed
        take_steps(parts, optimizers, range(3), skip=1)
        state = optimizers.state_dict()
        dcp.save(state, checkpoint_id=out / name / "optimizer")
        if (before := saved.get(repr(config.model))) is not None:
            for optimizer in optimizers:
                for values in optimizer.state.values():
                    for value in values.values():
                        value.fill_(torch.nan)
            state = optimizers.state_dict()
            dcp.load(state, checkpoint_id=before)
            optimizers.load_state_dict(state)
        take_steps(parts, optimizers, range(3, 4))
        saved[repr(config.model)] = out / name / "optimizer"
        torch.save(whole(parts), out / name / f"rank-{dist.get_rank()}.pt")
        tell(name)
