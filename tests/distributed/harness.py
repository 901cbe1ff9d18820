"""Launches jobs of several cases and reads what they left; see worker.py."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_moe.metrics import read_metrics

REPO = Path(__file__).parents[2]

# A small model of the debug flavor's structure, fp32, with a fixed global batch: 8 sequences of 64 tokens.
SMALL_FP32 = [
    "train_configs/debug_model.toml",
    *("--model.dim=64", "--model.n_layers=3", "--model.moe_hidden_dim=48", "--model.dense_hidden_dim=96"),
    *("--model.q_lora_rank=32", "--model.kv_lora_rank=32", "--model.n_heads=2"),
    *("--training.dataset=synthetic", "--training.seq_len=64", "--training.mixed_precision_param=float32"),
    *("--training.local_batch_size=2", "--training.global_batch_size=8", "--training.steps=5"),
    *("--optimizer.lr=3e-3", "--lr_scheduler.warmup_steps=2", "--moe.load_balance_coeff=0.01"),
    *("--metrics.log_freq=1", "--metrics.enable_tensorboard=false", "--validation.freq=5", "--validation.steps=1"),
]


@dataclass
class Outcome:
    """What one case left in its run folder."""

    folder: Path

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        return read_metrics(self.folder)

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics.values()]

    @property
    def direct(self) -> list[dict[str, Any]]:
        """With `few_labels`: by rank, [step, 0 in validation; summed cross-entropy; labels] of each microbatch."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("direct-*.json"))]

    @property
    def passes(self) -> list[dict[str, Any]]:
        """By rank: "training", how often each step ran forward and backward; "validation", in all; "factors" that the
        receive buffers of its layers had in the end."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("passes-*.json"))]

    @property
    def last_steps(self) -> list[int]:
        """With `stops`: the last step of each rank."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("last-step-*"))]

    @property
    def step1(self) -> dict[str, Any]:
        return torch.load(self.folder / "step1.pt", weights_only=True)


def torchrun(world_size: int, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `script` under torchrun on this machine and return the finished process; its output goes to the test's
    log."""
    command = ["-m", "torch.distributed.run", "--standalone", "--local-ranks-filter=0"]
    return _finished([*command, f"--nproc_per_node={world_size}", script, *args])


def forked(world_size: int, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The same for a script of the tests, whose ranks start sooner; see ranks.py."""
    return _finished(["tests/distributed/ranks.py", str(world_size), script, *args])


def _finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    # One thread per process: several on few cores would wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=600)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@dataclass
class Case:
    """Arguments of one training behind those of `base`, and the train.py that is run."""

    argv: list[str]
    train: Path = REPO / "train.py"
    base: list[str] = field(default_factory=lambda: SMALL_FP32)
    few_labels: bool = False  # hide most labels from data rank 1, and record losses computed directly
    overflow: bool = False  # rank 1's layers.2 lacks rows, once in step 2 and once in validation
    stops: bool = False  # a stop is asked for just before step 2


def run_cases(world_size: int, cases: dict[str, Case], out: Path) -> dict[str, Outcome]:
    """Train every case in one job of `world_size` ranks; the run folder of a case is OUT/<name> unless it says
    another."""
    out.mkdir(parents=True, exist_ok=True)
    table = {
        name: (
            free_port(),
            str(case.train),
            case.few_labels,
            case.overflow,
            case.stops,
            [*case.base, f"--job.dump_folder={out / name}", *case.argv],
        )
        for name, case in cases.items()
    }
    file = out / f"cases-{next(iter(cases))}.json"  # several jobs may share a folder
    file.write_text(json.dumps(table))
    finished = forked(world_size, "tests/distributed/worker.py", str(file))
    assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
    return {name: Outcome(out / name) for name in cases}
