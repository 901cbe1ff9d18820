"""The MoE region on one rank against torchtitan's stock RoutedExperts: time of forward + backward, and bytes kept.

    python benchmarks/layer.py [--sizes debug-512 debug-2048 wide 16b] [--repetitions 21] [--json FILE]

Both have the same weights, in bf16. Both run in each repetition, in random order, each on tokens and routing drawn for
it alone: shared token counts would let one variant warm kernels up for the other's shapes. Times are medians; the ratio
is stock's over ours (more than 1: ours is faster), with the quartiles of the repetitions. Bytes are the storages that
autograd holds between forward and backward, each counted once, parameters not; ours include the plan.

Shape letters: T tokens, D model width, F expert hidden width, E experts, K top-k.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch
from torch import Tensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from titan_moe.moe.layer import fuse
from titan_moe.moe.region import FusedRoutedExperts

SIZES = {  # T, D, F, E, K, and the least ratio of times that is not a regression
    "debug-512": (512, 256, 256, 8, 3, 1.5),
    "debug-2048": (2048, 256, 256, 8, 3, 1.5),
    "wide": (2048, 1024, 512, 64, 8, 1.5),
    "16b": (1024, 2048, 1408, 64, 6, 1.1),
}
LEAST_BYTES = 0.4


def build(D: int, F: int, E: int, K: int, experts: str, weighting: str) -> tuple[RoutedExperts, FusedRoutedExperts]:
    """Stock and ours, with the same weights."""
    routed = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
    )
    gate = Linear.Config(in_features=D, out_features=E)
    moe = MoE.Config(
        num_experts=E,
        routed_experts=routed,
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=gate, top_k=K),
    )
    stock = routed.build().to(torch.bfloat16)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ours = fuse(moe, experts=experts, weighting=weighting).routed_experts.build().to(torch.bfloat16)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def draw(T: int, D: int, E: int, K: int) -> tuple[Tensor, ...]:
    """Tokens, scores, ids, counts as RoutedExperts takes them, with some experts more popular than others."""
    x_BLD = torch.randn(1, T, D).bfloat16().requires_grad_()
    scores_TE = torch.sigmoid(torch.randn(T, E) + 0.5 * torch.randn(E))
    scores_TK, ids_TK = scores_TE.topk(K, dim=-1)
    counts_E = torch.zeros(E, dtype=torch.int64).scatter_add_(0, ids_TK.flatten(), torch.ones(T * K, dtype=torch.int64))
    return x_BLD, scores_TK[None].clone().requires_grad_(), ids_TK[None], counts_E


def seconds(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> float:
    layer.zero_grad(set_to_none=True)
    grad = torch.randn_like(inputs[0])
    start = time.perf_counter()
    layer(*inputs).backward(grad)
    return time.perf_counter() - start


def kept_bytes(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What autograd holds after a forward."""
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def counting(plan: Callable) -> Callable:
        def planned(*args):
            found = plan(*args)
            for tensor in (*found.rows, *found.copies, found.padded_counts_e):
                count(tensor)
            return found

        return planned

    plan = None
    if isinstance(layer, FusedRoutedExperts):
        assert layer.dispatcher is not None
        plan, layer.dispatcher.plan = layer.dispatcher.plan, counting(layer.dispatcher.plan)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = layer(*inputs)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    if plan is not None:
        layer.dispatcher.plan = plan
    del out
    return sum(size for storage, size in storages.items() if storage not in parameters)


def compare(name: str, repetitions: int, experts: str, weighting: str) -> dict[str, float | str]:
    T, D, F, E, K, least = SIZES[name]
    variants = dict(zip(("stock", "ours"), build(D, F, E, K, experts, weighting)))
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for repetition in range(-3, repetitions):
        for variant in random.sample(list(variants), 2):
            spent = seconds(variants[variant], draw(T, D, E, K))
            if repetition >= 0:
                times[variant].append(spent)
    inputs = draw(T, D, E, K)
    kept = {variant: kept_bytes(layer, inputs) for variant, layer in variants.items()}
    median = {variant: statistics.median(all_times) for variant, all_times in times.items()}
    pairs = sorted(stock / ours for stock, ours in zip(times["stock"], times["ours"]))
    return {
        "size": name,
        "shape": f"T {T} D {D} F {F} E {E} K {K}",
        "stock_ms": median["stock"] * 1e3,
        "ours_ms": median["ours"] * 1e3,
        "time_ratio": median["stock"] / median["ours"],
        "quartile_1": pairs[len(pairs) // 4],
        "quartile_3": pairs[-1 - len(pairs) // 4],
        "least_time_ratio": least,
        "stock_bytes": kept["stock"],
        "ours_bytes": kept["ours"],
        "bytes_ratio": kept["ours"] / kept["stock"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="FusedRoutedExperts against torchtitan's RoutedExperts")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--experts", default="auto")
    parser.add_argument("--weighting", default="early")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    print(f"bf16, {torch.get_num_threads()} threads, {args.repetitions} repetitions, torch {torch.__version__}")
    print(
        f"{'':32}{'stock ms':>10}{'ours ms':>10}{'ratio':>7} (quartiles; at least)   {'kept bytes: ours / stock':>28}"
    )
    results = []
    for name in args.sizes:
        r = compare(name, args.repetitions, args.experts, args.weighting)
        results.append(r)
        print(
            f"{r['shape']:32}{r['stock_ms']:10.2f}{r['ours_ms']:10.2f}{r['time_ratio']:7.2f} "
            f"({r['quartile_1']:.2f} - {r['quartile_3']:.2f}; {r['least_time_ratio']:.1f})   "
            f"{r['ours_bytes'] / 2**20:9.1f} / {r['stock_bytes'] / 2**20:.1f} MiB = {r['bytes_ratio']:.2f} "
            f"(at most {LEAST_BYTES})",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
