"""Functions on several ranks of this machine, with gloo."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch

from tests.faults.checkpoint_run import Job


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)`, which pickle finds by its name, returns on rank 0. One thread per rank: several on
    few cores would wait for each other. The ranks are forked from a server that has imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "store", _run, function, arguments, world_size=ranks)
        try:
            answer = job.hear()[0]
        except BaseException as error:
            job.kill()
            if isinstance(error, EOFError):
                raise RuntimeError(f"{function.__name__}: a rank ended without an answer; its error is above") from None
            raise
        job.end()
    if isinstance(answer, str):  # a ValueError that ended it
        raise ValueError(answer)
    return answer


def _run(tell: Callable[[Any], None], function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tell(function(*arguments))
