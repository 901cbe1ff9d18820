"""Stages that hold only the microbatches in flight, against torch's."""

import json
from typing import Any

import titan_moe.runtime  # noqa: F401

import pytest
import torch.distributed as dist

from tests.distributed.harness import forked
from tests.pipeline_stage_worker import MICROBATCHES, NAMES
from titan_moe import pipeline_stage


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("stages")
    finished = forked(2, "tests/pipeline_stage_worker.py", str(out))
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_buffers_are_those_of_the_microbatches_in_flight(ranks, name: str) -> None:
    """Where torch has one for every microbatch, at the least."""
    for rank in ranks:
        ours, torchs = rank[f"{name} InFlightStage"], rank[f"{name} PipelineStage"]
        assert torchs["most"] >= MICROBATCHES > 2 * ours["most"] > 0
        assert ours["most"] <= ours["allowed"]
        assert ours["most_evaluating"] <= ours["allowed_evaluating"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_is_the_same_to_the_bit(ranks, name: str) -> None:
    for rank in ranks:
        for what in ("losses", "gradients"):
            assert rank[f"{name} InFlightStage"][what] == rank[f"{name} PipelineStage"][what]
    assert len(ranks[name in NAMES[:3]][f"{name} InFlightStage"]["losses"]) == 2 * MICROBATCHES


def test_the_handle_of_a_send_is_let_go_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        ended = False

        def is_completed(self) -> bool:
            return self.ended

    first, second, received = [Work()], [Work()], [Work()]
    results = iter([first, second, received])
    monkeypatch.setattr(pipeline_stage, "_batch_p2p", lambda ops, desc: next(results))
    send, receive = (type("Op", (), {"op": op}) for op in (dist.isend, dist.irecv))
    assert pipeline_stage.batch_p2p([send]) is first and pipeline_stage.batch_p2p([send]) is second
    assert first and second, "under way"
    first[0].ended = True
    assert pipeline_stage.batch_p2p([receive]) is received
    assert first == [] and second and received
    second[0].ended = True
