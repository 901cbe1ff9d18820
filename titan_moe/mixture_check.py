"""What has to hold in a mixture: of each entry by itself, and between the weights.

A shard takes its samples in blocks (mixture.py), and a block has to be long enough for the lightest source. Imports
nothing but the schema.
"""

import math
import re
from collections.abc import Sequence
from math import ceil

from titan_moe.config import DataSource, ValidationSet

MIN_BLOCK, MAX_BLOCK = 1 << 10, 1 << 20
POINTS = 16  # of the lightest source in a block, so that it comes up regularly


def block_size(weights: Sequence[float]) -> int:
    """N: a power of two in which the lightest source has enough points."""
    if problem := _too_light(weights):
        raise ValueError(problem)
    return max(MIN_BLOCK, 1 << ceil(POINTS * sum(weights) / min(weights) - 1).bit_length())


def check(mixture: Sequence[DataSource]) -> list[str]:
    """Everything that is wrong with a mixture; empty when nothing is."""
    found = [problem for i, source in enumerate(mixture) for problem in check_entry(i, source)]
    weights = [source.weight for source in mixture]
    if mixture and all(0 < weight < math.inf for weight in weights) and (problem := _too_light(weights)):
        found.append(problem)
    return found


def check_entry(i: int, source: DataSource) -> list[str]:
    """What is wrong with entry `i`, whatever the others are."""
    entry, found = f"training.mixture[{i}]", []
    if not source.dataset:
        found.append(f'{entry}.dataset = "": must name a dataset, for example "python_stdlib"')
    if not 0 < source.weight < math.inf:
        found.append(
            f"{entry}.weight = {source.weight}: must be greater than 0 and finite, a share relative to the other "
            "entries"
        )
    return found


def check_sets(sets: Sequence[ValidationSet]) -> list[str]:
    """What is wrong with validation.sets: their names are part of those of quantities in logs."""
    found, first = [], dict[str, int]()
    for i, each in enumerate(sets):
        entry = f"validation.sets[{i}]"
        if not re.fullmatch(r"[\w.+-]{1,60}", each.name):
            found.append(f'{entry}.name = "{each.name}": must have 1 to 60 letters, digits or any of _ . + -')
        elif first.setdefault(each.name, i) != i:
            found.append(
                f'{entry}.name = "{each.name}": is also validation.sets[{first[each.name]}].name; give each its own'
            )
        if not each.dataset:
            found.append(f'{entry}.dataset = "": must name a dataset, for example "python_stdlib"')
    return found


def _too_light(weights: Sequence[float]) -> str | None:
    """Why no block is long enough for the lightest source; None if one is."""
    total, least, most = sum(weights), min(weights), max(weights)
    if not math.isfinite(POINTS * total):
        return (
            f"training.mixture[{weights.index(most)}].weight = {most}: {POINTS} times the sum of the weights is no "
            "finite number; only shares count, so divide all weights by one number"
        )
    if POINTS * total / least <= MAX_BLOCK:
        return None
    return (
        f"training.mixture[{weights.index(least)}].weight = {least}: is {least / total:.2g} of the sum {total}, fewer "
        f"than {POINTS} samples in {MAX_BLOCK:,}; give it more weight, or leave it out"
    )
