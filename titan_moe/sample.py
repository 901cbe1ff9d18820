"""Text from a checkpoint of a run, to see what the model has learnt.

    python -m titan_moe.sample RUN [--step N] [--prompt TEXT] [--tokens N] [--temperature T] [--top-p P] [--seed S]

One process on a CPU, in float32, whatever ranks, mesh and precision the run has. No serving engine: each token runs the
whole text before it through the model again, so N tokens cost as much as N forward passes.

A text is what the run was trained on: one document, which begins with the tokenizer's bos, if it has one, and is over
at eos. Greedy without a temperature; with one, softmax(logits / T), of which --top-p keeps the likeliest tokens that
together have at least that probability.

Shape letters: B batch (1), L sequence, D model width, V vocabulary.
"""

if __name__ == "__main__":
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: what builds the model asks what device there is

import argparse
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from titan_moe import checkpoint_folder
from titan_moe.attention import documents
from titan_moe.checkpoint_folder import Damaged
from titan_moe.checkpoint_io import Reader, SafeLoadPlanner, read_metadata
from titan_moe.config import Config, MoE
from titan_moe.config_check import model_flavor
from titan_moe.convert import configuration, require_undamaged
from titan_moe.families import Model
from titan_moe.model import build_model, init_weights
from titan_moe.sources.piece import Fault
from titan_moe.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m titan_moe.sample", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--step", type=int, help="of the checkpoint; left out: the newest")
    parser.add_argument("--prompt", default="", help="what the text begins with; left out: only the tokenizer's bos")
    parser.add_argument("--tokens", type=int, default=100, help="how many at most; a text may be over before")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of the probability that is drawn from; 1: all")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--verify", choices=["full", "size", "none"], default="full", help="as checkpoint.verify")
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # to stderr: the text alone goes to stdout
    try:
        text = sample(
            arguments.run,
            arguments.step,
            os.fsencode(arguments.prompt),
            arguments.tokens,
            choice(arguments.temperature, arguments.top_p, arguments.seed),
            arguments.verify,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        sys.stdout.buffer.write(text.encode() + b"\n")  # any text, whatever the locale
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def sample(
    run: Path, step: int | None, prompt: bytes, count: int, choose: Callable[[Tensor], int], verify: str = "full"
) -> str:
    """The prompt and what follows it, at most `count` tokens. Raises ValueError if there is no whole checkpoint, or the
    text has no room in the model."""
    if count < 1:
        raise ValueError(f"--tokens = {count}: must be at least 1")
    folder, config = find(run, step)
    tokenizer = build_tokenizer(config.model.hf_assets_path, model_flavor(config).vocab_size)
    tokens = encode(tokenizer, prompt)
    length, longest = len(tokens) + count, model_flavor(config).max_seq_len
    if length > longest:
        raise ValueError(
            f"{len(tokens)} tokens of prompt and --tokens = {count} are {length}, and the model's rotary table ends at "
            f"model.max_seq_len = {longest}; shorten one of them"
        )
    require_undamaged(folder, verify)
    model = load(config, folder, length)
    drawn = [*continuation(model, tokens, count, choose, tokenizer)]
    how = "it ended itself" if len(drawn) < count else "as many as asked for"
    logger.info(f"{folder}: {len(tokens)} tokens of prompt, {len(drawn)} more, {how}")
    return tokenizer.decode([*tokens, *drawn])


def find(run: Path, step: int | None) -> tuple[Path, Config]:
    """The checkpoint's folder and the run's configuration."""
    if not (run / "config.toml").is_file():
        raise ValueError(f"{run} is no run folder: it has no config.toml; name the folder that the run says it is in")
    config = configuration(run / "config.toml")
    checkpoints = run / config.checkpoint.folder
    there = checkpoint_folder.steps(checkpoints)
    if not there:
        raise ValueError(f"{checkpoints} holds no checkpoint: a run saves them with checkpoint.enable = true")
    if step is not None and step not in there:
        raise ValueError(f"--step = {step}: {checkpoints} has steps {there[::-1]}; choose one, or leave it out")
    return checkpoint_folder.step_folder(checkpoints, there[0] if step is None else step), config


def encode(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """As a document of the training begins; raises ValueError if it has no tokens, or some that there are none for."""
    bos = tokenizer.bos_id is not None
    (tokens,) = tokenizer.encode([prompt], bos, eos=False)
    if isinstance(tokens, Fault):
        raise ValueError(f"--prompt {tokens.reason}")
    if not len(tokens):
        raise ValueError("--prompt: is empty, and the tokenizer has no bos token for a text to begin with; give one")
    return tokens.tolist()


def load(config: Config, folder: Path, length: int) -> Model:
    """The run's model on this CPU with the weights of the checkpoint, for texts of at most `length` tokens. It returns
    hidden states."""
    alone = Config(model=replace(config.model, num_mtp_layers=0))  # a text needs none of their weights
    alone.moe = MoE(load_balance_coeff=config.moe.load_balance_coeff)  # whether routers have a bias
    alone.training.seq_len, alone.training.mixed_precision_param = length, "float32"
    model = build_model(alone)
    try:
        metadata = read_metadata(folder)
    except Damaged as damage:
        raise ValueError(f"The checkpoint {folder} cannot be read: {damage}") from damage
    require_same_tensors(model, metadata, folder)  # before they take memory
    model.to_empty(device="cpu").eval()
    init_weights(model, seed=0)  # for what no checkpoint holds: rotary tables
    state = model.state_dict()
    try:
        with warnings.catch_warnings():  # that this is not distributed
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=Reader(folder, metadata), planner=SafeLoadPlanner(), no_dist=True)
    except CheckpointException as failure:
        (cause, _), *_ = failure.failures.values()
        raise ValueError(
            f"The checkpoint {folder} cannot be read: {cause!r}; choose another with --step. Without --verify none all "
            "of it is read beforehand"
        ) from failure
    model.load_state_dict(state)
    model._skip_lm_head = True
    return model


def require_same_tensors(model: Model, metadata: Metadata, folder: Path) -> None:
    """Raises ValueError for a checkpoint that lacks one of the model, or has it in another shape."""
    for name, tensor in model.state_dict().items():
        stored = getattr(metadata.state_dict_metadata.get(name), "size", None)
        if stored != tensor.shape:
            has = "no tensor of that name" if stored is None else f"{list(stored)}"
            raise ValueError(
                f"The checkpoint {folder} is not of the model in its run's config.toml: {name} is "
                f"{list(tensor.shape)} there, and the checkpoint has {has}; bring back the config.toml of this run"
            )


@torch.no_grad()
def continuation(
    model: Model, tokens: list[int], count: int, choose: Callable[[Tensor], int], tokenizer: Tokenizer
) -> Iterator[int]:
    """At most `count` tokens behind `tokens`, up to eos, which is not among them."""
    assert model.lm_head is not None
    tokens_BL = torch.tensor([tokens])
    for _ in range(count):
        positions_BL = torch.arange(tokens_BL.shape[1])[None]
        h_BLD = model(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL))
        logits_V = model.lm_head(h_BLD[:, -1:])[0, 0, : tokenizer.vocab_size]  # a head can have more rows
        if not logits_V.isfinite().all():
            raise ValueError(
                f"After {tokens_BL.shape[1]} tokens the model's logits are not finite: its weights are not, or "
                "training had diverged; choose an earlier checkpoint with --step"
            )
        token = choose(logits_V)
        if token == tokenizer.eos_id:
            return
        yield token
        tokens_BL = torch.cat([tokens_BL, torch.tensor([[token]])], dim=1)


def choice(temperature: float, top_p: float, seed: int) -> Callable[[Tensor], int]:
    """How a token is taken from logits [V]. Raises ValueError for numbers that say nothing."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature = {temperature}: must be at least 0 and finite")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p = {top_p}: must be greater than 0 and at most 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed = {seed}: must lie in 0 .. 2**63 - 1")
    generator = torch.Generator().manual_seed(seed)

    def choose(logits_V: Tensor) -> int:
        if temperature == 0:
            return int(logits_V.argmax())
        below_V = logits_V.double() - logits_V.max()  # so that no temperature is too small to divide by
        sorted_V, order_V = (below_V / temperature).softmax(0).sort(descending=True)
        before_V = sorted_V.cumsum(0) - sorted_V
        kept_V = sorted_V * (before_V < top_p)
        return int(order_V[torch.multinomial(kept_V, 1, generator=generator)])

    return choose


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
