"""A training that watches its own memory: python tests/faults/long_run.py OUT ARGUMENTS OF train.py

OUT gets a JSON list, every 250 steps [step, resident MiB, live tensors]. Every 100th step has a loss that is no number,
so that the guard is at work too.
"""

import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import train


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def live_tensors() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules warn when an attribute of theirs is looked at
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def main() -> None:
    out, *argv = sys.argv[1:]
    seen: list[tuple[int, float, int]] = []
    train_step, forward_backward = train.train_step, train.forward_backward

    def watching(run, *args, **kwargs):
        train_step(run, *args, **kwargs)
        if run.progress.step % 250 == 0:
            gc.collect()
            seen.append((run.progress.step, resident_mib(), live_tensors()))

    def failing(run, *args, **kwargs):
        parts = forward_backward(run, *args, **kwargs)
        return {**parts, "loss": parts["loss"] * float("nan")} if run.progress.step % 100 == 0 else parts

    train.train_step, train.forward_backward = watching, failing
    train.main(argv)
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
