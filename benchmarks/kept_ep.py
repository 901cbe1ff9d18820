"""Bytes kept for backward by the MoE region on two expert-parallel ranks, against torchtitan's stock RoutedExperts.

    OMP_NUM_THREADS=1 python benchmarks/kept_ep.py

The received rows have to be kept here (layer.py, on one rank, gathers them again). Storages that autograd holds between
forward and backward on both ranks together, each counted once, parameters not, plan included; same routing for all.

Shape letters: T tokens of each rank, D model width, F expert hidden width, E experts, K top-k.
"""

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from benchmarks.layer import SIZES, draw, kept_bytes
from titan_moe.moe.region import FusedExperts, FusedRoutedExperts

RANKS = 2
MOST_BYTES = 0.45


def run(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    set_spmd_backend("partial_dtensor")  # torchtitan's dispatcher then uses a collective that gloo has
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    for T, D, F, E, K, _ in SIZES.values():
        torch.manual_seed(rank)
        inputs = draw(T, D, E, K)
        sizes = {"dim": D, "hidden_dim": F, "num_experts": E // RANKS}
        tokens = AllToAllTokenDispatcher.Config(num_experts=E, top_k=K)
        stock = RoutedExperts.Config(inner_experts=GroupedExperts.Config(**sizes), token_dispatcher=tokens).build()
        stock.token_dispatcher.wire_meshes(ep_mesh=mesh)
        kept = {"stock": kept_bytes(stock.to(torch.bfloat16), inputs)}
        for dispatcher in ("alltoall", "dedup"):
            ours = FusedRoutedExperts.Config(
                inner_experts=FusedExperts.Config(**sizes), token_dispatcher=tokens, dispatcher=dispatcher
            ).build()
            ours.dispatcher = ours._make_dispatcher(mesh.get_group())
            kept[dispatcher] = kept_bytes(ours.to(torch.bfloat16), inputs)
        total = torch.tensor(list(kept.values()))
        dist.all_reduce(total)  # a rank keeps what it receives, so only all of them together compare alike
        stock_bytes, alltoall, dedup = total.tolist()
        if rank == 0:
            print(
                f"T {T} D {D} F {F} E {E} K {K}: stock {stock_bytes / 2**20:.1f} MiB; of it alltoall "
                f"{alltoall / stock_bytes:.3f}, dedup {dedup / stock_bytes:.3f} (at most {MOST_BYTES})"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("localhost", 0))
        free = s.getsockname()[1]
    torch.multiprocessing.start_processes(run, (free,), nprocs=RANKS, start_method="spawn")
