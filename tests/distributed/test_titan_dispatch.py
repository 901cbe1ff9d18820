"""The dispatchers on DeepEP and HybridEP between two ranks: see titan_dispatch_worker.py for what each check does."""

import json

import pytest

from tests.distributed.harness import forked
from tests.distributed.titan_dispatch_worker import CASES


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, list[str]]:
    """What went wrong in each case."""
    out = tmp_path_factory.mktemp("titan_dispatch") / "errors.json"
    finished = forked(2, "tests/distributed/titan_dispatch_worker.py", str(out))
    assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_between_ranks(errors, name: str):
    assert not errors[name], "\n".join(errors[name])
