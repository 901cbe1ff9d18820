"""What activation checkpointing costs and saves: bytes that one block keeps for backward, and time.

    python benchmarks/recompute.py [--flavors 671B 16B debugmodel] [--tokens 4096] [--sizes debug wide]
                                   [--repetitions 11] [--json FILE]

Bytes: a block's forward in bf16 on a fake GPU (torch's FakeTensorMode: every operation's shapes, no numbers), so that a
layer of any size fits. Counted is all memory that an operation allocated and that is still held when forward is over,
each storage once; parameters and the block's output are not counted, its input is. Attention is a stand-in that keeps
what every fused kernel does: q, k, v, its output and the log-sum-exp. One expert-parallel rank: with more, each mode
also keeps the rows received (moe.redispatch). "shapes" is what titan_moe/recompute_facts.py computes without running
anything; it is what the start-up report prints.

Time: forward and backward of one MoE block on this machine's CPU, in fp32. All choices run in each repetition,
in random order, each on tokens drawn for it alone; the ratio is the median over repetitions of a choice's time over
that of "none".

Shape letters: T tokens, D model width.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.protocols.module import Module

from titan_moe import config_file
from titan_moe.attention import documents
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.model import model_config
from titan_moe.recompute import checkpointing
from titan_moe.recompute_facts import saved_bytes

PARTS = ("norms", "mla_up_proj", "swiglu", "shared_expert")
CHOICES = {
    "none": ["--activation_checkpoint.mode=none"],
    **{
        name: ["--activation_checkpoint.mode=none", f"--activation_checkpoint.recompute={parts}"]
        for name, parts in {**{part: part for part in PARTS}, "all four": ",".join(PARTS)}.items()
    },
    "selective": ["--activation_checkpoint.mode=selective"],
    "full": ["--activation_checkpoint.mode=full"],
}
TWO_LAYERS = ["train_configs/debug_model.toml", "--model.n_layers=2", "--model.n_dense_layers=1"]
SIZES = {  # T and what replaces the debug model's sizes
    "debug": (512, []),
    "wide": (
        512,
        [
            *("--model.dim=1024", "--model.moe_hidden_dim=512", "--model.num_experts=16", "--model.top_k=4"),
            *("--model.q_lora_rank=256", "--model.kv_lora_rank=128"),
        ],
    ),
}


class Allocations(TorchDispatchMode):
    """Memory that operations allocate, but for that of `known` tensors."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self.found: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.found.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> int:
        """Bytes of it that something still holds."""
        gc.collect()
        return sum(size for ref, size in self.found.items() if ref not in self.known and not ref.expired())


class FusedAttention(Module):
    """An attention kernel by what it keeps; it computes nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(self, q, k, v, *, attention_masks=None, scale=None):
        return _Kept.apply(q, k, v)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out


def checkpointed(block: nn.Module, config: Config) -> nn.Module:
    """The block as it is in a model with this configuration's activation checkpointing."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    policy = checkpointing(config)
    if policy is not None:
        policy.build(dump_folder="").apply(model)
    return model.layers["0"]


def kept_bytes(config: Config, tokens: int, *, moe: bool) -> int:
    """What one block, MoE or dense, keeps between forward and backward in bf16 on a GPU."""
    layer = model_config(config).layers[int(moe)]
    layer.attention.inner_attention = FusedAttention.Config()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        block = layer.build()
        for parameter in block.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16)
        x_BLD = torch.empty(1, tokens, block.attention.dim, dtype=torch.bfloat16, requires_grad=True)
        positions_BL = torch.zeros(1, tokens, dtype=torch.int64)
        block = checkpointed(block, config)
        with Allocations([*block.parameters(), *block.buffers(), positions_BL]) as allocated:
            y_BLD = block(x_BLD.view_as(x_BLD), None, positions_BL)
        return allocated.alive() - y_BLD.untyped_storage().nbytes()


def byte_table(flavor: str, tokens: int) -> list[dict]:
    rows: list[dict] = []
    for name, options in CHOICES.items():
        row: dict = {"flavor": flavor, "tokens": tokens, "choice": name}
        for kind, moe in {"MoE": True, "dense": False}.items():
            config = config_file.load(
                [*TWO_LAYERS, f"--model.flavor={flavor}", f"--training.seq_len={tokens}", *options]
            )
            row[kind] = kept_bytes(config, tokens, moe=moe)
            row[f"{kind} saves"] = (rows[0] if rows else row)[kind] - row[kind]
            parts = config.activation_checkpoint.recompute
            row[f"{kind} shapes"] = saved_bytes(model_flavor(config), tokens, 2, parts, moe=moe) if parts else None
        rows.append(row)
    return rows


def show_bytes(rows: list[dict], *columns: str) -> None:
    """In MiB, of an MoE and a dense layer: what each row says it keeps, and its number in each column."""
    kinds, widths = ("MoE", "dense"), (10, 9, 9, 11, 9, 9)

    def show(first: str, texts: list[str]) -> None:
        print(f"{first:14}" + "".join(f"{text:>{width}}" for text, width in zip(texts, widths)))

    show("", [head for kind in kinds for head in (kind, *columns)])
    for row in rows:
        numbers = [row[key] for kind in kinds for key in (kind, *(f"{kind} {column}" for column in columns))]
        show(row["choice"], ["-" if number is None else f"{number / 2**20:,.1f}" for number in numbers])


def time_table(size: str, repetitions: int) -> list[dict]:
    tokens, sizes = SIZES[size]
    blocks = {}
    for name, options in CHOICES.items():
        config = config_file.load([*TWO_LAYERS, *sizes, f"--training.seq_len={tokens}", *options])
        block = model_config(config).layers[1].build()
        block.init_states()
        blocks[name] = checkpointed(block, config)
    positions_BL = torch.arange(tokens)[None]
    masks = documents(positions_BL)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for repetition in range(repetitions + 1):  # the first warms up
        for name in random.sample(list(blocks), len(blocks)):
            block = blocks[name]
            block.zero_grad(set_to_none=True)
            x_BLD = torch.randn(1, tokens, model_flavor(config).dim, requires_grad=True)
            grad_BLD = torch.randn_like(x_BLD)
            start = time.perf_counter()
            block(x_BLD, masks, positions_BL).backward(grad_BLD)
            if repetition:
                times[name].append(time.perf_counter() - start)
    return [
        {
            "size": size,
            "choice": name,
            "ms": statistics.median(found) * 1e3,
            "ratio": statistics.median(t / base for t, base in zip(found, times["none"])),
        }
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavors", nargs="*", default=["671B", "16B", "debugmodel"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict]] = {"bytes": [], "time": []}
    for flavor in args.flavors:
        print(f"\n{flavor}, {args.tokens} tokens, bf16; MiB kept per layer, saved, and saved by shapes")
        results["bytes"] += (rows := byte_table(flavor, args.tokens))
        show_bytes(rows, "saves", "shapes")
    for size in args.sizes:
        print(f"\n{size}, {SIZES[size][0]} tokens, fp32, forward + backward of one MoE block on this CPU")
        for row in time_table(size, args.repetitions):
            results["time"].append(row)
            print(f"{row['choice']:14}{row['ms']:9.1f} ms{row['ratio']:8.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    main()
