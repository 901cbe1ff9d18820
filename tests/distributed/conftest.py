"""One torchrun job per number of ranks, started by the first test that asks for one of its cases."""

from collections.abc import Callable

import pytest

from tests.distributed.cases import cases
from tests.distributed.harness import Outcome, run_cases

REPORTED: list[str] = []


@pytest.fixture(scope="session")
def outcome(tmp_path_factory) -> Callable[[int, str], Outcome]:
    """`outcome(world_size, name)`: what that case left."""
    root = tmp_path_factory.mktemp("runs")
    done: dict[int, dict[str, Outcome]] = {}

    def get(world_size: int, name: str) -> Outcome:
        for ranks in (1, world_size):  # some cases of several ranks go on from a checkpoint of one
            if ranks not in done:
                out = root / str(ranks)
                done[ranks] = run_cases(ranks, cases(ranks, out), out)
        return done[world_size][name]

    return get


@pytest.fixture
def report() -> Callable[[str], None]:
    """A line for the end of the whole test run, also when the test passes."""
    return REPORTED.append


def pytest_terminal_summary(terminalreporter) -> None:
    if REPORTED:
        terminalreporter.section("meshes")
        for line in REPORTED:
            terminalreporter.line(line)
