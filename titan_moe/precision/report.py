"""What the start-up report says about low precision: where it holds, and the bytes that it saves for backward."""

import titan_moe.runtime  # noqa: F401

import torch

from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.flavors import Flavor
from titan_moe.mesh_check import microbatch_size, region_tokens
from titan_moe.precision.backend import backend_of_linears
from titan_moe.precision.layers import GROUPS, Chosen, chosen, linears
from titan_moe.precision.recipes import Format


def precision_report(config: Config) -> list[str]:
    """Nothing where no recipe quantizes."""
    flavor = model_flavor(config)
    low = chosen(config, flavor)
    if low is None:
        return []
    what = ["routed experts"] if low.experts else []
    for group in (*GROUPS, "eh_proj", "lm_head"):
        of_group = {name for name in linears(flavor) if name.split(".")[0] == group}
        if of_group and of_group <= low.linears:
            what.append(group)
        else:
            what += sorted(of_group & low.linears)
    line = f"Precision: GEMMs in {low.recipe.name} of {', '.join(what)}"
    if low.kept:
        line += f"; layers {', '.join(map(str, sorted(low.kept)))} stay in {config.training.mixed_precision_param}"
    lines = [line]
    if low.linears:
        by, why = backend_of_linears(config, flavor, low)
        lines.append(f"Precision: linear layers {'by Transformer Engine' if by == 'te' else by} ({why})")
    if config.activation_checkpoint.mode == "none":
        quantized, plain = kept_bytes(config, flavor, low)
        if not plain:  # all of them are there anyway, or made again
            return lines
        less, kept = (f"{size / 2**20:,.2f} MiB" for size in (plain - quantized, quantized))
        lines.append(
            f"Precision: an MoE layer keeps the inputs of these GEMMs for backward in {low.recipe.name}, {kept} of a "
            f"microbatch, which is {less} less than in {config.training.mixed_precision_param}"
        )
    return lines


def kept_bytes(config: Config, flavor: Flavor, low: Chosen) -> tuple[int, int]:
    """Of one MoE layer and microbatch, what wgrads keep: (as quantized, as it would be unquantized). Rows that experts
    receive are counted at an even load, where they are kept at all: with expert parallelism."""
    p = config.parallelism
    tp = p.tensor_parallel_degree
    tokens = microbatch_size(config) * config.training.seq_len // p.context_parallel_degree
    remade = REMADE | ({"attention_norm": {"mla_up_proj"}, "ffn_norm": {"shared_expert"}} if tp > 1 else {})
    widths = {}  # by what makes them, so that a tensor counts once
    for name, linear in linears(flavor).items():
        had_anyway = name in low.kept_inputs or not remade[linear.takes].isdisjoint(
            config.activation_checkpoint.recompute
        )
        if name in low.linears and name.split(".")[0] in ("attention", "shared_experts") and not had_anyway:
            widths[linear.takes] = linear.inputs // (tp if linear.cut == "inputs" else 1)
    numbers = tokens * sum(widths.values())
    if low.experts and p.expert_parallel_degree > 1:
        numbers += region_tokens(config) * flavor.top_k * flavor.dim
    itemsize = getattr(torch, config.training.mixed_precision_param).itemsize
    return round(numbers * bytes_per_number(low.recipe.wgrad_x)), numbers * itemsize


REMADE: dict[str, set[str]] = {
    "attention_norm": {"norms"},
    "q_norm": {"norms", "mla_up_proj"},
    "kv_norm": {"norms", "mla_up_proj"},
    "kernel": set(),
    "ffn_norm": {"norms", "shared_expert"},
    "swiglu": {"swiglu", "shared_expert"},
    "cat": set(),
    "norm": set(),
}
"""By what makes an input, the parts of activation_checkpoint.recompute that have it in backward anyway"""


def bytes_per_number(fmt: Format) -> float:
    """Of a stored tensor: the element and its share of a block's scale."""
    scale = {"fp32": 4, "pow2": 4, "e8m0": 1, "e4m3": 1}[fmt.scale]
    across, along = fmt.block or (0, 0)
    return (0.5 if fmt.element == "e2m1" else 1.0) + (scale / (across * along) if fmt.block else 0.0)
