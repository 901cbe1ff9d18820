"""What a run says about itself: the console line, metrics.jsonl in the run folder, and dashboards (trackers.py).

The console line is torchtitan's byte for byte up to `mfu`, so that its parsers keep working; ours follows after it.
Dashboards get torchtitan's tags. metrics.jsonl has one object per logged step in full precision; a run that is started
again appends to it with a higher `attempt`, and a reader keeps the last line of a step (`read_metrics`). A number that
is not finite, of a step that the guard skipped, is null there, and left out of dashboards.

Only rank 0 writes. Units: tokens and seconds of one rank; tps is tokens per second per device.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import titan_moe.runtime  # noqa: F401

from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, NoColor

from titan_moe.config import Config
from titan_moe.device_memory import DeviceMemory
from titan_moe.phase_names import OUTSIDE
from titan_moe.phases import Phases
from titan_moe.recompiles import Recompiles
from titan_moe.trackers import Guarded, JsonLines, dashboards

LOSS, PERPLEXITY = "validation_loss", "validation_perplexity"
"""Of held-out documents; "/NAME" follows for those of validation.sets"""


class Metrics:
    """Counts tokens and seconds between logged steps, and writes them out.

    `flops_per_token` are model FLOPs of forward and backward, attention counted as causal (plan/flops.py); MFU is
    against the device's dense peak in the recipe that its GEMMs compute in (`DeviceMemory.precision`), also where only
    some of them do; n/a when unknown. `phases` know the time that was spent on data, and outside of training.
    """

    def __init__(
        self, config: Config, run_folder: Path, attempt: int, flops_per_token: float, phases: Phases, writes: bool
    ) -> None:
        self.config, self.attempt, self.flops_per_token, self.phases = config, attempt, flops_per_token, phases
        self.memory = DeviceMemory()
        self.precision, self.peak_flops = self.memory.precision(config), self.memory.peak_flops(config)
        self.color = NoColor() if config.metrics.disable_color_printing else Color()
        self.recompiles = Recompiles() if config.compile.enable else None
        self.started = time.perf_counter()
        self.file = JsonLines(run_folder / "metrics.jsonl") if writes else None
        self.dashboards: list[Guarded] = dashboards(config, run_folder) if writes else []
        self._restart_interval()

    def _restart_interval(self) -> None:
        self.tokens, self.steps = 0.0, 0
        self.phases.host_seconds.clear()
        self.interval_started = time.perf_counter()

    def count(self, tokens: float) -> None:
        """One more optimizer step, over `tokens` tokens of this rank."""
        self.tokens += tokens
        self.steps += 1
        if self.recompiles is not None:
            self.recompiles.step()

    def log(
        self,
        step: int,
        *,
        loss: float,
        max_loss: float,
        grad_norm: float,
        lr: float,
        tokens_seen: int,
        validation_loss: Mapping[str, float] | None = None,
        **more: Any,
    ) -> None:
        """Write the line of `step`. `validation_loss`: of each set; "" is the unnamed one. `more`: further quantities
        of the caller, by name, into metrics.jsonl and dashboards: numbers, and the experts' loads as lists."""
        spent = self.phases.host_seconds
        seconds = time.perf_counter() - self.interval_started - sum(spent[name] for name in OUTSIDE)
        tps = self.tokens / seconds
        tflops = self.flops_per_token * tps / 1e12
        mfu = None if self.peak_flops is None else 100 * self.flops_per_token * tps / self.peak_flops
        data_percent = 100 * spent["data"] / seconds
        memory = self.memory.peak()
        if self.file is not None:
            record = {
                "step": step,
                "attempt": self.attempt,
                "loss": loss,
                "max_loss": max_loss,
                "grad_norm": grad_norm,
                "lr": lr,
                "tps": tps,
                "tflops": tflops,
                "mfu": mfu,
                "time_s": time.perf_counter() - self.started,
                "step_s": seconds / self.steps,
                "data_percent": data_percent,
                "memory_gib": memory["memory/max_reserved(GiB)"],
                "tokens_seen": tokens_seen,
                **_held_out(validation_loss or {}),
                **({} if self.recompiles is None else {"compile/recompiles": self.recompiles.count}),
                **more,
            }
            with self.phases.whole("logging"):
                self._write(record, memory, seconds)
        if self.recompiles is not None:
            self.recompiles.overlook()  # a validation's, just before
        self.memory.reset()
        self._restart_interval()

    def _write(self, record: dict[str, Any], memory: dict[str, float], seconds: float) -> None:
        known = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
        assert self.file is not None
        self.file.log(record["step"], known)
        tags = self._tags(known, memory)
        for dashboard in self.dashboards:
            dashboard.log(record["step"], tags)
        self._print(record, memory, seconds)

    def _print(self, record: dict[str, Any], memory: dict[str, float], seconds: float) -> None:
        c, step, steps = self.color, record["step"], self.config.training.steps
        eta = int((steps - step) * seconds / self.steps)
        mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.2f}%"
        logger.info(
            f"{c.red}step: {step:2}  "
            f"{c.green}loss: {record['loss']:8.5f}  "
            f"{c.orange}grad_norm: {record['grad_norm']:7.4f}  "
            f"{c.turquoise}memory: {memory['memory/max_reserved(GiB)']:5.2f}GiB"
            f"({memory['memory/max_reserved(%)']:.2f}%)  "
            f"{c.blue}tps: {round(record['tps']):,}  "
            f"{c.cyan}tflops: {record['tflops']:,.2f}  "
            f"{c.magenta}mfu: {mfu}{c.reset}  "
            f"lr: {record['lr']:.2e}  data: {record['data_percent']:.1f}%  {_balance(record)}{_skipped(record)}"
            f"{100 * step / steps:5.1f}%  eta: {_duration(eta)}"
        )
        for key, loss in record.items():
            if key == LOSS:
                logger.info(f"{c.yellow}validate step: {step:2}  {c.green}loss: {loss:7.4f}{c.reset}")
            elif key.startswith(f"{LOSS}/"):
                name = key.removeprefix(f"{LOSS}/")
                logger.info(
                    f"{c.yellow}validate step: {step:2}  {name}: {c.green}loss: {loss:7.4f}  "
                    f"perplexity: {record[f'{PERPLEXITY}/{name}']:.2f}{c.reset}"
                )

    def _tags(self, record: dict[str, Any], memory: dict[str, float]) -> dict[str, Any]:
        """The record under the names that torchtitan gives to dashboards, where it has one."""
        tags = {
            "loss_metrics/global_avg_loss": record["loss"],
            "loss_metrics/global_max_loss": record["max_loss"],
            "grad_norm": record["grad_norm"],
            "throughput(tps)": record["tps"],
            "tflops": record["tflops"],
            "mfu(%)": record["mfu"],
            "time_metrics/end_to_end(s)": record["step_s"],
            "time_metrics/data_loading(s)": self.phases.host_seconds["data"] / self.steps,
            "time_metrics/data_loading(%)": record["data_percent"],
            **memory,
            "n_tokens_seen": record["tokens_seen"],
            "lr": record["lr"],
            "validation_metrics/loss": record.get("validation_loss"),
        }
        known = {"step", "attempt", "loss", "time_s", "memory_gib", "data_percent", "step_s", "validation_loss"}
        return tags | {
            re.sub("^validation_(?=loss/|perplexity/)", "validation_metrics/", key): value
            for key, value in record.items()
            if key not in known and key not in tags
        }

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        for dashboard in self.dashboards:
            dashboard.close()


