"""dedup's two hops on slow links, one after the other and in chunks: time of dispatch + combine, and of their backward.

    python benchmarks/hop_chunks.py [--chunks 1 2 4 8] [--ns-per-byte 100] [--width 256] [--tokens 1024]

Four gloo ranks as two nodes of two. Both links of a rank, to the other node and inside its own, take so long for every
byte received (in_flight.py): on one machine there is nothing to wait for otherwise. The experts are the identity.
Routing is that of benchmarks/dispatch.py. All chunk counts run in each repetition, in random order; times are medians
of the slowest rank's. "predicted" is max(a, b) + min(a, b) / C for hops of a and b seconds, by their bytes alone.

Shape letters: T tokens, D model width, K top-k, E experts, C chunks.
"""

import argparse
import os
import random
import socket
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.dispatch import ALIGNMENT, E, K, measure, route
from titan_moe import in_flight
from titan_moe.moe.dispatch import make_dispatcher

RANKS, PER_NODE = 4, 2


def received_ms(plan, me: int, row_bytes: int, ns_per_byte: float) -> list[float]:
    """Milliseconds of each hop of dispatch, and of combine, which brings no weights: [2 hops of 2]."""

    def others(splits: list[int]) -> int:
        return sum(splits) - splits[me]

    found = [0.0] * 4
    for i, hop in enumerate(plan.hops):
        found[i % 2] += others(hop.row_splits[0]) * row_bytes + others(hop.copy_splits[0]) * 4
        found[2 + i % 2] += others(hop.row_splits[1]) * row_bytes
    return [size * ns_per_byte * 1e-6 for size in found]


def run(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    common = {"num_experts": E, "top_k": K, "alignment": ALIGNMENT, "ep_group": dist.group.WORLD}
    dispatchers = {C: make_dispatcher("dedup", ranks_per_node=PER_NODE, hop_chunks=C, **common) for C in args.chunks}
    in_flight.seconds_per_byte = args.ns_per_byte * 1e-9
    generator, order = torch.Generator().manual_seed(100 + rank), random.Random(0)  # the order is the same on all ranks
    x_TD = torch.randn(args.tokens, args.width, generator=generator).bfloat16().requires_grad_()
    grad_TD = torch.randn(args.tokens, args.width, generator=generator).bfloat16()
    w_TK = torch.rand(args.tokens, K, generator=generator).requires_grad_()
    times: dict[int, list[dict[str, float]]] = {C: [] for C in args.chunks}
    predicted: dict[int, list[float]] = {C: [] for C in args.chunks}
    for repetition in range(-1, args.repetitions):
        for C in order.sample(args.chunks, len(args.chunks)):
            ids_TK = route(args.tokens, generator)
            spans = measure(dispatchers[C], ids_TK, x_TD, w_TK, grad_TD)
            hops = received_ms(dispatchers[C].plan(ids_TK), rank, 2 * args.width, args.ns_per_byte)
            forward = torch.tensor(sum(max(two) + min(two) / C for two in (hops[:2], hops[2:])))
            dist.all_reduce(forward, dist.ReduceOp.MAX)
            if repetition >= 0:
                times[C].append(spans)
                predicted[C].append(forward.item())
    if rank == 0:
        for C in args.chunks:
            plan, forward, both = (
                statistics.median(spans[part] for spans in times[C]) for part in ("plan", "forward", "forward+backward")
            )
            expected = statistics.median(predicted[C])
            ms = f"forward {forward:7.1f} ms (predicted {expected:7.1f}), backward {both - forward:7.1f} ms"
            print(f"  C {C}: {ms}; plan {plan:5.1f} ms", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="dedup's two hops in chunks, on slow links")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ns-per-byte", type=float, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rank")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    print(
        f"{RANKS} ranks, {PER_NODE} a node, {args.tokens} tokens each, D {args.width}, bf16, {args.ns_per_byte} ns/byte"
    )
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(run, (port, args), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
