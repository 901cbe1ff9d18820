"""Experts backends in bf16 against a float64 loop over rows: outputs and every gradient.

Shape letters: R rows of the padded slabs, E experts, D model width, F expert hidden width.
"""

import titan_moe.runtime  # noqa: F401

import pytest
import torch

from tests.gpu.backends import NAMES, experts_backend
from tests.moe.test_experts import TOLERANCE, assert_close, oracle, problem
from tests.moe.test_te_fused import FUSED, reference
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


FUSED_SLABS = {
    "uneven": [256, 0, 768, 256],
    "first and last empty": [0, 512, 0],
    "one expert": [512],
    "nobody": [0, 0, 0],
}


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("slabs", FUSED_SLABS)
def test_the_fused_experts_multiply_what_they_should_have_quantized(tex, slabs, late):
    """On Blackwell. Only roundings to bf16, and few to FP8 that are nearly ties, are between the two: a wrong order of
    scales or rows is at least ten times as far off."""
    D, F, counts = 256, 384, FUSED_SLABS[slabs]
    if said := te_fused.problems(te.facts(), torch.bfloat16, D, F, len(counts)):
        pytest.skip("; ".join(said))
    tensors = problem(counts, torch.bfloat16, tail=256, D=D, F=F)
    expected = reference(counts, *tensors)
    if late:
        unweighted = reference(counts, tensors[0], torch.ones_like(tensors[1]), *tensors[2:])[0]
        expected[0] = unweighted * tensors[1][: sum(counts), None].double()
    leaves = [t.cuda().requires_grad_() for t in tensors[:4]]
    for _ in range(2):  # the kernels are compiled in the first
        y_RD = FUSED(leaves[0], torch.tensor(counts, device="cuda"), *leaves[1:], late=late)
        gradients = torch.autograd.grad(y_RD, leaves, tensors[4].cuda())
        got = [y_RD.detach(), *gradients[:2]]
        got = [t[: sum(counts)] for t in got] + list(gradients[2:])
        assert_close([t.cpu() for t in got], expected, 1e-2)


def test_the_fused_experts_say_what_they_lack(tex):
    """Of the conditions that come from the machine, on the machine: only Blackwell has the kernels."""
    said = te_fused.problems(te.facts(), torch.bfloat16, 7168, 2048, 64)
    is_blackwell = (10, 0) <= torch.cuda.get_device_capability() < (10, 7)
    assert any("compute capability 10.0 to 10.6" in line for line in said) is not is_blackwell
