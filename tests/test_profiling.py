"""A trace holds the phases: what the timers say it says too, each node of backward lies in its phase, and no file is
there before it is whole."""

import bisect
import gzip
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch.profiler import record_function

from tests.distributed.harness import REPO, free_port
from titan_moe import config_file, profiling
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.metrics import read_metrics
from titan_moe.phase_names import NAMES
from titan_moe.phases import Phases
from titan_moe.profiling import ROW, Profiling

STEPS = 8
TRACED, PLAIN = range(4, STEPS + 1, 2), range(3, STEPS + 1, 2)  # the first two set things up
RUN = [
    *("train_configs/debug_model.toml", "--training.local_batch_size=4", "--metrics.enable_tensorboard=false"),
    *(
        "--training.global_batch_size=8",
        "--validation.enable=false",
        "--metrics.log_freq=1",
        "--model.num_mtp_layers=1",
    ),
    *(f"--training.steps={STEPS}", "--lr_scheduler.warmup_steps=2", "--activation_checkpoint.mode=selective"),
    *("--profiling.enable_profiling", "--profiling.profile_freq=2", "--profiling.profiler_warmup=0"),
]


class Span(NamedTuple):
    start: float
    end: float
    name: str


class Trace:
    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") as file:
            self.events = json.load(file)["traceEvents"]
        self.spans = [e for e in self.events if e["ph"] == "X"]
        row = [e for e in self.spans if e["tid"] == ROW]
        self.phases = sorted(Span(e["ts"], e["ts"] + e["dur"], e["name"]) for e in row)

    def seconds(self) -> Counter[str]:
        totals: Counter[str] = Counter()
        for phase in self.phases:
            totals[phase.name] += (phase.end - phase.start) / 1e6  # type: ignore[assignment]
        return totals

    def phase_at(self, time: float) -> str:
        found = self.phases[max(bisect.bisect(self.phases, (time,)) - 1, 0)]
        return found.name if found.start <= time <= found.end else "other"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """The debug model with an MTP layer, two microbatches per step and recompute, on one rank, every other step of it
    recorded."""
    folder = tmp_path_factory.mktemp("profiled") / "run"
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *RUN, f"--job.dump_folder={folder}"]
    done = subprocess.run(command, cwd=REPO, env={**os.environ, **rank, **where}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def traces(run_folder) -> dict[int, Trace]:
    names = {step: f"profile_traces/iteration_{step}/rank0_trace.json.gz" for step in TRACED}
    return {step: Trace(run_folder / name) for step, name in names.items()}


@pytest.mark.slow
def test_timers_agree_with_the_profiler(run_folder, traces):
    """Within 5 %: all phases together, each that is a fiftieth of the step or more, and the smaller ones together. The
    median over steps: when the machine takes this process away between the two readings of a boundary, they differ in
    that step."""
    told = read_metrics(run_folder)
    ratios = defaultdict(list)
    for step, trace in traces.items():
        seconds = trace.seconds()
        mine = {name: told[step].get(f"phase/{name}", 0.0) for name in NAMES if name in seconds}
        small = {name for name in mine if mine[name] < 0.02 * told[step]["phase/step"]}
        for name, some in {"all": set(mine), "small": small, **{name: {name} for name in mine.keys() - small}}.items():
            ratios[name].append(sum(mine[each] for each in some) / sum(seconds[each] for each in some))
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    assert len(medians) > 8
    assert not {name: ratio for name, ratio in medians.items() if abs(ratio - 1) > 0.05}


@pytest.mark.slow
def test_phases_explain_the_step(run_folder):
    """At least 95 % of it, and all phases together are the step."""
    told = read_metrics(run_folder)
    shares = []
    for step in PLAIN:
        seconds = {name: told[step].get(f"phase/{name}", 0.0) for name in NAMES}
        assert sum(seconds.values()) == pytest.approx(told[step]["phase/step"])
        shares.append(seconds["other"] / (told[step]["phase/step"] - seconds["profile"]))
    assert statistics.median(shares) < 0.05, shares


NODES = {
    r"_HeadBackward": "loss.backward",
    r"_GatherRowsBackward|_SelectCopiesBackward": "dispatch.backward",
    r"_SumRowsBackward": "combine.backward",
    r"_(Dgrad|Wgrad|SwiGLU)Backward": "experts.backward",
    r"EmbeddingBackward0": "embedding.backward",
    r"(Bmm|SafeSoftmax|ViewAsComplex)Backward0": "attention.backward",
    r"(Sigmoid|Gather)Backward0": "router.backward",
    r"SiluBackward0": "shared_expert.backward|dense.backward",
    r"RsqrtBackward0": "norms.backward|attention.backward",  # attention has norms of its own, on its latents
    r"titan_moe::plan_local": "dispatch.forward|dispatch.backward",  # and this, which finds what it returned before
    r"aten::scaled_dot_product_attention": "attention.forward|attention.backward",  # made again
    r"aten::topk": "router.forward|router.backward",
}


@pytest.mark.slow
def test_each_operation_lies_in_its_phase(traces):
    """What the name of a node says about whose it is does not come from the timers."""
    seen = Counter()
    for trace in traces.values():
        for event in trace.spans:
            if event.get("cat") != "cpu_op":
                continue
            for pattern, phases in NODES.items():
                if re.fullmatch(pattern, event["name"]):
                    found = trace.phase_at(event["ts"] + event["dur"])  # its end: before, it may compute forward again
                    assert re.fullmatch(phases, found), f"{event['name']} lies in {found}"
                    seen[pattern] += 1
    assert seen.keys() == NODES.keys()


@pytest.mark.slow
def test_the_row_of_phases_is_named_and_has_no_overlap(traces):
    for trace in traces.values():
        names = [e["args"] for e in trace.events if e["ph"] == "M" and e["tid"] == ROW]
        assert {"name": "phases"} in names
        assert all(a.end <= b.start + 1e-3 for a, b in zip(trace.phases, trace.phases[1:]))
        # Every range of ours is there, and none of anybody else's.
        assert {e["name"] for e in trace.spans if e["tid"] == ROW} <= set(NAMES)
        assert not [e for e in trace.spans if e["tid"] != ROW and e["name"] in NAMES]


@pytest.mark.slow
def test_nothing_but_whole_traces_is_left(run_folder):
    files = [path.relative_to(run_folder / "profile_traces") for path in (run_folder / "profile_traces").rglob("*")]
    expected = {Path(f"iteration_{step}") for step in (2, *TRACED)}
    assert set(files) == expected | {folder / "rank0_trace.json.gz" for folder in expected}


# ---------------------------------------------------------------------------------------------------------------------
# Which steps


@pytest.fixture
def recorded(monkeypatch):
    """(steps of warm-up, recorded steps) of each trace, without a profiler."""
    events: list[Any] = []

    class Profiler:
        def __init__(self, *, schedule, **_):
            self.schedule, self.at = schedule, 0
            self.actions = [schedule(0)]

        def start(self):
            pass

        def step(self):
            self.at += 1
            self.actions.append(self.schedule(self.at))

        def stop(self):
            events.append(Counter(action.name for action in self.actions))

    monkeypatch.setattr(profiling, "profile", Profiler)
    monkeypatch.setattr(profiling, "write_trace", lambda profiler, path: path.write_text("{}"))
    monkeypatch.setattr(profiling.dist, "get_rank", lambda: 1)
    return events


def profile(folder: Path, first: int = 1, steps: int = 12, **chosen: Any) -> list[int]:
    """The steps that left a trace of a run of `steps` steps that begins with `first`."""
    config = Config()
    config.training.steps = steps
    for key, value in chosen.items():
        setattr(config.profiling, key, value)
    phases = Phases()
    profiler = Profiling(config, folder, phases)
    for step in range(first, steps + 1):
        phases.step()
        with profiler.step(step):
            phases.switch("other")
    assert profiler.profiler is None and not phases.ranges and phases.now == "other"
    return sorted(int(path.parent.name.removeprefix("iteration_")) for path in folder.rglob("rank1_trace.json.gz"))


def test_one_step(tmp_path, recorded):
    assert profile(tmp_path, step=6) == [6]
    assert recorded == [{"WARMUP": 3, "RECORD_AND_SAVE": 1}]


@pytest.mark.parametrize(("first", "warmup"), [(1, 1), (2, 0)])
def test_one_step_that_comes_too_soon_for_a_warm_up(tmp_path, recorded, first, warmup):
    assert profile(tmp_path, first=first, step=2) == [2]
    assert recorded == [Counter({"WARMUP": warmup, "RECORD_AND_SAVE": 1})]


def test_every_so_many_steps_as_torchtitan_counts_them(tmp_path, recorded):
    assert profile(tmp_path, enable_profiling=True, profile_freq=5, profiler_active=2) == [5, 10]
    assert recorded == [{"WARMUP": 3, "RECORD": 1, "RECORD_AND_SAVE": 1}] * 2


def test_both(tmp_path, recorded):
    assert profile(tmp_path, enable_profiling=True, profile_freq=6, step=5) == [5, 6, 12]


def test_a_step_that_never_comes_and_ranks_that_are_not_chosen(tmp_path, recorded):
    assert profile(tmp_path, first=7, step=3) == []
    assert profile(tmp_path, step=3, ranks=[0, 2]) == []
    assert profile(tmp_path, step=3, ranks=[1]) == [3]
    assert len(recorded) == 1


def test_a_step_that_fails_leaves_nothing(tmp_path, recorded):
    config, phases = Config(), Phases()
    config.profiling.step = 2
    profiler = Profiling(config, tmp_path, phases)
    with pytest.raises(KeyError), profiler.step(2):
        raise KeyError
    assert not list(tmp_path.iterdir()) and profiler.profiler is None and not phases.ranges


def test_a_disk_that_takes_no_trace_does_not_stop_the_training(tmp_path, recorded, monkeypatch, caplog):
    def half(profiler, path):
        path.write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling, "write_trace", half)
    assert profile(tmp_path, step=2) == []
    assert "was not written: [Errno 28] No space left on device" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# ---------------------------------------------------------------------------------------------------------------------
