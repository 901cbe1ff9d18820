"""Side-by-side benchmarks, in named suites.

    python benchmarks/run.py --suite layer,step [--quick] [--json FILE] [--docs]
    python benchmarks/run.py --suite all --quick --json benchmarks/results.json --docs

The second line is what docs/benchmarks.md is made by: at most a minute per suite on two idle cores. Each of several
suites runs in a process of its own, so that none inherits another's process group, threads or memory. One that fails
says so, the others go on, and the exit status is 1. `capacity` and `phases` are no part of `all`.

Suites that train (step, overlap, capacity, phases) take words for train.py, as --section.key=value.

`--docs` rewrites the tables of docs/benchmarks.md, and README's headline, from the records of FILE; without `--suite`
it measures nothing. A suite's records replace those that FILE had of it on this machine; the others stay.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch

from benchmarks import harness, publish, roofline
from benchmarks.harness import Options, Record

SUITES = ("layer", "step", "dispatch", "data", "checkpoint", "precision", "offload", "overlap", "scaling", "gpu")
MORE_SUITES = ("capacity", "phases")
MACHINE = "machine"


def module(suite: str):
    return importlib.import_module(f"benchmarks.{suite}")


def ceilings(device: str) -> list[Record]:
    """The machine's, and what else it was doing."""
    case = {"cuda": "GPU", "cpu": f"CPU, {torch.get_num_threads()} threads"}[device]
    found = [
        Record(suite=MACHINE, case=case, metric=f"matmul peak, {str(dtype).removeprefix('torch.')}", unit="TFLOPS",
               value=roofline.matmul_peak(dtype, device) / 1e12)
        for dtype in (torch.bfloat16, torch.float32)
    ]  # fmt: skip
    found.append(
        Record(suite=MACHINE, case=case, metric="memory bandwidth", value=roofline.bandwidth(device) / 1e9, unit="GB/s")
    )
    return found


def load(metric: str) -> Record:
    return Record(suite=MACHINE, case="load average, 1 minute", metric=metric, value=os.getloadavg()[0])


def run_here(suite: str, options: Options) -> list[Record]:
    """The records of one suite, which is printed as it comes."""
    measured = module(suite)
    print(f"\n## {suite}\n\n{measured.__doc__.splitlines()[0]}\n", flush=True)
    start, records = time.perf_counter(), list(measured.measure(options))
    print(harness.table(records))
    print(f"\n{suite}: {time.perf_counter() - start:.0f} s", flush=True)
    return records


def run_apart(suite: str, options: Options) -> list[Record] | None:
    """The same in a process of its own; None where that failed."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "records.json"
        command = [sys.executable, __file__, "--suite", suite, "--size", options.size, "--json", str(answer)]
        command += ["--traces", str(options.traces)] if options.traces else []
        done = subprocess.run([*command, "--part", *options.more], cwd=harness.ROOT)
        return None if done.returncode else [record for record, _ in harness.read(answer)]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="", help=f"names with commas between them; all: {', '.join(SUITES)}")
    parser.add_argument("--size", choices=harness.SIZES, default="full", help="smallest only tries the code")
    # Behind --size, whose default would not count otherwise.
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="at most a minute per suite")
    parser.add_argument("--json", type=Path, help="write the records here; with --docs: and read them from here")
    parser.add_argument("--traces", type=Path, help="a folder for what suites record in time")
    parser.add_argument("--docs", action="store_true", help=f"write {publish.PAGE.name} from --json FILE")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args, args.more = parser.parse_known_args(argv)
    args.suites = list(SUITES) if args.suite == "all" else [name for name in args.suite.split(",") if name]
    known = (*SUITES, *MORE_SUITES)
    if unknown := [name for name in args.suites if name not in known]:
        parser.error(f"no suite {', '.join(unknown)}: there are {', '.join(known)}")
    if wrong := [word for word in args.more if not word.startswith("--") or "." not in word.partition("=")[0]]:
        parser.error(f"{' '.join(wrong)}: neither an option nor a key of train.py, as --section.key=value")
    if not args.suites and not args.docs:
        parser.error("nothing to do: name suites with --suite, or all")
    if args.docs and args.json is None:
        parser.error("--docs makes its tables from the records in --json FILE: name one")
    if args.part and args.json is None:
        parser.error("--part is for suites of a run: leave it out")
    if args.json is not None and (why := unusable(args.json, needed=not args.suites)):
        parser.error(f"--json {args.json}: {why}")
    return args


def unusable(file: Path, needed: bool) -> str | None:
    """Why records cannot be read from and written to a file, now rather than after what they take to measure."""
    if file.exists() and not file.is_file():
        return "is no regular file, and is replaced as a whole; name another"
    if not os.access(file.parent, os.W_OK | os.X_OK):
        return f"nothing can be written to {file.parent.absolute()}; make that folder, or name another file"
    if not file.exists():
        return "is not there, and without --suite nothing is measured; name a file of records" if needed else None
    try:
        list(harness.read(file))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"holds no records of these benchmarks ({error}); name another file"
    return None


def main(argv: list[str]) -> int:
    args = parse(argv)
    options = Options(args.size, args.traces, tuple(args.more))
    if args.part:
        harness.write(args.json, [(record, {}) for record in run_here(args.suites[0], options)])
        return 0
    failed = []
    if args.suites:
        about = {
            "machine": harness.machine(),
            "threads": f"{torch.get_num_threads()}",
            "versions": harness.versions(),
            "commit": harness.commit(),
        }
        print("\n".join(f"{name}: {value}" for name, value in about.items()))
        records = [load("before"), *ceilings(roofline.DEVICE)]
        print(f"\n{harness.table(records)}", flush=True)
        for suite in args.suites:
            found = run_apart(suite, options)
            if found is None:
                failed.append(suite)
            records += found or []
            if args.json:  # now, so that an hour's work survives what may come
                harness.add(args.json, [*records, load("after")], about)
        missed = [r for r in records if r.met is False]
        print(f"\n{sum(r.met is True for r in records)} targets met, {len(missed)} missed")
        print("\n".join(f"missed: {r.suite}, {r.case}, {r.metric}: {r.target}" for r in missed))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if args.docs:
        publish.rewrite(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
