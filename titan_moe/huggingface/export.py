"""A checkpoint as a Hugging Face folder: safetensors, their index, config.json, tokenizer.

The source is a finished checkpoint on disk, never the model: so a run that has saved its last step can lose nothing
here, and the same code serves `python -m titan_moe.convert` afterwards. One of our parameters is read at a time, from
whatever slices the ranks had, and written as their matrices: a process needs memory for the largest one, a layer's
stack of one expert weight (671B in fp32: 256 x 2048 x 7168 x 4 bytes = 14 GiB), and for the piece of it that one rank
had saved. Files are shared out among ranks, which write theirs without each other.

What goes where is known from shapes alone (`plan`): the trainer asks for it before its first step, so a name or a size
that has no place is found then, not after the last one. All is written into a hidden folder, which is renamed once it
is complete.
"""

import json
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.tools.logging import logger

from titan_moe.checkpoint_folder import TMP, Damaged, amount, hidden, remove, sync_folder
from titan_moe.checkpoint_io import Reader, SafeLoadPlanner, read_metadata
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.export_check import has_bias
from titan_moe.huggingface import model_config, tokenizer_files
from titan_moe.huggingface.folder import CONFIG, INDEX, SINGLE
from titan_moe.huggingface.names import BIAS, CORRECTION, Weight, weights
from titan_moe.huggingface.safetensors_file import Entry, File

FILE_BYTES = 5_000_000_000
"""A file is closed once it has so many; it can have more by one parameter, which is never split"""

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What weights are written as, and how safetensors calls it"""


@dataclass
class Shard:
    """One file: which of our weights it holds, and as what."""

    weights: list[tuple[Weight, torch.dtype]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def plan(config: Config, there: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> list[Shard]:
    """The files for a model whose weights have the names and shapes `there`. Raises ValueError if one has no place, or
    if Hugging Face's classes cannot compute what this model does."""
    flavor, bias = model_flavor(config), has_bias(config)
    kind = model_config.model_type(flavor)
    # Whether a bias is in the way that transformers has no place for shows in its values, when they are read.
    problems = model_config.export_problems(flavor, bias=False)
    wanted = weights(flavor, bias)
    ours = {weight.ours: weight.our_shape for weight in wanted}
    if missing := sorted(ours.keys() - there.keys()):
        problems.append(f"{len(missing)} weights are missing, such as {missing[0]}: it is of another model")
    if unknown := sorted(there.keys() - ours.keys()):
        problems.append(f"{len(unknown)} weights have no name there, such as {unknown[0]}: it is of another model")
    problems += [
        f"{name} has shape {list(there[name])}, and the configuration says {list(shape)}"
        for name, shape in ours.items()
        if there.get(name, shape) != shape
    ]
    said = model_config.disagreements(model_config.content(flavor, "", None, None), config.model.name, flavor)
    assert not said or problems, said
    if problems:
        raise ValueError("cannot be written for Hugging Face's libraries: " + "; ".join(problems))
    shards = [Shard()]
    for weight in wanted:
        correction = weight.ours.endswith(BIAS)
        if correction and kind != "deepseek_v3":
            continue
        stored = torch.float32 if correction else dtype  # as published: sums of a thousand steps of 1e-3
        if shards[-1].bytes > FILE_BYTES:
            shards.append(Shard())
        shards[-1].weights.append((weight, stored))
        names = [*weight.names(), *weight.copies]
        shards[-1].entries += [Entry(name, DTYPES[stored], weight.shape) for name in names]
    if kind == "deepseek_v3" and not bias:
        shards[-1].entries += _no_bias(config)
    return shards


def _no_bias(config: Config) -> list[Entry]:
    """Zeros in the place of the router bias that a model without has not."""
    biases = [weight for weight in weights(model_flavor(config), True) if weight.ours.endswith(BIAS)]
    return [Entry(weight.theirs, "F32", weight.shape) for weight in biases]


def rehearse(config: Config, model: nn.Module) -> None:
    """Before the run, with the whole model on the meta device: raises ValueError if its weights could not be written.
    Nothing to do without checkpoint.last_save_in_hf."""
    if not config.checkpoint.last_save_in_hf:
        return
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    try:
        plan(config, shapes, getattr(torch, config.checkpoint.export_dtype))
        tokenizer_files.check(config.model.hf_assets_path)
    except ValueError as error:
        raise ValueError(f"checkpoint.last_save_in_hf: the model {error}") from error


