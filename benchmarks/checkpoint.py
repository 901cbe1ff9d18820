"""What checkpoints cost: how long saving keeps training waiting, what hashing adds, what verifying adds to loading.

A real training state on one process: model, AdamW moments, schedule, data position, after one step of the debug model
made wider. Saved in turn by stock torchtitan's manager (no hashes, files written where they stay), by ours, and by ours
in the background: "blocked" is how long `save` keeps the training loop, "staged" until everything is copied, which the
next step's forward and backward do not wait for, only its optimizer, "published" until the checkpoint is there. Then
loaded with each checkpoint.verify; the page cache holds what is loaded, and where it does not, verifying costs a second
reading. SHA-256 and writing of a file are also timed alone.
"""

import hashlib
import os
import random
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group  # isort: skip - before torchtitan

from torchtitan.components.checkpointer import CheckpointManager

import train
from benchmarks.harness import Options, Record, Times, spread
from titan_moe.checkpoint import build_checkpointer

SUITE = "checkpoint"

MIB = 2**20


def seconds(action: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def build(dim: int, folder: Path) -> train.Run:
    """A run of a model 3 layers deep, after its first step."""
    argv = ["train_configs/debug_model.toml", f"--model.dim={dim}", f"--model.moe_hidden_dim={dim // 2}"]
    argv += [f"--model.dense_hidden_dim={2 * dim}", "--model.n_layers=3", "--training.dataset=synthetic"]
    argv += ["--training.seq_len=64", "--training.local_batch_size=1"]
    stepped = SteppedRun(load([*argv, *QUIET], folder))
    stepped.step()
    return stepped.run


def managers(run: train.Run, folder: Path) -> dict[str, CheckpointManager]:
    states = {"progress": run.progress}
    parts = {
        "model_parts": run.model_parts,
        "optimizers": run.optimizers,
        "lr_schedulers": run.guard.lr_schedulers,
        "dataloader": run.dataloader,
    }
    c = run.config.checkpoint
    c.enable, c.keep_latest_k, c.interval = True, 0, 1
    stock = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0, initial_load_model_only=False)
    made: dict[str, CheckpointManager] = {
        "stock": stock.build(**parts, states=dict(states), sd_adapter=None, base_folder=str(folder / "stock"))
    }
    for mode in ("disabled", "async"):
        c.async_mode = mode
        made[mode] = build_checkpointer(run.config, folder / mode, **parts, states=states)
    for verify in ("full", "size", "none"):
        c.verify = verify
        made[verify] = build_checkpointer(run.config, folder / "disabled", **parts, states=states)
    return made


def save_all(made: dict[str, CheckpointManager], folder: Path, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each repetition but the first, which warms up."""
    times = defaultdict(list)
    for step in range(1, repetitions + 2):
        for name in random.sample(("stock", "disabled", "async"), 3):
            blocked = seconds(made[name].save, step)
            times[f"{name} blocked"].append(blocked)
            staged = blocked + seconds(made[name].maybe_wait_for_staging)
            times[f"{name} staged"].append(staged)
            times[f"{name} published"].append(staged + seconds(made[name].maybe_wait_for_saving))
            if step <= repetitions:
                shutil.rmtree(folder / name / "checkpoint" / f"step-{step}")
    return {name: found[1:] for name, found in times.items()}


def load_all(made: dict[str, CheckpointManager], repetitions: int) -> dict[str, list[float]]:
    times = defaultdict(list)
    for _ in range(repetitions + 1):
        for name in random.sample(("stock", "full", "size", "none"), 4):
            times[name].append(seconds(made[name].load, -1))
    return {name: found[1:] for name, found in times.items()}


def alone(file: Path, repetitions: int) -> dict[str, list[float]]:
    """SHA-256 of a file's bytes in memory, and writing them with fsync."""
    content, copy = file.read_bytes(), file.with_name("copy")

    def write() -> None:
        with copy.open("wb") as out:
            out.write(content)
            os.fsync(out.fileno())
        copy.unlink()

    actions = {"SHA-256": lambda: hashlib.sha256(content).digest(), "write and sync": write}
    return {name: [seconds(action) for _ in range(repetitions)] for name, action in actions.items()}


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def measure(options: Options) -> Iterator[Record]:
    random.seed(0)
    dim, repetitions = options.pick((64, 1), (512, 5), (1024, 9))
    with one_process_group() as folder:
        made = managers(build(dim, folder / "run"), folder)
        saved = Times(save_all(made, folder, repetitions))
        (file,) = (folder / "disabled" / "checkpoint").glob("step-*/*.distcp")  # one process, one step left
        size = file.stat().st_size
        loaded, rates = Times(load_all(made, repetitions)), alone(file, repetitions)
        for manager in made.values():
            manager.close()
    case = f"{size / MIB:,.0f} MiB"
    for mode, name in (("disabled", "ours"), ("async", "in the background")):
        for part in ("blocked", "staged", "published"):
            found = saved.against(f"{mode} {part}", f"stock {part}", scale=1) | {"against": "torchtitan"}
            yield record(f"{case}, save, {name}", part, unit="s", **found)
    for verify in ("full", "size", "none"):
        found = loaded.against(verify, "stock", scale=1) | {"against": "torchtitan"}
        yield record(f"{case}, load, verify {verify}", "load", unit="s", **found)
    for name, found in rates.items():
        speeds = [size / spent / 1e9 for spent in found]
        low, high = spread(speeds)
        yield record(case, name, value=statistics.median(speeds), unit="GB/s", low=low, high=high)
