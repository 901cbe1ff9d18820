"""What Muon costs a step beside AdamW (titan_moe/muon.py): products on whole matrices, and dense ones on the wire.

Computed from the sizes of matrices and the rates of GEMMs; no run on a GPU has been measured.
"""

import re
from collections import Counter
from functools import cache, lru_cache

from titan_moe.flavors import Flavor
from titan_moe.huggingface.names import weights
from titan_moe.optimizer_check import NOT_MUON
from titan_moe.plan import collectives, kernels
from titan_moe.plan.constants import Constants
from titan_moe.plan.job import Job

ITERATIONS = 5


@lru_cache
def _matrices(flavor: Flavor) -> Counter[tuple[int, int, bool]]:
    """How many there are, by rows, columns (no fewer) and whether they are an expert's."""
    found: Counter[tuple[int, int, bool]] = Counter()
    for weight in weights(flavor, bias=False):
        if len(weight.shape) == 2 and not re.search(NOT_MUON, weight.ours):
            rows, columns = sorted(weight.shape)
            found[rows, columns, weight.experts > 0] += weight.experts or 1
    return found


def seconds(job: Job, c: Constants) -> float:
    """Of products and transfers on one rank, in the mean over pipeline ranks."""

    @cache
    def products(rows: int, columns: int) -> float:
        """Of one matrix, rows <= columns: X X^T, its square, and that times X; each five times."""
        shapes = ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows))
        return ITERATIONS * sum(kernels.gemm_seconds(job.hardware, "bf16", "forward", m, n, k, c) for m, n, k in shapes)

    dense = experts = dense_numbers = 0.0
    for (rows, columns, of_expert), number in _matrices(job.model).items():
        if of_expert:
            experts += number * products(rows, columns)
        else:
            dense += number * products(rows, columns)
            dense_numbers += number * rows * columns
    ranks = job.dp_shard * job.cp
    # Gathered and handed out again in bf16; tensor-parallel ranks all do the same.
    moved = 2 * collectives.sharded_seconds(job, 2 * dense_numbers / job.pp, ranks, job.tp)
    return (dense / ranks + experts / (ranks * job.tp)) / job.pp + moved
