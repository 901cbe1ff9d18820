"""How the load of the experts moved: per MoE layer a grid of experts x steps, small enough for a page.

A cell says what an expert got over the mean of its layer, as one byte on a logarithmic scale, which treats twice as
much and half as much alike: 0 for an expert that got nothing, 1 to 255 from 1/16 to 16 times the mean, 128 for the
mean. One step of the scale is 2.2 %. Lines are merged, by adding up their counts, where there are more of them than
columns.
"""

import math
from dataclasses import dataclass

from titan_moe.report.decimate import cuts
from titan_moe.report.read import Run
from titan_moe.report.summary import layer_order, layers_of

OCTAVES = 4
"""Halvings and doublings of the mean at both ends of the scale"""
COLUMNS = 180
"""At most, over all steps"""
FEWEST = 4


@dataclass(frozen=True)
class Grid:
    ends: list[int]
    """Last step of each column"""
    rows: list[str]
    """What each row is"""
    cells: list[bytes]
    """One string of bytes a row, as many as columns"""


def byte_of(ratio: float) -> int:
    """A load over its mean on the scale."""
    if not ratio > 0:
        return 0
    return 128 + round(127 / OCTAVES * min(max(math.log2(ratio), -OCTAVES), OCTAVES))


def ratio_of(byte: int) -> float:
    """The load over its mean that a byte stands for."""
    return 2 ** ((byte - 128) * OCTAVES / 127) if byte else 0.0


def grids(run: Run, cells: int) -> dict[str, Grid]:
    """Experts x steps by layer, in the model's order; of all layers together at most so many cells, as long as that
    leaves a few columns."""
    experts = sum(len(loads.counts[0]) for loads in run.loads.values() if loads.counts)
    columns = min(COLUMNS, max(FEWEST, cells // max(experts, 1)))
    return {layer: _grid(run, layer, columns) for layer in sorted(run.loads, key=layer_order) if run.loads[layer].steps}


def _grid(run: Run, layer: str, columns: int) -> Grid:
    loads = run.loads[layer]
    ends, merged = [], []
    for start, end in cuts(len(loads.steps), columns):
        counts = loads.counts[start:end]
        total_E = counts[0] if len(counts) == 1 else [sum(each) for each in zip(*counts)]
        mean = sum(total_E) / len(total_E)
        ends.append(loads.steps[end - 1])
        merged.append([byte_of(count / mean if mean else 0.0) for count in total_E])
    rows = [f"expert {i}" for i in range(len(loads.counts[0]))]
    return Grid(ends, rows, [bytes(row) for row in zip(*merged)])


def overview(run: Run) -> Grid | None:
    """Layers x steps: the load of each layer's heaviest expert over the mean, the largest of the steps of a column."""
    series = layers_of(run, "moe_max/mean")
    if not series:
        return None
    layers = sorted(series, key=layer_order)
    steps = sorted({step for each in series.values() for step in each.steps})
    ends = [steps[end - 1] for _, end in cuts(len(steps), COLUMNS)]
    cells = []
    for layer in layers:
        row, at, each = [], 0, series[layer]
        for end in ends:
            largest = 0.0
            while at < len(each.steps) and each.steps[at] <= end:
                largest = max(largest, each.values[at]) if math.isfinite(each.values[at]) else largest
                at += 1
            row.append(byte_of(largest))
        cells.append(bytes(row))
    return Grid(ends, layers, cells)
