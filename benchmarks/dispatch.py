"""alltoall against dedup, by rank and by node, exact and fixed receive buffers, between gloo ranks of this machine.

Bytes and rows first: they are counted, and the same on any machine. Rows of bf16 each way (forward and backward move
them four times), without those that stay on their rank; metadata is all else. "across nodes" is what leaves a node, of
two ranks each. The floor of dedup is U (R-1)/R rows per token, where U, on how many ranks a token has experts, is drawn
independently. Slab rows are those that a rank's buffers have, over its mean share of T K.

Times are medians of the slowest rank's; four ranks on two cores say little about ranks that have a core each. Planning,
which happens once per layer and not again in backward, is timed apart.

Chunked hops (full only): dedup's two hops by nodes, on links made slow, one after the other or in C chunks; expected is
max(a, b) + min(a, b) / C for hops of a and b seconds, by their bytes alone.

Shape letters: T tokens of a rank, D model width, K top-k, E experts, R ranks, C chunks.
"""

import statistics
import time
from collections.abc import Iterator

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist

from benchmarks.harness import Options, Record, Times, interleaved, versus
from benchmarks.ranks import on_ranks
from benchmarks.wire import CountBytes, E, K, route, unique_places
from titan_moe import in_flight
from titan_moe.moe.dispatch import make_dispatcher

SUITE = "dispatch"
ALIGNMENT = 16
PER_NODE = 2
VARIANTS = {
    "alltoall": {"name": "alltoall"},
    "dedup": {"name": "dedup"},
    "dedup by node": {"name": "dedup", "ranks_per_node": PER_NODE},
    "alltoall, buffer 1.5": {"name": "alltoall", "recv_buffer": 1.5},
    "dedup, buffer 1.5": {"name": "dedup", "recv_buffer": 1.5},
    "alltoall, worst case": {"name": "alltoall", "recv_buffer": "worst_case"},
    "dedup, worst case": {"name": "dedup", "recv_buffer": "worst_case"},
}
BASES = {"dedup": "alltoall", "dedup by node": "dedup"}
"""What a variant is compared with; one with a fixed buffer with the same exact"""
PARTS = ("plan", "forward", "forward + backward")
MOST_OF_FLOOR = 1.02


