"""What moe.overlap hides: one process per rank on this machine, gloo, and links that are made slow.

    python benchmarks/overlap.py [--ranks 2] [--delays 0 10 500] [--steps 3] [--trace FILE] [--json FILE]
                                 [--section.key=value ...]

For each delay (debug.comm_delay_ns_per_byte) and each moe.overlap: the step, how long transfers of dispatch and combine
were in flight, how long this rank stood still for them, and the share that was hidden, forward and backward; medians
over steps, of rank 0. Ranks wait for each other, so on a machine that has other things to do the exposed time without a
delay is that of whoever is late.

"under shared" is the share of the shared expert's own time, forward and backward, in which a transfer was under way.

--trace writes the last step's intervals, one JSON object a line: {"mode", "delay", "name", "start", "end"} in seconds
from the step's start. Names are transfers ("dispatch", "combine backward", ...: from issue to arrival), waits for them
("wait dispatch", ...) and the shared expert.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.distributed import overlap_ranks
from tests.faults.checkpoint_run import Job

WIDTHS = {"forward": ("dispatch", "combine"), "backward": ("dispatch backward", "combine backward")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 10.0, 500.0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    args, more = parser.parse_known_args()
    base = [*overlap_ranks.SMALL, *overlap_ranks.LAYER, f"--parallelism.expert_parallel_degree={args.ranks}", *more]
    rows, traced = [], []
    print(f"{'delay':>6} {'overlap':<14} {'step':>7} | {'in flight':>9} {'exposed':>8} {'hidden':>7} | backward |")
    for delay in args.delays:
        for mode in overlap_ranks.MODES:
            argv = [*base, f"--moe.overlap={mode}", f"--debug.comm_delay_ns_per_byte={delay}"]
            with tempfile.TemporaryDirectory() as folder:
                job = Job(Path(folder) / "store", overlap_ranks.measure, argv, args.steps, world_size=args.ranks)
                answer = job.hear()[0]
                job.end()
            if not isinstance(answer, list):
                raise SystemExit(answer)
            rows.append(row(mode, delay, answer))
            show(rows[-1])
            traced += [{"mode": mode, "delay": delay, **interval} for interval in answer[-1]["intervals"]]
    if args.trace:
        args.trace.write_text("".join(json.dumps(interval) + "\n" for interval in traced))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def row(mode: str, delay: float, steps: list[dict]) -> dict:
    """The medians of one line of the table; seconds."""
    found: dict = {"mode": mode, "delay": delay, "step": statistics.median(step["seconds"] for step in steps)}
    for side, names in WIDTHS.items():
        for what in ("in_flight", "exposed"):
            found[f"{side} {what}"] = statistics.median(
                sum(step["totals"][name][what] for name in names) for step in steps
            )
        found[f"{side} hidden"] = max(0.0, 1 - found[f"{side} exposed"] / found[f"{side} in_flight"])
    found["under shared"] = statistics.median(step["under shared"] for step in steps)
    return found


def show(found: dict) -> None:
    line = f"{found['delay']:>6.0f} {found['mode']:<14} {found['step']:>6.2f}s |"
    for side in WIDTHS:
        ms = [f"{1e3 * found[f'{side} {what}']:>7.0f}ms" for what in ("in_flight", "exposed")]
        line += f" {' '.join(ms)} {found[f'{side} hidden']:>6.0%} |"
    print(line + f" under shared {found['under shared']:>4.0%}", flush=True)


if __name__ == "__main__":
    main()