# What needs a GPU, on doubles


def test_memory_history_is_written_at_the_step_and_when_memory_runs_out(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(profiling, "DEVICE_TYPE", "cuda")
    memory = SimpleNamespace(_record_memory_history=lambda **_: None, _snapshot=lambda: {"segments": []})
    monkeypatch.setattr(torch.cuda, "memory", memory)
    config = Config()
    config.profiling.enable_memory_snapshot, config.profiling.profile_freq = True, 4
    profiler = Profiling(config, tmp_path, Phases())
    for step in range(1, 6):
        with profiler.step(step):
            pass
    with pytest.raises(torch.OutOfMemoryError), profiler.step(6):
        raise torch.OutOfMemoryError
    found = sorted(tmp_path.rglob("*.pickle"))
    assert [path.parent.name for path in found] == ["iteration_4", "iteration_6"]
    assert pickle.loads(found[0].read_bytes()) == {"segments": []}


def test_nvtx_ranges_are_closed_by_the_thread_that_opened_them(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(profiling, "DEVICE_TYPE", "cuda")
    calls: list[str] = []
    nvtx = SimpleNamespace(range_push=calls.append, range_pop=lambda: calls.append("end"))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    config, phases = Config(), Phases()
    config.profiling.nvtx = True
    Profiling(config, tmp_path, phases)
    experts = phases.around(lambda x: x * 2, "experts")
    loss = experts(torch.ones(1, requires_grad=True)).sum()
    with phases.backward():
        loss.backward()
        assert calls[-1] == "end", "backward is over, and its last range still open"
    assert calls == ["experts.forward", "end", "experts.backward", "end"]


def test_a_cpu_leaves_out_what_needs_a_gpu_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(profiling.dist, "get_rank", lambda: 0)
    config = Config()
    config.profiling.enable_memory_snapshot = config.profiling.nvtx = True
    phases = Phases()
    profiler = Profiling(config, tmp_path, phases)
    assert not phases.ranges and not profiler.keeps_history
    for key in ("enable_memory_snapshot", "nvtx"):
        assert f"profiling.{key} = true is left out: it needs a CUDA device" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("profiling.step=20 training.steps=10", "profiling.step = 20: is behind the last step, training.steps = 10"),
        ("profiling.step=0", "profiling.step = 0: must be at least 1"),
        ("profiling.enable_profiling profiling.profile_freq=3", "profiling.profile_freq = 3: profiler_warmup = 3 and"),
        ("profiling.ranks=0,1,5", "profiling.ranks = [0, 1, 5]: 1, 5 is not among the ranks 0 .. 0"),
        ("profiling.save_traces_folder=../x", 'profiling.save_traces_folder = "../x": must be the name of a folder'),
    ],
)
def test_refused(words, sentence):
    argv = ["train_configs/debug_model.toml", *(f"--{word}" for word in words.split())]
    problems = check(config_file.load(argv), 1)
    assert len(problems) == 1 and problems[0].startswith(sentence), problems


def test_the_other_name_of_the_key():
    with pytest.raises(ValueError, match="profile.step was renamed to profiling.step"):
        config_file.raise_on_problems(config_file.load(["train_configs/debug_model.toml", "--profile.step=3"]), 1)


def test_ranges_of_a_profile_carry_the_names_of_phases():
    phases, ranges = Phases(), profiling.TraceRanges()
    phases.ranges.append(ranges)
    with torch.profiler.profile() as profiled, record_function("outer"):
        phases.inside(lambda: torch.ones(2) + 1, "experts")()
    names = Counter(event.key for event in profiled.key_averages())
    assert names["experts.forward"] == 1 and names["outer"] == 1
