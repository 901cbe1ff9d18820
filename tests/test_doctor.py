"""The doctor: what it makes of answers, and jobs of real processes of which one is slow, wrong, hangs or dies."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import free_port
from titan_moe import doctor
from titan_moe.config import Config
from titan_moe.doctor_checks import FLOORS, Examined, _judge_rank_order, checks, judge_rates, te_problems
from titan_moe.moe import te
from titan_moe.plan.hardware import HARDWARE

REPO = Path(__file__).parents[1]


def start(*command: str, **env: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=REPO, env=env, text=True, **pipes)


def case(name: str, **env: str) -> subprocess.Popen:
    return start(sys.executable, "-m", "tests.doctor_worker", name, **env)


def finish(process: subprocess.Popen) -> tuple[int, dict[str, str], str]:
    """(exit status, what is said of each check behind its state, stderr)."""
    out, err = process.communicate(timeout=180)
    lines = [(line[:6].strip(), line[6:26].strip(), line[26:]) for line in out.splitlines()]
    said: dict[str, str] = {}
    for state, check, text in lines:
        assert state in ("ok", "note", "slow", "wrong"), out
        said[check] = "\n".join(filter(None, [said.get(check), f"{state} {text}"]))
    return process.returncode, said, err


def examined(world_size: int = 8, per_node: int = 4, device: str = "NVIDIA H100 80GB HBM3") -> Examined:
    places = {
        rank: {"host": f"n{rank // per_node}", "device": device, "domain": f"n{rank // per_node}"}
        for rank in range(world_size)
    }
    store = dist.HashStore()
    return Examined(Config(), True, torch.device("cpu"), store, 0, world_size, per_node, places=places)


def test_the_slow_rank_and_the_wrong_version_are_named():
    status, said, err = finish(case("sick", NGPU="2"))
    assert (status, err) == (1, "")
    assert said["packages"].startswith("wrong rank 1 (") and "torch>=2.14.1,<2.15 (2.13.0)" in said["packages"]
    assert said["GEMM"].startswith("slow rank 1 (") and "of the median" in said["GEMM"]
    assert "rank 0" not in said["GEMM"] + said["packages"]
    assert {"all-reduce inside", "all-to-all inside", "pairs inside"} <= said.keys()  # it went on to the end
    assert not [check for check in said if "across" in check]


@pytest.mark.slow
def test_of_four_ranks_the_one_with_the_slow_link_is_named():
    _, said, _ = finish(case("slow_link", NGPU="4"))
    assert said["pairs inside"].startswith("slow rank 2 (") and said["pairs inside"].count("slow rank") == 1


def test_a_rank_that_hangs_is_named():
    begin = time.monotonic()
    status, said, err = finish(case("hangs", NGPU="2"))
    assert (status, err) == (1, "")
    assert said["memory copy"].startswith("wrong rank 1 (") and "no answer within 3 s" in said["memory copy"]
    assert list(said)[-1] == "memory copy" and time.monotonic() - begin < 60


def test_a_rank_that_dies_is_named_on_both_nodes():
    nodes = {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    first, second = [case("dies", NODE_RANK=str(rank), **nodes) for rank in (0, 1)]
    status, said, _ = finish(first)
    assert status == 1 and said["all-reduce across"].split()[0] in ("ok", "slow")
    assert (
        said["all-to-all across"].startswith("wrong rank 1 (") and "no answer within 5 s" in said["all-to-all across"]
    )
    assert "pairs across" not in said
    status, said, _ = finish(second)
    assert status == 1 and said.keys() == {"ranks"} and "rank 1 (process" in said["ranks"]
    assert "was ended by SIGKILL" in said["ranks"]


def test_as_the_shell_runs_it(tmp_path):
    process = start(
        str(REPO / "run_train.sh"), "--doctor", "train_configs/debug_model.toml", NGPU="1", PYTHON=sys.executable
    )
    status, said, err = finish(process)
    assert (status, err) == (0, "")
    assert list(said) == ["ranks", "packages", "host memory", "run folder", "GEMM", "memory copy", "rank order"]
    assert not (REPO / "outputs" / "doctor").exists()


def test_mistakes_in_the_command(capsys, tmp_path):
    (tmp_path / "a.toml").write_text("[training]\nstpes = 1\n")
    assert doctor.main([str(tmp_path / "a.toml")], {}) == 2
    assert "did you mean" in capsys.readouterr().err
    assert doctor.main([str(tmp_path / "b.toml")], {}) == 2
    assert doctor.main([], {"NGPU": "two"}) == 2
    assert "NGPU = 'two' in the environment" in capsys.readouterr().err


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


def test_gpus_that_torch_does_not_see_are_not_passed_over(monkeypatch):
    monkeypatch.setenv("GPUS", "4")
    with pytest.raises(RuntimeError, match="nvidia-smi shows GPUs"):
        checks(torch.device("cpu"), 1, 1)[0].measure(examined())


def test_the_rank_order_that_the_drivers_report():
    at = examined(8, 2)
    at.config.parallelism.expert_parallel_degree = 4
    (found,) = _judge_rank_order(at, {})
    assert found.state == "slow" and "2 of 2 groups" in found.text
    for rank, place in at.places.items():
        place["domain"] = f"rack {rank // 4}"
    assert _judge_rank_order(at, {})[0].state == "ok"
    at.config.parallelism.expert_parallel_degree = 3
    assert _judge_rank_order(at, {})[0].state == "note"  # for another number of ranks


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
