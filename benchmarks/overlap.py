"""What is hidden behind computation: moe.overlap, FSDP beside expert parallelism, and the planner's exposed seconds.

One process per rank on this machine, gloo, and links that are made slow; between processes that share cores there is
nothing to wait for otherwise. Ranks wait for each other, so where the machine has other things to do the exposed time
without a delay is that of whoever is late.

moe.overlap: for each delay (debug.comm_delay_ns_per_byte) the step, and the share of the seconds that transfers of
dispatch and combine were in flight in which this rank did not stand still for them; medians over steps, rank 0.
"under shared" is the share of the shared expert's own time, forward and backward, in which a transfer was under way.

FSDP: the share of its seconds in flight in which expert-parallel traffic was under way too, and the reverse, of a step
whose transfers, one after the other, take twice as long as the step without.

Planner: it gets a measured link and the measured times of attention, router, experts and shared expert in a run without
overlap; bytes, and what hides what, are its own. Against it stand the seconds that ranks stood still in a step.

FSDP's settings (full only): when gathered parameters are freed, and how far ahead the next are gathered. On two
processes nothing is hidden: what a setting costs.

--traces FOLDER leaves there overlap.jsonl, with one interval of each last step a line, and networks.json, which opens
in https://ui.perfetto.dev.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import titan_moe.runtime  # noqa: F401

from benchmarks.harness import Options, Record, versus
from benchmarks.ranks import heard
from tests.distributed import overlap_measured, overlap_ranks, traced
from tests.distributed.harness import Case, run_cases
from titan_moe.timeline import common, length, write_chrome_trace

SUITE = "overlap"
WIDTHS = {"forward": ("dispatch", "combine"), "backward": ("dispatch backward", "combine backward")}
NETWORKS = ["--parallelism.expert_parallel_degree=2", "--moe.force_balance=balanced_random", "--model.n_layers=5"]
SLOWNESS = 2.0
FSDP_MODEL = [
    *("--model.dim=512", "--model.n_layers=6", "--model.moe_hidden_dim=512", "--model.dense_hidden_dim=1536"),
    *("--model.q_lora_rank=128", "--model.kv_lora_rank=128", "--model.n_heads=4"),
    *("--training.seq_len=256", "--training.local_batch_size=1"),
    *("--training.global_batch_size=-1", "--validation.enable=false", "--parallelism.expert_parallel_degree=2"),
]
FSDP_SETTINGS = {
    f"reshard {reshard}, prefetch {prefetch}": [
        f"--parallelism.fsdp_reshard_after_forward={reshard}",
        f"--parallelism.fsdp_prefetch_layers={prefetch}",
    ]
    for reshard in ("default", "never")
    for prefetch in (1, 2, 3)
}
FSDP_DEFAULT = "reshard default, prefetch 1"


def measure(options: Options) -> Iterator[Record]:
    modes = options.pick(["none", "shared_expert"], overlap_ranks.MODES, overlap_ranks.MODES)
    delays = options.pick([10.0], [10.0], [0.0, 10.0, 500.0])
    yield from by_mode(2, modes, delays, options.pick(1, 3, 7), options)
    if options.size != "smallest":
        for ranks in options.pick([], [2], [2, 4]):
            yield from networks(ranks, options.traces)
            yield from prediction(ranks, options.pick(1, 3, 7))
    if options.size == "full":
        yield from fsdp_settings(ranks=2, steps=12, repetitions=3)


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def by_mode(ranks: int, modes, delays: list[float], steps: int, options: Options) -> Iterator[Record]:
    base = [*overlap_ranks.SMALL, *overlap_ranks.LAYER, f"--parallelism.expert_parallel_degree={ranks}"]
    base += options.more
    intervals: list[dict] = []
    for delay in delays:
        found = {}
        for mode in modes:
            argv = [*base, f"--moe.overlap={mode}", f"--debug.comm_delay_ns_per_byte={delay}"]
            told = heard(overlap_ranks.measure, argv, steps, world_size=ranks)[0][0]
            found[mode] = medians(told)
            intervals += [{"mode": mode, "delay": delay, **interval} for interval in told[-1]["intervals"]]
        for mode, row in found.items():
            case = f"{ranks} ranks, {delay:.0f} ns/byte, overlap {mode}"
            step = versus(1e3 * row["step"], 1e3 * found["none"]["step"]) | {"against": "none"}
            yield record(case, "step", value=1e3 * row["step"], unit="ms", **step)
            for side in WIDTHS:
                yield record(case, f"{side}, in flight", value=1e3 * row[f"{side} in_flight"], unit="ms")
                yield record(case, f"{side}, hidden", value=100 * row[f"{side} hidden"], unit="%")
            yield record(case, "under shared", value=100 * row["under shared"], unit="%")
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(interval) + "\n" for interval in intervals)
        (options.traces / "overlap.jsonl").write_text(lines, encoding="utf-8")


def medians(steps: list[dict]) -> dict[str, float]:
    """Over steps; seconds and shares."""
    found = {"step": statistics.median(step["seconds"] for step in steps)}
    for side, names in WIDTHS.items():
        for what in ("in_flight", "exposed"):
            found[f"{side} {what}"] = statistics.median(
                sum(step["totals"][name][what] for name in names) for step in steps
            )
        found[f"{side} hidden"] = max(0.0, 1 - found[f"{side} exposed"] / found[f"{side} in_flight"])
    found["under shared"] = statistics.median(step["under shared"] for step in steps)
    return found


def networks(ranks: int, traces: Path | None) -> Iterator[Record]:
    spans = heard(traced.traced_steps, NETWORKS, SLOWNESS, 1, world_size=ranks)[0]
    for backward in (False, True):
        case, shares = f"{ranks} ranks, {'backward' if backward else 'forward'}", []
        for found in spans:
            here = [span for span in found if span.backward == backward]
            fsdp, ep = ([s.interval for s in here if s.lane == lane] for lane in ("FSDP", "expert parallel"))
            both = length(common(fsdp, ep))
            shares.append((100 * both / length(fsdp), 100 * both / length(ep)))
        for i, name in enumerate(("FSDP beside expert parallel", "expert parallel beside FSDP")):
            yield record(case, name, value=statistics.mean(share[i] for share in shares), unit="%")
    if traces:
        traces.mkdir(parents=True, exist_ok=True)
        origin = min(span.start for found in spans for span in found)
        moved = [[replace(s, start=s.start - origin, end=s.end - origin) for s in found] for found in spans]
        write_chrome_trace(traces / "networks.json", dict(enumerate(moved)))


def prediction(ranks: int, steps: int) -> Iterator[Record]:
    modes = overlap_ranks.MODES
    told = heard(overlap_measured.measure, 1.0, steps, world_size=ranks, answers=len(modes))
    for answers in told:
        predicted, seen = (1e3 * statistics.mean(answer[i] for answer in answers) for i in (1, 2))
        case = f"{ranks} ranks, overlap {answers[0][0]}"
        yield record(case, "exposed, traced", value=seen, unit="ms")
        yield record(case, "exposed, planner / traced", value=predicted / seen)


def fsdp_settings(ranks: int, steps: int, repetitions: int) -> Iterator[Record]:
    speeds: dict[str, list[float]] = {name: [] for name in FSDP_SETTINGS}
    memory: dict[str, float] = {}
    for _ in range(repetitions):  # all settings in each, so that a slow minute hits all of them
        cases = {n: Case([*FSDP_MODEL, *s, f"--training.steps={steps}"]) for n, s in FSDP_SETTINGS.items()}
        with tempfile.TemporaryDirectory() as folder:
            for name, outcome in run_cases(ranks, cases, Path(folder) / "runs").items():
                rows = list(outcome.metrics.values())
                speeds[name].append(statistics.mean(row["tps"] for row in rows[2:]))
                memory[name] = rows[-1]["memory_gib"]
    found = {name: statistics.median(values) for name, values in speeds.items()}
    for name, speed in found.items():
        over = versus(speed, found[FSDP_DEFAULT], more_is_better=True) | {"against": "default"}
        yield record(f"FSDP on {ranks} ranks, {name}", "speed of a rank", value=speed, unit="tokens/s", **over)
        yield record(f"FSDP on {ranks} ranks, {name}", "peak of a process", value=memory[name], unit="GiB")
