"""One job per number of ranks, and one for the slow cases of that number, started by the first test that asks
for one of its cases."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.cases import SLOW, cases
from tests.distributed.harness import Case, Outcome, run_cases

REPORTED: list[str] = []


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Callable[[int, str], Outcome]:
    root = tmp_path_factory.mktemp("runs")
    done: dict[tuple[int, bool], dict[str, Outcome]] = {}

    def get(world_size: int, name: str) -> Outcome:
        slow = name in SLOW[world_size]
        for job in ((1, False), (world_size, slow)):  # some cases of several ranks go on from a checkpoint of one
            if job not in done:
                ranks, out = job[0], root / str(job[0])
                chosen = {name: case for name, case in cases(ranks, out).items() if (name in SLOW[ranks]) == job[1]}
                done[job] = run_cases(ranks, chosen, out) if ranks > 1 else on_two_cores(chosen, out)
        return done[world_size, slow][name]

    return get


def on_two_cores(cases: dict[str, Case], out: Path) -> dict[str, Outcome]:
    """Cases of one rank, in two jobs at once; one that goes on from another stays beside it."""
    names = dict.fromkeys(name.removesuffix("_again") for name in cases)
    halves = [{n: case for n, case in cases.items() if n.removesuffix("_again") in [*names][i::2]} for i in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_cases, 1, half, out) for half in halves]
        return {name: outcome for job in jobs for name, outcome in job.result().items()}


@pytest.fixture
def outcome(request, trained) -> Callable[[int, str], Outcome]:
    """`outcome(world_size, name)`: what that case left."""

    def get(world_size: int, name: str) -> Outcome:
        slow = request.node.get_closest_marker("slow")
        assert slow or name not in SLOW[world_size], f"{name} is a slow case, which a test without that mark asks for"
        return trained(world_size, name)

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
