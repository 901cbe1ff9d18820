"""A whole training step against stock torchtitan's, what each part of the gain comes from, memory, and start-up.

Both train on the same data with the same weights, dtype (bf16 in FSDP2, fp32 weights and moments) and threads; the
baseline is stock.py. Between the two stand runs with one more part of ours each: attention, then the MoE layer, then
the loop with everything around it (loss, telemetry, guards), so that within a repetition their gains multiply to the
whole.

Phases are those of train.py's own timers. Their floors are model FLOPs by plan/flops.py and, where bytes weigh more,
the bytes that must move: AdamW reads weight, gradient and two moments and writes three of them, 28 bytes a parameter.

Memory is the peak of a process that trains a few steps; start-up is from the command to the first step's line, with
imports that the page cache holds.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks import roofline
from benchmarks.harness import ROOT, Options, Record, Times, interleaved, versus

from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group  # isort: skip - before torchtitan

import torch

from benchmarks.stock import StockRun
from titan_moe import config_file, parallel
from titan_moe.plan import flops

SUITE = "step"
DEBUG = [
    *("train_configs/debug_model.toml", "--training.mixed_precision_param=bfloat16", "--training.local_batch_size=1"),
]
FIFTY = [  # 50M parameters, 18M of them active
    *("--model.dim=512", "--model.n_layers=6", "--model.moe_hidden_dim=384", "--model.dense_hidden_dim=1536"),
    *("--model.num_experts=16", "--model.top_k=4", "--model.n_heads=8", "--model.q_lora_rank=256"),
    "--model.kv_lora_rank=128",
]
TINY = [
    *("--model.dim=64", "--model.n_layers=2", "--model.moe_hidden_dim=48", "--model.dense_hidden_dim=96"),
    *("--model.q_lora_rank=32", "--model.kv_lora_rank=32", "--model.n_heads=2"),
]
CASES: dict[str, tuple[list[str], int, float | None]] = {  # more words, tokens, the least ratio
    "debug, 1 x 512": ([], 512, 1.1),
    "debug, 1 x 2048": ([], 2048, 1.8),
    "50M, 1 x 1024": (FIFTY, 1024, 1.3),
    "tiny, 1 x 64": (TINY, 64, None),
}
LADDER = {  # each has one more part of ours than the one before
    "torchtitan": lambda config: StockRun(config).step,
    "+ attention": lambda config: StockRun(config, attention="ours").step,
    "+ MoE": lambda config: StockRun(config, attention="ours", moe="ours").step,
}
MOST_START_S = 12.0
PHASE_STEPS = 3


def measure(options: Options) -> Iterator[Record]:
    cases = options.pick(["tiny, 1 x 64"], [name for name in CASES if "tiny" not in name], list(CASES))
    repetitions, budget_s = options.pick((3, 1.0), (15, 6.0), (41, 120.0))
    with one_process_group() as folder:
        for case in cases:
            yield from compare(case, folder / case.replace(" ", ""), repetitions, budget_s, options.more)
    for case in options.pick([], ["debug, 1 x 2048"], cases):
        yield from whole_runs(case, options.pick(1, 2, 5))


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def compare(case: str, folder: Path, repetitions: int, budget_s: float, words: tuple[str, ...]) -> Iterator[Record]:
    more, tokens, least = CASES[case]
    argv = [*DEBUG, *QUIET, f"--training.seq_len={tokens}", *more, *words]
    config = load(argv, folder)
    ours = SteppedRun(config)
    steps: dict[str, Callable[[], object]] = {name: build(config) for name, build in LADDER.items()}
    steps["ours"] = ours.step
    times = interleaved(
        {name: (lambda step=step: step) for name, step in steps.items()},
        repetitions,
        warm_up=2,  # what the first steps set up is none of a step's cost
        budget_s=budget_s,
        wait=lambda: roofline.synchronize(roofline.DEVICE),
    )
    whole = times.against("ours", "torchtitan")
    speeds = {"value": 1e3 * tokens / whole["value"], "baseline": 1e3 * tokens / whole["baseline"]}
    target = f"ratio >= {least}" if least else ""
    yield record(case, "whole step", unit="tokens/s", **{**whole, **speeds}, target=target)
    names = list(steps)
    for before, name in pairwise(names):
        label = "+ loop (ours)" if name == "ours" else name
        yield record(case, f"{label}, over the row above", unit="ms", **times.against(name, before))
    yield from by_phase(case, ours, tokens)
    ours.close()
    del ours, steps, times
    gc.collect()  # four models and their moments


def by_phase(case: str, ours: SteppedRun, tokens: int) -> Iterator[Record]:
    """Our phases of at least 1 % of the step, in the mean over a few, and the floor under each."""
    phases = ours.run.telemetry.phases
    phases.take()  # with what others did meanwhile
    for _ in range(PHASE_STEPS):
        ours.step()
    taken, _ = phases.take()
    seconds = {name: spent / PHASE_STEPS for name, spent in taken.items()}
    step = sum(seconds.values())
    floors = phase_floors(ours, tokens)
    merged: dict[str, float] = {}
    for name, spent in seconds.items():
        merged[name.partition(".")[0]] = merged.get(name.partition(".")[0], 0.0) + spent
    for name, spent in sorted(merged.items(), key=lambda item: -item[1]):
        if spent >= 0.01 * step:
            roof = floors[name] / spent if name in floors else None
            yield record(f"{case}, phases", name, value=1e3 * spent, unit="ms", roof=roof)


def phase_floors(ours: SteppedRun, tokens: int) -> dict[str, float]:
    """Seconds, forward and backward together."""
    config, model = ours.run.config, ours.run.model_parts[0]
    flavor = config_file.model_flavor(config)
    f = flops.per_token(flavor, config.training.seq_len, num_mtp_layers=0)
    parameters, _ = parallel.total_and_active_parameters(model, flavor.top_k, flavor.num_experts)
    of = {
        "attention": f["attention q"] + f["attention kv"] + f["attention out"] + f["core attention"],
        "dense": f["dense MLP"],
        "experts": f["routed experts"],
        "shared_expert": f["shared experts"],
        "loss": f["logits"],
    }
    floors = {name: roofline.floor(tokens * each, 0, torch.bfloat16) for name, each in of.items()}
    rows = (flavor.top_k + 1) * tokens * flavor.dim * 2 * (flavor.n_layers - flavor.n_dense_layers)
    floors |= {name: roofline.floor(0, 2 * rows, torch.bfloat16) for name in ("dispatch", "combine")}
    return floors | {
        "optimizer": roofline.floor(0, 28 * parameters, torch.float32),
        "clip": roofline.floor(0, 12 * parameters, torch.float32),  # read for the norm, read and written to scale
        "fsdp": roofline.floor(0, (4 + 2 + 2 + 4) * parameters, torch.float32),  # weights to bf16, gradients back
    }


# ---------------------------------------------------------------------------------------------------------------------
# Whole processes


def whole_runs(case: str, repetitions: int) -> Iterator[Record]:
    """Start-up and memory, of commands that take turns."""
    more, tokens, _ = CASES[case]
    scripts = {"torchtitan": "benchmarks/stock.py", "ours": "train.py"}
    argv = [*DEBUG, *QUIET, f"--training.seq_len={tokens}", *more, "--training.steps=3", "--metrics.log_freq=1"]
    peaks: dict[str, list[float]] = {name: [] for name in scripts}
    times = Times({name: [] for name in scripts})
    for _ in range(repetitions):  # this process has read most of what they import into the page cache
        for name, script in scripts.items():
            start, peak = first_step([script, *argv])
            times.seconds[name].append(start)
            peaks[name].append(peak)
    target = f"value <= {MOST_START_S}" if case.startswith("debug") else ""
    start = times.against("ours", "torchtitan", scale=1)
    yield record(case, "command to first step", unit="s", **start, target=target)
    ours, stock = (statistics.median(peaks[name]) for name in ("ours", "torchtitan"))
    peak = versus(ours, stock) | {"against": "torchtitan"}
    yield record(case, "peak memory of the process", unit="MiB", value=ours, **peak)


def first_step(words: list[str]) -> tuple[float, float]:
    """Seconds until a training says that its first step is done, and MiB of its peak memory."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words, f"--job.dump_folder={folder}/run"],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        said, spent, peak = [], None, 0.0
        for line in process.stdout:
            said.append(line)
            peak = peak_mib(process.pid) or peak
            if spent is None and "step:  1" in line:
                spent = time.perf_counter() - start
        process.stdout.close()
        process.wait()
    if spent is None or process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{''.join(said[-20:])}")
    return spent, peak


def peak_mib(pid: int) -> float:
    """Peak memory of a process so far; 0 if it has ended. Not ru_maxrss, which begins at the size of the process that
    forked it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0.0
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) / 1024 if found else 0.0
