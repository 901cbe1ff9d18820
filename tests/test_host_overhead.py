"""That Python's work in one pass through a MoE layer does not grow unnoticed: counts, which are the same anywhere."""

import importlib.util
from pathlib import Path

import titan_moe.runtime  # noqa: F401

import pytest
from torch import nn

from titan_moe.moe import region

SCRIPT = Path(__file__).parents[1] / "benchmarks/host_overhead.py"
# Measured, and a tenth more: raise them with a reason.
MOST = {
    "layer": {"calls": 855, "aten ops": 204},
    "region": {"calls": 660, "aten ops": 107},
    "plan": {"calls": 83, "aten ops": 3},
}


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("host_overhead", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_calls_and_operators_of_a_pass(benchmark):
    found = benchmark.measure(repeats=1)
    for name, most in MOST.items():
        for what, count in most.items():
            assert 0 < found[name][what] <= count, f"{name}: {found[name][what]} {what}, at most {count} expected"


def test_the_backend_is_chosen_once(benchmark, monkeypatch):
    """And again when dtype or device change."""
    asked = []
    choose = region.choose_experts
    monkeypatch.setattr(region, "choose_experts", lambda *args: asked.append(args) or choose(*args))
    moe: nn.Module = benchmark.build()
    x = benchmark.torch.randn(1, 16, 32)
    for _ in range(3):
        moe(x)
    assert len(asked) == 1
    moe.bfloat16()(x.bfloat16())
    assert len(asked) == 2
