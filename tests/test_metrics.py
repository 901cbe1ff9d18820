"""metrics.jsonl survives kills and restarts, and the console line keeps torchtitan's format."""

import json
import logging
import math
import re
from pathlib import Path

import titan_moe.runtime  # noqa: F401

import pytest

from titan_moe import clock as clock_module
from titan_moe import metrics as metrics_module
from titan_moe import phases as phases_module
from titan_moe.config import Config
from titan_moe.device_memory import DeviceMemory
from titan_moe.metrics import Metrics, read_metrics
from titan_moe.moe import te
from titan_moe.phases import Phases
from titan_moe.startup import peak

# torchtitan's own pattern for the losses in a log (scripts/loss_compare.py of 0.2.2).
TORCHTITAN_PATTERN = re.compile(r"step:\s*(\d+)\s*loss:\s*(\d+\.\d+)")


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics_module, "time", clock)
    monkeypatch.setattr(phases_module, "time", clock)
    return clock


def make(folder, attempt=1, flops_per_token=10**9, tensorboard=False, wandb=False, trackio=False) -> Metrics:
    config = Config()
    config.training.steps = 50
    config.metrics.enable_tensorboard = tensorboard
    config.metrics.enable_wandb, config.metrics.enable_trackio = wandb, trackio
    config.metrics.disable_color_printing = True
    return Metrics(config, folder, attempt, flops_per_token, Phases(), writes=True)


def log(metrics: Metrics, step: int, loss: float = 2.5, **more) -> None:
    metrics.log(step, loss=loss, max_loss=3.0, grad_norm=1.0, lr=1e-3, tokens_seen=step * 100, **more)


def test_rates_count_training_time_only(tmp_path, clock):
    """8 steps of 100 tokens in 4 s of training, beside 6 s of validation: 200 tokens/s, whichever step it is."""
    metrics = make(tmp_path)
    for _ in range(8):
        metrics.count(100)
    clock.now += 4
    with metrics.phases.whole("validation"):
        clock.now += 6
    log(metrics, 13)
    record = read_metrics(tmp_path)[13]
    assert record["tps"] == 200 and record["step_s"] == 0.5 and record["tflops"] == 0.2 and record["time_s"] == 10
    metrics.count(100)
    with metrics.phases.whole("data"):
        clock.now += 1
    clock.now += 1
    log(metrics, 14)
    assert read_metrics(tmp_path)[14]["data_percent"] == 50


def test_what_telling_costs_is_a_phase(tmp_path, clock, monkeypatch):
    metrics = make(tmp_path)
    monkeypatch.setattr(clock_module, "time", clock)
    metrics.phases.step()
    metrics.count(1)
    clock.now += 1
    monkeypatch.setattr(metrics.file, "log", lambda *_: setattr(clock, "now", clock.now + 3))
    log(metrics, 1)
    seconds, _ = metrics.phases.take()
    assert {name: value for name, value in seconds.items() if value} == {"other": 1, "logging": 3}


def test_the_console_line_is_torchtitans_up_to_mfu(tmp_path, clock, caplog):
    metrics = make(tmp_path)
    metrics.count(1234)
    clock.now += 1
    with caplog.at_level(logging.INFO):
        log(metrics, 7, loss=4.123456789, validation_loss={"": 4.5, "code": 2.25, "naïve": 800.0})
    line, validation, *sets = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        r"step:  7  loss:  4\.12346  grad_norm:  1\.0000  memory: +\d+\.\d\dGiB\(\d+\.\d\d%\)  tps: 1,234  "
        r"tflops: 1\.23  mfu: n/a  lr: 1\.00e-03  data: 0\.0%   14\.0%  eta: 0m43s",
        line,
    )
    assert TORCHTITAN_PATTERN.findall(line) == [("7", "4.12346")]
    assert validation == "validate step:  7  loss:  4.5000"
    assert sets == [
        "validate step:  7  code: loss:  2.2500  perplexity: 9.49",
        "validate step:  7  naïve: loss: 800.0000  perplexity: inf",
    ]
    record = read_metrics(tmp_path)[7]
    assert record["validation_loss"] == 4.5 and "validation_perplexity" not in record
    assert record["validation_perplexity/code"] == math.exp(record["validation_loss/code"]) == math.exp(2.25)
    assert record["validation_perplexity/naïve"] is None  # no JSON has an infinity


