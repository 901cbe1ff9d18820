"""FSDP's two policies, measured: when gathered parameters are freed, and how far ahead the next ones are gathered.

    python benchmarks/fsdp.py [--ranks 2] [--steps 12] [--repeat 3] [--json FILE]

The debug model, wide enough that its parameters weigh (dim 512, experts of 512), in whole training runs on gloo ranks
with FSDP2 and EP: every setting once per repetition, one after the other, so that a slow minute of the machine hits all
of them. Speed is the median over repetitions of the mean over the steps after the first two, as a ratio to the
defaults. Two processes on two cores have nothing to hide
communication behind, so times here say what a policy costs, not what it hides: run it on the machine you train on.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.distributed.harness import Case, run_cases  # noqa: E402

MODEL = [
    *("--model.dim=512", "--model.n_layers=6", "--model.moe_hidden_dim=512", "--model.dense_hidden_dim=1536"),
    *("--model.q_lora_rank=128", "--model.kv_lora_rank=128", "--model.n_heads=4"),
    *("--training.seq_len=256", "--training.local_batch_size=1"),
    *("--training.global_batch_size=-1", "--validation.enable=false", "--parallelism.expert_parallel_degree=2"),
]
SETTINGS = {
    f"reshard {reshard}, prefetch {prefetch}": [
        f"--parallelism.fsdp_reshard_after_forward={reshard}",
        f"--parallelism.fsdp_prefetch_layers={prefetch}",
    ]
    for reshard in ("default", "never")
    for prefetch in (1, 2, 3)
}
DEFAULT = "reshard default, prefetch 1"


def measure(ranks: int, steps: int, repeat: int) -> dict[str, dict[str, float]]:
    """{setting: tokens/s of a rank, ratio to the default, peak GiB of rank 0}."""
    speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    memory: dict[str, float] = {}
    for _ in range(repeat):
        cases = {name: Case([*MODEL, *setting, f"--training.steps={steps}"]) for name, setting in SETTINGS.items()}
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_cases(ranks, cases, Path(folder) / "runs")
            for name, outcome in outcomes.items():
                records = list(outcome.metrics.values())
                speeds[name].append(statistics.mean(record["tps"] for record in records[2:]))
                memory[name] = records[-1]["memory_gib"]
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    return {
        name: {"tps": tps, "ratio": tps / medians[DEFAULT], "memory_gib": memory[name]} for name, tps in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.ranks, args.steps, args.repeat)
    print("| setting | tokens/s of a rank | over the default | peak GiB of a process |\n|---|---|---|---|")
    for name, row in found.items():
        print(f"| {name} | {row['tps']:,.0f} | {row['ratio']:.2f}x | {row['memory_gib']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
