"""Runs suites at their smallest in this process, for test_suites.py: `python smallest.py FOLDER SUITE ...`. What a
suite finds goes to FOLDER/SUITE.json, or its error to FOLDER/SUITE.txt. "baseline" is no suite: the losses of its runs
that the step suite takes turns with."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan

import torch

from benchmarks import gpu, harness, run, step
from benchmarks.harness import Options, Record
from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group
from titan_moe.metrics import read_metrics


def baseline() -> Iterator[Record]:
    """Losses of three steps of every rung of the ladder, ours last."""
    with one_process_group() as folder:
        config = load([*step.DEBUG, *QUIET, *step.TINY, "--training.seq_len=64"], folder / "run")
        for name, build in step.LADDER.items():
            take = build(config)
            for i in range(1, 4):
                yield Record(suite="baseline", case=name, metric=f"step {i}", value=float(take()))
        ours = SteppedRun(config)
        for _ in range(3):
            ours.step(logs=True)
        ours.close()
        for i, row in read_metrics(folder / "run").items():
            yield Record(suite="baseline", case="ours", metric=f"step {i}", value=row["loss"])


def measure(suite: str, options: Options) -> Iterator[Record]:
    if suite == "baseline":
        return baseline()
    return gpu.measure_on("cpu", options) if suite == "gpu" else run.module(suite).measure(options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, options = Path(sys.argv[1]), Options("smallest", traces=Path(sys.argv[1]) / "traces")
    for suite in sys.argv[2:]:
        try:
            harness.write(folder / f"{suite}.json", [(record, {}) for record in measure(suite, options)])
        except Exception:
            (folder / f"{suite}.txt").write_text(traceback.format_exc(), encoding="utf-8")
