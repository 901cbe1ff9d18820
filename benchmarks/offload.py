"""Activation checkpointing and offload: bytes that one layer keeps on the device for backward, and time.

Bytes: a block's forward in bf16 on a fake GPU (recompute.py says how), so that layers of any size fit; of offload host
memory is not counted. They are set against a block that neither recomputes nor offloads. "by shapes" and "moves" are
what titan_moe/recompute_facts.py and offload_check.py compute without running anything, and what the start-up report
prints. Latent attention's values are a view of keys and values together, so that they free more than is moved. One
expert-parallel rank, which keeps no expert input; "kept" counts a block's input.

Time: forward and backward on this machine's CPU in fp32, of one MoE block with a choice of recompute, and of four
layers with a choice of offload, expert inputs kept as between ranks. Host memory is the same memory there, so that
nothing is gained and each copy costs: the numbers say what bookkeeping and copies take, not what a GPU would. Offloaded
gradients must equal, bit for bit, those without.

Shape letters: T tokens, D model width.
"""

from collections.abc import Callable, Iterable, Iterator

import titan_moe.runtime  # noqa: F401

import torch
from torch import nn

from benchmarks import recompute
from benchmarks.harness import Options, Record, Times, interleaved, versus
from benchmarks.recompute import TWO_LAYERS, Allocations, fake_block
from titan_moe import config_file
from titan_moe.attention import documents
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.model import build_model, init_weights
from titan_moe.offload import Offloader
from titan_moe.offload_blocks import attach
from titan_moe.offload_check import offloaded_bytes

SUITE = "offload"
MIB = 2**20
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_out")
CHOICES: dict[str, tuple[str, ...]] = {
    "none": (),
    "layer_input": ("layer_input",),
    **{name: (name,) for name in ATTENTION},
    "all five": ("layer_input", *ATTENTION),
}
FOUR_LAYERS = ["train_configs/debug_model.toml", "--model.n_layers=4", "--training.mixed_precision_param=float32"]


def wrapped(block: nn.Module, names: tuple[str, ...]) -> Offloader:
    """An offloader around one block, which is no stage's first. Its copies are made when they are waited for."""
    model, offloader = nn.Module(), Offloader(names, torch.device("cpu"))
    model.layers, model.mtp_layers, model.tok_embeddings = nn.ModuleDict({"0": block}), None, nn.Identity()
    attach(offloader, model)
    return offloader


def kept_bytes(config: Config, tokens: int, *, moe: bool) -> int:
    """What one block, MoE or dense, keeps on a GPU between forward and backward in bf16, its input counted."""
    with fake_block(config, tokens, moe=moe) as (block, before, positions_BL):
        offloader = wrapped(block, tuple(config.activation_offload.tensors))
        with Allocations([*block.parameters(), *block.buffers(), positions_BL, before]) as allocated:
            x_BLD = before * 2  # as a layer before it would, nobody else keeps it
            y_BLD = block(x_BLD, None, positions_BL)
            del x_BLD
            offloader.settle()
        return allocated.alive() - y_BLD.untyped_storage().nbytes() - offloader.pool.allocated


def byte_table(flavor: str, tokens: int, choices: Iterable[str] = tuple(CHOICES)) -> list[dict]:
    rows: list[dict] = []
    for name in choices:
        tensors = CHOICES[name]
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


def time_table(tokens: int, repetitions: int, budget_s: float, choices: Iterable[str]) -> tuple[Times, dict[str, int]]:
    """Forward and backward of four layers, by choice; and bytes that each moves."""
    models, offloaders, gradients = {}, {}, {}
    for name in (*choices, "all six"):
        tensors = (*CHOICES["all five"], "moe_expert_input") if name == "all six" else CHOICES[name]
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
    tokens_BL = torch.randint(0, 250, (1, tokens))

    def prepare(name: str) -> Callable[[], object]:
        models[name].zero_grad(set_to_none=True)
        offloaders[name].statistics()
        return lambda: models[name](tokens_BL, positions_BL, masks).square().mean().backward()

    times = interleaved(
        {name: (lambda name=name: prepare(name)) for name in models}, repetitions, warm_up=1, budget_s=budget_s
    )
    for name, model in models.items():
        gradients[name] = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, gradients[name], gradients["none"])), f"offloading {name} changes gradients"
    moved = {}
    for name, offloader in offloaders.items():
        told = offloader.statistics()
        moved[name] = sum(value for key, value in told.items() if key != "wait_s")
    return times, moved


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def measure(options: Options) -> Iterator[Record]:
    tokens = options.pick(256, 4096, 4096)
    recomputes = options.pick(["none", "norms"], list(recompute.CHOICES), list(recompute.CHOICES))
    offloads = options.pick(["none", "all five"], list(CHOICES), list(CHOICES))
    for flavor in options.pick(["debugmodel"], ["671B"], ["671B", "16B", "debugmodel"]):
        for what, rows, told in (
            ("recompute", recompute.byte_table(flavor, tokens, recomputes), "shapes"),
            ("offload", byte_table(flavor, tokens, offloads), "moves"),
        ):
            yield from bytes_of(f"{flavor}, {tokens} tokens, {what}", rows, told)
    repetitions, budget_s = options.pick((2, 1.0), (9, 5.0), (31, 60.0))
    for size in options.pick(["smallest"], ["debug", "wide"], ["debug", "wide"]):
        times = recompute.time_table(size, repetitions, budget_s, recomputes)
        for name in times.seconds:
            yield record(f"{size} block, recompute {name}", "time", unit="ms", **times.against(name, "none"))
    times, moved = time_table(options.pick(64, 512, 512), repetitions, budget_s, offloads)
    for name in times.seconds:
        yield record(f"four layers, offload {name}", "time", unit="ms", **times.against(name, "none"))
        yield record(f"four layers, offload {name}", "moved", value=moved[name] / MIB, unit="MiB")


def bytes_of(case: str, rows: list[dict], told: str) -> Iterator[Record]:
    """What each choice keeps, against the first."""
    for row in rows:
        for kind in ("MoE", "dense"):
            kept = versus(row[kind] / MIB, rows[0][kind] / MIB) | {"against": rows[0]["choice"]}
            yield record(f"{case} {row['choice']}", f"{kind} layer keeps", value=row[kind] / MIB, unit="MiB", **kept)
            if row[f"{kind} {told}"]:
                metric = f"{kind} layer {'saves by shapes' if told == 'shapes' else 'moves'}"
                yield record(f"{case} {row['choice']}", metric, value=row[f"{kind} {told}"] / MIB, unit="MiB")
