"""CUDA graphs of the whole step: what is refused, and that replays compute what eager does, on a double of the graphs.

The double (cuda_graph_double.py) records every op of a step and runs them again; real graphs: tests/gpu. That the host
reads nothing in between: `test_the_host_reads_nothing`, on fake tensors (sync_free_worker.py).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.cuda_graph_double import cuda_graphs
from tests.distributed.harness import REPO, SMALL_FP32, free_port
from tests.faults.checkpoint_run import Job as Ranks
from titan_moe import config_file, cuda_graph, cuda_graph_check, in_flight, launch
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.inputs import Inputs
from titan_moe.moe import experts
from titan_moe.moe.layer import moe_layers
from titan_moe.phases import Phases
from titan_moe.plan.hardware import resolve
from titan_moe.plan.job import Job

EP2, STATIC = "parallelism.expert_parallel_degree=2", "moe.recv_buffer=worst_case"


def read(words: str = "") -> Config:
    """The debug model in bf16, with CUDA graphs and `words` changed."""
    start = ["train_configs/debug_model.toml", "--training.mixed_precision_param=bfloat16", "--cuda_graph.scope=full"]
    return config_file.load([*start, *(f"--{word}" for word in words.split())])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_degree = 2 sends between stages"),
        (EP2, 'moe.recv_buffer = "exact" with parallelism.expert_parallel_degree = 2'),
        (f"{EP2} moe.dispatcher=deepep", 'choose "te_ep" or "hybridep"'),
        ("moe.experts=loop", 'moe.experts = "loop" cuts slabs on the host'),
        ("training.mixed_precision_param=float32", 'set it to "bfloat16"'),
        ("parallelism.fsdp_reshard_after_forward=always", 'choose "default" or "never"'),
        ("guards.corruption_check_every=5 debug.deterministic", "guards.corruption_check_every = 5 looks from Python"),
        ("activation_offload.tensors=attn_q", "activation_offload.tensors moves activations"),
        ("precision.recipe=nvfp4", 'precision.recipe = "nvfp4" with precision.backend = "auto" may be emulated'),
    ],
)
def test_refused(words, said):
    found = [problem for problem in check(read(words), 2, accelerator=True) if "cuda_graph" in problem]
    assert len(found) == 1 and found[0].startswith('cuda_graph.scope = "full": ') and said in found[0]


@pytest.mark.parametrize(
    "words", ["", f"{EP2} {STATIC}", f"{EP2} moe.recv_buffer=1.5", "activation_checkpoint.mode=full", "compile.enable"]
)
def test_taken(words):
    config = read(words)
    assert check(config, 2) == []
    config.cuda_graph.scope = "none"
    assert cuda_graph_check.check(config) == []


def test_all_that_is_wrong_is_said_at_once():
    assert len(cuda_graph_check.check(read(f"{EP2} moe.experts=loop guards.corruption_check_every=5"))) == 3


def test_a_cpu_is_refused():
    """Before any process starts, and by train.py started otherwise."""
    (said,) = launch._hardware(read())
    assert said.startswith('cuda_graph.scope = "full": needs a GPU')
    if cuda_graph.DEVICE_TYPE == "cpu":
        with pytest.raises(ValueError, match='cuda_graph.scope = "full": needs a CUDA GPU, and this is a cpu'):
            cuda_graph.launcher(read(), [], SimpleNamespace(), Phases())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dispatcher", "backend", "said"),
    [
        (SimpleNamespace(name="dedup", sync_free=False), "grouped_mm", "the dispatcher dedup makes the host wait"),
        (SimpleNamespace(name="local", sync_free=True), "loop", "in the experts loop the host cuts the rows"),
        (SimpleNamespace(name="local", sync_free=True), "grouped_mm", None),
    ],
)
def test_what_the_built_model_shows(dispatcher, backend, said):
    inner = SimpleNamespace(backend=backend, recipe=None, w2_EDF=torch.empty(2, 64, 32))
    moe: Any = SimpleNamespace(routed_experts=SimpleNamespace(dispatcher=dispatcher, inner_experts=inner))
    found = cuda_graph.problem(moe, torch.bfloat16, "cuda")
    assert found is None if said is None else found is not None and said in found


def test_the_planner_knows():
    job = Job.from_config(read(f"{EP2} {STATIC}"), 2, resolve("H100"))
    assert job.graphs == "full" and job.sync_free
    config = read(EP2)
    config.cuda_graph.scope = "none"
    job = Job.from_config(config, 2, resolve("H100"))
    assert job.graphs == "none" and not job.sync_free


# ---------------------------------------------------------------------------------------------------------------------
# Replays equal eager steps


def train_once(tell: Callable, argv: list[str], graphs: bool, port: int, folder: Path) -> None:
    """A job of `Ranks`: a training with the double in the place of CUDA's graphs. Tells what is logged of each step,
    weights, router biases and load counts in the end, captures, replays, and the receive buffers' factor."""
    import train

    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # that of `Ranks`: train.py makes its own
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()}, RUN_ID="run")
    config = config_file.load([*SMALL_FP32, *argv, f"--job.dump_folder={folder}"])
    config.cuda_graph.scope = "full" if graphs else "none"
    lines: list[dict[str, float]] = []
    with ExitStack() as stack:
        # A CPU's experts read the counts, which a recording would decide for good: these do not.
        stack.enter_context(mock.patch.object(experts, "_PiecewiseGemm", experts._GroupedGemm))
        stack.enter_context(mock.patch.multiple(cuda_graph, DEVICE_TYPE="cuda", problem=lambda *_: None))
        double = stack.enter_context(cuda_graphs())
        run = train.build(config)
        run.metrics.log = lambda step, **line: lines.append(computed(line))  # type: ignore[method-assign]
        train.train(run)
        counts = double.captures, double.replays
        run.checkpointer.close()
        run.metrics.close()
    (model,), state = run.model_parts, {}
    for name, tensor in model.named_parameters():
        state[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy()
    for name, moe in moe_layers(model).items():
        assert moe.expert_bias_E is not None
        state[f"{name}.bias"] = moe.expert_bias_E.numpy()
    tell((lines, state, counts, run.replay.factor))


def computed(line: dict[str, float]) -> dict[str, float]:
    """What a step's numbers say but for times, and for what Python counts of transfers and rows, which a replay does
    not."""
    return {name: value for name, value in line.items() if not re.match("phase|slowest_rank|comm/", name)}


def run_both(tmp_path: Path, ranks: int, *argv: str) -> tuple[list[dict[str, float]], tuple[int, int], float]:
    """(what is logged of each step, (captures, replays), the receive buffers' factor in the end), which are the same
    with graphs and without."""
    heard = []
    for graphs in (False, True):
        arguments = ([*argv, "--validation.freq=1"], graphs, free_port(), tmp_path / str(graphs))
        job = Ranks(tmp_path / "store", train_once, *arguments, world_size=ranks)
        heard.append(job.hear())
        job.end()
    for eager, replayed in zip(*heard):
        assert not isinstance(eager, str) and not isinstance(replayed, str), (eager, replayed)
        lines, state, counts, factor = replayed
        assert eager[0] == lines and eager[2] == (0, 0) and eager[3] == factor
        assert [name for name, value in eager[1].items() if (value != state[name]).any()] == []
    return lines, (counts[0] - 1, counts[1]), factor  # torchtitan makes one of nothing, to get a pool


def test_replays_equal_eager_steps(tmp_path):
    """To the bit: losses, norms, auxiliary losses, dropped copies, weights, biases; with four microbatches a step and a
    validation, which leaves FSDP2 elsewhere, between any two."""
    lines, counts, _ = run_both(
        tmp_path, 1, "--moe.sequence_loss_coeff=1e-3", "--moe.z_loss_coeff=1e-3", "--moe.capacity_factor=1.0"
    )
    assert counts == (1, 4) and len(lines) == 5
    last = lines[-1]
    assert last["moe_aux_loss"] > 0 and last["moe_dropped.layers.1"] > 0 and last["loss"] < lines[0]["loss"]


@pytest.mark.slow
def test_replays_equal_eager_steps_with_recompute_and_mtp(tmp_path):
    lines, counts, _ = run_both(tmp_path, 1, "--activation_checkpoint.mode=selective", "--model.num_mtp_layers=1")
    assert counts == (1, 4) and all("mtp_loss" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "half_batch"])
