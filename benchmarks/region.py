"""What one pass through the MoE region does, per dispatcher and experts backend: launches, host syncs, bytes, padding.

    python benchmarks/region.py [--ranks 1 2] [--tokens 512] [--json FILE]

Forward and backward of FusedRoutedExperts in bf16 on gloo ranks, routed as in dispatch.py. The numbers are counts, not
times, and rank 0's where not said otherwise:

- Launches: aten ops that compute something, from torch.profiler. An op that calls others counts as those; views,
  allocations and collectives do not count. By phase: the plan, dispatch and combine, the experts, backward.
- Host syncs: where the host would wait for a GPU: Tensor.cpu, .tolist, .item and their like, on what is not a copy on
  the host already, and ops whose result's shape depends on values. Named with their phase. They are counted at the
  call, because on a CPU these calls copy nothing and no dispatch mode sees them.
- Bytes: sent to other ranks, mean of the ranks, as dispatch.py counts them: payload is rows, metadata all else.
- Padded / valid: rows of the padded slabs over the copies in them, of all ranks.

`grouped_mm` runs GEMMs in pieces on a CPU, for which the host reads the counts; `grouped_mm, GPU` is the code that a
GPU runs, here on torch's own CPU kernel.

Shape letters: T tokens, D model width, F expert hidden width, K top-k, E experts, R ranks.
"""

import argparse
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan: it tells torchtitan about CPUs

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler reports each start and stop otherwise

import torch
import torch.distributed as dist
import torch.multiprocessing
from dispatch import GROUPS, KEPT_GROUPS, CountBytes, E, K, route
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from titan_moe.moe import experts
from titan_moe.moe.choices import ALIGNMENT
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.moe.layer import fuse
from titan_moe.moe.region import FusedRoutedExperts

D, F = 256, 128
PHASES = ("plan", "dispatch + combine", "experts", "backward")
BACKENDS = {"loop": "loop", "grouped_mm": "grouped_mm", "grouped_mm, GPU": "grouped_mm"}
SYNC = "host sync"
SYNC_METHODS = ("cpu", "tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")
SYNC_OPS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount")
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")


def build(dispatcher: str, backend: str, ranks: int) -> FusedRoutedExperts:
    """The region with this rank's experts in it."""
    moe = MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E // ranks),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=Linear.Config(in_features=D, out_features=E), top_k=K),
    )
    region = fuse(moe, dispatcher=dispatcher, experts=backend).routed_experts.build().to(torch.bfloat16)
    for parameter in region.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    group = None if dispatcher == "local" else dist.group.WORLD
    region.dispatcher = make_dispatcher(dispatcher, num_experts=E, top_k=K, alignment=ALIGNMENT, ep_group=group)
    return region


def labelled(name: str, function: Callable) -> Callable:
    def call(*args, **kwargs):
        with record_function(name):
            return function(*args, **kwargs)

    return call


@contextmanager
def marked_syncs() -> Iterator[None]:
    """Each call that would wait for a GPU leaves a mark in the profile."""
    on_host: list[Tensor] = []  # kept, so that no other tensor gets their memory

    def marking(name: str) -> Callable:
        method = getattr(torch.Tensor, name)

        def call(self, *args, **kwargs):
            if any(self.data_ptr() == host.data_ptr() for host in on_host):
                return method(self, *args, **kwargs)
            with record_function(SYNC):
                found = method(self, *args, **kwargs)
            if name == "cpu":
                on_host.append(found)
            return found

        return call

    with mock.patch.multiple(torch.Tensor, **{name: marking(name) for name in SYNC_METHODS}):
        yield


@cache
def computes(name: str) -> bool:
    """Whether an op, by its name in the profile, does more than look at memory or allocate it."""
    library, _, op = name.partition("::")
    packet = getattr(torch.ops.aten, op, None) if library == "aten" else None
    if packet is None or op in ALLOCATIONS:
        return False
    arguments = getattr(packet, packet.overloads()[0])._schema.arguments
    return not any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)


def count(event, phase: str, launches: Counter, syncs: Counter) -> int:
    """Add up an event of the profile and what it called, by phase; returns its launches."""
    if event.name in PHASES:
        phase = event.name
    if event.name == SYNC or event.name in SYNC_OPS:
        syncs[phase] += 1
        return 0
    inner = 0
    if event.name != "aten::_grouped_mm":  # one kernel on a GPU, a loop on a CPU
        inner = sum(count(child, phase, launches, syncs) for child in event.cpu_children)
    if inner == 0 and computes(event.name):
        launches[phase] += 1
        return 1
    return inner


