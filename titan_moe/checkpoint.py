"""What a checkpoint of a run holds, and what a user reads when it does not fit.

Through torchtitan's manager of torch.distributed.checkpoint (DCP), which reshards on load and saves sync or async, and
which checkpoint_manager makes verify and publish.
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.runtime import DEVICE_TYPE

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from titan_moe.checkpoint_manager import VerifiedCheckpoints
from titan_moe.config import Config


class Progress(Stateful):
    """How far the run is: optimizer steps done, and tokens that all ranks have seen in them."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens_seen = state_dict["step"], state_dict["tokens_seen"]


def build_checkpointer(
    config: Config,
    run_folder: Path,
    *,
    model_parts: Sequence[nn.Module],
    optimizers: OptimizersContainer,
    lr_schedulers: LRSchedulersContainer,
    dataloader: Stateful,
    states: Mapping[str, Stateful],
) -> VerifiedCheckpoints:
    """torchtitan's manager over everything that a resumed run needs: weights, router biases, optimizer, schedule,
    position in the data, and `states`: progress and what else the run keeps, by name."""
    from titan_moe.huggingface.export import after_last_step
    from titan_moe.huggingface.load import load as load_hugging_face

    c = config.checkpoint
    if c.async_mode == "async_with_pinned_mem" and DEVICE_TYPE == "cpu":
        raise ValueError(
            'checkpoint.async_mode = "async_with_pinned_mem" needs a GPU; on a CPU use "async" or "disabled"'
        )
    initial_load_path = str(Path(c.initial_load_path).resolve()) if c.initial_load_path else None
    return VerifiedCheckpoints.Config(
        enable=c.enable,
        folder=c.folder,
        interval=c.interval,
        async_mode=c.async_mode,
        initial_load_path=initial_load_path,
        initial_load_model_only=c.initial_load_model_only and initial_load_path is not None,
        last_save_model_only=c.last_save_model_only,
        export_dtype=c.export_dtype,
        keep_latest_k=c.keep_latest_k,
        load_step=c.load_step,
        load_only=c.load_only,
        verify=c.verify,
        upcycle=c.upcycle,
    ).build(
        dataloader=dataloader,
        model_parts=list(model_parts),
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        states=dict(states),
        sd_adapter=None,
        base_folder=str(run_folder),
        import_weights=lambda folder, group: load_hugging_face(folder, config, model_parts, group),
        export_weights=partial(after_last_step, config) if c.last_save_in_hf else None,
    )


def load(checkpointer: CheckpointManager, step: int) -> bool:
    """Resume from `step` of the run folder (-1: the newest) or start from initial_load_path; False if there is neither.

    Raises ValueError when there are some but none is as it was written, or when the one that is was made by a
    configuration that this one cannot continue.
    """
    try:
        return checkpointer.load(step)
    except (RuntimeError, CheckpointException) as error:
        if problem := unreadable(error):
            raise ValueError(problem) from error
        missing = re.search(r"Missing key in checkpoint state_dict: ([\w.]+)", str(error))
        if missing is None and "Size mismatch between saved" not in str(error):
            raise
        key = "" if missing is None else missing[1]
        if key.startswith(("dataloader.shard.", "dataloader.source.")):
            reason = "its data had fewer shards or sources: put [training] and the files back as they were"
        elif key.startswith(("optimizer.", "lr_scheduler.", "dataloader.", "progress.", "guard.")):
            reason = (
                "it holds only weights (checkpoint.last_save_model_only) or the state of another optimizer.name: move "
                "it away to resume the one before it, put the name back, or start a new run from it with "
                "checkpoint.initial_load_path"
            )
        else:
            reason = "it is of another model: put [model] back"
        was = "config.toml in the run folder has what it was"
        raise ValueError(f"The checkpoint cannot be resumed, {reason} ({was})") from error


def unreadable(error: BaseException) -> str | None:
    """What a user reads when a value could not be read, or was none; None for another error."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for cause in causes:
        if isinstance(cause, pickle.UnpicklingError):
            return f"The checkpoint holds something else than tensors and plain values, and was not loaded: {cause}"
        if isinstance(cause, OSError) or "PytorchStreamReader" in str(cause):
            return (
                f'The checkpoint could not be read: {cause}. Start again: with checkpoint.verify = "full" all of it is '
                "read beforehand, and an older one is taken if need be"
            )
    return None
