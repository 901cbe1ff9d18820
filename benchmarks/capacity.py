"""What dropping costs and saves: the debug model trained dropless and with capacity factors.

    python benchmarks/capacity.py [--steps 40] [--seeds 0] [--json FILE] [--section.key=value ...]

All variants start from the same weights and see the same batches. They train in one process, one step each in turn, in
a random order, so that a busy machine slows all of them alike; time is the median over steps of a variant's time over
the dropless one's in the same turn. Loss is the mean of the last 5 steps; validation, after the last step, drops as
training does. "dropless, late" only rounds elsewhere: its loss says how much of a difference is chance.

The drop share is of all routed copies, the mean over layers: of all steps, and of the last 5. max/mean is the load of
the heaviest over the mean expert in the worst layer, last 5 steps. In these, the first steps of a training, experts
take sides faster than the bias evens the loads out (1e-3 per step), so much is dropped; a faster bias, as in
--moe.load_balance_coeff=0.02, shows what a balanced router loses.

Numbers come from each run's metrics.jsonl, but for "padded / valid": rows of the padded slabs over the copies in them,
from the plans of training forwards. With several seeds all are means over them.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # isort: skip - first of all: it tells torchtitan about CPUs

import torch
import torch.distributed as dist

from titan_moe import config_file, runtime
from titan_moe.metrics import read_metrics
from titan_moe.moe.layer import moe_layers

VARIANTS: dict[str, list[str]] = {
    "dropless": [],
    "dropless, late": ["--moe.weighting=late"],
    **{f"factor {f}, probs": [f"--moe.capacity_factor={f}", "--moe.drop_policy=probs"] for f in (1.0, 1.25, 2.0)},
    "factor 1.0, position": ["--moe.capacity_factor=1.0", "--moe.drop_policy=position"],
}
BASE = "dropless"
TAIL = 5
COLUMNS = {  # metric: its unit, the width of its column, decimals
    "loss": ("nats/token", 9, 4),
    "validation loss": ("nats/token", 17, 4),
    "dropped": ("%", 11, 2),
    f"dropped, last {TAIL}": ("%", 19, 2),
    "max/mean": ("", 10, 2),
    "step": ("ms", 9, 0),
    "padded / valid": ("", 16, 3),
}


class Variant:
    """One training run that waits between its steps."""

    def __init__(self, options: list[str], folder: Path, args: argparse.Namespace, seed: int) -> None:
        fixed = {
            "job.dump_folder": folder,
            "training.steps": args.steps,
            "debug.seed": seed,
            "metrics.log_freq": 1,
            "metrics.enable_tensorboard": "false",
            "checkpoint.enable": "false",
            "validation.enable": "true",
        }
        argv = [args.config, *(f"--{key}={value}" for key, value in fixed.items()), *args.more, *options]
        runtime.default_environment(argv)
        config = config_file.load(argv)
        config_file.raise_on_problems(config, 1)
        self.folder, self.run = folder, train.build(config)
        self.batches = iter(self.run.dataloader)
        self.rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for moe in moe_layers(self.run.model).values():
            self.watch(moe.routed_experts)
        self.others = ExitStack()
        self.wait()

    def watch(self, routed) -> None:
        """Note the counts of every plan that a training forward makes."""
        plan = routed.dispatcher.plan

        def noting(*inputs):
            found = plan(*inputs)
            if routed.training:
                self.rows.append((found.padded_counts_e, found.counts_E, found.dropped))
            return found

        routed.dispatcher.plan = noting

    def wait(self) -> None:
        """From here to the next step time is not this run's."""
        self.others.enter_context(self.run.telemetry.phase("validation"))

    def step(self, last: bool) -> None:
        self.others.close()
        self.run.progress.step += 1
        train.train_step(self.run, self.batches, validates=last, logs=True)
        self.wait()

    def close(self) -> None:
        self.others.close()
        self.run.checkpointer.close()
        self.run.metrics.close()

    def measured(self) -> dict[str, float]:
        records = list(read_metrics(self.folder).values())
        shares = [100 * r.get("moe_dropped", 0.0) for r in records]
        padded, routed, dropped = (sum(t.sum().item() for t in tensors) for tensors in zip(*self.rows))
        return {
            "loss": statistics.mean(r["loss"] for r in records[-TAIL:]),
            "validation loss": records[-1]["validation_loss"],
            "dropped": statistics.mean(shares),
            f"dropped, last {TAIL}": statistics.mean(shares[-TAIL:]),
            "max/mean": statistics.mean(r["moe_max/mean"] for r in records[-TAIL:]),
            "step": 1e3 * statistics.median(self.seconds()),
            "padded / valid": padded / (routed - dropped),
        }

    def seconds(self) -> list[float]:
        """Of each step but the first two, which set things up."""
        return [record["step_s"] for record in read_metrics(self.folder).values()][2:]


def compare(args: argparse.Namespace, seed: int, folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Metrics of every variant, and its median time per step over the dropless one's."""
    order = random.Random(seed)
    variants = {
        name: Variant(options, folder / f"{seed}-{i}", args, seed) for i, (name, options) in enumerate(VARIANTS.items())
    }
    gc.disable()
    for step in range(1, args.steps + 1):
        for name in order.sample(list(variants), len(variants)):
            variants[name].step(last=step == args.steps)
        gc.collect()
    for variant in variants.values():
        variant.close()
    base = variants[BASE].seconds()
    times = {name: statistics.median(a / b for a, b in zip(v.seconds(), base)) for name, v in variants.items()}
    return {name: variant.measured() for name, variant in variants.items()}, times


def report(found: list[dict[str, dict[str, float]]], times: list[dict[str, float]]) -> list[dict]:
    """Print the table; returns its numbers as records."""
    means = {name: {m: statistics.mean(f[name][m] for f in found) for m in COLUMNS} for name in VARIANTS}
    titles = [f"{m} {unit}".strip() if len(unit) < 3 else m for m, (unit, *_) in COLUMNS.items()]
    header = "".join(f"{title:>{width}}" for title, (_, width, _) in zip(titles, COLUMNS.values()))
    print(f"{'':22}{header}{'time / dropless':>17}")
    records = []
    for name, row in means.items():
        ratio = statistics.mean(t[name] for t in times)
        cells = "".join(f"{row[m]:{width}.{digits}f}" for m, (_, width, digits) in COLUMNS.items())
        print(f"{name:22}{cells}{ratio:17.3f}")
        for metric, (unit, *_) in COLUMNS.items():
            base = means[BASE][metric]
            of_base = ratio if metric == "step" else row[metric] / base if base else None
            records.append(
                {
                    "suite": "capacity",
                    "case": name,
                    "metric": metric,
                    "value": row[metric],
                    "baseline": base,
                    "ratio": of_base,
                    "unit": unit,
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description="dropless against capacity factors")
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "train_configs" / "debug_model.toml"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args, args.more = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    join = runtime.init_process_group
    devices: list[torch.device] = []  # the variants share one process group

    def join_once(config, folder):
        devices[:] = devices or [join(config, folder)]
        return devices[0]

    runtime.init_process_group = join_once
    os.environ["RUN_ID"] = "capacity"
    with tempfile.TemporaryDirectory() as folder:
        results = [compare(args, seed, Path(folder)) for seed in args.seeds]
    settings = " ".join([Path(args.config).name, *args.more])
    print(f"{settings}, {args.steps} steps, seeds {args.seeds}, threads {args.threads}, torch {torch.__version__}")
    records = report([found for found, _ in results], [times for _, times in results])
    if args.json:
        args.json.write_text(json.dumps(records, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
