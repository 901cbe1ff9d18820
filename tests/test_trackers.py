"""Dashboards get what they should, under doubles of W&B and trackio, and from W&B's own package offline; none of them
can end a run, however it fails, nor can a full disk under metrics.jsonl."""

import io
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import titan_moe.runtime  # noqa: F401

import pytest

from tests.test_metrics import log, make
from titan_moe import heat_map
from titan_moe.metrics import read_metrics
from titan_moe.trackers import JsonLines, TensorBoard

NETWORK = ["wandb", "trackio"]


class Service(ModuleType):
    """A double of a package: what its `init` and its run's `log` and `finish` were called with. `fails` is the call
    that raises."""

    def __init__(self, name: str, fails: str | None = None) -> None:
        super().__init__(name)
        self.fails, self.inits, self.lines, self.finished, self.calls = fails, [], [], 0, []
        self.Settings = lambda **kwargs: kwargs

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise ConnectionError("the network is gone")

    def init(self, **kwargs: Any) -> "Service":
        self._call("init")
        self.inits.append(kwargs)
        self.id = kwargs.get("id") or "made-up-id"
        return self

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self._call("log")
        self.lines.append((step, numbers))

    def finish(self) -> None:
        self._call("finish")
        self.finished += 1


@pytest.fixture
def services(monkeypatch) -> dict[str, Service]:
    for key in [key for key in os.environ if key.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(key)
    found = {name: Service(name) for name in NETWORK}
    for name, service in found.items():
        monkeypatch.setitem(sys.modules, name, service)
    return found


def run(folder: Path, steps: int = 2, attempt: int = 1, **more: Any) -> None:
    """Everything enabled."""
    metrics = make(folder, attempt=attempt, tensorboard=True, wandb=True, trackio=True)
    for step in range(1, steps + 1):
        metrics.count(1)
        log(metrics, step, **more)
    metrics.close()


def test_dashboards_get_torchtitans_names_and_only_numbers(services, tmp_path):
    run(tmp_path, loss=float("nan"), **{"moe_load.layers.1": [3, 1], "moe_dead": 0})
    for service in services.values():
        assert [step for step, _ in service.lines] == [1, 2] and service.finished == 1
        numbers = service.lines[0][1]
        assert numbers["loss_metrics/global_max_loss"] == 3.0 and numbers["moe_dead"] == 0
        assert not {"loss_metrics/global_avg_loss", "mfu(%)", "moe_load.layers.1", "step"} & numbers.keys()
        assert service.inits[0]["config"]["training"]["steps"] == 50
    assert read_metrics(tmp_path)[1]["moe_load.layers.1"] == [3, 1]


def test_a_run_that_starts_again_goes_on_where_it_was(services, tmp_path, monkeypatch):
    run(tmp_path)
    run(tmp_path, attempt=2)
    first, again = services["wandb"].inits
    assert first["id"] is None and again["id"] == "made-up-id" and again["resume"] == "allow"
    assert first["name"] == again["name"] == tmp_path.name and first["project"] == "titan_moe"
    assert [(made["name"], made["resume"]) for made in services["trackio"].inits] == [(tmp_path.name, "allow")] * 2
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("WANDB_PROJECT", "there")
    monkeypatch.setenv("WANDB_RUN_TAGS", "a,b")
    run(tmp_path, attempt=3)
    *_, third = services["wandb"].inits
    assert third["id"] == "mine" and third["project"] == "there" and third["tags"] == ["a", "b"]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
@pytest.mark.parametrize("name", NETWORK)
def test_a_tracker_that_fails_is_told_once_and_nothing_else_stops(services, tmp_path, caplog, name, call):
    services[name].fails = call
    (other,) = set(NETWORK) - {name}
    run(tmp_path, steps=3)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "ConnectionError: the network is gone" in warnings[0]
    assert warnings[0].startswith({"wandb": "W&B is off", "trackio": "trackio is off"}[name])
    assert services[name].calls.count(call) == 1, "it was off from then on"
    assert list(read_metrics(tmp_path)) == [1, 2, 3] and len(services[other].lines) == 3
    assert list((tmp_path / "tb").iterdir())


def test_a_package_that_is_missing_comes_with_the_remedy(services, tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    run(tmp_path)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("trackio is off") and warning.endswith("; pip install trackio")
    assert list(read_metrics(tmp_path)) == [1, 2] and len(services["wandb"].lines) == 2


def test_tensorboard_may_fail_too(services, tmp_path, caplog):
    (tmp_path / "tb").write_text("in the way")
    run(tmp_path)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("TensorBoard is off") and list(read_metrics(tmp_path)) == [1, 2]


def test_an_error_of_ours_still_ends_the_run(services, tmp_path):
    """What is guarded is trackers only."""
    metrics = make(tmp_path, wandb=True)
    with pytest.raises(ZeroDivisionError):
        log(metrics, 1)  # no step was counted


# ---------------------------------------------------------------------------------------------------------------------
# metrics.jsonl


class FullDisk(io.RawIOBase):
    """Takes `room` bytes of what is written to it."""

    name = "metrics.jsonl"

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def write(self, line: bytes) -> int:  # type: ignore[override]
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = line[: self.room]
        self.content, self.room = self.content + taken, self.room - len(taken)
        return len(taken)


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path, caplog):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.file.close()
    lines.file = disk = FullDisk(20)
    for step in range(1, 5):
        disk.room += 100 if step == 4 else 0
        lines.log(step, {"step": step})
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.startswith("metrics.jsonl lacks step 2: there is no room for the whole line")
    (tmp_path / "metrics.jsonl").write_bytes(disk.content)
    assert list(read_metrics(tmp_path)) == [1, 4]
    assert len(disk.content.splitlines()) == 3, "half of step 2 has a line of its own"


def test_a_device_without_room_is_told_once(caplog):
    lines = JsonLines(Path("/dev/full"))
    for step in (1, 2):
        lines.log(step, {"step": step})
    lines.close()
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "lacks step 1" in warning and "No space left" in warning


# ---------------------------------------------------------------------------------------------------------------------
# Heat maps


def test_a_heat_map_shows_experts_down_and_steps_across():
    columns = [heat_map.levels([4, 0, 2, 2]), heat_map.levels([2, 2, 2, 2]), heat_map.levels([1, 1, 1, 20_000])]
    image = heat_map.picture(columns)
    height, width, _ = image.shape
    assert height >= heat_map.MIN_HEIGHT and height % 4 == 0 and width >= heat_map.MIN_WIDTH and width % 3 == 0
    fields = image[height // 8 :: height // 4, width // 6 :: width // 3]
    assert fields.shape == (4, 3, 3)
    assert (fields[1, 0] == 0).all(), "no token is black"
    assert all((fields[e, c] == heat_map.WHITE).all() for e, c in [(2, 0), (3, 0), *((e, 1) for e in range(4))])
    red, green, blue = fields[0, 0].astype(int)
    assert red > green and red > blue, "twice the mean is reddish"
    assert (fields[3, 2] - heat_map.RED <= 1).all() and fields[0, 2, 2] > fields[0, 2, 0], "four times, a quarter"


def test_levels_are_of_the_load_over_the_mean():
    """A step of the scale is a quarter of an octave, and its ends are at a quarter of the mean and four times."""
    assert heat_map.levels([0, 0, 0]).tolist() == [0, 0, 0]
    load = [0, 1, 250, 841, 1000, 1189, 2000, 4000, 9000]
    load += [2 * 10000 - sum(load)] + [0] * 10  # 20 experts whose mean is 1000
    assert heat_map.levels(load).tolist()[:9] == [0, 1, 1, 8, 9, 10, 13, 17, 17]


def test_tensorboard_gets_a_heat_map_per_layer_ten_times_a_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, steps=100)
    for step in range(2, 98, 5):
        board.log(step, {"loss": 1.0, "moe_load.layers.1": [step, 1], "moe_load.mtp_layers.0": [1, 1]})
    board.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    assert events.Tags()["images"] == ["moe_load.layers.1", "moe_load.mtp_layers.0"]
    assert [event.step for event in events.Images("moe_load.layers.1")] == [*range(12, 98, 10), 97]
    *_, last = events.Images("moe_load.layers.1")
    assert last.width >= heat_map.MIN_WIDTH and last.width % 20 == 0, "one column for each logged step"


# ---------------------------------------------------------------------------------------------------------------------
# The real W&B


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch, caplog):
    """Two starts write what to send later to the run folder, as the same W&B run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for attempt in (1, 2):
        metrics = make(tmp_path, attempt=attempt, wandb=True)
        metrics.count(1)
        log(metrics, attempt, **{"moe_load.layers.1": [3, 1]})
        metrics.close()
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]
    wandb_id = (tmp_path / "wandb_run_id").read_text()
    written = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert written and {path.stem for path in written} == {f"run-{wandb_id}"}
    assert b"loss_metrics/global_avg_loss" in written[0].read_bytes()