def measure(options: Options) -> Iterator[Record]:
    tokens, repetitions = options.pick((64, 2), (1024, 9), (1024, 31))
    for ranks in options.pick([2], [2, 4], [2, 4, 8]):
        for D in options.pick([16], [256, 1024], [256, 1024]):
            yield from compare(ranks, D, tokens, repetitions)
    if options.size == "full":
        yield from chunked(chunks=[1, 2, 4, 8], ns_per_byte=400.0, D=256, tokens=1024, repetitions=5)


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def compare(ranks: int, D: int, tokens: int, repetitions: int) -> Iterator[Record]:
    variants = [name for name in VARIANTS if ranks > PER_NODE or "node" not in name]
    seconds, sent = on_ranks(ranks, on_rank, variants, D, tokens, repetitions)
    times = by_part(seconds)
    for name in variants:
        case, base = f"{ranks} ranks, D {D}, {name}", BASES.get(name, name.partition(",")[0])
        is_base = base == name
        for metric, unit in (("payload", "B/token"), ("rows", "rows/token"), ("across nodes", "B/token")):
            if metric == "across nodes" and ranks <= PER_NODE:
                continue
            against = {} if is_base else versus(sent[name][metric], sent[base][metric]) | {"against": base}
            yield record(case, f"{metric} each way", value=sent[name][metric], unit=unit, **against)
        yield record(case, "metadata", value=sent[name]["metadata"], unit="B/token")
        yield record(case, "slab rows / mean", value=sent[name]["slab rows"])
        if "buffer" in name:
            yield record(case, "ranks that overflowed", value=sent[name]["overflowed"], unit="of all")
        for part in PARTS:
            fields = times[part].alone(name) if is_base else times[part].against(name, base)
            yield record(case, part, unit="ms", **fields)
    for name, places in (("dedup", ranks), ("dedup by node", ranks // PER_NODE)):
        if name in variants:
            floor = unique_places(places) * (places - 1) / places * 2 * D
            metric = "payload" if name == "dedup" else "across nodes"
            share = sent[name][metric] / floor
            target = f"value <= {MOST_OF_FLOOR}" if tokens >= 1024 else ""
            yield record(f"{ranks} ranks, D {D}, {name}", f"{metric} / floor", value=share, target=target)


def by_part(seconds: dict[str, list[dict[str, float]]]) -> dict[str, Times]:
    """Of the seconds of the parts by repetition, by variant."""
    return {part: Times({name: [s[part] for s in spans] for name, spans in seconds.items()}) for part in PARTS}


def on_rank(variants: list[str], D: int, tokens: int, repetitions: int) -> tuple[dict, dict]:
    """({variant: seconds of the parts by repetition}, {variant: what a token sends}), of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    common = {"num_experts": E, "top_k": K, "alignment": ALIGNMENT, "ep_group": dist.group.WORLD, "max_tokens": tokens}
    dispatchers = {name: make_dispatcher(**VARIANTS[name], **common) for name in variants}
    counter, generator = CountBytes(PER_NODE), torch.Generator().manual_seed(100 + rank)
    x_TD = torch.randn(tokens, D, generator=generator).bfloat16().requires_grad_()
    grad_TD = torch.randn(tokens, D, generator=generator).bfloat16()
    w_TK = torch.rand(tokens, K, generator=generator).requires_grad_()
    spans: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    names = (*CountBytes.NAMES, "slab rows", "overflowed")
    sums = {name: torch.zeros(len(names), dtype=torch.float64) for name in variants}

    def prepare(name: str):
        ids_TK = route(tokens, generator)

        def run() -> None:
            counter.clear()
            found, (slab_rows, overflowed) = one_pass(dispatchers[name], ids_TK, x_TD, w_TK, grad_TD)
            spans[name].append(found)
            values = [*counter.found.values(), slab_rows, overflowed]
            sums[name] += torch.tensor(values, dtype=torch.float64)

        return run

    warm_up = 2
    interleaved({n: (lambda n=n: prepare(n)) for n in variants}, repetitions, warm_up=warm_up)  # all in the same order
    for total in sums.values():
        dist.all_reduce(total)
    runs = (repetitions + warm_up) * ranks
    # Forward and backward exchange rows twice each: dispatch and combine, and their transposes.
    scale = torch.tensor([1 / (4 * tokens)] * 3 + [1 / tokens, 1 / (tokens * K), 1.0])
    sent = {name: dict(zip(names, (total / runs * scale).tolist())) for name, total in sums.items()}
    return {name: found[warm_up:] for name, found in spans.items()}, sent


def one_pass(dispatcher, ids_TK, x_TD, w_TK, grad_TD) -> tuple[dict[str, float], tuple[int, bool]]:
    """Seconds of the parts, the slowest rank's; rows of the slabs, and whether some were missing."""
    marks = []

    def mark() -> None:
        marks.append(time.perf_counter())
        dist.barrier()
        marks.append(time.perf_counter())

    mark()
    plan = dispatcher.plan(ids_TK)
    mark()
    received = dispatcher.dispatch(x_TD, w_TK, plan)
    out_TD = dispatcher.combine(received.x_RD, received.state)
    mark()
    # Rows past the slabs are undefined: their weights enter no sum, so the weights' gradient is given as it is.
    grads = [grad_TD, torch.ones_like(received.weight_R)]
    torch.autograd.grad([out_TD, received.weight_R], [x_TD, w_TK], grads)
    mark()
    found = torch.tensor([end - start for start, end in zip(marks[1::2], marks[2::2])])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    plan_s, forward, backward = found.tolist()
    missing = plan.overflow is not None and bool(plan.overflow)
    return dict(zip(PARTS, (plan_s, forward, forward + backward))), (len(received.x_RD), missing)


# ---------------------------------------------------------------------------------------------------------------------
# Chunked hops


def chunked(chunks: list[int], ns_per_byte: float, D: int, tokens: int, repetitions: int) -> Iterator[Record]:
    seconds, expected = on_ranks(4, chunked_on_rank, chunks, ns_per_byte, D, tokens, repetitions)
    times = by_part({str(C): spans for C, spans in seconds.items()})
    for C in chunks:
        case = f"4 ranks in 2 nodes, {ns_per_byte:.0f} ns/byte, D {D}, {C} chunks"
        for part in PARTS:
            yield record(case, part, unit="ms", **times[part].against(str(C), "1") | {"against": "1 chunk"})
        yield record(case, "forward, expected", unit="ms", value=1e3 * statistics.median(expected[C]))


def chunked_on_rank(chunks: list[int], ns_per_byte: float, D: int, tokens: int, repetitions: int) -> tuple[dict, dict]:
    """({C: seconds of the parts}, {C: expected seconds of forward}), by repetition."""
    rank = dist.get_rank()
    common = {"num_experts": E, "top_k": K, "alignment": ALIGNMENT, "ep_group": dist.group.WORLD}
    dispatchers = {C: make_dispatcher("dedup", ranks_per_node=PER_NODE, hop_chunks=C, **common) for C in chunks}
    in_flight.seconds_per_byte = ns_per_byte * 1e-9
    generator = torch.Generator().manual_seed(100 + rank)
    x_TD = torch.randn(tokens, D, generator=generator).bfloat16().requires_grad_()
    grad_TD = torch.randn(tokens, D, generator=generator).bfloat16()
    w_TK = torch.rand(tokens, K, generator=generator).requires_grad_()
    spans: dict[int, list] = {C: [] for C in chunks}
    expected: dict[int, list] = {C: [] for C in chunks}

    def prepare(C: int):
        ids_TK = route(tokens, generator)
        hops = received_seconds(dispatchers[C].plan(ids_TK), rank, 2 * D)
        forward = torch.tensor(sum(max(two) + min(two) / C for two in (hops[:2], hops[2:])))
        dist.all_reduce(forward, dist.ReduceOp.MAX)
        expected[C].append(forward.item())
        return lambda: spans[C].append(one_pass(dispatchers[C], ids_TK, x_TD, w_TK, grad_TD)[0])

    interleaved({str(C): (lambda C=C: prepare(C)) for C in chunks}, repetitions, warm_up=1)
    return {C: s[1:] for C, s in spans.items()}, {C: e[1:] for C, e in expected.items()}


def received_seconds(plan, me: int, row_bytes: int) -> list[float]:
    """Of each hop of dispatch, and of combine, which brings no weights: [2 hops of 2]."""

    def others(splits: list[int]) -> int:
        return sum(splits) - splits[me]

    found = [0.0] * 4
    for i, hop in enumerate(plan.hops):
        found[i % 2] += others(hop.row_splits[0]) * row_bytes + others(hop.copy_splits[0]) * 4
        found[2 + i % 2] += others(hop.row_splits[1]) * row_bytes
    return [size * in_flight.seconds_per_byte for size in found]
