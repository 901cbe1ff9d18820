"""torch.compile: trains as eager does, and compiles nothing after the second step but validation's variants, once.

The backend "eager" of torch.compile makes the same graphs, guards and variants as inductor, and compiles no C++.
"""

import subprocess
import sys

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch._dynamo import utils

from tests.distributed.harness import REPO, Case, Outcome, run_cases
from titan_moe.recompiles import Recompiles

EVERYTHING = [
    *("--model.num_mtp_layers=1", "--validation.freq=3", "--training.steps=6"),
    *("--training.dataset=python_stdlib", "--training.seq_len=64"),  # documents of changing length
]
MODES = {
    "none": ["--activation_checkpoint.mode=none"],
    "selective": ["--activation_checkpoint.mode=selective"],
    "full": ["--activation_checkpoint.mode=full"],
}


def compiled(backend: str) -> list[str]:
    return ["--compile.enable", f"--compile.backend={backend}"]


def assert_settled(outcome: Outcome) -> None:
    records = outcome.metrics.values()
    assert [record["compile/recompiles"] for record in records] == [0] * len(records)


def test_counts_what_training_compiles(monkeypatch, caplog):
    """After the second step, and not what validation compiles."""
    frames = {"ok": 3}
    monkeypatch.setitem(utils.counters, "frames", frames)
    recompiles = Recompiles()
    for more, counted in ((0, 0), (2, 0), (0, 0), (1, 1), (0, 1), (4, 5)):
        frames["ok"] += more
        recompiles.step()
        assert recompiles.count == counted
        frames["ok"] += 7
        recompiles.overlook()
    assert "compiled 4 functions again in the 6th step" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_compiled_after_the_second_step(tmp_path, ranks):
    """With accumulation, documents, validation, MTP and each mode of activation checkpointing, alone and with EP 2."""
    ep = [f"--parallelism.expert_parallel_degree={ranks}"]
    cases = {name: Case([*EVERYTHING, *argv, *ep, *compiled("eager")]) for name, argv in MODES.items()}
    cases["uncompiled"] = Case([*EVERYTHING, *ep])
    found = run_cases(ranks, cases, tmp_path)
    expected = found.pop("uncompiled").losses
    for name, outcome in found.items():
        assert_settled(outcome)
        assert outcome.losses == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_inductor_computes_the_same(tmp_path, dtype, close):
    settings = ["--validation.freq=3", "--training.steps=4", f"--training.mixed_precision_param={dtype}"]
    cases = {"eager": Case(settings), "compiled": Case([*settings, *compiled("inductor")])}
    found = run_cases(1, cases, tmp_path)
    assert_settled(found["compiled"])
    assert found["compiled"].losses == pytest.approx(found["eager"].losses, rel=close)


def test_what_does_not_compile_loads_no_compiler():
    """On a CPU. torchtitan alone would, at import; and that garbage is collected again when all is imported."""
    program = "import gc, sys, train; print('torch._inductor.compile_fx' in sys.modules, gc.isenabled())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO, check=True)
    assert run.stdout.split() == [str(torch.cuda.is_available()), "True"]
