"""How cost grows with tokens, experts, top-k, layers and ranks: fitted exponents, and cost per token over experts.

An exponent p of value = c size^p is fitted to medians of interleaved repetitions. Of tokens, experts, top-k and layers
the value is the time of forward and backward; of ranks it is what one rank spends, CPU seconds and bytes, while each
has the same tokens. 1 is linear; less than 1 means that a fixed cost is still seen. A term that grows with the square
would show as an exponent on its way to 2.

Over experts, active FLOPs of a token and rows of an expert are equal, so that tokens grow with experts. Of the region
between router and output the cost per token should stay. A router compares each token with every expert: with it a
layer's cost per token has to grow, by 6 D E FLOPs in fp32.

Shape letters: T tokens, D model width, F expert hidden width, E experts, K top-k, R ranks.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group  # isort: skip - before torchtitan

import torch
import torch.distributed as dist

from benchmarks.harness import Options, Record, Times, exponent, interleaved
from benchmarks.peers import Shape, build, draw, even, stock_config
from benchmarks.ranks import on_ranks
from benchmarks.wire import CountBytes, E, K, route
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.moe.layer import fuse

SUITE = "scaling"
BASE = Shape(1024, 256, 256, 16, 4)
MOST_EXPONENT = 1.2
MOST_UNEVEN = 1.1
ROWS = 256  # of an expert
DEBUG = ["train_configs/debug_model.toml", "--training.mixed_precision_param=bfloat16", "--training.dataset=synthetic"]


def measure(options: Options) -> Iterator[Record]:
    small = options.size == "smallest"
    repetitions, budget_s = options.pick((3, 1.0), (9, 3.0), (41, 60.0))
    base = Shape(64, 32, 32, 8, 2) if small else BASE
    tokens, top_k = ([64, 128], [1, 2]) if small else ([512, 1024, 2048, 4096, 8192], [1, 2, 4, 8])
    axes: dict[str, dict[int, Shape]] = {
        "tokens": {T: base._replace(T=T) for T in tokens},
        "top-k": {k: base._replace(K=k) for k in top_k},
    }
    for axis, shapes in axes.items():
        calls = {size: region_pass(s) for size, s in shapes.items()}
        times = interleaved({str(n): call for n, call in calls.items()}, repetitions, budget_s=budget_s)
        yield from fitted(axis, "region, forward + backward", times, f"D {base.D} F {base.F} E {base.E}")
        plans = {str(n): plan_pass(s) for n, s in shapes.items()}
        yield from fitted(axis, "plan", interleaved(plans, repetitions, budget_s=budget_s), "")
    experts = [4, 8] if small else [8, 32, 128, 256]
    rows = 16 if small else ROWS
    yield from over_experts(base, experts, rows, repetitions, budget_s)
    with one_process_group() as folder:
        yield from over_layers(options.pick([1, 2], [2, 4, 8], [2, 4, 8, 16]), folder, repetitions, budget_s)
    yield from over_ranks(options.pick([1, 2], [2, 4, 8], [2, 4, 8, 16]), options.pick(64, 512, 1024), repetitions)


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def fitted(axis: str, metric: str, times: Times, more: str) -> Iterator[Record]:
    """Exponents of what was timed, by sizes that are the names; low and high are of single repetitions the extremes."""
    sizes = {int(name): 1e3 * times.median(name) for name in times.seconds}
    case = f"{axis} {min(sizes)} to {max(sizes)}" + (f", {more}" if more else "")
    each = [exponent(sizes, values) for values in zip(*times.seconds.values())]
    yield record(
        case, f"{metric}, exponent", value=exponent(sizes, sizes.values()), low=min(each), high=max(each),
        target=f"value <= {MOST_EXPONENT}",
    )  # fmt: skip
    yield record(case, f"{metric}, {max(sizes)}", value=sizes[max(sizes)], unit="ms")


def region_pass(s: Shape, routing: str = "natural") -> Callable[[], Callable[[], object]]:
    _, region = build(s)

    def prepare() -> Callable[[], object]:
        region.zero_grad(set_to_none=True)
        inputs = draw(s, routing)
        grad = torch.randn_like(inputs[0])
        return lambda: region(*inputs).backward(grad)

    return prepare


def layer_pass(s: Shape) -> Callable[[], Callable[[], object]]:
    """With the router, whose choice is its own."""
    layer = fuse(stock_config(s)).build().to(torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def prepare() -> Callable[[], object]:
        layer.zero_grad(set_to_none=True)
        x_BLD = torch.randn(1, s.T, s.D).bfloat16().requires_grad_()
        grad = torch.randn_like(x_BLD)
        return lambda: layer(x_BLD).backward(grad)

    return prepare


def plan_pass(s: Shape) -> Callable[[], Callable[[], object]]:
    dispatcher = make_dispatcher("local", num_experts=s.E, top_k=s.K, alignment=16)

    def prepare() -> Callable[[], object]:
        ids_TK = even(s, "cpu")
        return lambda: dispatcher.plan(ids_TK)

    return prepare


def over_experts(base: Shape, experts: list[int], rows: int, repetitions: int, budget_s: float) -> Iterator[Record]:
    shapes = {E: base._replace(E=E, T=rows * E // base.K) for E in experts}
    passes = {
        "region": lambda s: region_pass(s, "even"),
        "plan": plan_pass,
        "layer with router": layer_pass,
    }
    for name, make in passes.items():
        variants = {str(E): make(s) for E, s in shapes.items()}
        times = interleaved(variants, repetitions, budget_s=budget_s)
        per_token = {E: times.median(str(E)) / s.T for E, s in shapes.items()}
        case = f"experts {experts[0]} to {experts[-1]}, {rows} rows of each, D {base.D} F {base.F} K {base.K}"
        for count, seconds in per_token.items():
            yield record(case, f"{name}, per token, E {count}", value=1e6 * seconds, unit="us")
        uneven = max(per_token.values()) / min(per_token.values())
        target = f"value <= {MOST_UNEVEN}" if name == "region" else ""
        yield record(case, f"{name}, per token, dearest / cheapest", value=uneven, target=target)


def over_layers(layers: list[int], folder: Path, repetitions: int, budget_s: float) -> Iterator[Record]:
    runs = {}
    for count in layers:
        argv = [*DEBUG, *QUIET, "--training.local_batch_size=1", "--training.seq_len=128", f"--model.n_layers={count}"]
        runs[count] = SteppedRun(load([*argv, "--model.n_dense_layers=0"], folder / str(count)))
    times = interleaved({str(n): (lambda run=run: run.step) for n, run in runs.items()}, repetitions, budget_s=budget_s)
    for run in runs.values():
        run.close()
    yield from fitted("layers", "step of the debug model", times, "")


def over_ranks(counts: list[int], tokens: int, repetitions: int) -> Iterator[Record]:
    for name in ("alltoall", "dedup"):
        found = {ranks: on_ranks(ranks, rank_cost, name, tokens, repetitions) for ranks in counts}
        case = f"ranks {counts[0]} to {counts[-1]}, {name}, {tokens} tokens each"
        for metric in ("CPU time of a rank, plan", "CPU time of a rank, rows", "metadata of a rank"):
            values = {ranks: cost[metric] for ranks, cost in found.items() if cost[metric]}
            if len(values) > 1:
                target = f"value <= {MOST_EXPONENT}"
                p = exponent(values, values.values())
                yield record(case, f"{metric}, exponent", value=p, target=target)
            unit = "B" if "metadata" in metric else "ms"
            yield record(case, f"{metric}, {counts[-1]} ranks", value=found[counts[-1]][metric], unit=unit)


def rank_cost(name: str, tokens: int, repetitions: int) -> dict[str, float]:
    """Of one rank: CPU milliseconds of plan, and of dispatch and combine; bytes of metadata."""
    group, counter, D = dist.group.WORLD, CountBytes(), 256
    dispatcher = make_dispatcher(name, num_experts=E, top_k=K, alignment=16, ep_group=group)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD, w_TK = torch.randn(tokens, D).bfloat16(), torch.rand(tokens, K)
    plans, rows = [], []
    for _ in range(repetitions + 1):
        ids_TK = route(tokens, generator)
        dist.barrier()
        counter.clear()
        start = time.process_time()
        plan = dispatcher.plan(ids_TK)
        planned = time.process_time()
        received = dispatcher.dispatch(x_TD, w_TK, plan)
        dispatcher.combine(received.x_RD, received.state)
        rows.append(time.process_time() - planned)
        plans.append(planned - start)
    return {
        "CPU time of a rank, plan": 1e3 * median(plans[1:]),
        "CPU time of a rank, rows": 1e3 * median(rows[1:]),
        "metadata of a rank": float(counter.found["metadata"]),
    }
