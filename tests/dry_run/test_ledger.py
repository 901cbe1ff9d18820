"""What the ledger writes down of operations whose bytes can be counted by hand."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_moe.dry_run.collectives import Collectives
from titan_moe.dry_run.ledger import ACTIVATIONS, GATHERED, GRADIENTS, PARAMETERS, WORKING, Ledger
from titan_moe.dry_run.watch import Watch

ROW = 4 * 1000  # bytes of 1,000 numbers in fp32


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def watching(ledger: Ledger) -> Watch:
    return Watch(ledger, cast(Collectives, type("None", (), {"count": lambda *_: None})()))


def test_what_forward_leaves_for_backward_is_an_activation() -> None:
    ledger, x = Ledger(), torch.zeros(1000, requires_grad=True)
    ledger.label(x, PARAMETERS)
    with watching(ledger):
        (x.sin() + 1).exp().sum().backward()  # sin keeps x, exp its result; sum + 1 goes at once
        ledger.label(x.grad, GRADIENTS)
    assert ledger.most(PARAMETERS) == ledger.most(GRADIENTS) == ROW
    assert ledger.most(ACTIVATIONS) == ROW + 2 * 4  # and the loss and its gradient, a number each
    assert 2 * ROW <= ledger.most(WORKING) < 2.01 * ROW  # a result or gradient on its way, and the next one


def test_the_peak_is_told_by_kind() -> None:
    ledger = Ledger()
    with watching(ledger):
        first = torch.zeros(1000)
        second = torch.zeros(3000)
        del second
        third = torch.zeros(1000)
    ledger.label(first, GRADIENTS)
    peak = ledger.at_peak()
    assert peak[GRADIENTS] == ROW and peak[WORKING] == 3 * ROW and sum(peak.values()) == 4 * ROW
    del third


def test_views_and_results_in_place_are_no_new_memory() -> None:
    ledger = Ledger()
    with watching(ledger):
        x = torch.zeros(1000)
        x.view(10, 100)[3].add_(1)
    assert [line.size for line in ledger.lines] == [ROW]


def test_what_fsdp_frees_and_allocates_by_resizing() -> None:
    ledger, x = Ledger(), torch.zeros(1000)
    storage = x.untyped_storage()
    with ledger.seeing_resizes(), watching(ledger):
        ledger.label(x, GATHERED)
        storage.resize_(0)
        other = torch.zeros(500)
        storage.resize_(ROW)
    assert ledger.most(GATHERED) == ROW
    assert [line.size for line in ledger.lines] == [ROW, 0, ROW // 2, ROW]
    del other


def test_what_is_said_first_stays() -> None:
    ledger, x = Ledger(), torch.zeros(10)
    with ledger.assuming(WORKING):
        ledger.label(x, PARAMETERS)
        ledger.label(x, GATHERED)
    assert [line.kind for line in ledger.lines] == [PARAMETERS]


def test_numbers_of_another_fake_mode_are_questions_about_shapes() -> None:
    ledger: Any = Ledger()
    with watching(ledger), FakeTensorMode():
        torch.zeros(1000)
    assert ledger.lines == []
