"""What ranks' numbers become, and which transfers count. Whole runs are in tests/distributed/test_telemetry.py."""

import titan_moe.runtime  # noqa: F401

import pytest
import torch

from titan_moe import in_flight
from titan_moe.clock import Mark
from titan_moe.config import Config
from titan_moe.in_flight import InFlight, Transfer
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.phase_names import NAMES
from titan_moe.phases import Phases
from titan_moe.telemetry import Telemetry, phase_statistics
from titan_moe.wire import GB, Wire


def seconds(**phases: float) -> list[float]:
    found = {name.replace("_forward", ".forward").replace("_backward", ".backward"): s for name, s in phases.items()}
    assert found.keys() <= set(NAMES)
    return [found.get(name, 0.0) for name in NAMES]


def test_mean_largest_and_whose_it_is():
    """Rank 2 works longest, the others wait for it: it is named, though others are longest in what they wait in."""
    ranks = [
        seconds(experts_forward=1.0, combine_forward=3.0, other=0.5),
        seconds(experts_forward=1.5, combine_forward=2.5, other=0.5),
        seconds(experts_forward=3.5, combine_forward=0.5, other=0.5),
    ]
    found = phase_statistics(torch.tensor(ranks, dtype=torch.float64))
    assert found == {
        "phase/step": 4.5,
        "phase/experts.forward": 2.0,
        "phase_max/experts.forward": 3.5,
        "phase_rank/experts.forward": 2,
        "phase/combine.forward": 2.0,
        "phase_max/combine.forward": 3.0,
        "phase_rank/combine.forward": 0,
        "phase/other": 0.5,
        "phase_max/other": 0.5,
        "phase_rank/other": 0,
        "slowest_rank": 2,
        "slowest_rank_s": 1.5,
    }


@pytest.fixture
def wire(monkeypatch) -> Wire:
    monkeypatch.setattr(in_flight, "log", None)
    config = Config()
    config.parallelism.expert_parallel_degree = 2
    return Wire(config, [], torch.device("cpu"), lambda: True)


def send(name: str, backward: bool, sent: int, issued: float, waited: float, done: float) -> None:
    assert in_flight.log is not None
    marks = {"issued": Mark(issued), "ended": Mark(done), "waited": Mark(waited), "done": Mark(done)}
    in_flight.log.append(Transfer(name=name, backward=backward, sent=sent, received=0, **marks))


def test_bytes_and_waiting_of_a_step(wire):
    """Two steps. Of dispatch 2 of 4 seconds are hidden, of combine nothing; what FSDP gathers is not told here."""
    for _ in range(2):
        wire.step()
        send("dispatch", False, 3_000, issued=0, waited=1, done=2)
        send("dispatch", True, 1_000, issued=5, waited=6, done=7)
        send("combine", False, 2_000, issued=8, waited=8, done=9)
        send("gather", False, 9_999, issued=8, waited=8, done=9)
    numbers = torch.tensor([wire.take(2)], dtype=torch.float64)
    found = wire.statistics(numbers)
    assert found == pytest.approx(
        {
            "comm/exposed_s": 3.0,
            "comm/in_flight_s": 5.0,
            "comm/hidden": 0.4,
            "comm/dispatch_bytes": 4_000,
            "comm/combine_bytes": 2_000,
            "comm/dispatch_gb_s": 1_000 / GB,
            "comm/combine_gb_s": 2_000 / GB,
        }
    )
    assert in_flight.log == [] and wire.statistics(torch.tensor([wire.take(1)])) == {}


def test_transfers_are_read_a_step_late_and_those_of_validation_never(wire):
    for step in range(3):
        wire.step()
        send("dispatch", False, 10**step, issued=0, waited=0, done=1)
        assert wire.sent["dispatch"] == [0, 0, 1][step], "what the last step began is not over on a GPU"
    telemetry = Telemetry.__new__(Telemetry)
    telemetry.phases = Phases()
    transfers = [InFlight([], (), "dispatch", backward=False, sent=1000, received=0)]
    with telemetry.phase("validation"):
        transfers.append(InFlight([], (), "dispatch", backward=False, sent=10**6, received=0))
    for each in transfers:
        each.wait()
    assert wire.take(1)[0] == 1111


def test_unique_ranks_and_padding_are_counted_from_ids(wire):
    """Two ranks of two experts. Tokens go to both, to one, to both; of 6 copies each expert's slab is padded to 4."""
    dispatcher = make_dispatcher("local", num_experts=4, top_k=2, alignment=4)
    ids_TK = torch.tensor([[0, 2], [0, 1], [3, 1]])
    plan = dispatcher.plan(ids_TK)
    wire._note_rows(plan)
    dispatcher.local_experts, dispatcher.ranks = 2, 2
    wire._note_plan(dispatcher, ids_TK, plan)
    found = wire.statistics(torch.tensor([wire.take(1)], dtype=torch.float64))
    assert found["comm/unique_ranks"] == pytest.approx(5 / 3)
    assert found["comm/padded_over_valid"] == pytest.approx(16 / 6)
    assert found["comm/unique_ranks_predicted"] == wire.predicted > 1
