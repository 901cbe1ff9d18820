"""The MoE region on one rank against torchtitan's RoutedExperts, transformers' DeepSeek-V3 experts and a plain loop.

Time is of forward and backward in bf16, every repetition on tokens and routing of its own: a stock layer meets new
counts of rows in every step of a training, and a CPU compiles a kernel for each. "even" says what is left where it does
not, because all counts are equal and repeat. Bytes are what is kept for backward.
Launches and host syncs are those that a GPU would see, by the code that it would run.

The grouped GEMM is set against the best square product in the same repetition. Phases of our region are set against
their floors; kept bytes of two expert-parallel ranks, where received rows are kept, are in the table too, and what
Python costs in a pass through a layer that has nothing to compute.

Shape letters: T tokens, D model width, F expert hidden width, E experts, K top-k, N = T*K copies.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import titan_moe.runtime  # noqa: F401

import torch
from torch import nn

from benchmarks import host_overhead, launches, roofline
from benchmarks.harness import Options, Record, Times, interleaved, versus
from benchmarks.kept import kept_bytes
from benchmarks.peers import ROUTING, Shape, build, draw, peers, stock_config
from titan_moe.moe.experts import Source, grouped_gemm
from titan_moe.moe.layer import fuse
from titan_moe.moe.region import FusedRoutedExperts

SUITE = "layer"
SHAPES = {
    "smallest": Shape(64, 32, 32, 4, 2),
    "debug-512": Shape(512, 256, 256, 8, 3),
    "debug-2048": Shape(2048, 256, 256, 8, 3),
    "wide": Shape(2048, 1024, 512, 64, 8),
    "16b": Shape(1024, 2048, 1408, 64, 6),
}
LEAST_RATIO = {"debug-512": 1.5, "debug-2048": 1.5, "wide": 1.5, "16b": 1.1}
LARGE = ("wide", "16b")
"""Against torchtitan alone: five sets of such weights are too much for a small machine, five times for `--quick`"""
CASES = {
    "smallest": [("smallest", "natural")],
    "quick": [("debug-512", "natural"), *(("debug-2048", r) for r in ROUTING)]
    + [("wide", "natural"), ("16b", "natural")],
    "full": [(name, r) for name in LEAST_RATIO for r in ROUTING],
}
GEMM = Shape(0, 2048, 1408, 8, 1)
SLABS = (128, 512, 1024)
LEAST_OF_PEAK = 0.7
FEWER_BYTES = 1 / 0.4
FEWER_BYTES_EP = 1 / 0.45


def measure(options: Options) -> Iterator[Record]:
    repetitions, budget_s = options.pick((3, 1.0), (11, 3.0), (31, 60.0))
    for name, routing in CASES[options.size]:
        yield from compare(name, routing, repetitions, budget_s)
    for rows in options.pick((16,), SLABS, SLABS):
        yield from gemm_peak(rows, options.pick(GEMM._replace(D=64, F=32), GEMM, GEMM), repetitions, budget_s)
    for name in options.pick(["smallest"], ["debug-2048", "wide"], list(LEAST_RATIO)):
        yield from phases(SHAPES[name], f"{name}, phases", min(repetitions, 3) if name in LARGE else repetitions)
    yield from kept_by_ranks(options.pick(["smallest"], ["debug-2048"], list(LEAST_RATIO)))
    yield from python(options.pick(1, 100, 400))


# ---------------------------------------------------------------------------------------------------------------------
# Against others


def compare(name: str, routing: str, repetitions: int, budget_s: float, device: str = "cpu") -> Iterator[Record]:
    s, case = SHAPES[name], f"{name}: {SHAPES[name]}, {routing}"
    stock, ours = build(s, device)
    layers: dict[str, nn.Module] = {"torchtitan": stock, "ours": ours}
    if name not in LARGE:
        layers |= peers(stock)
    others = [peer for peer in layers if peer not in ("torchtitan", "ours")]
    warm_up = 1 if name in LARGE else 3  # what is compiled for one shape, the next draw does not have
    times = time_layers(layers, s, routing, repetitions, budget_s, device, warm_up)
    target = f"ratio >= {LEAST_RATIO[name]}" if name in LEAST_RATIO and routing != "even" else ""
    yield record(case, "forward + backward", unit="ms", **times.against("ours", "torchtitan"), target=target)
    for peer in others:
        yield record(case, "forward + backward", unit="ms", **times.against("ours", peer))
    if routing != "natural":  # the rest is the same
        return
    inputs = draw(s, routing, device)
    kept = {peer: kept_bytes(layer, lambda layer=layer: layer(*inputs)) for peer, layer in layers.items()}
    target = f"ratio >= {FEWER_BYTES}" if name in LEAST_RATIO else ""
    for peer in ("torchtitan", *others):
        mib = versus(kept["ours"] / 2**20, kept[peer] / 2**20)
        aim = target if peer == "torchtitan" else ""
        yield record(case, "kept for backward", value=kept["ours"] / 2**20, unit="MiB", **mib, against=peer, target=aim)
    found = {peer: launches.counts(layer, inputs) for peer, layer in layers.items()}
    for i, metric in enumerate(("launches", "host syncs")):
        mine = found["ours"][i].total()
        for peer in ("torchtitan", *others):
            theirs = found[peer][i].total()
            yield record(case, metric, value=mine, **versus(mine, theirs), against=peer)


def time_layers(
    layers: dict[str, nn.Module], s: Shape, routing: str, repetitions: int, budget_s: float, device: str, warm_up: int
) -> Times:
    def prepare(layer: nn.Module) -> Callable[[], object]:
        for other in layers.values():
            other.zero_grad(set_to_none=True)
        inputs = draw(s, routing, device)
        grad = torch.randn_like(inputs[0])
        return lambda: layer(*inputs).backward(grad)

    variants = {name: (lambda layer=layer: prepare(layer)) for name, layer in layers.items()}
    return interleaved(
        variants, repetitions, warm_up=warm_up, budget_s=budget_s, wait=lambda: roofline.synchronize(device)
    )


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


# ---------------------------------------------------------------------------------------------------------------------
# Against the machine


def gemm_peak(rows: int, s: Shape, repetitions: int, budget_s: float) -> Iterator[Record]:
    """Our grouped GEMM for `rows` rows of each expert, over the rate of the best square product."""
    D, wide, E, R = s.D, 2 * s.F, s.E, rows * s.E
    gemm = grouped_gemm(torch.full((E,), rows))
    shapes = ((R, D), (R, wide), (E, wide, D))
    x_RI, grad_RO, w_EOI = (torch.randn(*shape).bfloat16() for shape in shapes)
    calls = {
        "forward": lambda: gemm.forward(x_RI, w_EOI),
        "dgrad": lambda: gemm.dgrad(grad_RO, w_EOI),
        "wgrad": lambda: gemm.wgrad(grad_RO, x_RI),
    }
    side = roofline.best_side(torch.bfloat16)
    a, b = (torch.randn(side, side).bfloat16() for _ in range(2))
    square = torch.empty_like(a)
    flops, of_square = 2 * R * D * wide, 2 * side**3
    several = max(1, round(flops / of_square))  # as long as the others take

    def products() -> None:
        for _ in range(several):
            torch.mm(a, b, out=square)

    times = interleaved(
        {name: (lambda call=call: call) for name, call in {**calls, "square": products}.items()},
        repetitions,
        budget_s=budget_s,
    )
    for name in calls:
        shares = [ratio * flops / (several * of_square) for ratio in times.ratios(name, "square")]
        yield record(
            f"grouped GEMM, {E} slabs of {rows} rows, {D} x {wide}",
            name,
            **times.alone(name),
            unit="ms",
            roof=statistics.median(shares),
            target=f"roof >= {LEAST_OF_PEAK}" if rows >= 512 else "",
        )


def phases(s: Shape, case: str, repetitions: int) -> Iterator[Record]:
    """What our region's time goes to, and the floor under each part."""
    _, ours = build(s)
    assert ours.dispatcher is not None
    runs = [one_pass(ours, s) for _ in range(repetitions + 1)][1:]
    N, row, weights = s.T * s.K, 2 * s.D, 2 * 3 * s.E * s.D * s.F
    flops = 2 * N * 3 * s.D * s.F
    # Bytes at least: ids in, row numbers out; rows once in and once out; weights; gate, up and h; and in backward the
    # gradients of all of them.
    experts_bytes = 2 * N * row + weights + 2 * N * 3 * s.F * 2
    floors = {
        "plan": (0, 3 * 8 * N),
        "dispatch": (0, s.T * row + N * row),
        "experts": (flops, experts_bytes),
        "combine": (0, N * row + s.T * row),
        "backward": (2 * flops, 2 * experts_bytes + 2 * (N * row + s.T * row)),
    }
    for name, (work, moved) in floors.items():
        spent = statistics.median(run[name] for run in runs)
        least = roofline.floor(work, moved, torch.bfloat16)
        yield record(case, name, value=1e3 * spent, unit="ms", roof=least / spent)
    found, _ = launches.counts(ours, draw(s))
    for phase, number in found.items():
        yield record(case, f"launches, {phase}", value=number)


