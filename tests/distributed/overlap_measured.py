"""What ranks of a forked job do to compare the planner's exposed seconds with those of a trace: measure the link, the
blocks of kernels in a run without overlap, and then, in turn, steps with each moe.overlap.

In turn, because other processes share the machine: a slow minute hits what is predicted from and what is compared.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist

from tests.distributed.overlap_ranks import MODES, SMALL, Found, Trainee
from titan_moe import in_flight
from titan_moe.clock import seconds
from titan_moe.in_flight import InFlight, Transfer
from titan_moe.plan.hardware import resolve
from titan_moe.plan.job import Job
from titan_moe.plan.measured import Link, exposed_seconds, received_bytes

LAYERS = 4
B, L = 8, 128
MODEL = [
    *(f"--model.n_layers={1 + LAYERS}", f"--training.seq_len={L}", "--training.global_batch_size=-1"),
    *("--moe.force_balance=balanced_random", "--moe.dispatcher=alltoall"),
]
SIZES = (2**12, 2**14, 2**16, 2**18)
"""Bytes received from others by which the link is measured"""


def measure(tell: Callable, slowness: float, steps: int) -> None:
    """Tells, for each mode, (predicted, traced) exposed expert-parallel seconds of a step, and the link. The link is so
    slow that a step's transfers take `slowness` times as long as all else."""
    argv = [*SMALL, *MODEL, f"--parallelism.expert_parallel_degree={dist.get_world_size()}"]
    whole = {mode: Trainee([*argv, f"--training.local_batch_size={B}", f"--moe.overlap={mode}"]) for mode in MODES}
    half = Trainee([*argv, f"--training.local_batch_size={B // 2}"])
    for trainee in (*whole.values(), half):  # warm
        trainee.run()
    plain = whole["none"].run()
    slow = torch.tensor(slowness * plain.seconds / sum(t.received for t in plain.transfers))
    dist.all_reduce(slow)
    in_flight.seconds_per_byte = slow.item() / dist.get_world_size()

    link = measured_link(whole["none"])
    exposed: dict[str, list[float]] = defaultdict(list)
    blocks: dict[Trainee, list[dict[str, float]]] = {whole["none"]: [], half: []}
    for _ in range(steps):
        for mode, trainee in whole.items():
            dist.barrier()
            with shared_timed(trainee) as shared:
                found = trainee.run()
            exposed[mode].append(sum(transfer.exposed for transfer in found.transfers))
            if mode == "none":
                blocks[trainee].append(of_step(found, shared))
        dist.barrier()
        with shared_timed(half) as shared:
            blocks[half].append(of_step(half.run(), shared))

    job = Job.from_config(whole["none"].config, dist.get_world_size(), resolve("H100"))  # of which nothing is asked
    received = received_bytes(job, element=4)
    for mode in MODES:
        source, times = (half, 2.0) if mode == "half_batch" else (whole["none"], 1.0)
        taken = {name: times * statistics.median(b[name] for b in blocks[source]) for name in blocks[source][0]}
        predicted = LAYERS * exposed_seconds(replace(job, overlap=mode), taken, link, received)
        tell((mode, predicted, statistics.median(exposed[mode])))
    actual = statistics.mean(transfer.received for transfer in plain.transfers)
    tell((link, statistics.mean(received.values()), actual))


def measured_link(trainee: Trainee, repetitions: int = 5) -> Link:
    """Of the expert-parallel group, from transfers of rows between all its ranks."""
    dispatcher = next(iter(trainee.layers.values())).routed_experts.dispatcher
    assert dispatcher is not None
    group, points = dispatcher.group, []
    for size in SIZES:
        received = size // (group.size() - 1) * (group.size() - 1)
        x, taken = torch.zeros(size // (group.size() - 1) // 4 * group.size()), []
        for _ in range(repetitions):
            dist.barrier()
            start, out = time.perf_counter(), torch.empty_like(x)
            work = dist.all_to_all_single(out, x, group=group, async_op=True)
            assert work is not None
            sizes = {"sent": received, "received": received, "link": group.group_name}
            InFlight([work], (out,), "dispatch", backward=False, **sizes).wait()
            taken.append(time.perf_counter() - start)
        points.append((received, statistics.median(taken)))
    return Link.fitted(points)


def of_step(found: Found, shared: dict[str, float]) -> dict[str, float]:
    """Seconds of each block of one MoE layer, in the mean over the layers of a step without overlap: what stands
    between its transfers. What is before the first layer's dispatch and behind the last's gradient is not one layer's.
    """
    forward, backward = ([t for t in found.transfers if t.backward == b] for b in (False, True))
    assert [t.name for t in forward] == ["dispatch", "combine"] * LAYERS
    assert [t.name for t in backward] == ["combine", "dispatch"] * LAYERS
    blocks = {f"shared {side}": total / LAYERS for side, total in shared.items()}
    for side, ordered in (("forward", forward), ("backward", backward)):
        gaps = [between(a, b) for a, b in pairwise(ordered)]
        blocks[f"experts {side}"] = statistics.mean(gaps[::2])
        blocks[f"attention {side}"] = max(0.0, statistics.mean(gaps[1::2]) - blocks[f"shared {side}"])
    return blocks


def between(before: Transfer, after: Transfer) -> float:
    assert before.done is not None
    return seconds(before.done, after.issued)


@contextmanager
def shared_timed(trainee: Trainee) -> Iterator[dict[str, float]]:
    """Seconds of all layers' shared experts, in forward and in backward."""
    taken, begun = {"forward": 0.0, "backward": 0.0}, [0.0]

    def begin(*_) -> None:
        begun[0] = time.perf_counter()

    def end(side: str) -> Callable:
        def ended(*_) -> None:
            taken[side] += time.perf_counter() - begun[0]

        return ended

    hooks = []
    for moe in trainee.layers.values():
        assert moe.shared_experts is not None
        hooks.append(moe.shared_experts.register_forward_pre_hook(begin))
        hooks.append(moe.shared_experts.register_forward_hook(end("forward")))
        hooks.append(moe.shared_experts.register_full_backward_pre_hook(begin))
        hooks.append(moe.shared_experts.register_full_backward_hook(end("backward")))
    yield taken
    for hook in hooks:
        hook.remove()
