"""torchtitan's checkpoint manager, but a checkpoint is complete or not there, and what is loaded has been verified.

Everything on disk is in checkpoint_folder, how files are written and read in checkpoint_io. What is here is when:

- Saving fails on all ranks or on none, with one ValueError that says why; nothing of a failed checkpoint is left. In
  the background it fails unseen, so while one is being written, the ranks agree after each step whether all are done:
  the error appears there, on all of them, not only when the next checkpoint is due.
- An older checkpoint is deleted only after the new one is published.
- Loading takes the newest checkpoint that is as it was written. The ranks share the work of reading all of it
  (verify = "full"), and all learn the same verdict.
"""

import errno
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from titan_moe import checkpoint_folder
from titan_moe.checkpoint_folder import DELETED, TMP, Damaged, Manifest, hidden, step_folder, steps
from titan_moe.checkpoint_io import Reader, SafeLoadPlanner, Writer, read_metadata

UNVERIFIED = 'checkpoint.verify = "none" loads it unverified'


class VerifiedCheckpoints(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        verify: Literal["full", "size", "none"] = "full"
        upcycle: bool = False

    def __init__(
        self,
        config: Config,
        *,
        import_weights: Callable[[Path, dist.ProcessGroup], None] | None = None,
        export_weights: Callable[[Path, int, dist.ProcessGroup], None] | None = None,
        **components: Any,
    ) -> None:
        """`import_weights(folder, group)` reads Hugging Face's, `export_weights(checkpoint, step, group)` writes such a
        folder from the checkpoint of the last step."""
        super().__init__(config, **components)
        if not self.enable:
            return
        self.import_weights, self.export_weights = import_weights, export_weights
        self.verify, self.upcycle = config.verify, config.upcycle
        self.saving = Path()  # the checkpoint that is being written in the background
        # Groups of their own, with torch's limit of 30 minutes: ranks wait here for the one with the slowest disk, or
        # with the most to write. The background thread uses self.pg, and two threads may not share a group.
        if self.pg is None:
            self.pg = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.agreement = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        for group in (self.pg, self.agreement):
            group._set_group_desc(runtime.SAVING)
        if not self.load_only:
            runtime.on_rank_0(lambda: checkpoint_folder.prepare(Path(self.folder)))

    # -----------------------------------------------------------------------------------------------------------------
    # Saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Called after each step; torchtitan's decides whether to save."""
        if self.save_future is not None and self._all_ranks_done(self.save_future):
            self._wait_for_saving()
        saved = super()._save(curr_step, last_step)
        if saved and last_step:
            self._purge_stale_checkpoints()  # which torchtitan does for all but the last
            if self.export_weights is not None:
                self.export_weights(step_folder(Path(self.folder), curr_step), curr_step, self.agreement)
        return saved

    def _all_ranks_done(self, future: Future) -> bool:
        done = torch.tensor(future.done(), dtype=torch.int32)
        dist.all_reduce(done, dist.ReduceOp.MIN, group=self.agreement)
        return bool(done)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        assert not to_hf
        self.saving = Path(checkpoint_id)
        writer = Writer(checkpoint_id)
        if async_mode == AsyncMode.DISABLED:
            try:
                dcp.save(state_dict, storage_writer=writer, process_group=self.pg)
            except CheckpointException as failure:
                problem = self._clean_up(failure)
                raise ValueError(problem) from failure
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        if self.stager is None:  # copies in a thread, into the same memory each time: as torchtitan's pinned one
            self.stager = DefaultStager(StagingOptions(False, False, True, False))
        pinned = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
        # Experts' gates and ups are views of one tensor, and torch 2.14.1's stager, which keeps account of storages by
        # the addresses of their Python objects, fails on those. So they are copied, until they are staged.
        parts = {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in state_dict.items()}
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a stager may copy on a stream of its own, which waits for no other
        saving = dcp.async_save(
            parts,
            storage_writer=writer,
            process_group=self.pg,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if pinned else AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
        )
        assert isinstance(saving, AsyncSaveResponse)
        self.staging_future = saving.staging_completion
        return saving if pinned else saving.upload_completion  # what torchtitan expects of each

    def _maybe_wait_for_staging(self) -> None:
        """Before anything that is being saved changes: forward and backward of the next step go on meanwhile."""
        if self.staging_future is not None:
            self.staging_future.result()
            self.staging_future = None

    def _wait_for_saving(self) -> None:
        """Until the checkpoint in the background is published; raises ValueError, on all ranks, if it is not."""
        assert self.save_future is not None
        failure = self.save_future.exception()
        self.save_future = None
        if failure is not None:
            problem = self._clean_up(failure)
            raise ValueError(problem) from failure
        self._purge_stale_checkpoints()

    def _clean_up(self, failure: BaseException) -> str:
        """Remove what is left of the checkpoint that failed, and tell why it did; another failure than the file
        system's is raised again."""
        if dist.get_rank() == 0:
            shutil.rmtree(hidden(self.saving, TMP), ignore_errors=True)
        failures = failure.failures if isinstance(failure, CheckpointException) else {}
        reasons = [f"rank {rank}: {error}" for rank, (error, _) in failures.items() if isinstance(error, OSError)]
        if not reasons:
            raise failure
        full = any(getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT) for error, _ in failures.values())
        remedy = f"make room, or lower checkpoint.keep_latest_k = {self.keep_latest_k}," if full else "mend that"
        return (
            f"The checkpoint {self.saving} could not be written; {'; '.join(reasons)}. Nothing of it is left, and the "
            f"checkpoints of steps {steps(self.saving.parent)} are as they were: {remedy} and start again to go on "
            "from the newest"
        )

    def _purge_stale_checkpoints(self) -> None:
        """Only published ones count, so that one which is being written takes no place from a whole one."""
        if not self._should_purge():
            return
        for step in steps(Path(self.folder))[self.keep_latest_k :]:
            old = step_folder(Path(self.folder), step)
            try:
                old.rename(hidden(old, DELETED))
            except OSError as error:
                logger.warning(f"Checkpoint {old} is not needed any more, but cannot be deleted: {error}")
            else:
                self.purge_queue.put(str(hidden(old, DELETED)))

    def _close(self) -> None:
        if self.save_future is not None:  # we are leaving because of an error, and do not hide it behind another
            logger.info(f"Waiting for checkpoint {self.saving} to be written")
            try:
                self._wait_for_saving()
            except (Exception, CheckpointException) as error:
                logger.error(str(error))
        super()._close()

    # -----------------------------------------------------------------------------------------------------------------
    # Loading

    def _load(self, step: int = -1) -> bool:
        """The checkpoint of `step`, or the newest that can be trusted (-1), or initial_load_path; False if there is
        none of them. Raises ValueError if there are some, but none that can be trusted."""
        folder = Path(self.folder)
        there = runtime.on_rank_0(lambda: steps(folder))
        if step >= 0 and step not in there:
            raise ValueError(f"checkpoint.load_step = {step}: {folder} has steps {there[::-1]}; choose one, or -1")
        refused: dict[int, str] = {}
        for candidate in [step] if step >= 0 else there:
            if problem := self._damage(step_folder(folder, candidate), candidate):
                refused[candidate] = problem
                logger.error(f"CHECKPOINT step-{candidate} IS DAMAGED AND NOT LOADED: {problem}")
                continue
            loaded = super()._load(candidate)
            if refused:
                self._went_back(candidate, refused)
            return loaded
        if refused:
            listed = "".join(f"\n    step-{step}: {problem}" for step, problem in refused.items())
            raise ValueError(
                f"No checkpoint of {folder} that was to be loaded is as it was written:{listed}\nBring one back, or "
                f"move the folder away to start from the beginning; {UNVERIFIED}"
            )
        if start := self.initial_load_path:
            if problem := runtime.on_rank_0(lambda: checkpoint_folder.misnamed(Path(start))):
                raise ValueError(f"checkpoint.initial_load_path = {start!r}: {problem}")
            foreign = self.upcycle or runtime.on_rank_0(lambda: checkpoint_folder.is_hugging_face(Path(start)))
            if self.import_weights and foreign:
                self.import_weights(Path(start), self.agreement)
                return True
            if problem := self._damage(Path(start), None):
                raise ValueError(f"checkpoint.initial_load_path = {start!r}: {problem}; {UNVERIFIED}")
        return super()._load(-1)

    def _went_back(self, step: int, refused: dict[int, str]) -> None:
        """After loading an older checkpoint: out of the way with newer ones, before the run gets to their steps."""
        where = ""
        if not self.load_only and dist.get_rank() == 0:
            for newer in refused:
                checkpoint_folder.set_aside(step_folder(Path(self.folder), newer))
            where = f"; those not loaded are now damaged-step-*, for you to look at, beside it in {self.folder}"
        logger.error(f"WENT BACK FROM CHECKPOINT step-{max(refused)} TO step-{step}{where}")

    def _find_load_step(self, folder: str = "") -> int:
        return -1  # torchtitan asks only when `_load` has found none

    def _damage(self, checkpoint: Path, step: int | None) -> str | None:
        """What is wrong with a checkpoint, the same on all ranks; None if nothing is, or nobody is to look."""
        if self.verify == "none":
            return None

        def listed() -> Manifest:
            manifest = checkpoint_folder.read_manifest(checkpoint)
            if step not in (None, manifest.step):
                raise Damaged(f"the folder is of step {step}, its {checkpoint_folder.MANIFEST} of {manifest.step}")
            checkpoint_folder.check_sizes(checkpoint, manifest.files)
            return manifest

        try:
            files = runtime.on_rank_0(listed).files
        except Damaged as damage:
            return str(damage)
        if self.verify == "size":
            return None
        # On as many ranks as wrote it, each reads what it is going to load, for the most part.
        rank, ranks = dist.get_rank(), dist.get_world_size()
        found: list[str | None] = [None] * ranks
        dist.all_gather_object(found, checkpoint_folder.check_hashes(checkpoint, files[rank::ranks]))
        return next((problem for problem in found if problem), None)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        assert not from_hf and not from_quantized
        checkpoint = Path(checkpoint_id)
        try:
            metadata = runtime.on_rank_0(lambda: read_metadata(checkpoint))
        except Damaged as damage:
            raise ValueError(f"The checkpoint {checkpoint} cannot be loaded: {damage}") from damage
        dcp.load(state_dict, storage_reader=Reader(checkpoint, metadata), planner=SafeLoadPlanner())
        self.states[MODEL].load_state_dict(state_dict)