def one_pass(region: FusedRoutedExperts, s: Shape) -> dict[str, float]:
    """Seconds of the parts of one forward and backward."""
    x_BLD, scores_BLK, ids_BLK, _ = draw(s)
    grad_TD = torch.randn(s.T, s.D).bfloat16()
    dispatcher = region.dispatcher
    assert dispatcher is not None
    x_TD, scores_TK = x_BLD.flatten(0, 1), scores_BLK.flatten(0, 1)
    marks = [time.perf_counter()]
    plan = dispatcher.plan(ids_BLK.flatten(0, 1), scores_TK)
    marks.append(time.perf_counter())
    received = dispatcher.dispatch(x_TD, scores_TK, plan)
    marks.append(time.perf_counter())
    source = Source(x_TD, lambda x_TD: dispatcher.regather(x_TD, plan=plan))
    y_RD = region.inner_experts(received.x_RD, received.counts_e, received.weight_R, source)
    marks.append(time.perf_counter())
    out_TD = dispatcher.combine(y_RD, received.state)
    marks.append(time.perf_counter())
    out_TD.backward(grad_TD)
    marks.append(time.perf_counter())
    region.zero_grad(set_to_none=True)
    names = ("plan", "dispatch", "experts", "combine", "backward")
    return dict(zip(names, (end - start for start, end in pairwise(marks))))


