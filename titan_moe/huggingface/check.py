"""Whether a Hugging Face folder holds the weights of the configured model. Imports no torch: see launch.py."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_moe.checkpoint_folder import is_hugging_face
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.export_check import has_bias
from titan_moe.flavors import Flavor
from titan_moe.huggingface import folder as hf_folder
from titan_moe.huggingface import model_config
from titan_moe.huggingface.folder import CONFIG, ITEM_BYTES, Stored
from titan_moe.huggingface.names import CORRECTION, Weight, weights, weights_from_dense
from titan_moe.upcycle_check import no_dense_model

SCALE = "_scale_inv"
"""What FP8 files append to a weight's name for its scales"""

SHOWN = 10  # of the problems of one kind


@dataclass(frozen=True, slots=True)
class Found:
    """What a look into a folder tells."""

    problems: list[str]
    """Everything that keeps its weights from being loaded, each behind its key; the rest means something without any"""

    content: dict[str, Any] = field(default_factory=dict)
    """config.json"""

    wanted: list[Weight] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)
    block: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale"""


def problems(config: Config, path: Path) -> list[str]:
    return look(config, path).problems


def look(config: Config, path: Path) -> Found:
    """Read config.json, the index and the header of each file, once."""
    if config.checkpoint.upcycle and not is_hugging_face(path):
        return Found([no_dense_model(str(path))])
    if not config.checkpoint.initial_load_model_only:
        only = "checkpoint.initial_load_model_only = false: a Hugging Face folder has only weights; set it to true"
        return Found([only])
    try:
        content = hf_folder.read_json(path / CONFIG)
    except ValueError as error:
        return Found(_of(path, [str(error)]))
    flavor = model_flavor(config)
    if found := model_config.disagreements(content, config.model.name, flavor, dense=config.checkpoint.upcycle):
        return Found(_of(path, found))  # names and shapes would only say the same again
    block, found = block_size(content)
    stored, broken = hf_folder.tensors(path)
    wanted = wanted_weights(config, content)
    found += _some(broken, "") if broken else tensor_problems(flavor, wanted, stored, block)
    return Found(_of(path, found), content, wanted, stored, block)


def wanted_weights(config: Config, content: Mapping[str, Any]) -> list[Weight]:
    """What is to be read from a folder with this config.json."""
    flavor = model_flavor(config)
    if config.checkpoint.upcycle:
        return weights_from_dense(flavor, tied=bool(content.get("tie_word_embeddings")))
    return weights(flavor, has_bias(config))


def _of(path: Path, problems: list[str]) -> list[str]:
    return [f"checkpoint.initial_load_path = {str(path)!r}: {problem}" for problem in problems]


def _some(found: list[str], what: str) -> list[str]:
    more = len(found) - SHOWN
    return found if more <= 0 else [*found[:SHOWN], f"and {more} more{what}"]


def block_size(content: Mapping[str, Any]) -> tuple[tuple[int, int], list[str]]:
    """Rows and columns that share a scale in a folder with this config.json, and what is wrong with its
    quantization."""
    quantization = content.get("quantization_config") or {}
    method, block = quantization.get("quant_method", "fp8"), quantization.get("weight_block_size", [128, 128])
    sound = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if method == "fp8" and sound and quantization.get("fmt", "e4m3") == "e4m3":
        return (block[0], block[1]), []
    return (128, 128), [
        f"config.json: quantization_config has quant_method = {method!r}, weight_block_size = {block}, fmt = "
        f'{quantization.get("fmt")!r}: only "fp8" in blocks, "e4m3", as DeepSeek publishes, is read; take an '
        "unquantized copy of the model"
    ]


def left_out(flavor: Flavor, wanted: list[Weight], stored: Mapping[str, Stored]) -> tuple[set[str], set[str]]:
    """Of the stored names that no weight has: those of multi-token prediction layers that are not configured, which are
    left out, and those that nothing explains."""
    known = {name for weight in wanted for name in (*weight.names(), *weight.copies)}
    known |= {name + SCALE for name in known}
    rest = {name for name in stored if name not in known and not name.endswith("rotary_emb.inv_freq")}
    beyond = {name for name in rest if _layer(name) >= flavor.n_layers + flavor.num_mtp_layers}
    return beyond, rest - beyond


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdecimal() else -1


def tensor_problems(
    flavor: Flavor, wanted: list[Weight], stored: Mapping[str, Stored], block: tuple[int, int]
) -> list[str]:
    """Missing and unexpected names, shapes and types."""
    missing, other = [], []
    for weight in wanted:
        for name in dict.fromkeys(weight.names()):
            if name not in stored:
                missing.append(name)
                continue
            there = stored[name]
            if there.shape != weight.shape:
                shape = f"{list(there.shape)}, but this configuration needs {weight.explained()}"
                other.append(f"{name} in {there.file} has shape {shape}")
            elif there.dtype not in ITEM_BYTES:
                other.append(f"{name} in {there.file} is of type {there.dtype}; read are {', '.join(ITEM_BYTES)}")
            elif there.dtype == "F8_E4M3":
                other += _scale_problems(name, weight.shape, stored, block)
    if not any(name.endswith(CORRECTION) for name in stored):  # a model without: ours begin with zeros
        missing = [name for name in missing if not name.endswith(CORRECTION)]
    found = []
    if "lm_head.weight" in missing and "model.embed_tokens.weight" in stored:
        missing.remove("lm_head.weight")
        found.append(
            "lm_head.weight is missing: the model's head is tied to its embedding, and this trainer's is a weight of "
            "its own"
        )
    if missing:
        found.append(f"{len(missing)} weights are missing: {_names(missing)}")
    _, unexpected = left_out(flavor, wanted, stored)
    biases = {name for name in unexpected if name.endswith(CORRECTION)}
    if biases:
        found.append(
            f"{_names(sorted(biases))}: moe.load_balance_coeff = 0 leaves no place for the router bias that this model "
            "was trained with; set it, as small as you like"
        )
    if unexpected := unexpected - biases:
        found.append(f"{len(unexpected)} tensors belong to no weight of this model: {_names(sorted(unexpected))}")
    return found + _some(other, " tensors of other shapes or types")


def _scale_problems(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], block: tuple[int, int]
) -> list[str]:
    scale = stored.get(name + SCALE)
    if scale is None:
        return [f"{name} is in FP8, and {name}{SCALE}, its scales, is missing"]
    blocks = tuple(math.ceil(size / of) for size, of in zip(shape, block))
    if len(shape) == 2 and scale.shape == blocks and scale.dtype in ITEM_BYTES:
        return []
    return [
        f"{name}{SCALE} in {scale.file} has shape {list(scale.shape)}, but {list(shape)} in blocks of {list(block)} "
        f"need {list(blocks)}"
    ]


def _names(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
