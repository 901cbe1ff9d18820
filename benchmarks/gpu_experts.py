"""Every experts backend at the widths of three models, and TE's recipes: markdown tables for scripts/gpu_check.sh.

    python benchmarks/gpu_experts.py [--sizes debugmodel 16B 671B] [--tokens 4096] [--device cuda]

Forward and backward of one rank's routed experts in bf16, all of one layer, but for 671B, where it is 32 ranks that
share them. Slabs are as random routing makes them. The time is the median wall time from the first launch to the end of
the last kernel; FLOPs are those of the T K copies, 6 per weight and copy, and not of the rows that pad slabs.
"--device cpu" tries the code.

The second table is of low-precision recipes, by Transformer Engine (TE), quantization and GEMMs together, beside bf16
by the same functions: what a recipe gains over bf16 is what the last column says.

Shape letters: T tokens of the rank, D model width, K top-k, N = T*K copies, E experts of the rank, F expert hidden
width, R rows of the padded slabs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch
from torch import Tensor

from tests.gpu.backends import LOW_PRECISION, NAMES, experts_backend
from titan_moe.flavors import FLAVORS, Flavor
from titan_moe.moe import layout

RANKS = {"debugmodel": 1, "16B": 1, "671B": 32}  # that share the experts
ALIGNMENT, WARM_UP, REPETITIONS = 128, 3, 10


def milliseconds(run: Callable[[], object], device: str) -> float:
    """Median wall time of a call, the device's work included."""
    spans = []
    for repetition in range(WARM_UP + REPETITIONS):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if repetition >= WARM_UP:
            spans.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spans)


def draw(model: Flavor, E: int, tokens: int, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """x_RD, weight_R, w13_EF2D and w2_EDF as leaves; slab sizes counts_E; the gradient of the output."""
    D, F, N = model.dim, model.moe_hidden_dim, tokens * model.top_k
    generator = torch.Generator(device).manual_seed(0)
    ids_N = torch.randint(E, (N,), generator=generator, device=device)
    counts_E = layout.round_up(layout.expert_counts(ids_N, E), ALIGNMENT)
    R = int(counts_E.sum())

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    weight_R = torch.rand(R, generator=generator, device=device)
    leaves = [randn(R, D), weight_R, randn(E, F, 2, D) * D**-0.5, randn(E, D, F) * F**-0.5]
    return [leaf.requires_grad_() for leaf in leaves], counts_E, randn(R, D)


def rows_of(flavor: str, names: Sequence[str], tokens: int, device: str) -> list[str]:
    """Of one model; speeds are relative to the first of `names` that is there."""
    model = FLAVORS[flavor]
    E, D, F, N = model.num_experts // RANKS[flavor], model.dim, model.moe_hidden_dim, tokens * model.top_k
    leaves, counts_E, grad_RD = draw(model, E, tokens, device)
    x_RD, weight_R, w13_EF2D, w2_EDF = leaves
    flops = 6 * N * 3 * D * F
    lines = []
    base = None
    for name in names:
        backend = experts_backend(name, torch.bfloat16, D, F, E)
        if isinstance(backend, str):
            lines.append(f"| {flavor} | {name} | not here: {backend} | | |")
            continue

        def step(backend=backend):
            torch.autograd.grad(backend(x_RD, counts_E, weight_R, w13_EF2D, w2_EDF), leaves, grad_RD)

        spent = milliseconds(step, device)
        base = base or spent
        lines.append(
            f"| {flavor}: {E} x {D} x {F}, {N:,} copies | {name} | {spent:.2f} | {flops / spent / 1e9:.1f} | "
            f"{base / spent:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="experts backends, forward and backward")
    parser.add_argument("--sizes", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    for names in (NAMES, ("TE, device splits", "TE, host splits", *LOW_PRECISION)):
        print("\n| experts: E x D x F | backend | forward + backward, ms | achieved TFLOPS | speed over the first |")
        print("|---|---|---|---|---|")
        for flavor in args.sizes:
            print("\n".join(rows_of(flavor, names, args.tokens, args.device)), flush=True)


if __name__ == "__main__":
    main()
