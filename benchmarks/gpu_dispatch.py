"""Every dispatcher between the GPUs of a machine, at the widths of 671B. The `gpu` suite runs it:

    torchrun --nproc_per_node N benchmarks/gpu_dispatch.py --json FILE [--tokens 4096] [--width 7168]

All ranks are one expert-parallel group. Plan, dispatch and combine, forward and backward, in bf16, on random routing,
with the identity for experts. The time is the slowest rank's median wall time. The bytes are what must leave that rank:
one row for each of its (token, other rank) pairs, four times; so alltoall, which sends a row for each copy, moves more
than it is credited with. On a machine without GPUs gloo carries the rows, which tries the code.

Shape letters: T tokens of a rank, D model width, K top-k, E experts, R rows received, P ranks.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from titan_moe.runtime import DEVICE_TYPE  # isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch
import torch.distributed as dist

from benchmarks import harness, roofline
from benchmarks.harness import Record, interleaved
from titan_moe.flavors import FLAVORS
from titan_moe.moe import layout
from titan_moe.moe.dispatch import Dispatcher, make_dispatcher
from titan_moe.moe.te_ep_ops import finalize

VARIANTS = {
    "alltoall": ("alltoall", "exact"),
    "dedup": ("dedup", "exact"),
    "te_ep": ("te_ep", "exact"),
    "te_ep, static": ("te_ep", "worst_case"),
}
E, K = FLAVORS["671B"].num_experts, FLAVORS["671B"].top_k
ALIGNMENT, REPETITIONS = 128, 10


def measure(dispatcher: Dispatcher, tokens: int, width: int) -> tuple[float, float]:
    """(seconds, bytes) of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(DEVICE_TYPE).manual_seed(rank)
    scores_TE = torch.rand(tokens, E, generator=generator, device=DEVICE_TYPE)
    weights_TK, ids_TK = scores_TE.topk(K, dim=-1)
    x_TD = torch.randn(tokens, width, generator=generator, device=DEVICE_TYPE, dtype=torch.bfloat16)
    grad_TD = torch.randn_like(x_TD)
    leaves = [x_TD.requires_grad_(), weights_TK.requires_grad_()]

    def step() -> None:
        plan = dispatcher.plan(ids_TK, weights_TK)
        received = dispatcher.dispatch(x_TD, weights_TK, plan)
        out_TD = dispatcher.combine(received.x_RD, received.state)
        # Rows past the slabs are undefined: their weights enter no sum, so the weights' gradient is given as it is.
        torch.autograd.grad([out_TD, received.weight_R], leaves, [grad_TD, torch.ones_like(received.weight_R)])

    goes_TP = layout.destinations(ids_TK // (E // ranks), ranks)
    goes_TP[:, rank] = False
    times = interleaved({"step": lambda: step}, REPETITIONS, wait=lambda: roofline.synchronize(DEVICE_TYPE))
    return times.median("step"), 4 * int(goes_TP.sum()) * width * x_TD.element_size()


def main() -> None:
    parser = argparse.ArgumentParser(description="dispatchers, forward and backward")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=FLAVORS["671B"].dim)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    records = []
    for label, (name, recv_buffer) in VARIANTS.items():
        case = f"{label}, {dist.get_world_size()} ranks, {args.tokens} tokens each, D {args.width}"
        arguments = {"dim": args.width, "max_tokens": args.tokens} if name == "te_ep" else {}
        try:
            dispatcher = make_dispatcher(
                name,
                num_experts=E,
                top_k=K,
                alignment=ALIGNMENT,
                ep_group=dist.group.WORLD,
                recv_buffer=recv_buffer,
                **arguments,
            )
        except ValueError as refusal:  # alike on all ranks: it is about the machine
            if dist.get_rank() == 0:
                print(f"not here: {case}: {refusal}", flush=True)
            continue
        figures = torch.tensor(measure(dispatcher, args.tokens, args.width), device=DEVICE_TYPE)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        spent, sent = figures.tolist()
        records += [
            Record(suite="gpu", case=case, metric="forward + backward", value=1e3 * spent, unit="ms"),
            Record(suite="gpu", case=case, metric="leaving a rank", value=sent / spent / 1e9, unit="GB/s"),
        ]
        if name == "te_ep":
            finalize()
    if dist.get_rank() == 0:
        harness.write(args.json, [(record, {}) for record in records])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
