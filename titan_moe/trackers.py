"""Where a run's numbers go: metrics.jsonl, TensorBoard, Weights & Biases (W&B), trackio. One small class each.

metrics.jsonl is the record of the run and always there. The others are for looking on, and no reason to stop: whatever
goes wrong in one of them, from a missing package to a network that is gone, is told once, that one is off for the rest
of the run, and training goes on (`Guarded`). A line that metrics.jsonl has no room for is lost, told once too, and the
next one is tried again.

No step waits for a network. W&B hands a line to a process of its own, trackio to a thread; both catch up later. Only
opening and closing them can take long.

A run that is started again goes on in the same W&B run, whose id is in its folder (`wandb_run_id`), and in the same
trackio run, which has the folder's name. Steps that are trained a second time, because the last checkpoint was older
than the crash, W&B takes once; trackio and TensorBoard show both.

Environment variables, as with torchtitan: WANDB_PROJECT (default titan_moe), WANDB_TEAM, WANDB_RUN_NAME (default: the
folder's name), WANDB_RUN_ID, WANDB_RUN_NOTES, WANDB_RUN_TAGS, and whatever else W&B knows, such as WANDB_MODE=offline;
TRACKIO_PROJECT (default titan_moe), and trackio's own, such as TRACKIO_SPACE_ID.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import titan_moe.runtime  # noqa: F401

from torchtitan.tools.logging import logger

from titan_moe import heat_map
from titan_moe.config import Config

Record = dict[str, Any]
"""A step's numbers by name, None where one is not finite; `moe_load.LAYER` is a list of the experts' loads"""

PICTURES = 10
"""How often in a run TensorBoard gets its heat maps, which are the larger the longer it has run: it shows ten"""

LOGIN_SECONDS = 30
"""W&B asks for a key on a terminal, where perhaps nobody is"""


class Tracker(Protocol):
    def log(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object per line, there for every reader as soon as `log` returns."""

    def __init__(self, path: Path) -> None:
        # Unbuffered, so that what could not be written is not tried again by a later line, or by closing.
        self.file = path.open("ab", buffering=0)
        self.whole = True
        if self.file.tell():
            with path.open("rb") as file:  # a killed run may have left half a line
                file.seek(-1, os.SEEK_END)
                self.whole = file.read() == b"\n"
        self.told = False

    def log(self, step: int, record: Record) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        line = line if self.whole else b"\n" + line
        self.whole = False
        try:
            self.whole = self.file.write(line) == len(line)
            problem = "there is no room for the whole line"
        except OSError as error:
            problem = str(error)
        if not self.whole and not self.told:
            logger.warning(f"{self.file.name} lacks step {step}: {problem}. Later lines are tried all the same")
            self.told = True

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Scalars, and for each MoE layer a heat map of expert and step, of what this start of the run has seen."""

    def __init__(self, folder: Path, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer, self.steps = SummaryWriter(str(folder)), steps
        self.columns: dict[str, list[Any]] = {}
        self.drawn = self.step = 0

    def log(self, step: int, record: Record) -> None:
        for tag, value in record.items():
            if isinstance(value, list):
                self.columns.setdefault(tag, []).append(heat_map.levels(value))
                self.step = step
            elif value is not None:
                self.writer.add_scalar(tag, value, step)
        if PICTURES * step // self.steps > PICTURES * self.drawn // self.steps:
            self._draw()

    def _draw(self) -> None:
        if self.step > self.drawn:
            for tag, columns in self.columns.items():
                self.writer.add_image(tag, heat_map.picture(columns), self.step, dataformats="HWC")
        self.drawn = self.step

    def close(self) -> None:
        self._draw()
        self.writer.close()


class Wandb:
    def __init__(self, folder: Path, config: Config) -> None:
        import wandb

        env, id_file = os.environ, folder / "wandb_run_id"
        self.run = wandb.init(
            dir=str(folder),
            entity=env.get("WANDB_TEAM") or None,
            project=env.get("WANDB_PROJECT") or "titan_moe",
            name=env.get("WANDB_RUN_NAME") or env.get("WANDB_NAME") or folder.resolve().name,
            notes=env.get("WANDB_RUN_NOTES") or None,
            tags=env["WANDB_RUN_TAGS"].split(",") if env.get("WANDB_RUN_TAGS") else None,
            id=env.get("WANDB_RUN_ID") or (id_file.read_text().strip() if id_file.exists() else None),
            resume="allow",
            config=asdict(config),
            settings=wandb.Settings(login_timeout=LOGIN_SECONDS),
        )
        id_file.write_text(self.run.id)

    def log(self, step: int, record: Record) -> None:
        self.run.log(_numbers(record), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    def __init__(self, folder: Path, config: Config) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT") or "titan_moe"
        self.run = trackio.init(project=project, name=folder.resolve().name, config=asdict(config), resume="allow")

    def log(self, step: int, record: Record) -> None:
        self.run.log(_numbers(record), step=step)

    def close(self) -> None:
        self.run.finish()


def _numbers(record: Record) -> Record:
    return {key: value for key, value in record.items() if value is not None and not isinstance(value, list)}


class Guarded:
    """A tracker that is off from its first failure on, which it tells of."""

    def __init__(self, name: str, package: str, make: Callable[[], Tracker]) -> None:
        self.name, self.package = name, package
        self.tracker: Tracker | None = None
        with self._guarding():
            self.tracker = make()

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever another package may raise
            self.tracker = None
            remedy = f"; pip install {self.package}" if isinstance(error, ImportError) else ""
            logger.warning(f"{self.name} is off, training goes on without it: {type(error).__name__}: {error}{remedy}")

    def log(self, step: int, record: Record) -> None:
        if self.tracker is not None:
            with self._guarding():
                self.tracker.log(step, record)

    def close(self) -> None:
        if self.tracker is not None:
            with self._guarding():
                self.tracker.close()


def dashboards(config: Config, folder: Path) -> list[Guarded]:
    """Those that `[metrics]` enables, besides metrics.jsonl."""
    m, steps = config.metrics, config.training.steps
    found: list[tuple[bool, str, str, Callable[[], Tracker]]] = [
        (m.enable_tensorboard, "TensorBoard", "tensorboard", lambda: TensorBoard(folder / m.save_tb_folder, steps)),
        (m.enable_wandb, "W&B", "wandb", lambda: Wandb(folder, config)),
        (m.enable_trackio, "trackio", "trackio", lambda: Trackio(folder, config)),
    ]
    return [Guarded(name, package, make) for enabled, name, package, make in found if enabled]
