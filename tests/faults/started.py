"""A run that run_train.sh really starts, to be broken, and all processes that it has."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from titan_moe.processes import TORCHRUN

from tests.distributed.harness import REPO, SMALL_FP32, Case, run_cases
from titan_moe.metrics import read_metrics

SCHEDULE_100 = "--lr_scheduler.total_steps=100"  # must not follow training.steps where a run stops before its end
BASE = [*SMALL_FP32, SCHEDULE_100, "--parallelism.expert_parallel_degree=2"]

# Python runs it at the start of each process that finds it on its path. It breaks only torchrun's workers.
FAULTS = """
import os, time
if "TORCHELASTIC_RUN_ID" in os.environ:
    def slowly(seconds, module, name, call):
        function, calls = getattr(module, name), []
        def slow(*args, **kwargs):
            calls.append(name)
            deadline = time.monotonic() + seconds * (len(calls) == call)
            while time.monotonic() < deadline:
                time.sleep(0.05)
            return function(*args, **kwargs)
        setattr(module, name, slow)

    # Seconds, in the middle of a file.
    if "SLOW_SAVE" in os.environ and os.environ["RANK"] in os.environ.get("SLOW_RANKS", "01"):
        import torch.distributed.checkpoint.filesystem
        slowly(float(os.environ["SLOW_SAVE"]), torch.distributed.checkpoint.filesystem, "_write_item", 3)
    # The rank that hangs, once, before it clips its gradients in step 6, for expert and other parameters.
    if os.environ.get("HANGS") == os.environ["RANK"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        import torch
        slowly(1000, torch.nn.utils, "clip_grads_with_norm_", 11)
"""


STEPS = 8


@functools.cache
def uninterrupted() -> dict[int, float]:
    """Losses of a run of STEPS steps that nothing happens to, by step."""
    with tempfile.TemporaryDirectory() as folder:
        cases = {"uninterrupted": Case([f"--training.steps={STEPS}"], base=BASE)}
        metrics = run_cases(2, cases, Path(folder))["uninterrupted"].metrics
    return {step: record["loss"] for step, record in metrics.items()}


class Started:
    """run_train.sh with two ranks on CPUs; `folder` is the run folder. What it prints is in `output`."""

    def __init__(self, tmp_path: Path, *args: str, **env: str) -> None:
        self.folder, self.log = tmp_path / "run with space", tmp_path / f"log-{uuid.uuid4().hex[:4]}"
        self.mark = f"FAULTS_MARK={uuid.uuid4()}"
        faults = tmp_path / "faults"
        faults.mkdir(parents=True, exist_ok=True)
        (faults / "sitecustomize.py").write_text(FAULTS)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(faults), "NGPU": "2", "OMP_NUM_THREADS": "1"}
        command = ["./run_train.sh", *BASE, f"--job.dump_folder={self.folder}", *args]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=REPO, env={**environment, name: value, **env}, stdout=log, stderr=log
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Wait for it; fails if the run ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output[-6000:]
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: max(self.losses, default=0) >= step)

    @property
    def losses(self) -> dict[int, float]:
        """By step, of the newest attempt at it."""
        if not (self.folder / "metrics.jsonl").exists():
            return {}
        return {step: record["loss"] for step, record in read_metrics(self.folder).items()}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def status(self, seconds: float = 120) -> int:
        """Exit status, and that no process is left."""
        try:
            status = self.process.wait(seconds)
        finally:
            left = self.processes()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes are left: {self.output[-3000:]}"
        return status

    def processes(self) -> dict[int, str]:
        """What runs of it, by what is in the environment that all of them inherit: process, command line."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # somebody else's, or ended in between
                continue
        return found

    def ranks(self) -> list[int]:
        """The processes of the ranks, rank 0 first."""
        # What starts them may have a RANK too: its own job's.
        started = {pid: environ(pid) for pid in self.processes()}
        rank = {pid: int(env["RANK"]) for pid, env in started.items() if TORCHRUN in env}
        return sorted(rank, key=lambda pid: rank[pid])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


def environ(pid: int) -> dict[str, str]:
    """What the process started with; nothing if it has ended."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
