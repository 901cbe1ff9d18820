"""What the doctor makes of answers."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from titan_moe import machine_check
from titan_moe.config import Config
from titan_moe.doctor.checks import checks, judge_rank_order
from titan_moe.doctor.contract import Examined
from titan_moe.doctor.software import te_problems
from titan_moe.doctor.speed import FLOORS, host_memory, judge_host_memory, judge_rates
from titan_moe.moe import te
from titan_moe.plan.hardware import HARDWARE


def examined(world_size: int = 8, per_node: int = 4, device: str = "NVIDIA H100 80GB HBM3") -> Examined:
    places = {
        rank: {"host": f"n{rank // per_node}", "device": device, "domain": f"n{rank // per_node}"}
        for rank in range(world_size)
    }
    store = dist.HashStore()
    return Examined(Config(), True, torch.device("cpu"), store, 0, world_size, per_node, places=places)


def test_rates_against_the_median_and_the_data_sheet():
    at = examined()
    healthy = dict.fromkeys(range(8), 700.0)
    (found,) = judge_rates(at, "GEMM", "TFLOP/s", healthy, 0.9)
    assert found.state == "ok" and "0.5 of the 989 of a H100" in found.text
    found = judge_rates(at, "GEMM", "TFLOP/s", healthy | {5: 500.0}, 0.9)
    assert [(f.state, f.text.split(":")[0]) for f in found] == [("slow", "rank 5 (n1)")]
    assert "500 TFLOP/s, 0.71 of the median 700; expected at least 0.9" in found[0].text
    (found,) = judge_rates(at, "GEMM", "TFLOP/s", dict.fromkeys(range(8), 400.0), 0.9)
    assert found.state == "slow" and "all ranks are slow" in found.text
    (found,) = judge_rates(examined(device="CPU"), "GEMM", "GFLOP/s", dict.fromkeys(range(8), 4e-1), 0.9)
    assert found.state == "ok"
    names = {check.name for check in checks(torch.device("cuda"), 2, 8)}
    assert names >= FLOORS.keys() and all(hasattr(HARDWARE["H100"], rate) for rate, _, _ in FLOORS.values())


def test_memory_is_what_a_container_leaves(monkeypatch):
    monkeypatch.setattr(machine_check, "available_bytes", lambda: 7 * 2**30)
    at, gib = examined(), host_memory(examined())
    (found,) = judge_host_memory(at, {0: gib, 4: 64.0})
    assert found.state == "wrong"
    assert "free GiB: rank 0 (n0) 7.0; expected at least 4 processes x 2.0 = 8 GiB" in found.text
    assert judge_host_memory(at, {0: 8.5, 4: 64.0})[0].state == "ok"


def test_gpus_that_torch_does_not_see_are_not_passed_over(monkeypatch):
    monkeypatch.setenv("GPUS", "4")
    with pytest.raises(RuntimeError, match="nvidia-smi shows GPUs"):
        checks(torch.device("cpu"), 1, 1)[0].measure(examined())


def test_the_rank_order_that_the_drivers_report():
    at = examined(8, 2)
    at.config.parallelism.expert_parallel_degree = 4
    (found,) = judge_rank_order(at, {})
    assert found.state == "slow" and "2 of 2 groups" in found.text
    for rank, place in at.places.items():
        place["domain"] = f"rack {rank // 4}"
    assert judge_rank_order(at, {})[0].state == "ok"
    at.config.parallelism.expert_parallel_degree = 3
    assert judge_rank_order(at, {})[0].state == "note"  # for another number of ranks


WHOLE = te.Facts("2.20.2", "", (9, 0), 130600, (2, 32, 3), True, "/usr/bin/nvcc", "/usr/include")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nccl": (2, 30, 7)}, "NCCL is 2.30.7, NCCL EP needs 2.32.3; pip install --no-deps nvidia-nccl-cu13==2.32.3"),
        ({"nccl": None}, "NCCL is not found"),
        ({"nccl_ep": False}, "libnccl_ep.so"),
        ({"nvcc": None}, "set NCCL_EP_JIT_NVCC"),
        ({"nccl_headers": None}, "set NCCL_EP_JIT_BUILD_INCLUDE_DIR"),
        ({"capability": None}, "needs a CUDA device"),
    ],
)
def test_what_keeps_transformer_engines_expert_parallelism_from_running(change, expected):
    assert te_problems(WHOLE, True) == []
    (problem,) = te_problems(replace(WHOLE, **change), True)
    assert expected in problem
    assert te_problems(replace(WHOLE, **change), False) == ([] if "capability" not in change else [problem])