# ---------------------------------------------------------------------------------------------------------------------
# Between two ranks; Python


def kept_by_ranks(names: list[str]) -> Iterator[Record]:
    """On two expert-parallel ranks together: a rank keeps what it receives, so only all of them compare alike."""
    from benchmarks.ranks import on_ranks

    for name, *kept in on_ranks(2, kept_on_rank, names):
        mib = dict(zip(("torchtitan", "alltoall", "dedup"), (size / 2**20 for size in kept)))
        for dispatcher in ("alltoall", "dedup"):
            yield record(
                f"{name}, 2 ranks, {dispatcher}",
                "kept for backward",
                value=mib[dispatcher],
                unit="MiB",
                **versus(mib[dispatcher], mib["torchtitan"]),
                against="torchtitan",
                target=f"ratio >= {FEWER_BYTES_EP:.2f}" if name in LEAST_RATIO else "",
            )


def kept_on_rank(names: list[str]) -> list[tuple]:
    """(size, bytes by torchtitan's experts, by ours with alltoall, with dedup), summed over the ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    set_spmd_backend("partial_dtensor")  # torchtitan's dispatcher then uses a collective that gloo has
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    found = []
    for name in names:
        s = SHAPES[name]
        torch.manual_seed(dist.get_rank())
        inputs = draw(s)
        config = stock_config(s, s.E // 2)
        config.routed_experts.token_dispatcher = AllToAllTokenDispatcher.Config(num_experts=s.E, top_k=s.K)
        stock = config.routed_experts.build().to(torch.bfloat16)
        stock.token_dispatcher.wire_meshes(ep_mesh=mesh)
        layers = [stock]
        for dispatcher in ("alltoall", "dedup"):
            ours = fuse(config, dispatcher=dispatcher).routed_experts.build().to(torch.bfloat16)
            ours.dispatcher = ours._make_dispatcher(mesh.get_group())
            layers.append(ours)
        total = torch.tensor([kept_bytes(layer, partial(layer, *inputs)) for layer in layers])
        dist.all_reduce(total)
        found.append((name, *total.tolist()))
    return found


def python(passes: int) -> Iterator[Record]:
    units = {"calls": "calls", "aten ops": "ops", "us": "us"}
    for name, numbers in host_overhead.measure(passes).items():
        for what, value in numbers.items():
            yield record(f"Python of one pass, {name}", what, value=value, unit=units[what])
