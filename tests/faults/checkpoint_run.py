"""A run that only saves and loads: the checkpoint manager over a tiny state, whose values say which step they are of.

A Job is real ranks with gloo, each forked from a server that has imported everything, so that a start costs a tenth of
a second.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import titan_moe.runtime  # noqa: F401

import torch
import torch._dynamo  # DTensor imports it on first use: once here, instead of in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_moe.checkpoint import Progress
from titan_moe.checkpoint_manager import VerifiedCheckpoints

SIZE = 1 << 14  # values of the one weight: 64 KiB


class State(Stateful):
    """Optimizer, schedule or data position: a tensor and values that are none."""

    def __init__(self, name: str) -> None:
        self.values = {f"{name}.moment": torch.zeros(1000), f"{name}.note": {"at": 0, "text": "0"}}
        self.name = name

    def fill(self, step: int) -> None:
        self.values = {
            f"{self.name}.moment": torch.full((1000,), float(step)),
            f"{self.name}.note": {"at": step, "text": str(step)},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict

    def steps(self) -> set[int]:
        note = self.values[f"{self.name}.note"]
        return {*map(int, self.values[f"{self.name}.moment"].unique()), note["at"], int(note["text"])}


class TinyRun:
    """Of a rank in the default process group. The weight is sharded over all ranks."""

    def __init__(self, folder: Path, *, size: int = SIZE, **config: Any) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Module()
        self.model.weight = nn.Parameter(distribute_tensor(torch.zeros(size), mesh, [Shard(0)]))
        self.states = [State(name) for name in ("optimizer", "lr_scheduler", "dataloader")]
        self.progress = Progress()
        self.manager = VerifiedCheckpoints.Config(
            **{
                "enable": True,
                "interval": 1,
                "keep_latest_k": 2,
                "last_save_model_only": False,
                "initial_load_model_only": False,
                **config,
            }
        ).build(
            model_parts=[self.model],
            **dict(zip(("optimizers", "lr_schedulers", "dataloader"), self.states, strict=True)),
            states={"progress": self.progress},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def to_step(self, step: int) -> None:
        """A step of training: all values become `step`."""
        self.manager.maybe_wait_for_staging()  # as before the optimizer
        self.progress.step = self.progress.tokens_seen = step
        with torch.no_grad():
            self.model.weight.to_local().fill_(step)
        for state in self.states:
            state.fill(step)

    def save(self, step: int, **how: Any) -> None:
        self.to_step(step)
        self.manager.save(step, **how)

    def steps(self) -> set[int]:
        """The steps that the values are of: one, if a checkpoint was whole."""
        found = {*map(int, self.model.weight.to_local().detach().unique())}
        return found.union({self.progress.step, self.progress.tokens_seen}, *(state.steps() for state in self.states))


@contextmanager
def joined(rank: int, world_size: int, store: str) -> Iterator[None]:
    """This process is a rank, and afterwards what it was."""
    threads, ranks = torch.get_num_threads(), {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, {name: str(value) for name, value in ranks.items()}):
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            torch.set_num_threads(threads)


def _rank(job: Callable, rank: int, world_size: int, store: str, answers: Connection, arguments: tuple) -> None:
    with joined(rank, world_size, store):
        try:
            job(answers.send, *arguments)
        except ValueError as error:
            answers.send(f"ValueError: {error}")


class Job:
    """Ranks that run `job(tell, *arguments)`, where `tell` sends an answer; a ValueError that ends it is one too."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def __init__(self, store: Path, job: Callable, *arguments: Any, world_size: int = 1) -> None:
        store.unlink(missing_ok=True)
        pipes = [self.context.Pipe(duplex=False) for _ in range(world_size)]  # a queue's lock could die with its holder
        self.answers = [receiving for receiving, _ in pipes]
        self.ranks = [
            self.context.Process(target=_rank, args=(job, rank, world_size, str(store), sending, arguments))
            for rank, (_, sending) in enumerate(pipes)
        ]
        for process, (_, sending) in zip(self.ranks, pipes, strict=True):
            process.start()
            sending.close()

    def hear(self) -> list[Any]:
        """The next answer of each rank. Raises EOFError if a rank has ended without one."""
        found = []
        for answers in self.answers:
            assert answers.poll(300), "a rank hangs"
            found.append(answers.recv())
        return found

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
        self.end()

    def end(self) -> None:
        for process in self.ranks:
            process.join(300)
        assert all(process.exitcode is not None for process in self.ranks), "a rank hangs"