class Checkpoint:
    """The weights in a checkpoint's folder, one at a time and whole, whatever the ranks were that wrote them."""

    def __init__(self, folder: Path) -> None:
        try:
            self.metadata = read_metadata(folder)
        except Damaged as damage:
            raise ValueError(f"The checkpoint {folder} cannot be read: {damage}") from damage
        self.folder = folder
        self.entries = {
            name: entry
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and _is_weight(name)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry.size) for name, entry in self.entries.items()}

    def dtype(self) -> torch.dtype:
        return self.entries["norm.weight"].properties.dtype

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        values = torch.empty(entry.size, dtype=entry.properties.dtype)
        reader = Reader(self.folder, self.metadata)
        with warnings.catch_warnings():  # that this is not distributed
            warnings.simplefilter("ignore", UserWarning)
            dcp.load({name: values}, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
        return values


def _is_weight(name: str) -> bool:
    return name.startswith(("layers.", "mtp_layers.", "tok_embeddings.", "norm.", "lm_head."))


def export(
    config: Config,
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the weights of the checkpoint to the new folder `out`, in their own type without a `dtype`. With a `group`,
    its ranks all call this, and share the work. Raises ValueError on all of them if it fails; nothing is left then."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    temporary = hidden(out, TMP)

    source: Any = None

    def together(work: Any) -> None:
        """Of all ranks; the error of one is an error on all."""
        try:
            problem = work()
        except (ValueError, OSError) as error:
            problem = str(error)
        found: list[str | None] = [problem]
        if group is not None:
            found = [None] * ranks
            dist.all_gather_object(found, problem, group=group)
        if said := [each for each in found if each is not None]:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise ValueError(f"The weights of {checkpoint} were not written to {out}: {said[0]}")

    start, shards = time.monotonic(), []

    def prepare() -> None:
        nonlocal source
        source = Checkpoint(checkpoint)
        shards.extend(plan(config, source.shapes(), dtype or source.dtype()))
        if rank == 0:
            _refuse_moved_bias(source, shards)
            remove(temporary)
            temporary.mkdir(parents=True)
            total, free = sum(shard.bytes for shard in shards), shutil.disk_usage(temporary).free
            if free < total:
                raise ValueError(f"it takes {amount(total)}, and {amount(free)} are free")

    def write() -> None:
        for i in range(rank, len(shards), ranks):
            logger.info(f"Writing file {i + 1} of {len(shards)}, {amount(shards[i].bytes)}")
            _write(source, shards[i], temporary / _name(i, len(shards)))

    def finish() -> None:
        if rank == 0:
            _write_rest(config, shards, temporary)
            sync_folder(temporary)
            remove(out)  # of an earlier try of the same step: the caller has looked
            temporary.rename(out)
            sync_folder(out.parent)

    for work in (prepare, write, finish):
        together(work)
    logger.info(f"Wrote {out} in {time.monotonic() - start:.1f} s")


def _name(i: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _refuse_moved_bias(source: Checkpoint, shards: list[Shard]) -> None:
    """A router bias that decides who computes what, and that the other format has no place for."""
    written = {weight.ours for shard in shards for weight, _ in shard.weights}
    for name in source.entries:
        if name.endswith(BIAS) and name not in written and source.read(name).any():
            raise ValueError(
                f"{name} is not zero: the model was trained with a router bias (moe.load_balance_coeff), for which its "
                "class in transformers has no place; without it, it would route otherwise"
            )


def _write(source: Checkpoint, shard: Shard, path: Path) -> None:
    with File(path, shard.entries) as file:
        for weight, dtype in shard.weights:
            values = source.read(weight.ours)
            names = [*weight.names(), *weight.copies]
            for name, part in zip(names, values if weight.experts else [values] * len(names), strict=True):
                file.write(name, _bytes(part.to(dtype)))
        for entry in file.waiting[::-1]:
            assert entry.name.endswith(CORRECTION), entry
            file.write(entry.name, _bytes(torch.zeros(entry.shape)))


def _bytes(values: Tensor) -> memoryview:
    return cast(Any, values.contiguous().view(-1).view(torch.uint8).numpy()).data


def _write_rest(config: Config, shards: list[Shard], folder: Path) -> None:
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.bytes for shard in shards)},
            "weight_map": {
                entry.name: _name(i, len(shards)) for i, shard in enumerate(shards) for entry in shard.entries
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (_, dtype), *_ = shards[0].weights
    bos, eos = tokenizer_files.write(config.model.hf_assets_path, folder)
    content = model_config.content(model_flavor(config), str(dtype).removeprefix("torch."), bos, eos)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def after_last_step(config: Config, checkpoint: Path, step: int, group: dist.ProcessGroup) -> None:
    """What checkpoint.last_save_in_hf asks for."""
    out = checkpoint.parents[len(Path(config.checkpoint.folder).parts)] / "hf" / f"step-{step}"
    export(config, checkpoint, out, getattr(torch, config.checkpoint.export_dtype), group=group)
