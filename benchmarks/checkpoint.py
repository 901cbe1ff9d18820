"""What checkpoints cost: how long saving keeps training waiting, what hashing adds, what verifying adds to loading.

    python benchmarks/checkpoint.py [--dim 768] [--repetitions 7] [--folder FOLDER] [--json FILE]

A real training state on one process: model, AdamW moments, schedule, data position, after one step of the debug model
made wider. Saved, in random order in each repetition, by stock torchtitan's manager (no hashes, files written where
they stay), by ours, and by ours in the background: "blocked" is how long `save` keeps the training loop, "staged"
until everything is copied, which the next step's forward and backward do not wait for, only its optimizer, "published"
until the checkpoint is there. Then loaded with each checkpoint.verify; the page cache holds what is loaded, and where
it does not, verifying costs a second reading. Medians; ratios are the medians of the ratios within a repetition.
SHA-256 and writing of a file are also timed alone.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # isort: skip - first: it tells torchtitan about CPUs

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.tools.logging import logger

from titan_moe import config_file, runtime
from titan_moe.checkpoint import build_checkpointer

MIB = 2**20


def seconds(action: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def build(dim: int, folder: Path) -> train.Run:
    """A run of a model 3 layers deep, after its first step."""
    argv = ["train_configs/debug_model.toml", f"--model.dim={dim}", f"--model.moe_hidden_dim={dim // 2}"]
    argv += [f"--model.dense_hidden_dim={2 * dim}", "--model.n_layers=3", "--training.dataset=synthetic"]
    argv += ["--training.seq_len=64", "--training.local_batch_size=1", "--training.global_batch_size=1"]
    argv += ["--training.mixed_precision_param=float32", "--validation.enable=false", f"--job.dump_folder={folder}"]
    run = train.build(config_file.load(argv, 1))
    run.progress.step = 1
    train.train_step(run, iter(run.dataloader), validates=False, logs=False)
    return run


def managers(run: train.Run, folder: Path) -> dict[str, CheckpointManager]:
    states = {"progress": run.progress}
    parts = {
        "model_parts": run.model_parts,
        "optimizers": run.optimizers,
        "lr_schedulers": run.lr_schedulers,
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


def ratio(found: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runtime.default_environment([])
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder = Path(place)
        run = build(args.dim, folder / "run")
        logger.setLevel("WARNING")
        made = managers(run, folder)
        saved = save_all(made, folder, args.repetitions)
        files = sorted((folder / "disabled" / "checkpoint").glob("step-*/*.distcp"))
        size = sum(file.stat().st_size for file in files)
        loaded, rates = load_all(made, args.repetitions), alone(files[0], args.repetitions)
        for manager in made.values():
            manager.close()
    print(f"\n{size / MIB:,.0f} MiB, {args.repetitions} repetitions, {torch.get_num_threads()} threads")
    print(f"load of the machine, 1 minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    for name, found in rates.items():
        print(f"{name:23} {size / statistics.median(found) / 1e9:8.2f} GB/s")
    for what, table, base in (("save", saved, "disabled blocked"), ("load", loaded, "stock")):
        for name, found in table.items():
            print(f"{what} {name:18} {statistics.median(found):8.3f} s, {ratio(table, name, base):6.3f} of {base}")
    if args.json:
        args.json.write_text(json.dumps({"bytes": size, "saved": saved, "loaded": loaded, "alone": rates}, indent=1))
    runtime.leave_process_group()


if __name__ == "__main__":
    random.seed(0)
    main()
