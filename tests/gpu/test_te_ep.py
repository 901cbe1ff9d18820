"""te_ep between GPUs: the cases that it passes over doubles, and the debug model's curve against dedup's."""

import json

import pytest

from tests.distributed.harness import torchrun
from tests.gpu.test_training import train
from titan_moe.moe import te
from titan_moe.moe.te_ep import problems

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def ranks(gpus) -> int:
    """How many GPUs to use."""
    if gpus < 2:
        pytest.skip("one GPU: nothing to dispatch to")
    if missing := problems(te.facts()):
        pytest.skip("; ".join(missing))
    return 4 if gpus >= 4 else 2


def test_the_cases_of_the_doubles(ranks, tmp_path):
    """Exact and static, in and out of bounds, against a loop over tokens."""
    out = tmp_path / "errors.json"
    finished = torchrun(ranks, "tests/gpu/te_ep_worker.py", str(out))
    assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
    errors = json.loads(out.read_text())
    assert errors
    assert {name: found for name, found in errors.items() if found} == {}


def test_the_debug_model_trains(tmp_path):
    """On two GPUs, exact and static. All send bfloat16, but round at different places."""
    ep2 = "--parallelism.expert_parallel_degree=2"
    expected = train(tmp_path / "dedup", ep2, "--moe.dispatcher=dedup", ranks=2)
    for recv_buffer in ("exact", "worst_case"):
        settings = [ep2, "--moe.dispatcher=te_ep", f"--moe.recv_buffer={recv_buffer}"]
        assert train(tmp_path / recv_buffer, *settings, ranks=2) == pytest.approx(expected, rel=2e-2)