def measure(region: FusedRoutedExperts, tokens: int, counter: CountBytes) -> dict:
    """The counts of one forward and backward, on the same tokens and routing whatever the region."""
    assert region.dispatcher is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    plans = []

    def plan(*args):
        with record_function("plan"):
            plans.append(original(*args))
        return plans[-1]

    original, region.dispatcher.plan = region.dispatcher.plan, plan
    region.inner_experts.forward = labelled("experts", region.inner_experts.forward)
    ids = route(tokens, generator)[None]
    x = torch.randn(1, tokens, D, generator=generator).bfloat16().requires_grad_()
    scores = torch.rand(1, tokens, K, generator=generator).requires_grad_()
    grad = torch.randn(1, tokens, D, generator=generator).bfloat16()
    counter.payload = counter.metadata = 0
    with profile(activities=[ProfilerActivity.CPU]) as profiled, marked_syncs():
        out = labelled("dispatch + combine", region)(x, scores, ids, torch.empty(0))
        labelled("backward", out.backward)(grad)
    launches, syncs = Counter(), Counter()
    for event in profiled.events():
        if event.cpu_parent is None:
            count(event, "other", launches, syncs)
    rows = [plans[0].padded_counts_e.sum().item(), plans[0].counts_E.sum().item()]
    totals = torch.tensor([counter.payload, counter.metadata, *rows], dtype=torch.float64)
    dist.all_reduce(totals)
    payload, metadata, padded, valid = totals.tolist()
    ranks = dist.get_world_size()
    return {
        "launches": {phase: launches[phase] for phase in PHASES},
        "syncs": {phase: syncs[phase] for phase in PHASES if syncs[phase]},
        "payload": payload / ranks,
        "metadata": metadata / ranks,
        "padded / valid": padded / valid,
    }


def run(rank: int, ranks: int, port: int, args: argparse.Namespace, results) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    counter = CountBytes()
    for dispatcher in ("local",) if ranks == 1 else ("alltoall", "dedup"):
        for case, backend in BACKENDS.items():
            gemm = experts._GroupedGemm if case.endswith("GPU") else experts._PiecewiseGemm
            with mock.patch.object(experts, "_PiecewiseGemm", gemm):
                found = measure(build(dispatcher, backend, ranks), args.tokens, counter)
            if rank == 0:
                results.put((ranks, dispatcher, case, found))
    dist.destroy_process_group()


def report(all_found: list[tuple[int, str, str, dict]]) -> list[dict]:
    """Print the table; returns its numbers as records."""
    print(
        f"{'EP':>2} {'dispatcher':11}{'experts':17}{'launches':>9} ({', '.join(PHASES)})"
        f"{'':4}{'payload':>9}{'metadata':>13}{'padded / valid':>16}   host syncs"
    )
    records = []
    for ranks, dispatcher, case, found in all_found:
        phases = ", ".join(f"{found['launches'][phase]}" for phase in PHASES)
        syncs = ", ".join(f"{number} in {phase}" for phase, number in found["syncs"].items()) or "none"
        total = sum(found["launches"].values())
        print(
            f"{ranks:2} {dispatcher:11}{case:17}{total:9} {f'({phases})':44}{found['payload'] / 1024:8.1f} KiB"
            f"{found['metadata'] / 1024:8.1f} KiB{found['padded / valid']:13.3f}   {syncs}"
        )
        values = {
            "launches": (total, "ops"),
            "host syncs": (sum(found["syncs"].values()), ""),
            "payload": (found["payload"], "bytes"),
            "metadata": (found["metadata"], "bytes"),
            "padded / valid": (found["padded / valid"], ""),
        }
        suite = {"suite": "region", "case": f"EP {ranks}, {dispatcher}, {case}"}
        records += [
            {**suite, "metric": metric, "value": value, "baseline": None, "ratio": None, "unit": unit}
            for metric, (value, unit) in values.items()
        ]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description="launches, host syncs, bytes and padding of the MoE region")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rank")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    print(
        f"T {args.tokens} per rank, D {D}, F {F}, E {E}, K {K}, {GROUPS} groups of which {KEPT_GROUPS} kept, bf16, "
        f"slabs of multiples of {ALIGNMENT}; forward + backward"
    )
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    for ranks in args.ranks:
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        torch.multiprocessing.start_processes(run, (ranks, port, args, results), nprocs=ranks)
    found = []
    while not results.empty():
        found.append(results.get())
    records = report(found)
    if args.json:
        args.json.write_text(json.dumps(records, indent=2))


if __name__ == "__main__":
    main()
