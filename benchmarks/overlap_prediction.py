"""The planner's exposed expert-parallel seconds against a trace's, for each moe.overlap, between gloo ranks here.

    python benchmarks/overlap_prediction.py [--ranks 2 4] [--slowness 1.0] [--steps 7]

The planner gets a measured link (latency and bytes per second, from transfers of four sizes) and the measured times of
attention, router, experts and shared expert in a run without overlap; the bytes and what hides what are its own. Links
inside one machine are made slow, as with debug.comm_delay_ns_per_byte: so that a step's transfers, one after the other,
take `slowness` times as long as all else. Traced is for how long the ranks stood still in waits for dispatch and
combine, forward and backward, of a step: median over steps, mean over ranks.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.distributed.overlap_measured import measure  # noqa: E402
from tests.distributed.overlap_ranks import MODES  # noqa: E402
from tests.faults.checkpoint_run import Job  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--slowness", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder) / "store", measure, args.slowness, args.steps, world_size=ranks)
            print(f"\n{ranks} ranks\n| moe.overlap | predicted ms | traced ms | error |\n|---|---|---|---|")
            for _ in MODES:
                answers = job.hear()
                predicted, traced = (1e3 * statistics.mean(a[i] for a in answers) for i in (1, 2))
                print(f"| {answers[0][0]} | {predicted:.1f} | {traced:.1f} | {predicted / traced - 1:+.1%} |")
            for rank, (link, received, actual) in enumerate(job.hear()):
                print(
                    f"rank {rank}: link {1e6 * link.latency:.0f} us + bytes / {link.bytes_per_s / 1e6:.2f} MB/s; bytes "
                    f"of a transfer {received:,.0f} by the planner, {actual:,.0f} seen"
                )
            job.end()


if __name__ == "__main__":
    main()
