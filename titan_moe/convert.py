"""A checkpoint as a folder for Hugging Face's libraries.

    python -m titan_moe.convert RUN/checkpoint/step-N --to hf OUT [--dtype bfloat16]

OUT is complete or not there. The run's config.toml, in the folder above the checkpoints, says what model it is; every
file of the checkpoint is verified first. One process, on a CPU, with memory for the largest parameter. The other way
round needs no conversion: checkpoint.initial_load_path takes a Hugging Face folder.
"""

import argparse
import sys
from pathlib import Path

import titan_moe.runtime  # noqa: F401

import torch
from torchtitan.tools.logging import init_logger, logger

from titan_moe import checkpoint_folder, config_file
from titan_moe.checkpoint_folder import Damaged, ForeignFormat
from titan_moe.config import Config
from titan_moe.huggingface import export

DTYPES = [str(dtype).removeprefix("torch.") for dtype in export.DTYPES]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m titan_moe.convert", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of a run, RUN/checkpoint/step-N")
    parser.add_argument("out", type=Path, help="the folder to write, which must not be there")
    parser.add_argument("--to", choices=["hf"], required=True, help="hf: safetensors, config.json, tokenizer")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights; left out: as in the checkpoint")
    parser.add_argument("--verify", choices=["full", "size", "none"], default="full", help="as checkpoint.verify")
    arguments = parser.parse_args(argv)
    init_logger()
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    try:
        convert(arguments.checkpoint, arguments.out, dtype, arguments.verify)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def convert(checkpoint: Path, out: Path, dtype: torch.dtype | None, verify: str = "full") -> None:
    """Raises ValueError if the checkpoint is not as it was written, or `out` is there."""
    if problem := checkpoint_folder.misnamed(checkpoint):
        raise ValueError(f"{checkpoint} {problem}")
    if out.exists():
        raise ValueError(f"{out} is there already: name a folder that is not")
    config = configuration(checkpoint)
    require_undamaged(checkpoint, verify)
    out.parent.mkdir(parents=True, exist_ok=True)
    export.export(config, checkpoint, out, dtype)


def require_undamaged(checkpoint: Path, verify: str) -> None:
    """Raises ValueError if the checkpoint is not as it was written, as far as checkpoint.verify = `verify` looks."""
    if verify == "none":
        return
    try:
        files = checkpoint_folder.read_manifest(checkpoint).files
        checkpoint_folder.check_sizes(checkpoint, files)
    except (Damaged, ForeignFormat) as damage:
        raise ValueError(f"The checkpoint {checkpoint} is damaged: {damage}; --verify none takes it anyway") from damage
    if verify == "full":
        logger.info(f"Verifying {len(files)} files of {checkpoint}")
        if problem := checkpoint_folder.check_hashes(checkpoint, files):
            raise ValueError(f"The checkpoint {checkpoint} is damaged: {problem}; --verify none takes it anyway")


def configuration(checkpoint: Path) -> Config:
    """Of the run that a checkpoint is in."""
    for folder in checkpoint.absolute().parents:
        if (folder / "config.toml").is_file():
            return config_file.load([str(folder / "config.toml")])
    raise ValueError(
        f"{checkpoint} is in no run folder: no config.toml above it says what model it is of; put that of its run there"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
