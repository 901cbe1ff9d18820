"""What activation offload frees, moves and costs: bytes that one layer keeps on the device for backward, and time.

    python benchmarks/offload.py [--flavors 671B 16B debugmodel] [--tokens 4096] [--repetitions 11] [--json FILE]

Bytes: as in benchmarks/recompute.py, a block's forward in bf16 on a fake GPU with a stand-in for a fused attention
kernel; host memory is not counted. "moves" is what titan_moe/offload_check.py computes without running anything; it is
what the start-up report prints. Latent attention's values are a view of keys and values together, so that they free
more than is moved. One expert-parallel rank, which keeps no expert input.

Time: forward and backward of a model of four layers on this machine's CPU, in fp32, with nothing recomputed; expert
inputs kept as between ranks. Host memory is the same memory there, so that nothing is gained and each copy costs: the
numbers say what the bookkeeping and the copies take, not what a GPU would. All choices run in each repetition, in
random order, on the same weights and tokens; the ratio is the median over repetitions of a choice's time over that of
"none". Gradients are compared bit by bit with those of "none".

Shape letters: T tokens, D model width.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.recompute import Allocations, FusedAttention, checkpointed, show_bytes
from titan_moe import config_file
from titan_moe.attention import documents
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.model import build_model, init_weights, model_config
from titan_moe.offload import Offloader
from titan_moe.offload_blocks import attach
from titan_moe.offload_check import offloaded_bytes

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_out")
CHOICES: dict[str, tuple[str, ...]] = {
    "none": (),
    "layer_input": ("layer_input",),
    **{name: (name,) for name in ATTENTION},
    "all five": ("layer_input", *ATTENTION),
}
TWO_LAYERS = ["train_configs/debug_model.toml", "--model.n_layers=2", "--model.n_dense_layers=1"]
FOUR_LAYERS = ["train_configs/debug_model.toml", "--model.n_layers=4", "--training.mixed_precision_param=float32"]


def wrapped(block: nn.Module, names: tuple[str, ...]) -> Offloader:
    """An offloader around one block, which is no stage's first. Its copies are made when they are waited for."""
    model, offloader = nn.Module(), Offloader(names, torch.device("cpu"))
    model.layers, model.mtp_layers, model.tok_embeddings = nn.ModuleDict({"0": block}), None, nn.Identity()
    attach(offloader, model)
    return offloader


def kept_bytes(config: Config, tokens: int, *, moe: bool) -> int:
    """What one block, MoE or dense, keeps on a GPU between forward and backward in bf16, its input counted."""
    layer = model_config(config).layers[int(moe)]
    layer.attention.inner_attention = FusedAttention.Config()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        block = layer.build()
        for parameter in block.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16)
        positions_BL = torch.zeros(1, tokens, dtype=torch.int64)
        block = checkpointed(block, config)
        offloader = wrapped(block, tuple(config.activation_offload.tensors))
        width = block.attention.dim
        before = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        with Allocations([*block.parameters(), *block.buffers(), positions_BL, before]) as allocated:
            x_BLD = before * 2  # as a layer before it would, nobody else keeps it
            y_BLD = block(x_BLD, None, positions_BL)
            del x_BLD
            offloader.settle()
        return allocated.alive() - y_BLD.untyped_storage().nbytes() - offloader.pool.allocated


def byte_table(flavor: str, tokens: int) -> list[dict]:
    rows: list[dict] = []
    for name, tensors in CHOICES.items():
        row: dict = {"flavor": flavor, "tokens": tokens, "choice": name}
        config = config_file.load(
            [
                *(*TWO_LAYERS, f"--model.flavor={flavor}", f"--training.seq_len={tokens}"),
                *("--training.local_batch_size=1", f"--activation_offload.tensors={','.join(tensors)}"),
            ]
        )
        for kind, moe in {"MoE": True, "dense": False}.items():
            row[kind] = kept_bytes(config, tokens, moe=moe)
            row[f"{kind} frees"] = (rows[0] if rows else row)[kind] - row[kind]
            row[f"{kind} moves"] = sum(offloaded_bytes(config, model_flavor(config), 2, moe=moe).values())
        rows.append(row)
    return rows


def time_table(repetitions: int, tokens: int = 512) -> list[dict]:
    models, offloaders, gradients = {}, {}, {}
    choices = {**CHOICES, "all six": (*CHOICES["all five"], "moe_expert_input")}
    for name, tensors in choices.items():
        config = config_file.load([*FOUR_LAYERS, f"--training.seq_len={tokens}"])
        model = build_model(config).to_empty(device="cpu").train()
        init_weights(model, seed=0)
        model._skip_lm_head = True
        for layer in model.layers.values():
            if layer.moe_enabled:
                layer.moe.routed_experts.dispatcher.regather = None  # keep the rows, as ranks do that exchange them
        offloaders[name] = Offloader(tensors, torch.device("cpu"))
        if tensors:
            attach(offloaders[name], model)
        models[name] = model
    positions_BL = torch.arange(tokens)[None]
    masks = documents(positions_BL)
    times: dict[str, list[float]] = {name: [] for name in models}
    for repetition in range(repetitions + 1):  # the first warms up
        tokens_BL = torch.randint(0, 250, (1, tokens))
        for name in random.sample(list(models), len(models)):
            model = models[name]
            model.zero_grad(set_to_none=True)
            offloaders[name].statistics()
            start = time.perf_counter()
            model(tokens_BL, positions_BL, masks).square().mean().backward()
            if repetition:
                times[name].append(time.perf_counter() - start)
            gradients[name] = [p.grad for p in model.parameters() if p.grad is not None]
    rows = []
    for name, found in times.items():
        told = offloaders[name].statistics()
        wait = told.pop("wait_s")
        rows.append(
            {
                "choice": name,
                "ms": statistics.median(found) * 1e3,
                "ratio": statistics.median(t / base for t, base in zip(found, times["none"])),
                "moved": sum(told.values()),
                "host": offloaders[name].pool.allocated,
                "wait_ms": wait * 1e3,
                "equal": all(map(torch.equal, gradients[name], gradients["none"])),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavors", nargs="*", default=["671B", "16B", "debugmodel"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict]] = {"bytes": [], "time": []}
    for flavor in args.flavors:
        print(f"\n{flavor}, {args.tokens} tokens, bf16; MiB kept on the device per layer, freed, and moved")
        results["bytes"] += (rows := byte_table(flavor, args.tokens))
        show_bytes(rows, "frees", "moves")
    if args.repetitions:
        print("\nfour layers of the debug model, 512 tokens, fp32, forward + backward on this CPU")
        print(f"{'':18}{'time':>9}{'ratio':>8}{'MiB moved':>11}{'MiB on host':>13}{'ms waited':>11}  gradients")
        for row in time_table(args.repetitions):
            results["time"].append(row)
            print(
                f"{row['choice']:18}{row['ms']:6.1f} ms{row['ratio']:8.2f}{row['moved'] / 2**20:11.1f}"
                f"{row['host'] / 2**20:13.1f}{row['wait_ms']:11.1f}  {'equal' if row['equal'] else 'DIFFER'}"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    main()
