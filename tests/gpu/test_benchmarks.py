"""The benchmarks' gpu suite on a GPU, at its smallest: for what is installed, that it runs and compares."""

import math

import titan_moe.runtime  # noqa: F401

import pytest

from benchmarks import gpu
from benchmarks.harness import Options

pytestmark = pytest.mark.gpu


def test_the_gpu_suite():
    records = list(gpu.measure_on("cuda", Options("smallest")))
    cases = {record.case for record in records}
    assert {"step, torchtitan", "step, ours", "step, CUDA graph"} <= cases
    assert all(math.isfinite(record.value) and record.value > 0 for record in records)
    assert any(record.metric == "peak of device memory" for record in records)