def test_replays_equal_eager_steps_between_ranks(tmp_path, overlap):
    """Two ranks, buffers of the mean: they overflow, the step runs again, and the next ones go on as eager ones do."""
    argv = ["--moe.dispatcher=alltoall", "--moe.recv_buffer=1.0", f"--{EP2}", f"--moe.overlap={overlap}"]
    lines, counts, factor = run_both(tmp_path, 2, *argv)
    assert factor > 1.0 and counts[1] >= 2 and len(lines) == 5


def test_a_grown_buffer_is_recorded_anew():
    """What Python reads of the factor is decided at capture; so is where inputs are read and results are written."""
    replay: Any = SimpleNamespace(factor=1.0)
    calls = []

    def compute(microbatches: list[Inputs], valid_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(replay.factor)
        ((tokens_BL, labels_BL, _),) = microbatches
        return {"loss": (tokens_BL * labels_BL).sum() * replay.factor / valid_tokens}

    with cuda_graphs() as double:
        launch = cuda_graph.StepGraph([], replay, Phases())
        places = []
        for step in range(8):
            replay.factor = 1.0 if step < 4 else 1.5
            tokens_BL, labels_BL = torch.full((2, 3), step), torch.full((2, 3), 2)
            loss = launch(compute, torch.tensor(4), [(tokens_BL, labels_BL, {})])["loss"]
            assert loss == 6 * step * 2 * replay.factor / 4
            places.append(loss.data_ptr())
        assert calls == [1.0, 1.0, 1.5, 1.5]  # warm-up and capture, twice
        assert double.captures - 1 == 2 and double.replays == 6
        assert len({*places[1:4]}) == 1 == len({*places[5:]})
        with pytest.raises(ValueError, match="same shape"):
            launch(compute, torch.tensor(4), [(tokens_BL[:1], labels_BL[:1], {})])


# ---------------------------------------------------------------------------------------------------------------------
# What is recorded reads nothing


@pytest.mark.slow
def test_the_host_reads_nothing(tmp_path):
    """In forward and backward of whole steps, with accumulation, MTP, an auxiliary loss; with exact sizes it does."""
    base = ["train_configs/debug_model.toml", "--training.mixed_precision_param=bfloat16", "--model.num_mtp_layers=1"]
    base += ["--training.global_batch_size=32", "--moe.sequence_loss_coeff=1e-3"]
    static = [f"--{EP2}", "--moe.recv_buffer=1.5"]
    cases = {
        "local": (1, ["--activation_checkpoint.mode=full"]),
        "alltoall": (2, [f"--{EP2}", f"--{STATIC}", "--moe.dispatcher=alltoall"]),
        "dedup": (2, [*static, "--activation_checkpoint.mode=selective"]),
        "tp": (4, [*static, "--parallelism.tensor_parallel_degree=2"]),
        "exact": (2, [f"--{EP2}"]),
    }
    table = {name: (ranks, [*base, *argv]) for name, (ranks, argv) in cases.items()}
    (tmp_path / "cases.json").write_text(json.dumps(table))
    command = [sys.executable, "-m", "tests.sync_free_worker", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stderr[-6000:]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in cases}
    assert "plan_dedup" in found.pop("exact")
    assert found == dict.fromkeys(found)


def test_a_recorded_step_is_one_phase():
    """A replay makes no marks, so there must be none inside: the phase "graph" has all of its time."""
    phases = Phases()
    replay: Any = SimpleNamespace(factor=None)

    def compute(microbatches: list[Inputs], valid_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        ((tokens_BL, *_),) = microbatches
        in_flight.InFlight([], (), "dispatch", backward=False, sent=0, received=0)
        return {"loss": phases.around(torch.sum, "loss")(tokens_BL)}

    in_flight.log = []
    try:
        with cuda_graphs():
            launch = cuda_graph.StepGraph([], replay, phases)
            for _ in range(4):
                phases.step()
                launch(compute, torch.tensor(4), [(torch.ones(2, 3), torch.ones(2, 3), {})])
        assert in_flight.log == []
    finally:
        in_flight.log = None
    seconds, steps = phases.take()
    assert steps == 4 and {name for name, spent in seconds.items() if spent} == {"graph", "other"}
