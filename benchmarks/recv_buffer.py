"""What fixed receive buffers cost on the wire and in memory, against exact sizes; between gloo ranks on this machine.

    python benchmarks/recv_buffer.py [--ranks 8] [--tokens 1024] [--repetitions 3]

Routing is DeepSeek-V3's rule on random scores, 256 experts in 8 groups of which a token uses 4, top-8, as in
dispatch.py, where bytes are counted too: at the collectives, without what a rank keeps. Payload is rows of bf16 each
way, metadata all else. Bytes scale with D, which is small here, so the table has rows per token, and what they come to
at DeepSeek-V3's D. Slab rows are those that a rank's buffers have, over the mean of T K. Whether routing overflowed a
buffer is counted by rank and repetition.

Shape letters: T tokens, D model width, K top-k, E experts.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))
from dispatch import CountBytes, K, route

from titan_moe.moe.dispatch import make_dispatcher

E, ALIGNMENT, D, DEEPSEEK_D, BF16 = 256, 128, 64, 7168, 2
BUFFERS = ("exact", 1.0, 1.25, 1.5, 2.0, "worst_case")


def run(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    counter = CountBytes()
    T = args.tokens
    for name in ("alltoall", "dedup"):
        for recv_buffer in BUFFERS:
            dispatcher = make_dispatcher(
                name,
                num_experts=E,
                top_k=K,
                alignment=ALIGNMENT,
                ep_group=dist.group.WORLD,
                recv_buffer=recv_buffer,
                max_tokens=T,
            )
            found = torch.zeros(4, dtype=torch.float64)
            generator = torch.Generator().manual_seed(100 + rank)  # the same routing for all
            for _ in range(args.repetitions):
                counter.payload = counter.metadata = 0
                plan = dispatcher.plan(route(T, generator, E))
                weights_TK = torch.rand(T, K, generator=generator)
                received = dispatcher.dispatch(torch.zeros(T, D, dtype=torch.bfloat16), weights_TK, plan)
                dispatcher.combine(received.x_RD, received.state)
                overflow = False if plan.overflow is None else bool(plan.overflow)
                found += torch.tensor([counter.payload, counter.metadata, len(received.x_RD), overflow])
            dist.all_reduce(found)
            if rank == 0:
                report(name, recv_buffer, found, args)
    dist.destroy_process_group()


def report(name: str, recv_buffer: str | float, found: torch.Tensor, args: argparse.Namespace) -> None:
    runs = args.ranks * args.repetitions
    payload, metadata, slab_rows, overflows = found.tolist()
    rows = payload / (runs * args.tokens * 2 * D * BF16)  # there and back
    per_token = rows * DEEPSEEK_D * BF16 / 1024
    print(
        f"| {name} | {recv_buffer} | {rows:.2f} | {per_token:,.1f} KiB | {metadata / runs / args.tokens:.1f} B | "
        f"{slab_rows / runs / (args.tokens * K):.2f} | {overflows:.0f} of {runs} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes and rows of fixed receive buffers")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rank")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.ranks} ranks, {args.tokens} tokens each, E {E}, K {K}, slabs of multiples of {ALIGNMENT}\n")
    columns = ["dispatcher", "recv_buffer", "rows per token each way", f"at D {DEEPSEEK_D}", "metadata per token"]
    columns += ["slab rows / mean", "overflowed"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(run, (port, args), nprocs=args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
