"""Functions on several ranks of this machine, with gloo."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch

from tests.faults.checkpoint_run import Job


def heard(work: Callable[..., None], *arguments: Any, world_size: int, answers: int = 1) -> list[list[Any]]:
    """What each rank told, answer by answer, that did `work(tell, *arguments)`. Ranks are forked from a server that has
    imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "store", work, *arguments, world_size=world_size)
        try:
            found = [job.hear() for _ in range(answers)]
        except BaseException as error:
            job.kill()
            if isinstance(error, EOFError):
                raise RuntimeError(f"{work.__name__}: a rank ended without an answer; its error is above") from None
            raise
        job.end()
    for answer in found:
        if isinstance(answer[0], str):  # a ValueError that ended it
            raise ValueError(answer[0])
    return found


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)`, which pickle finds by its name, returns on rank 0. One thread per rank: several on
    few cores would wait for each other."""
    return heard(_run, function, arguments, world_size=ranks)[0][0]


def _run(tell: Callable[[Any], None], function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tell(function(*arguments))
