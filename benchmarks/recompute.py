"""What activation checkpointing costs and saves: bytes that one block keeps for backward, and time.

Bytes: a block's forward in bf16 on a fake GPU (torch's FakeTensorMode: every operation's shapes, no numbers), so that a
layer of any size fits. Counted is all memory that an operation allocated and that is still held when forward is over,
each storage once; parameters and the block's output are not counted, its input is. Attention is a stand-in that keeps
what every fused kernel does: q, k, v, its output and the log-sum-exp. One expert-parallel rank: with more, each mode
also keeps the rows received (moe.redispatch). "shapes" is what titan_moe/recompute_facts.py computes without running
anything; it is what the start-up report prints.

Time: forward and backward of one MoE block on this machine's CPU, in fp32. The `offload` suite shows both.

Shape letters: T tokens, D model width.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.protocols.module import Module

from benchmarks.harness import Times, interleaved
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
    "smallest": (64, []),
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


@contextmanager
def fake_block(config: Config, tokens: int, *, moe: bool) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """On a fake GPU: a block, MoE or dense, with bf16 weights and this configuration's checkpointing; x_BLD, a leaf;
    positions_BL."""
    layer = model_config(config).layers[int(moe)]
    layer.attention.inner_attention = FusedAttention.Config()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        block = layer.build()
        for parameter in block.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16)
        x_BLD = torch.empty(1, tokens, block.attention.dim, dtype=torch.bfloat16, requires_grad=True)
        positions_BL = torch.zeros(1, tokens, dtype=torch.int64)
        yield checkpointed(block, config), x_BLD, positions_BL


def kept_bytes(config: Config, tokens: int, *, moe: bool) -> int:
    """What one block keeps between forward and backward in bf16 on a GPU."""
    with fake_block(config, tokens, moe=moe) as (block, x_BLD, positions_BL):
        with Allocations([*block.parameters(), *block.buffers(), positions_BL]) as allocated:
            y_BLD = block(x_BLD.view_as(x_BLD), None, positions_BL)
        return allocated.alive() - y_BLD.untyped_storage().nbytes()


def byte_table(flavor: str, tokens: int, choices: Iterable[str] = tuple(CHOICES)) -> list[dict]:
    rows: list[dict] = []
    for name in choices:
        options = CHOICES[name]
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


def time_table(size: str, repetitions: int, budget_s: float, choices: Iterable[str] = tuple(CHOICES)) -> Times:
    """Forward and backward of one MoE block, by choice."""
    tokens, sizes = SIZES[size]
    blocks = {}
    for name in choices:
        options = CHOICES[name]
        config = config_file.load([*TWO_LAYERS, *sizes, f"--training.seq_len={tokens}", *options])
        block = model_config(config).layers[1].build()
        block.init_states()
        blocks[name] = checkpointed(block, config)
    positions_BL = torch.arange(tokens)[None]
    masks, width = documents(positions_BL), model_flavor(config).dim

    def prepare(block: nn.Module) -> Callable[[], object]:
        block.zero_grad(set_to_none=True)
        x_BLD = torch.randn(1, tokens, width, requires_grad=True)
        grad_BLD = torch.randn_like(x_BLD)
        return lambda: block(x_BLD, masks, positions_BL).backward(grad_BLD)

    variants = {name: (lambda block=block: prepare(block)) for name, block in blocks.items()}
    return interleaved(variants, repetitions, warm_up=1, budget_s=budget_s)
