"""The planner's exposed expert-parallel seconds against those of a trace, between real gloo ranks. See
overlap_measured.py; benchmarks/overlap.py prints the same numbers."""

import statistics

import pytest

from tests.distributed.overlap_measured import measure
from tests.distributed.overlap_ranks import MODES
from tests.faults.checkpoint_run import Job


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "slowness"), [(2, 2.0), (4, 4.0)])
def test_predicted_exposed_seconds_are_within_a_quarter_of_the_trace(tmp_path, report, ranks, slowness):
    """For each moe.overlap; and the bytes that the planner counts are those that were sent. On links that take
    longer than all else: ranks that share too few cores also wait for each other, which no link explains."""
    job = Job(tmp_path / "store", measure, slowness, 5, world_size=ranks)
    found = {}
    for mode in MODES:
        answers = job.hear()
        assert [answer[0] for answer in answers] == [mode] * ranks, answers
        found[mode] = tuple(statistics.mean(answer[i] for answer in answers) for i in (1, 2))
        predicted, traced = found[mode]
        report(f"{ranks} ranks, {mode}: {predicted:.3f} s exposed predicted, {traced:.3f} s traced")
    for _, planned, actual in job.hear():
        assert planned == pytest.approx(actual, rel=0.02)
    job.end()
    for mode, (predicted, traced) in found.items():
        assert predicted == pytest.approx(traced, rel=0.25), mode
    for i, what in enumerate(("predicted", "traced")):
        assert found["half_batch"][i] < found["shared_expert"][i] < found["none"][i], what
