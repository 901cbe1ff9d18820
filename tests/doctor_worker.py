"""`python -m tests.doctor_worker CASE`: the doctor on ranks of which one is sick, by wrapping what it measures.

NNODES, NGPU and so on in the environment, as for run_train.sh; the exit status is the doctor's.
"""

import os
import signal
import sys
import time
from importlib import metadata
from types import SimpleNamespace

import torch

from titan_moe import doctor, doctor_bench, doctor_checks
from titan_moe.config import Config


def sick(config: Config, asked: bool) -> int:
    """Rank 1 multiplies twelve times where others do it once, and has another torch."""
    if os.environ["RANK"] == "1":
        multiply, distributions = torch.mm, metadata.distributions

        def other(name: str):
            return [SimpleNamespace(version="2.13.0")] if name == "torch" else distributions(name=name)

        def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            for _ in range(11):
                multiply(a, b)
            return multiply(a, b)

        torch.mm = slow
        doctor_checks.setup_env.metadata = SimpleNamespace(distributions=other)
    return doctor.work(config, asked)


def slow_link(config: Config, asked: bool) -> int:
    if os.environ["RANK"] == "2":
        exchange = doctor_bench._exchange

        def slow(*args) -> None:
            time.sleep(0.5)
            exchange(*args)

        doctor_bench._exchange = slow
    return doctor.work(config, asked)


def hangs(config: Config, asked: bool) -> int:
    doctor_bench.LIMIT_SECONDS = 3.0
    if os.environ["RANK"] == "1":
        doctor_bench.memory_copy = lambda device: time.sleep(600)
    return doctor.work(config, asked)


def dies(config: Config, asked: bool) -> int:
    """Rank 1 is killed when the others wait for it in a collective."""
    doctor_bench.LIMIT_SECONDS = 5.0
    if os.environ["RANK"] == "1":
        doctor_bench.all_to_all = lambda group, device: os.kill(os.getpid(), signal.SIGKILL)
    return doctor.work(config, asked)


if __name__ == "__main__":
    cases = {"sick": sick, "slow_link": slow_link, "hangs": hangs, "dies": dies}
    sys.exit(doctor.examine(cases[sys.argv[1]], Config(), False, os.environ))
