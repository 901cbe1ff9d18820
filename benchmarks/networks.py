"""FSDP's traffic beside expert parallelism's: a step of a real gloo run as a trace, and how much of it is at once.

    python benchmarks/networks.py [--ranks 4] [--slowness 2.0] [--trace networks.json]

The links are made slow, those of each kind of traffic for themselves: so that a step's transfers, one after the other,
take `slowness` times as long as a step without. The file of --trace opens in https://ui.perfetto.dev.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.distributed.traced import traced_steps  # noqa: E402
from tests.faults.checkpoint_run import Job  # noqa: E402
from titan_moe.timeline import common, length, write_chrome_trace  # noqa: E402

MODEL = ["--parallelism.expert_parallel_degree=2", "--moe.force_balance=balanced_random", "--model.n_layers=5"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slowness", type=float, default=2.0)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "store", traced_steps, MODEL, args.slowness, 1, world_size=args.ranks)
        ranks = job.hear()
        job.end()
    print("| rank | pass | FSDP s | expert parallel s | both s | of FSDP | of expert parallel |")
    print("|---|---|---|---|---|---|---|")
    for rank, found in enumerate(ranks):
        for backward in (False, True):
            here = [span for span in found if span.backward == backward]
            fsdp, ep = ([s.interval for s in here if s.lane == lane] for lane in ("FSDP", "expert parallel"))
            both = length(common(fsdp, ep))
            shares = f"{both / length(fsdp):.0%} | {both / length(ep):.0%}"
            where = "backward" if backward else "forward"
            print(f"| {rank} | {where} | {length(fsdp):.3f} | {length(ep):.3f} | {both:.3f} | {shares} |")
    if args.trace:
        origin = min(span.start for found in ranks for span in found)
        moved = [[replace(s, start=s.start - origin, end=s.end - origin) for s in found] for found in ranks]
        write_chrome_trace(args.trace, dict(enumerate(moved)))


if __name__ == "__main__":
    main()
