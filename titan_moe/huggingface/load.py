"""Hugging Face weights into a model that is already sharded: every rank reads the slices that it holds, nothing else.

Nothing is gathered and nothing sent. For each of its parameters a rank knows which rows and columns of which of their
matrices its part consists of (of expert 7, say, rows 512 to 1023 of gate_proj), and reads these from the file into the
parameter. It has one file mapped at a time, and beside the model only the slice that is being copied, so any model that
can be trained can be loaded. Ranks that hold the same slice each read it: the file system's cache serves the second.

FP8 files have E4M3 numbers and for each block, of 128 x 128, the fp32 factor that it was divided by. A slice needs the
factors of the blocks that it touches, and is multiplied in fp32, as a whole matrix would be: the same values on every
mesh.

Shape letters: E experts, F expert hidden width, D model width, R rows, C columns.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger

from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.huggingface import check
from titan_moe.huggingface.folder import Stored
from titan_moe.huggingface.names import BIAS, Weight
from titan_moe.model import local_slice
from titan_moe.moe.names import FUSED, GATE, UP, split_w13

GATE_OF_ROUTER = "moe.router.gate.weight"
LINE_EVERY = 10.0  # seconds between two progress lines


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of one of their tensors, and the memory that it belongs in."""

    name: str
    start: tuple[int, ...]
    target: Tensor

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.target.shape))


@torch.no_grad()
def load(path: Path, config: Config, model_parts: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Fill the model's weights and router biases from a Hugging Face folder. All ranks call it. `group`: to agree in on
    how it went. Raises ValueError on all of them if the folder is not whole, or is of another model."""
    found = runtime.on_rank_0(lambda: _look(path, config))
    wanted = {weight.ours: weight for weight in found.wanted}
    problem = None
    try:
        _read(path, list(pieces(model_parts, wanted, found.stored)), found.stored, found.block)
    except (OSError, SafetensorError) as error:
        problem = f"rank {dist.get_rank()}: {error}"
    everywhere: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, problem, group=group)
    if said := next((problem for problem in everywhere if problem), None):
        raise ValueError(f"checkpoint.initial_load_path = {str(path)!r} could not be read; {said}")


def _look(path: Path, config: Config) -> check.Found:
    """On rank 0: what is where, and wanted. Raises ValueError with everything that is wrong."""
    found, flavor = check.look(config, path), model_flavor(config)
    if found.problems:
        raise ValueError("\n".join(found.problems))
    beyond, _ = check.left_out(flavor, found.wanted, found.stored)
    if beyond:
        layers = sorted({int(name.split(".")[2]) for name in beyond})
        logger.info(
            f"Left out of {path}: {len(beyond)} tensors of layers {layers}, multi-token prediction that "
            f"model.num_mtp_layers = {flavor.num_mtp_layers} does not have"
        )
    if config.checkpoint.upcycle:
        tied = "; its tied head becomes a weight of its own" if found.content.get("tie_word_embeddings") else ""
        logger.info(
            f"Upcycling: each of the {flavor.num_experts} experts of a layer begins as the feed-forward of {path}; "
            f"routers begin as the seed has them{tied}"
        )
    return found


def tensors(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """This rank's weights and router biases as plain tensors, each under the name of checkpoints, with where it begins
    in the whole. Gate and up are views of one parameter."""
    for part in model_parts:
        named = [*part.named_parameters(), *((n, b) for n, b in part.named_buffers() if n.endswith(BIAS))]
        for name, whole in named:
            local, offset = local_slice(whole)
            name = canonical_fqn(name)
            if not name.endswith(FUSED):
                yield name, local, offset
                continue
            expert, row, _, column = offset
            for half, view_EFD in split_w13(local).items():
                assert half in (GATE, UP)
                yield name.replace(FUSED, half), view_EFD, (expert, row, column)


def pieces(
    model_parts: Sequence[nn.Module], wanted: Mapping[str, Weight], stored: Mapping[str, Stored]
) -> Iterator[Piece]:
    """What this rank reads. A router that comes from nowhere, or a bias that the files do not have, stays as it is."""
    for name, local, offset in tensors(model_parts):
        if (weight := wanted.get(name)) is None:
            assert name.endswith((GATE_OF_ROUTER, BIAS)), name
            continue
        names = weight.names()
        if local.numel() == 0 or (name.endswith(BIAS) and names[0] not in stored):
            continue
        if not weight.experts:
            yield Piece(names[0], offset, local)
            continue
        for theirs, target in zip(names[offset[0] :], local):
            yield Piece(theirs, offset[1:], target)


def _read(path: Path, pieces: list[Piece], stored: Mapping[str, Stored], block: tuple[int, int]) -> None:
    """File by file. The factors of an FP8 slice are mostly in the same one; others stay open until it is done."""
    by_file: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(stored[piece.name].file, []).append(piece)
    total, done, said = sum(piece.target.numel() for piece in pieces), 0, time.monotonic()
    logger.info(f"Reading {total:,} weights of this rank from {len(by_file)} files of {path}")
    for i, file in enumerate(sorted(by_file), start=1):
        with ExitStack() as opened:
            files: dict[str, Any] = {}

            def read(name: str, index: tuple[slice, ...], opened=opened, files=files) -> Tensor:
                if (there := stored[name].file) not in files:
                    files[there] = opened.enter_context(safe_open(path / there, framework="pt"))
                return files[there].get_slice(name)[index]

            for piece in by_file[file]:
                values = read(piece.name, piece.index)
                if stored[piece.name].dtype == "F8_E4M3":
                    values = values.float() * _factors(piece, read, block)
                piece.target.copy_(values)
                done += piece.target.numel()
                if time.monotonic() - said > LINE_EVERY:
                    said = time.monotonic()
                    logger.info(f"Reading weights: {done / total:.0%}, file {i} of {len(by_file)}")


def _factors(piece: Piece, read: Callable[[str, tuple[slice, ...]], Tensor], block: tuple[int, int]) -> Tensor:
    """For each number of an FP8 slice [R, C], the fp32 factor of its block."""
    index = [slice(at.start // size, -(-at.stop // size)) for at, size in zip(piece.index, block)]
    factors = read(piece.name + check.SCALE, tuple(index)).float()
    for dim, (at, size) in enumerate(zip(piece.index, block)):
        factors = factors.repeat_interleave(size, dim).narrow(dim, at.start % size, at.stop - at.start)
    return factors