def _held_out(losses: Mapping[str, float]) -> dict[str, float]:
    """What is told of validation sets; perplexity, e to the loss, only of those with a name, beside which there are
    others to compare with."""
    found = {}
    for name, loss in losses.items():
        if name:
            found |= {f"{LOSS}/{name}": loss, f"{PERPLEXITY}/{name}": math.inf if loss > 700 else math.exp(loss)}
        else:
            found[LOSS] = loss
    return found


def _balance(record: dict[str, Any]) -> str:
    """Load of the heaviest expert over the mean, of the worst layer, and the share of copies dropped, if any were."""
    found = "" if "moe_max/mean" not in record else f"moe_max/mean: {record['moe_max/mean']:.2f}  "
    return found + (f"moe_dropped: {100 * record['moe_dropped']:.1f}%  " if "moe_dropped" in record else "")


def _skipped(record: dict[str, Any]) -> str:
    """Steps that the guard skipped, since the run began, if any."""
    return f"skipped: {record['skipped_steps']}  " if record.get("skipped_steps") else ""


def _duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def read_metrics(run_folder: Path | str) -> dict[int, dict[str, Any]]:
    """{step: the last complete line about it} of a run, steps in order. Lines that were cut off by a kill are passed
    over."""
    records: dict[int, dict[str, Any]] = {}
    for line in (Path(run_folder) / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
            records[record["step"]] = record
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return dict(sorted(records.items()))
