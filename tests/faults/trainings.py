"""Trainings one after the other, each on as many processes as it says; torch is imported once, for all.

    python -m tests.faults.trainings OUT

OUT/trainings.json lists them: a name, the number of ranks, a free port, environment variables, and the arguments of
train.py. Each runs its `main` for real, in a fork of this process per rank. Rank r of training `name` leaves its output
in OUT/<name>-<r>.log; the samples that it trained on in OUT/<name>-<r>.json: for each step, its data-parallel rank and
degree, and every sample as the ids of its tokens; and in OUT/<name>-<r>.written every path that Python opened for
writing, made, renamed, linked or removed, in that process or its data workers.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.distributed.harness import REPO, SMALL_FP32, free_port

SCHEDULE_100 = "--lr_scheduler.total_steps=100"  # it must not follow training.steps, by which runs are cut here
SAVING = ["--checkpoint.enable", "--checkpoint.interval=1000"]  # at the end of each part
NOT_REPEATED = {"attempt", "tps", "tflops", "mfu", "time_s", "step_s", "data_percent", "memory_gib"}
"""What metrics.jsonl has that no two runs share"""
TIMES = (
    "phase",
    "slowest_rank",
    "comm/exposed",
    "comm/in_flight",
    "comm/hidden",
    "comm/dispatch_gb",
    "comm/combine_gb",
)
"""And what else has names that begin like this"""


@dataclass
class Training:
    """Arguments of train.py behind those of SMALL_FP32; `run` is the run folder's name, which several can share;
    `config` a file that names the data itself."""

    name: str
    ranks: int
    argv: list[str]
    run: str = ""
    config: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def folder(self) -> str:
        return self.run or self.name

    def arguments(self, out: Path) -> list[str]:
        config, *base = SMALL_FP32
        if self.config is not None:
            config, base = str(self.config), [word for word in base if not word.startswith("--training.dataset=")]
        return [config, *base, SCHEDULE_100, f"--job.dump_folder={out / self.folder}", *self.argv]


def in_parts(name: str, ends: Sequence[int], argv: Sequence[str], ranks: int = 1, **options: Any) -> list[Training]:
    """One run to step ends[-1] without a break, called `name`, and one that ends and is resumed at each of `ends`."""
    whole = Training(name, ranks, [*argv, f"--training.steps={ends[-1]}"], **options)
    parts = [[*argv, *SAVING, f"--training.steps={end}"] for end in ends]
    return [whole] + [
        Training(f"{name}-{end}", ranks, part, f"{name}-parts", **options)
        for end, part in zip(ends, parts, strict=True)
    ]


def run_all(trainings: Sequence[Training], out: Path) -> str:
    """What it printed: how long each took. Raises AssertionError with the output of the first that fails."""
    out.mkdir(parents=True, exist_ok=True)
    for training in trainings:
        training.port = free_port()
    table = [{**asdict(t), "run": t.folder, "config": None, "argv": t.arguments(out)} for t in trainings]
    (out / "trainings.json").write_text(json.dumps(table))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "tests.faults.trainings", str(out)]
    finished = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-8000:]
    return finished.stdout


def repeated(metrics: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of metrics.jsonl, what a run has to repeat."""
    return {
        step: {k: v for k, v in record.items() if k not in NOT_REPEATED and not k.startswith(TIMES)}
        for step, record in metrics.items()
    }


def consumed(out: Path, names: Sequence[str]) -> list[list[int]]:
    """The samples that trainings, one going on from the other, were trained on, in the run's global order: of sample i
    of data-parallel rank r of R in a step, the place is i R + r."""
    samples = []
    for name in names:
        by_step: dict[int, dict[int, list[int]]] = {}
        for path in out.glob(f"{name}-[0-9].json"):
            for step, (rank, degree, rows) in json.loads(path.read_text()).items():
                places = {i * degree + rank: row for i, row in enumerate(rows)}
                known = by_step.setdefault(int(step), {})
                # Ranks that share a batch, as those of a pipeline do, have to see the same.
                assert all(known.get(place, row) == row for place, row in places.items())
                known.update(places)
        for step in sorted(by_step):
            assert sorted(by_step[step]) == list(range(len(by_step[step])))
            samples += [by_step[step][place] for place in sorted(by_step[step])]
    return samples


# ---------------------------------------------------------------------------------------------------------------------
# In the process that forks

CHANGES = {"os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "os.utime"}


def watch_writes(to: Path) -> None:
    """Note what this process and its forks write to; for good, as audit hooks cannot be taken off."""
    notes = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            paths = [path] if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else []
        else:
            paths = [argument for argument in arguments if event in CHANGES and isinstance(argument, str | os.PathLike)]
        for path in paths:
            if not isinstance(path, int):
                os.write(notes, os.fsencode(os.path.abspath(os.fsdecode(path))) + b"\n")

    sys.addaudithook(note)


def train_one(training: dict[str, Any], rank: int, out: Path) -> None:
    import train
    from titan_moe import data, runtime

    log = os.open(out / f"{training['name']}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(training["ranks"])}
    os.environ |= {"LOCAL_WORLD_SIZE": str(training["ranks"]), "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": str(training["port"]), "RUN_ID": training["run"], **training["env"]}
    run: Any = None
    found: dict[int, tuple[int, int, list[list[int]]]] = {}
    build, batches = train.build, data.PackedDataLoader._batches

    def keeping_build(config: Any) -> Any:
        nonlocal run
        run = build(config)
        return run

    def recording(self: data.PackedDataLoader, iterator: Iterator, iteration: int) -> Iterator[data.Batch]:
        for batch in batches(self, iterator, iteration):
            if self is run.dataloader:
                place = (self._data.dp_rank, self._data.dp_degree, [])
                found.setdefault(run.progress.step, place)[2].extend(batch[0]["input"].tolist())
            yield batch

    train.build, data.PackedDataLoader._batches = keeping_build, recording
    watch_writes(out / f"{training['name']}-{rank}.written")
    train.main(training["argv"])
    runtime.leave_process_group()
    (out / f"{training['name']}-{rank}.json").write_text(json.dumps(found))


def fork(training: dict[str, Any], rank: int, out: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            train_one(training, rank, out)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return child


def main(out: Path) -> None:
    sys.path.insert(0, str(REPO))
    import train  # noqa: F401 - once, for all forks

    for training in json.loads((out / "trainings.json").read_text()):
        start = time.monotonic()
        children = [fork(training, rank, out) for rank in range(training["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(f"{training['name']}: {time.monotonic() - start:.1f} s", flush=True)
        if any(codes):
            for rank in range(training["ranks"]):
                print((out / f"{training['name']}-{rank}.log").read_text()[-3000:])
            sys.exit(f"{training['name']}: exit status {codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
