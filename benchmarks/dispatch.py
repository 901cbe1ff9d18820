"""alltoall against dedup between gloo ranks on this machine: time of dispatch + combine, and bytes sent.

    python benchmarks/dispatch.py [--ranks 2 4] [--widths 256 1024] [--tokens 1024] [--repetitions 15]

Routing is that of DeepSeek-V3 on random scores: 8 groups of experts, the 4 groups with the largest sum of their two
best scores stay, then the 8 best of 64 experts. The experts are the identity. Both variants run in each repetition, in
random order, each on routing drawn for it alone: shared token counts would let one variant warm shapes up for the
other. Times are medians over repetitions of the slowest rank's time; planning, which happens once per layer and not
again in backward, is timed apart. Bytes are counted where the collectives are called, without what a rank keeps:
payload is rows, forward and backward, metadata all else. Payload is compared with U (R-1)/R x bytes per row, where U,
the unique destination ranks of a token, is drawn independently; the closed formula for groups picked at random is
printed too (the real rule spreads a token more).

Shape letters: T tokens, D model width, K top-k, E experts, R ranks.
"""

import argparse
import os
import random
import socket
import statistics
import sys
import time
from math import comb
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))
from titan_moe.moe.dispatch import make_dispatcher

E, K, GROUPS, KEPT_GROUPS, ALIGNMENT = 64, 8, 8, 4, 16
VARIANTS = ("alltoall", "dedup")


