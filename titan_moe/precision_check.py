"""The [precision] section: what it names has to exist, and a recipe's blocks of numbers have to tile the model's
matrices. See config_check.py. No torch.

What a backend or a GPU lacks for a recipe is in precision/support.py.
"""

from collections.abc import Iterator, Set

from titan_moe.config import Config
from titan_moe.config_print import literal
from titan_moe.flavors import Flavor
from titan_moe.mesh_check import EP, TP
from titan_moe.precision.layers import kept_layers, linears, named, quantized_layers, quantizes
from titan_moe.precision.recipes import RECIPES

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Recipes that quantize nothing, and the training.mixed_precision_param that they are"""


def check(config: Config, flavor: Flavor, unsound: Set[str] = frozenset()) -> list[str]:
    """What does not fit together in the [precision] section, and between it and the model's sizes, as far as it can be
    told without the keys that are `unsound`."""
    p = config.precision
    found = [*_dtype(config)]
    there = linears(flavor)
    chosen, mistakes = named(p.linears, there)
    found += [
        f'precision.linears: no linear layer of this model is called "{name}"; {hint}'
        for name, hint in mistakes.items()
    ]
    try:
        kept = kept_layers(p.keep_high_precision_layers, flavor.n_layers, flavor.num_mtp_layers)
    except ValueError as problem:
        return [*found, f"precision.keep_high_precision_layers = {literal(p.keep_high_precision_layers)}: {problem}"]
    if not quantizes(config):
        if kept:
            found.append(
                f"precision.keep_high_precision_layers = {literal(p.keep_high_precision_layers)}: leaves layers alone "
                f"that precision.recipe = {literal(p.recipe) if p.recipe else 'none'} does not quantize; leave it out, "
                f"or choose a recipe of {', '.join(RECIPES)}"
            )
        return found
    if not mistakes and "lm_head" not in chosen and not quantized_layers(flavor, chosen, p.experts, kept):
        found.append(_for_nothing(config, chosen))
    if not unsound & {EP, TP}:
        found += _tiles(config, flavor, chosen)
    return found


def _for_nothing(config: Config, chosen: Set[str]) -> str:
    p = config.precision
    start = f'precision.recipe = "{p.recipe}": holds for nothing, because '
    if not p.experts and not chosen:
        why = "precision.experts = false and precision.linears names none; set one of them"
    else:
        why = (
            f"precision.keep_high_precision_layers = {literal(p.keep_high_precision_layers)} leaves no layer that has "
            "something to quantize; keep fewer"
        )
    return f"{start}{why}, or leave the recipe out"


def _dtype(config: Config) -> Iterator[str]:
    recipe, dtype = config.precision.recipe, config.training.mixed_precision_param
    if recipe in DTYPES and dtype != DTYPES[recipe]:
        yield (
            f'precision.recipe = "{recipe}": computes in {DTYPES[recipe]}, but training.mixed_precision_param = '
            f'"{dtype}"; leave one of them out'
        )


def _tiles(config: Config, f: Flavor, names: Set[str]) -> Iterator[str]:
    """Matrices whose sides are no multiples of what the recipe wants. Tensor-parallel ranks have a part of a side."""
    p, degrees = config.precision, config.parallelism
    assert p.recipe is not None
    tp, multiple = degrees.tensor_parallel_degree, RECIPES[p.recipe].multiple
    start = f'precision.recipe = "{p.recipe}": wants sides of matrices that are multiples of {multiple}, but '

    def side(length: int, ranks: int) -> str | None:
        local, rest = divmod(length, ranks)
        if rest or not local % multiple:  # ranks that do not divide it are mesh_check's matter
            return None
        of_rank = f"{length} / tensor_parallel_degree {ranks} = " if ranks > 1 else ""
        return f"{of_rank}{local} = {local // multiple} x {multiple} + {local % multiple}"

    sides: dict[str, list[str]] = {}  # by what is wrong, the layers that have it
    for name in (name for name in linears(f) if name in names):
        linear = linears(f)[name]
        for of, length in (("inputs", linear.inputs), ("outputs", linear.outputs)):
            if found := side(length, tp if linear.cut == of else 1):
                sides.setdefault(f"{found} {of}", []).append(name)
    for found, layers in sides.items():
        has = "has" if len(layers) == 1 else "have"
        yield f"{start}{', '.join(layers)} {has} {found}; change the model's sizes, or precision.linears"
    if p.experts:
        # With expert parallelism tensor ranks hold whole experts.
        ranks = 1 if degrees.expert_parallel_degree > 1 else tp
        for key, length, cut in (("dim", f.dim, 1), ("moe_hidden_dim", f.moe_hidden_dim, ranks)):
            if found := side(length, cut):
                yield f"{start}model.{key} = {found}; change it, or set precision.experts = false"