def test_a_later_attempt_wins_and_half_a_line_costs_only_itself(tmp_path, clock):
    first = make(tmp_path)
    for step in (1, 2, 3):
        first.count(1)
        clock.now += 1
        log(first, step)
    first.close()
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])  # killed while writing step 3
    assert list(read_metrics(tmp_path)) == [1, 2]
    second = make(tmp_path, attempt=2)
    second.count(1)
    clock.now += 1
    log(second, 2, loss=9.0)
    assert {step: record["attempt"] for step, record in read_metrics(tmp_path).items()} == {1: 1, 2: 2}
    assert read_metrics(tmp_path)[2]["loss"] == 9.0
    assert len(file.read_text().splitlines()) == 4


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_null_and_skipped_steps_are_shown(tmp_path, clock, caplog, loss):
    metrics = make(tmp_path, tensorboard=True)
    metrics.count(1)
    clock.now += 1
    with caplog.at_level(logging.INFO):
        log(metrics, 5, loss=loss, skipped_steps=3)
    metrics.close()
    record = read_metrics(tmp_path)[5]
    assert record["loss"] is None and record["grad_norm"] == 1.0 and record["skipped_steps"] == 3
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(r"loss: +(nan|inf) ", line) and "  skipped: 3  " in line
    assert "loss_metrics/global_avg_loss" not in scalars(tmp_path)


def scalars(folder) -> set[str]:
    """Tags that TensorBoard's files have."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_further_quantities_reach_both_files(tmp_path, clock):
    metrics = make(tmp_path, tensorboard=True)
    metrics.count(10)
    clock.now += 1
    log(metrics, 1, embedding_norm=2.0, validation_loss={"": 1.0, "code": 2.0})
    metrics.close()
    tags = scalars(tmp_path)
    assert tags >= {
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "grad_norm",
        "throughput(tps)",
        "tflops",
    }
    assert tags >= {"time_metrics/end_to_end(s)", "time_metrics/data_loading(s)", "time_metrics/data_loading(%)"}
    assert tags >= {"memory/max_active(GiB)", "memory/max_reserved(%)", "memory/num_ooms", "embedding_norm", "tflops"}
    assert {tag for tag in tags if "validation" in tag} == {
        "validation_metrics/loss",
        "validation_metrics/loss/code",
        "validation_metrics/perplexity/code",
    }
    assert "mfu(%)" not in tags, "unknown hardware has no MFU"
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["embedding_norm"] == 2.0


@pytest.mark.parametrize(
    ("device", "compute", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA GB300", "bfloat16", 2500),
        ("NVIDIA B300", "bfloat16", 2250),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("AMD Instinct MI300X", "bfloat16", 1307),
        ("NVIDIA H100 80GB HBM3", "float32", None),  # another peak, which the table does not have
        ("NVIDIA H100 PCIe", "bfloat16", None),  # slower than the H100 of the table
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("CPU", "bfloat16", None),
    ],
)
def test_mfu_is_of_a_known_peak_or_none(device, compute, tflops):
    config, memory = Config(), DeviceMemory()
    config.training.mixed_precision_param = compute
    memory.device_name = device
    assert memory.peak_flops(config) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize(
    ("device", "recipe", "backend", "has_te", "tflops", "precision"),
    [
        ("NVIDIA B200", "mxfp8", "auto", True, 4500, "mxfp8"),
        ("NVIDIA B200", "mxfp8", "te", True, 4500, "mxfp8"),
        ("NVIDIA B200", "nvfp4", "auto", True, 9000, "nvfp4"),
        ("NVIDIA B200", "mxfp8", "emulated", True, 2250, "bf16"),
        ("NVIDIA B200", "mxfp8", "auto", False, 2250, "bf16"),  # without Transformer Engine it is emulated
        ("NVIDIA B200", "bf16", "auto", True, 2250, "bf16"),
        ("NVIDIA H100 80GB HBM3", "mxfp8", "auto", True, 989, "bf16"),  # has FP8, but not MXFP8
        ("NVIDIA H100 80GB HBM3", "fp8_block", "auto", True, 1979, "fp8_block"),
        ("CPU", "mxfp8", "auto", False, None, None),
    ],
)
def test_mfu_is_of_the_peak_of_what_computes(monkeypatch, device, recipe, backend, has_te, tflops, precision):
    monkeypatch.setattr(te, "problem", lambda found: None if has_te else "not installed")
    config, memory = Config(), DeviceMemory()
    config.precision.recipe, config.precision.backend = recipe, backend
    memory.device_name = device
    monkeypatch.setattr(metrics_module, "DeviceMemory", lambda: memory)
    metrics = Metrics(config, Path("unused"), 1, 1.0, Phases(), writes=False)
    assert metrics.precision == precision and metrics.peak_flops == (None if tflops is None else tflops * 1e12)
    assert peak(metrics) == ("unknown" if tflops is None else f"{tflops:,} {precision} TFLOP/s")
