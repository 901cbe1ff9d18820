"""Jobs of real processes, of which one is slow, wrong, hangs or dies; see worker.py."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.harness import free_port
from titan_moe.doctor.__main__ import main

REPO = Path(__file__).parents[2]


def start(*command: str, **env: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=REPO, env=env, text=True, **pipes)


def case(name: str, **env: str) -> subprocess.Popen:
    return start(sys.executable, "-m", "tests.doctor.worker", name, **env)


def finish(process: subprocess.Popen) -> tuple[int, dict[str, str], str]:
    """(exit status, what is said of each check behind its state, stderr)."""
    out, err = process.communicate(timeout=180)
    lines = [(line[:6].strip(), line[6:26].strip(), line[26:]) for line in out.splitlines()]
    said: dict[str, str] = {}
    for state, check, text in lines:
        assert state in ("ok", "note", "slow", "wrong"), out
        said[check] = "\n".join(filter(None, [said.get(check), f"{state} {text}"]))
    return process.returncode, said, err


def test_a_rank_that_is_slow_or_wrong_or_hangs_is_named():
    begin = time.monotonic()
    status, said, err = finish(case("sick", NGPU="2"))
    assert (status, err) == (1, "")
    assert said["packages"].startswith("wrong rank 1 (") and "torch>=2.14.1,<2.15 (2.13.0)" in said["packages"]
    assert said["GEMM"].startswith("slow rank 1 (") and "of the median" in said["GEMM"]
    assert said["memory copy"].startswith("wrong rank 1 (") and "no answer within 3 s" in said["memory copy"]
    assert "rank 0" not in said["packages"] + said["GEMM"] + said["memory copy"]
    assert list(said)[-1] == "memory copy" and time.monotonic() - begin < 90  # the others do not wait for it


@pytest.mark.slow
def test_of_four_ranks_the_one_with_the_slow_link_is_named():
    _, said, _ = finish(case("slow_link", NGPU="4"))
    assert said["pairs inside"].startswith("slow rank 2 (") and said["pairs inside"].count("slow rank") == 1


@pytest.mark.slow
def test_a_rank_that_dies_is_named_on_both_nodes():
    nodes = {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    first, second = [case("dies", NODE_RANK=str(rank), **nodes) for rank in (0, 1)]
    status, said, _ = finish(first)
    assert status == 1 and said["all-reduce across"].split()[0] in ("ok", "slow")
    assert (
        said["all-to-all across"].startswith("wrong rank 1 (") and "no answer within 3 s" in said["all-to-all across"]
    )
    assert "rank 0" not in said["all-to-all across"]  # it only waited for rank 1
    assert "pairs across" not in said
    status, said, _ = finish(second)
    assert status == 1 and said.keys() == {"ranks"} and "rank 1 (process" in said["ranks"]
    assert "was ended by SIGKILL" in said["ranks"]


@pytest.mark.slow
def test_as_the_shell_runs_it():
    command = [str(REPO / "run_train.sh"), "--doctor", "train_configs/debug_model.toml"]
    begin = time.monotonic()
    status, said, err = finish(start(*command, NGPU="2", PYTHON=sys.executable))
    assert time.monotonic() - begin < 60
    # This machine may have other work, that slows one of the ranks.
    assert err == "" and status == int(any(text.startswith("slow") for text in said.values()))
    software, speed = ["ranks", "packages", "host memory", "run folder"], ["GEMM", "memory copy", "connection"]
    together = ["all-reduce inside", "all-to-all inside", "pairs inside"]
    assert list(said) == [*software, *speed, *together, "rank order"]
    assert all(said[check].startswith("ok") for check in [*software, "connection", "rank order"])
    assert not (REPO / "outputs" / "doctor").exists()


def test_mistakes_in_the_command(capsys, tmp_path):
    (tmp_path / "a.toml").write_text("[training]\nstpes = 1\n")
    assert main([str(tmp_path / "a.toml")], {}) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main([str(tmp_path / "b.toml")], {}) == 2
    assert main([], {"NGPU": "two"}) == 2
    assert "NGPU = 'two' in the environment" in capsys.readouterr().err
