"""Dispatchers between real ranks: see dispatch_worker.py for what each check does. One job per number of
ranks."""

import json

import pytest

from tests.distributed.dispatch_worker import Case, cases
from tests.distributed.harness import forked


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """`errors(world_size)`: what went wrong in each case."""
    done: dict[int, dict[str, list[str]]] = {}

    def get(world_size: int) -> dict[str, list[str]]:
        if world_size not in done:
            out = tmp_path_factory.mktemp("dispatch") / "errors.json"
            finished = forked(world_size, "tests/distributed/dispatch_worker.py", str(out))
            assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
            done[world_size] = json.loads(out.read_text())
        return done[world_size]

    return get


@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(n, case, id=f"{n} ranks: {case.name}") for n in (2, 4) for case in cases(n)],
)
def test_between_ranks(errors, world_size: int, case: Case):
    found = errors(world_size)[case.name]
    assert not found, "\n".join(found)
