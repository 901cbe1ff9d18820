"""`python -m tests.doctor.worker CASE`: the doctor on ranks of which one is sick, by wrapping what it measures.

NNODES, NGPU and so on in the environment, as for run_train.sh; the exit status is the doctor's.
"""

import os
import signal
import sys
import time
from importlib import metadata
from types import SimpleNamespace

import torch

from titan_moe.config import Config
from titan_moe.doctor import bench, software
from titan_moe.doctor.__main__ import examine
from titan_moe.doctor.ranks import work


def lose_patience_after(name: str) -> None:
    """Wait for answers for 3 s from the check after this one on; earlier, a busy machine might need longer."""
    measure = getattr(bench, name)

    def and_lose_patience(*args) -> float:
        bench.LIMIT_SECONDS = 3.0
        return measure(*args)

    setattr(bench, name, and_lose_patience)


def sick(config: Config, asked: bool) -> int:
    """Rank 1 has another torch, multiplies twelve times where others do it once, and then hangs."""
    lose_patience_after("gemm")
    if os.environ["RANK"] == "1":
        multiply, distributions = torch.mm, metadata.distributions

        def other(name: str):
            return [SimpleNamespace(version="2.13.0")] if name == "torch" else distributions(name=name)

        def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            for _ in range(11):
                multiply(a, b)
            return multiply(a, b)

        torch.mm = slow
        software.setup_env.metadata = SimpleNamespace(distributions=other)
        bench.memory_copy = lambda device: time.sleep(600)
    return work(config, asked)


def slow_link(config: Config, asked: bool) -> int:
    if os.environ["RANK"] == "2":
        exchange = bench._exchange

        def slow(*args) -> None:
            time.sleep(0.5)
            exchange(*args)

        bench._exchange = slow
    return work(config, asked)


def dies(config: Config, asked: bool) -> int:
    """Rank 1 is killed when the others wait for it in a collective."""
    lose_patience_after("all_reduce")
    if os.environ["RANK"] == "1":
        bench.all_to_all = lambda group, device: os.kill(os.getpid(), signal.SIGKILL)
    return work(config, asked)


if __name__ == "__main__":
    cases = {"sick": sick, "slow_link": slow_link, "dies": dies}
    sys.exit(examine(cases[sys.argv[1]], Config(), False, os.environ))