def route(tokens: int, generator: torch.Generator, experts: int = E) -> torch.Tensor:
    """Expert ids [T, K] by the group-limited rule on random scores."""
    scores = torch.rand(tokens, GROUPS, experts // GROUPS, generator=generator)
    kept = scores.topk(2, dim=-1).values.sum(-1).topk(KEPT_GROUPS, dim=-1).indices
    allowed = torch.zeros(tokens, GROUPS, 1).scatter_(1, kept[:, :, None], 1.0)
    return (scores * allowed).flatten(1).topk(K, dim=-1).indices


def unique_ranks(ranks: int) -> tuple[float, float]:
    """U of the rule above, from 200,000 tokens, and by the formula for groups picked at random."""
    ids = route(200_000, torch.Generator().manual_seed(1))
    drawn = torch.zeros(len(ids), ranks).scatter_(1, ids // (E // ranks), 1.0).sum(1).mean().item()
    each, size = GROUPS // ranks, E // GROUPS  # groups of a rank, experts of a group
    formula = 0.0
    for j in range(min(each, KEPT_GROUPS) + 1):
        groups_here = comb(each, j) * comb(GROUPS - each, KEPT_GROUPS - j) / comb(GROUPS, KEPT_GROUPS)
        missed = comb((KEPT_GROUPS - j) * size, K) / comb(KEPT_GROUPS * size, K)
        formula += ranks * groups_here * (1 - missed)
    return drawn, formula


class CountBytes:
    """Bytes this rank sends to others: payload is floating-point rows, metadata all else."""

    def __init__(self) -> None:
        self.payload = self.metadata = 0
        self.exchange = dist.all_to_all_single
        dist.all_to_all_single = self

    def __call__(self, output, input, output_splits=None, input_splits=None, group=None, async_op=False):
        splits = input_splits or [len(input) // dist.get_world_size()] * dist.get_world_size()
        rows = sum(splits) - splits[dist.get_rank()]
        size = rows * input.element_size() * (input[0].numel() if len(input) else 0)
        if input.dim() == 2 and input.is_floating_point():
            self.payload += size
        else:
            self.metadata += size
        return self.exchange(output, input, output_splits, input_splits, group, async_op)


def measure(dispatcher, ids_TK, x_TD, w_TK, grad_TD) -> dict[str, float]:
    """Milliseconds of the parts, the slowest rank's."""
    marks = []

    def mark():
        marks.append(time.perf_counter())
        dist.barrier()
        marks.append(time.perf_counter())

    mark()
    plan = dispatcher.plan(ids_TK)
    mark()
    received = dispatcher.dispatch(x_TD, w_TK, plan)
    out_TD = dispatcher.combine(received.x_RD, received.state)
    mark()
    torch.autograd.grad([out_TD, received.weight_R.sum()], [x_TD, w_TK], [grad_TD, torch.ones(())])
    mark()
    spans = torch.tensor([(end - start) * 1e3 for start, end in zip(marks[1::2], marks[2::2])])
    dist.all_reduce(spans, dist.ReduceOp.MAX)
    plan_ms, forward, backward = spans.tolist()
    return {"plan": plan_ms, "forward": forward, "forward+backward": forward + backward}


def run(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    dispatchers = {
        name: make_dispatcher(name, num_experts=E, top_k=K, alignment=ALIGNMENT, ep_group=group) for name in VARIANTS
    }
    counter = CountBytes()
    generator = torch.Generator().manual_seed(100 + rank)
    order = random.Random(0)  # the same on all ranks
    T = args.tokens
    for D in args.widths:
        x_TD = torch.randn(T, D, generator=generator).bfloat16().requires_grad_()
        grad_TD = torch.randn(T, D, generator=generator).bfloat16()
        w_TK = torch.rand(T, K, generator=generator).requires_grad_()
        times: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        sent = {name: torch.zeros(2, dtype=torch.float64) for name in VARIANTS}
        for repetition in range(-2, args.repetitions):
            for name in order.sample(VARIANTS, len(VARIANTS)):
                counter.payload = counter.metadata = 0
                spans = measure(dispatchers[name], route(T, generator), x_TD, w_TK, grad_TD)
                if repetition >= 0:
                    times[name].append(spans)
                    sent[name] += torch.tensor([counter.payload, counter.metadata], dtype=torch.float64)
        for total in sent.values():
            dist.all_reduce(total)
        if rank == 0:
            report(ranks, D, times, {name: total / (args.repetitions * ranks * T) for name, total in sent.items()})
    dist.destroy_process_group()


def report(ranks: int, D: int, times, bytes_per_token) -> None:
    parts = ("plan", "forward", "forward+backward")
    medians = {
        name: {part: statistics.median(spans[part] for spans in all_spans) for part in parts}
        for name, all_spans in times.items()
    }
    print(f"\n{ranks} ranks, D {D}, bf16")
    for name in VARIANTS:
        # Forward and backward exchange rows twice each: dispatch and combine, and their transposes.
        payload, metadata = (bytes_per_token[name] / torch.tensor([4, 1])).tolist()
        milliseconds = ", ".join(f"{part} {medians[name][part]:7.2f} ms" for part in parts)
        print(f"  {name:9}{milliseconds}; per token {payload:7.1f} B of rows each way, {metadata:5.1f} B of metadata")
    drawn, formula = unique_ranks(ranks)
    expected = drawn * (ranks - 1) / ranks * D * 2
    payload = bytes_per_token["dedup"][0].item() / 4
    print(
        f"  dedup payload is {payload / expected - 1:+.2%} from U (R-1)/R x {2 * D} B = {expected:.1f} B with "
        f"U = {drawn:.3f} (groups picked at random: {formula:.3f})"
    )
    for part in parts[1:]:
        base, ours = medians["alltoall"], medians["dedup"]
        with_plan = (base[part] + base["plan"]) / (ours[part] + ours["plan"])
        pairs = sorted(a[part] / d[part] for a, d in zip(times["alltoall"], times["dedup"]))
        print(
            f"  alltoall / dedup, {part}: {base[part] / ours[part]:.2f}x (quartiles of the repetitions "
            f"{pairs[len(pairs) // 4]:.2f} - {pairs[-1 - len(pairs) // 4]:.2f}); with the plan {with_plan:.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="alltoall against dedup on gloo")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rank")
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    print(
        f"E {E}, K {K}, {GROUPS} groups of which {KEPT_GROUPS} kept, {args.tokens} tokens per rank, 1 thread per rank"
    )
    for ranks in args.ranks:
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        torch.multiprocessing.start_processes(run, (ranks, port, args), nprocs=ranks, start_method="spawn")


if __name__ == "__main__":
    main()
