"""Steps of other jobs on this machine, predicted from a run on one rank and a run on two (--plan.calibrate).

    python benchmarks/calibrate.py [--rounds 3] [--steps 12] [--clock wall|process] [--KEY=VALUE ...]

Each round trains the debug model for a few steps: on one rank and on two with expert parallelism, which is what the
planner learns from; then on four ranks, and with twice the width on one rank and on two, which it predicts. Told are,
for each, the medians over the rounds of the step as predicted and as measured, and of their ratio within a round, so
that what slows a whole round down plays no part in it.

Every rank computes with one thread. Four ranks on two cores share them, and take twice as long: the prediction says so.
Other programs on the machine share them too, and the prediction cannot know that. --clock=process makes every run
measure the processor time of its ranks in the place of time on the wall: nothing waits and nobody crowds there, which
leaves the work itself to compare, whatever else the machine does.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from titan_moe.plan import machine  # noqa: E402
from titan_moe.plan.calibrate import Measured, measured  # noqa: E402

CONFIG = "train_configs/debug_model.toml"
QUIET = ["--metrics.log_freq=1", "--validation.enable=false", "--metrics.enable_tensorboard=false"]
WIDE = ["--model.dim=512", "--model.moe_hidden_dim=512", "--model.dense_hidden_dim=1536"]
LEARNT = {"1 rank": (1, []), "2 ranks, EP 2": (2, ["--parallelism.expert_parallel_degree=2"])}
PREDICTED = {
    "4 ranks, EP 4": (4, ["--parallelism.expert_parallel_degree=4"]),
    "4 ranks, EP 2": (4, ["--parallelism.expert_parallel_degree=2"]),
    "twice as wide, 1 rank": (1, WIDE),
    "twice as wide, 2 ranks, EP 2": (2, [*WIDE, "--parallelism.expert_parallel_degree=2"]),
}
PROCESSOR_TIME = "import time; time.perf_counter = time.process_time; "
PROGRAM = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_path('train.py', run_name='__main__')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--clock", choices=["wall", "process"], default="wall")
    args, more = parser.parse_known_args()
    rounds = []
    for i in range(args.rounds):
        rounds.append(one_round(args.steps, args.clock, more))
        print(
            f"round {i + 1} of {args.rounds}: {' '.join(f'{e[1] / e[0] - 1:+.1%}' for e in rounds[-1].values())}",
            flush=True,
        )
    print(f"\nSeconds of a step, {args.clock} clock, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| run | measured | predicted | error |\n|---|---|---|---|")
    for name in rounds[0]:
        seen, predicted = (statistics.median(each[name][k] for each in rounds) for k in (0, 1))
        error = statistics.median(each[name][1] / each[name][0] for each in rounds) - 1
        print(f"| {name} | {seen:.3f} | {predicted:.3f} | {error:+.1%} |")


def one_round(steps: int, clock: str, more: list[str]) -> dict[str, tuple[float, float]]:
    """(measured, predicted) seconds of a step of each job."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: train(Path(folder) / str(i), ranks, [*words, f"--training.steps={steps}", *more], clock)
            for i, (name, (ranks, words)) in enumerate({**LEARNT, **PREDICTED}.items())
        }
        learnt = machine.learn([runs[name] for name in LEARNT])
    return {name: (run.step, sum(learnt.predict(machine.job_of(run)).values())) for name, run in runs.items()}


def train(folder: Path, ranks: int, words: list[str], clock: str) -> Measured:
    program = folder.parent / "rank.py"
    program.write_text((PROCESSOR_TIME if clock == "process" else "") + PROGRAM)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(program), str(ROOT)]
    done = subprocess.run(
        [sys.executable, *launch, CONFIG, *QUIET, *words, f"--job.dump_folder={folder}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    run = measured(str(folder))
    return replace(run, cores=1_000_000) if clock == "process" else run


if __name__ == "__main__":
    main()
