"""Experts backends in bf16 against a float64 loop over rows: outputs and every gradient.

Shape letters: R rows of the padded slabs, E experts, D model width, F expert hidden width.
"""

import os

import titan_moe.runtime  # noqa: F401

import pytest
import torch

from tests.gpu.backends import NAMES, experts_backend
from tests.moe.test_experts import TOLERANCE, assert_close, oracle, problem
from titan_moe.moe import te, te_fused

pytestmark = pytest.mark.gpu

SLABS = {
    "uneven": [128, 0, 256, 128],
    "first and last empty": [0, 256, 0],
    "one expert": [256],
    "nobody": [0, 0, 0],
}
D, F = 64, 48


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("slabs", SLABS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_loop_over_rows(name, slabs, late):
    """Rows past the slabs are NaN, in x and in the gradient: none may get anywhere else."""
    backend = experts_backend(name, torch.bfloat16, D, F)
    if isinstance(backend, str):
        pytest.skip(backend)
    counts = SLABS[slabs]
    rows = slice(0, sum(counts))
    tensors = problem(counts, torch.bfloat16, tail=128, D=D, F=F)
    leaves = x_RD, weight_R, w13_EF2D, w2_EDF = [t.cuda().requires_grad_() for t in tensors[:4]]
    y_RD = backend(x_RD, torch.tensor(counts, device="cuda"), weight_R, w13_EF2D, w2_EDF, late=late)
    y_RD.backward(tensors[4].nan_to_num(0.0).cuda() if name == "loop" else tensors[4].cuda())
    got = [y_RD.detach()[rows], x_RD.grad[rows], weight_R.grad[rows], *(leaf.grad for leaf in leaves[2:])]
    assert_close([t.cpu() for t in got], oracle(counts, *tensors), TOLERANCE[torch.bfloat16])


def test_the_fused_kernels_say_what_they_lack(tex):
    """Of the conditions that come from the machine, on the machine: only Blackwell has the kernels."""
    said = te_fused.problems(te.facts(), os.environ, torch.bfloat16, 7168, 2048, "mxfp8")
    is_blackwell = torch.cuda.get_device_capability()[0] == 10
    assert any("compute capability 10.x" in line for line in said) is not is_blackwell
