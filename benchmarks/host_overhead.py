"""What Python costs in one pass through a MoE layer, forward and backward.

On a GPU the host launches kernels and runs ahead of them; where it cannot, because kernels are short, the device waits
for Python, and this is the time that it waits for. Here the layer is so small (16 tokens of 32 numbers) that hardly
anything else is left of a pass on a CPU. Per pass:

- calls: functions that Python calls, written in Python or in C, from sys.setprofile. A count, the same on any machine.
- aten ops: operators that reach a device, views and allocations included, from a dispatch mode.
- us: the fastest of all passes, one thread.

"layer" is FusedMoE with router, shared expert and all; "region" is what lies between router and output; "plan" the
dispatcher's plan alone, without backward. Experts by the code that a GPU runs.

Shape letters: T tokens, D model width, F expert hidden width, K top-k, E experts.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import titan_moe.runtime  # noqa: F401

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear

from benchmarks.peers import Shape, stock_config
from titan_moe.moe import experts
from titan_moe.moe.layer import FusedMoE, fuse

T, D, F, K, E = 16, 32, 16, 2, 4


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def build() -> FusedMoE:
    linear = {"w1": (D, F), "w2": (F, D), "w3": (D, F)}
    shared = {name: Linear.Config(in_features=i, out_features=o) for name, (i, o) in linear.items()}
    config = replace(
        stock_config(Shape(T, D, F, E, K)), load_balance_coeff=1e-3, shared_experts=FeedForward.Config(**shared)
    )
    moe = fuse(config).build()
    assert isinstance(moe, FusedMoE)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return moe


def passes() -> dict[str, Callable[[], object]]:
    """What is measured, by name. Each call is one pass."""
    moe = build()
    region, x = moe.routed_experts, torch.randn(1, T, D, requires_grad=True)
    scores = torch.rand(1, T, K, requires_grad=True)
    ids, counts = torch.rand(1, T, E).topk(K).indices, torch.empty(0)
    grad, dispatcher, ids_TK = torch.ones(1, T, D), region.dispatcher, ids[0]
    assert dispatcher is not None
    layer_inputs, region_inputs = [x, *moe.parameters()], [x, scores, *region.parameters()]
    return {
        "layer": lambda: torch.autograd.grad(moe(x), layer_inputs, grad),
        "region": lambda: torch.autograd.grad(region(x, scores, ids, counts), region_inputs, grad),
        "region, no backward": lambda: region(x, scores, ids, counts),
        "plan": lambda: dispatcher.plan(ids_TK),
    }


def python_calls(run: Callable[[], object]) -> int:
    count = 0

    def note(frame, event: str, arg) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def aten_ops(run: Callable[[], object]) -> int:
    with CountOps() as ops:
        run()
    return ops.count


def fastest(run: Callable[[], object], repeats: int) -> float:
    """Microseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """By pass: "calls", "aten ops", "us"."""
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.object(experts, "_PiecewiseGemm", experts._GroupedGemm):
        for name, run in passes().items():
            for _ in range(5):  # what is made once
                run()
            found[name] = {"calls": python_calls(run), "aten ops": aten_ops(run), "us": fastest(run, repeats)}
    torch.set_num_threads(threads)
    return found
