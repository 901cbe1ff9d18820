"""Stopping when asked to, in one process: what is looked at when, what is saved and what is answered. On meshes:
tests/distributed; with signals and real runs: tests/faults."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist

from titan_moe import stop_file
from titan_moe.config import Config
from titan_moe.stop import Stop
from titan_moe.stop_file import Outcome


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Checkpointer(SimpleNamespace):
    last_save_model_only = True

    def __init__(self) -> None:
        super().__init__(saved=[])

    def save(self, step: int, last_step: bool = False) -> None:
        self.saved.append((step, last_step, self.last_save_model_only))

    def maybe_wait_for_saving(self) -> None:
        assert self.saved


def make(folder: Path, device: str = "cpu", **checkpoint: bool) -> tuple[Stop, Checkpointer]:
    config = Config()
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    checkpointer = Checkpointer()
    return Stop(config, folder, torch.device(device), checkpointer), checkpointer  # pyrefly: ignore


def test_the_step_after_the_one_that_told_is_the_last(tmp_path, group):
    stop, _ = make(tmp_path)
    assert not stop.agreed()
    assert stop.sum_over_ranks(torch.tensor(7)).item() == 7
    assert not stop.agreed()
    stop_file.ask(tmp_path, "SIGTERM")
    assert not stop.agreed()
    assert stop.sum_over_ranks(torch.tensor(2**40 + 1)).item() == 2**40 + 1  # the count itself is not touched
    assert stop.agreed()


@pytest.mark.parametrize(
    ("checkpoint", "saved", "outcome"),
    [
        ({"enable": True}, [(4, True, False)], Outcome(saves=True)),  # whole, though the last may hold weights only
        ({"enable": False}, [], Outcome(saves=False)),
        ({"enable": True, "load_only": True}, [], Outcome(saves=False)),
    ],
)
def test_what_is_saved_and_answered(tmp_path, group, monkeypatch, checkpoint, saved, outcome):
    monkeypatch.setenv(stop_file.OUTCOME, str(tmp_path / "outcome"))
    stop, checkpointer = make(tmp_path, **checkpoint)
    stop_file.ask(tmp_path, "SIGTERM")
    assert Outcome.read(tmp_path / "outcome") is None
    stop.save(3, last=False, stops=False)
    assert checkpointer.saved.pop() == (3, False, True) and not stop.done
    stop.save(4, last=False, stops=True)
    assert stop.done and checkpointer.saved == saved and Outcome.read(tmp_path / "outcome") == outcome
    assert not stop_file.asked(tmp_path)


def test_asked_for_during_the_set_up(tmp_path, group, monkeypatch):
    monkeypatch.setenv(stop_file.OUTCOME, str(tmp_path / "outcome"))
    (tmp_path / "stop").touch()  # by hand
    stop, _ = make(tmp_path, enable=True)
    assert stop.agreed()


def test_a_run_that_is_complete_has_not_been_stopped(tmp_path, group, monkeypatch):
    monkeypatch.setenv(stop_file.OUTCOME, str(tmp_path / "outcome"))
    stop, checkpointer = make(tmp_path, enable=True)
    stop.save(9, last=True, stops=True)
    assert checkpointer.saved == [(9, True, True)]  # as the configuration wants the last
    assert Outcome.read(tmp_path / "outcome") is None


def test_a_request_is_there_as_a_whole_and_once(tmp_path):
    folder = tmp_path / "run"
    stop_file.ask(folder, "SIGUSR1")  # before the run has made its folder
    stop_file.ask(folder, "SIGTERM")
    assert [path.name for path in folder.iterdir()] == ["stop"]
    assert stop_file.why(folder) == f"SIGUSR1 on {os.uname().nodename}"
    stop_file.withdraw(folder)
    stop_file.withdraw(folder)
    assert not stop_file.asked(folder) and stop_file.why(folder) == "by a file that is gone"


def test_nobody_waits_for_a_device(tmp_path, group, monkeypatch):
    """With doubles of an event and of pinned memory: what the device says is copied without waiting, the event is put
    behind the copy, and only before the next step the host waits for the event and reads its own copy."""
    calls: list[str] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            calls.append(f"event on {device}")

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    class Host(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            calls.append(f"copy, non_blocking={non_blocking}")
            return super().copy_(source)

        def item(self) -> int:
            calls.append("read")
            return int(self.sum().as_subclass(torch.Tensor).item())

    def pinned(tensor: torch.Tensor, device: str, pin_memory: bool) -> torch.Tensor:
        calls.append(f"pinned={pin_memory} on {device}")
        return torch.full((), 0, dtype=tensor.dtype).as_subclass(Host)

    def on_the_host(tensor: torch.Tensor) -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "zeros_like", pinned)
    stop, _ = make(tmp_path, device="cuda:0")
    assert not stop.agreed()
    (tmp_path / "stop").touch()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", on_the_host)
        patch.setattr(torch.Tensor, "tolist", on_the_host)
        stop.sum_over_ranks(torch.tensor(3))
        stop.sum_over_ranks(torch.tensor(3))
    assert calls == ["pinned=True on cpu", "event on cuda:0", *["copy, non_blocking=True", "record"] * 2]
    assert stop.agreed() and calls[-2:] == ["synchronize", "read"]
