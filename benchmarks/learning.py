"""Does the debug model still learn in low precision? It is trained under every recipe, from the same weights, on the
same batches in the same order, and compared with bf16 step by step.

    python benchmarks/learning.py [--steps 300] [--recipes bf16 mxfp8 ...] [--batch 4] [--out outputs/precision]
                                   [--picture docs/precision.png] [WORDS FOR train.py ...]

Two kinds of noise say what a difference means. The recipe "fp32" differs from bf16 by rounding alone, so its difference
is what any change of rounding grows to in so many steps. And "bf16, seed 2" has other initial weights and another order
of the data: only its validation loss compares, and shows what a seed is worth.

Each training is one process on one thread; OUT/<recipe> is its run folder. One that is complete is not run again,
unless its command was another; then its folder is emptied.
Time is CPU time, which other load on the machine moves less, without the start: that of a run of one step.

The picture has the difference of the training loss to that of bf16, each step a dot, and its mean over 25 steps a line.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from titan_moe.metrics import read_metrics  # noqa: E402
from titan_moe.plan.pictures import COLORS, EDGE, GRID, INK, PALE, WIDTH, Canvas  # noqa: E402

RECIPES = ("bf16", "fp32", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
SEED_2, ONE_STEP = "bf16, seed 2", "bf16, one step"
WINDOW = 25  # steps that a line is the mean of
LAST = 50  # steps that the final loss is the mean of
HEIGHT = 560


def command(name: str, folder: Path, steps: int, batch: int, more: list[str]) -> list[str]:
    recipe = name.split(",")[0]
    if recipe in ("fp32", "bf16"):
        precision = [f"--precision.recipe={recipe}"]
    else:
        precision = [f"--precision.recipe={recipe}", "--training.mixed_precision_param=bfloat16"]
    precision += ["--debug.seed=2"] if name == SEED_2 else []
    settings = [
        f"--training.steps={1 if name == ONE_STEP else steps}",
        f"--training.local_batch_size={batch}",
        *("--lr_scheduler.total_steps=none", "--lr_scheduler.warmup_steps=10", "--metrics.log_freq=1"),
        *("--metrics.enable_tensorboard=false", f"--validation.freq={steps}", "--validation.steps=16"),
        f"--job.dump_folder={folder}",
    ]
    return [sys.executable, "train.py", "train_configs/debug_model.toml", *settings, *precision, *more]


def train(name: str, out: Path, steps: int, batch: int, more: list[str]) -> dict:
    """What the training of that name left: its losses by step, validation loss at the end, and CPU seconds."""
    folder = out / name.replace(", ", "-").replace(" ", "-")
    done, argv = folder / "result.json", command(name, folder, steps, batch, more)
    if not done.exists() or json.loads(done.read_text())["command"] != argv:
        shutil.rmtree(folder, ignore_errors=True)
        with open(out / "log.txt", "a", encoding="utf-8") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(argv, cwd=REPO, env=environment, stdout=log, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{name} failed: see {out / 'log.txt'}")
        records = read_metrics(folder)
        losses = [record["loss"] for record in records.values()]
        validation = records[max(records)]["validation_loss"]
        seconds = usage.ru_utime + usage.ru_stime
        result = {"command": argv, "losses": losses, "validation": validation, "cpu_seconds": seconds}
        done.write_text(json.dumps(result))
    return json.loads(done.read_text())


def table(results: dict[str, dict]) -> str:
    """Final losses and time, as Markdown."""
    bf16, start = results["bf16"], results[ONE_STEP]["cpu_seconds"]
    lines = [
        f"| recipe | training loss, last {LAST} steps | to bf16 | validation loss | to bf16 | noise per step | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if name == ONE_STEP:
            continue
        final, reference = (statistics.fmean(r["losses"][-LAST:]) for r in (result, bf16))
        gap, noise = f"{final / reference - 1:+.2%}", "-"
        if name == SEED_2:
            gap = "other data"
        elif name != "bf16":
            noise = f"{statistics.stdev(differences(result, bf16)[-LAST:]):.4f}"
        validation = result["validation"] / bf16["validation"] - 1
        time = (result["cpu_seconds"] - start) / (bf16["cpu_seconds"] - start)
        own = f"{final:.4f} | {gap} | {result['validation']:.4f} | {validation:+.2%} | {noise} | {time:.2f}"
        lines.append(f"| {name} | {own} |")
    return "\n".join(lines)


def differences(result: dict, reference: dict) -> list[float]:
    return [loss - other for loss, other in zip(result["losses"], reference["losses"])]


def means(values: list[float]) -> list[float]:
    """Of WINDOW neighbours, fewer at the ends."""
    half = WINDOW // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw(results: dict[str, dict], path: Path, title: str) -> None:
    shown = {name: differences(r, results["bf16"]) for name, r in results.items() if "bf16" not in name}
    # The first steps differ by more than any later one, as all losses fall by whole numbers there.
    settled = sorted(abs(value) for values in shown.values() for value in values[WINDOW:])
    limit = max(settled[int(0.995 * (len(settled) - 1))], 1e-6)
    canvas = Canvas(HEIGHT)
    top = canvas.heading("Training loss minus that of bf16, same weights and batches", [title]) + 40
    left, right, bottom = EDGE + 70, WIDTH - EDGE, HEIGHT - EDGE - 30
    steps = len(results["bf16"]["losses"])

    def at(step: int, value: float) -> tuple[float, float]:
        share = (limit - max(-limit, min(limit, value))) / (2 * limit)
        return left + (right - left) * step / (steps - 1), top + (bottom - top) * share

    unit = 10.0 ** (len(f"{int(1 / limit)}") * -1)
    for k in range(-int(limit / unit), int(limit / unit) + 1):
        y = at(0, k * unit)[1]
        canvas.line(left, y, right, y, PALE if k == 0 else GRID)
        canvas.text(left - 8, y, f"{k * unit:+g}" if k else "0", 13, PALE, "rm")
    for step in range(0, steps, max(1, steps // 6)):
        canvas.text(at(step, 0)[0], bottom + 16, f"{step}", 13, PALE, "mm")
    canvas.text(right, bottom + 34, "step", 13, PALE, "rm")
    for i, (name, values) in enumerate(shown.items()):
        color = INK if name == "fp32" else COLORS[i]
        for step, value in enumerate(values):
            x, y = at(step, value)
            canvas.box(x - 0.8, y - 0.8, x + 0.8, y + 0.8, color)
    for i, (name, values) in enumerate(shown.items()):
        color = INK if name == "fp32" else COLORS[i]
        points = [at(step, value) for step, value in enumerate(means(values))]
        for (x0, y0), (x1, y1) in pairwise(points):
            canvas.line(x0, y0, x1, y1, color, 2.5)
        x = left + i * 150
        canvas.box(x, top - 27, x + 14, top - 13, color)
        canvas.text(x + 21, top - 20, name, 13)
    canvas.save(path, title)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "precision")
    parser.add_argument("--picture", type=Path, default=REPO / "docs" / "precision.png")
    arguments, more = parser.parse_known_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys([ONE_STEP, "bf16", *arguments.recipes, SEED_2]))
    results = {}
    for name in names:
        results[name] = train(name, arguments.out, arguments.steps, arguments.batch, more)
        print(f"{name}: {results[name]['cpu_seconds']:.0f} CPU seconds", file=sys.stderr, flush=True)
    tokens = arguments.batch * 128
    draw(results, arguments.picture, f"debug model, {arguments.steps} steps of {tokens:,} tokens, CPU")
    print(table(results))


if __name__ == "__main__":
    main()
