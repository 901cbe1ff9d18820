"""Training runs whose steps are taken one by one, so that several can take turns in one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import train  # isort: skip - first: it tells torchtitan about CPUs

import torch
from torchtitan.distributed.cudagraph import cudagraph_teardown
from torchtitan.tools.logging import logger

from titan_moe import config_file, runtime
from titan_moe.config import Config

QUIET = [
    *("--metrics.enable_tensorboard=false", "--checkpoint.enable=false", "--validation.enable=false"),
    *("--lr_scheduler.total_steps=none", "--training.global_batch_size=-1", "--training.steps=1000000"),
]


def load(argv: list[str], folder: Path) -> Config:
    config = config_file.load([*argv, f"--job.dump_folder={folder}"], 1)
    config_file.raise_on_problems(config, 1)
    return config


class SteppedRun:
    """Our train.py, a step at a time."""

    def __init__(self, config: Config) -> None:
        self.run = train.build(config)
        self.batches = iter(self.run.dataloader)

    def step(self, *, logs: bool = False, validates: bool = False) -> None:
        self.run.progress.step += 1
        with self.run.telemetry.step(self.run.progress.step, logs=logs):
            train.train_step(self.run, self.batches, validates=validates, logs=logs)

    def close(self) -> None:
        cudagraph_teardown()  # of all runs: a graph holds on to the device's memory
        self.run.checkpointer.close()
        self.run.metrics.close()


@contextmanager
def one_process_group() -> Iterator[Path]:
    """In which all runs of this process share a process group, which is left in the end. Yields a folder for them,
    which is gone then; run folders of `train.build` are inside."""
    level = logger.level
    logger.setLevel("WARNING")
    devices: list[torch.device] = []
    join = runtime.init_process_group

    def join_once(*arguments: Any) -> torch.device:
        devices[:] = devices or [join(*arguments)]
        return devices[0]

    try:
        with (
            TemporaryDirectory() as folder,
            mock.patch.dict(os.environ),
            mock.patch.object(runtime, "init_process_group", join_once),
        ):
            runtime.default_environment(["benchmark"])
            try:
                yield Path(folder)
            finally:
                runtime.leave_process_group()
    finally:
        logger.setLevel(level)
