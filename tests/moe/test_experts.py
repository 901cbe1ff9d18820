"""Experts backends against a float64 loop over single rows: outputs and every gradient, whatever the slabs."""

from collections.abc import Callable

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from titan_moe.moe import experts
from titan_moe.moe.choices import choose_dispatcher, choose_experts
from titan_moe.moe.experts import EXPERTS, Source

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PORTABLE = ("loop", "grouped_mm")  # for "te" see test_te_experts.py
SLABS = {
    "uneven": [16, 0, 32, 48],
    "nobody": [0, 0, 0],
    "first_empty": [0, 16, 16],
    "one_takes_all": [0, 0, 1824],  # more than the largest piece
    "one_expert": [32],
}


def problem(counts: list[int], dtype: torch.dtype, tail: int = 0, D: int = 24, F: int = 40) -> list[torch.Tensor]:
    """x_RD, weight_R, w13, w2 and the gradient of y, with NaN in the rows past the slabs, zeros in each slab's last."""
    generator = torch.Generator().manual_seed(1)
    E, R = len(counts), sum(counts) + tail

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x_RD, weight_R = randn(R, D), torch.rand(R, generator=generator).to(torch.promote_types(dtype, torch.float32))
    w13_EF2D, w2_EDF, grad_RD = randn(E, F, 2, D) * 0.3, randn(E, D, F) * 0.3, randn(R, D)
    for rows, value in ((slice(sum(counts), None), float("nan")), (slice(sum(counts) - 3, sum(counts)), 0.0)):
        x_RD[rows] = weight_R[rows] = value
    grad_RD[sum(counts) :] = float("nan")
    return [x_RD, weight_R, w13_EF2D, w2_EDF, grad_RD]


def oracle(counts: list[int], x_RD, weight_R, w13_EF2D, w2_EDF, grad_RD) -> list[torch.Tensor]:
    """y, gradients of x, weight, w13, w2: row by row in float64."""
    leaves = [t.double().requires_grad_() for t in (x_RD[: sum(counts)], weight_R[: sum(counts)], w13_EF2D, w2_EDF)]
    x, weight, w13, w2 = leaves
    expert_of_row = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = []
    for r, e in enumerate(expert_of_row):
        gate, up = w13[e, :, 0] @ x[r], w13[e, :, 1] @ x[r]
        rows.append(weight[r] * (w2[e] @ (gate * torch.sigmoid(gate) * up)))
    y = torch.stack(rows) if rows else x * 0
    loss = (y * grad_RD[: sum(counts)].double()).sum() + 0 * (w13.sum() + w2.sum() + weight.sum())
    return [y.detach(), *torch.autograd.grad(loss, leaves)]


def run(experts: str | Callable, counts: list[int], tensors: list[torch.Tensor], **options) -> list[torch.Tensor]:
    x_RD, weight_R, w13, w2 = leaves = [t.clone().requires_grad_() for t in tensors[:4]]
    backend = EXPERTS[experts] if isinstance(experts, str) else experts
    y_RD = backend(x_RD, torch.tensor(counts), weight_R, w13, w2, **options)
    y_RD.backward(tensors[4].nan_to_num(0.0) if experts == "loop" else tensors[4])
    rows = slice(0, sum(counts))
    return [y_RD.detach()[rows], leaves[0].grad[rows], leaves[1].grad[rows], leaves[2].grad, leaves[3].grad]


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for name, value, reference in zip(("y", "x", "weight", "w13", "w2"), got, expected, strict=True):
        assert value.isfinite().all(), name
        error = (value.double() - reference).norm() / reference.norm().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_a_loop_over_rows(name, late, dtype):
    for counts in ([16, 0, 32, 48], [0, 16, 16], [32]):
        tensors = problem(counts, dtype, tail=16)
        assert_close(run(name, counts, tensors, late=late), oracle(counts, *tensors), TOLERANCE[dtype])


@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.parametrize("slabs", SLABS)
def test_any_slabs(name, slabs):
    tensors = problem(SLABS[slabs], torch.float64)
    assert_close(run(name, SLABS[slabs], tensors), oracle(SLABS[slabs], *tensors), 1e-12)


def test_pieces_cover_the_slabs_and_come_in_few_sizes():
    counts = torch.randint(0, 5000, (200,)) // 16 * 16
    gemm = experts._PiecewiseGemm(counts)
    assert sum(rows.stop - rows.start for _, rows in gemm.pieces) == counts.sum()
    assert [rows.start for _, rows in gemm.pieces] == [0, *(rows.stop for _, rows in gemm.pieces[:-1])]
    assert len({rows.stop - rows.start for _, rows in gemm.pieces}) <= len(experts.CPU_PIECES) + 256 // 16


@pytest.mark.parametrize("backend", ["_GroupedGemm", "_PiecewiseGemm"])
def test_gemms_agree(backend, monkeypatch):
    """On a CPU torch._grouped_mm is not used, but it is there: what a GPU runs is tested here too."""
    monkeypatch.setattr(experts, "_PiecewiseGemm", getattr(experts, backend))
    counts = [16, 0, 32, 48]
    tensors = problem(counts, torch.float32, tail=0)
    assert_close(run("grouped_mm", counts, tensors), oracle(counts, *tensors), 2e-6)


def test_rows_that_can_be_gathered_again_are_not_kept():
    counts, tokens = [32, 48], 40
    x_RD, weight_R, w13, w2, grad_RD = problem(counts, torch.float32)
    x_TD = torch.randn(tokens, x_RD.shape[1])
    token_R = torch.randint(0, tokens, (80,))
    kept: dict[str, set[int]] = {}
    gradients = {}
    for variant, source in (("keep", None), ("gather", Source(x_TD, lambda x: x[token_R]))):
        kept[variant] = seen = set()

        def note(tensor: torch.Tensor, seen: set[int] = seen) -> torch.Tensor:
            seen.add(tensor.data_ptr())
            return tensor

        x = x_TD[token_R].requires_grad_()
        w = [w13.clone().requires_grad_(), w2.clone().requires_grad_()]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = EXPERTS["grouped_mm"](x, torch.tensor(counts), weight_R, *w, source=source)
        assert (x.data_ptr() in seen) == (variant == "keep") and (x_TD.data_ptr() in seen) == (variant == "gather")
        gradients[variant] = torch.autograd.grad(y, [x, *w], grad_RD)
    assert all(torch.equal(a, b) for a, b in zip(*gradients.values()))


def test_a_split_backward_runs_each_gemm_once(monkeypatch):
    """As zero-bubble schedules do it: first gradients of inputs, later those of weights."""
    calls = []
    for name in ("dgrad", "wgrad"):
        original = getattr(experts._GroupedGemm, name)
        monkeypatch.setattr(
            experts._GroupedGemm, name, lambda *args, _n=name, _o=original: calls.append(_n) or _o(*args)
        )
    monkeypatch.setattr(experts, "_PiecewiseGemm", experts._GroupedGemm)
    counts = [16, 32]
    x_RD, weight_R, w13, w2, grad_RD = problem(counts, torch.float32)
    x, w = x_RD.requires_grad_(), [nn.Parameter(w13), nn.Parameter(w2)]

    def forward() -> torch.Tensor:
        return EXPERTS["grouped_mm"](x * 1, torch.tensor(counts), weight_R, *w) * 1

    expected = torch.autograd.grad(forward(), [x, *w], grad_RD)
    assert sorted(calls) == ["dgrad", "dgrad", "wgrad", "wgrad"]
    calls.clear()
    (grad_x,), groups = stage_backward_input([forward()], [grad_RD], [x], iter(w))
    assert calls == ["dgrad", "dgrad"]
    stage_backward_weight(iter(w), groups)
    assert calls == ["dgrad", "dgrad", "wgrad", "wgrad"]
    for got, reference in zip((grad_x, w[0].grad, w[1].grad), expected):
        torch.testing.assert_close(got, reference)


def test_stride_zero_gradients_and_frozen_weights():
    counts = [16, 16]
    x, weight, w13, w2, _ = problem(counts, torch.float32)
    y = EXPERTS["grouped_mm"](x.requires_grad_(), torch.tensor(counts), weight, w13, w2.requires_grad_())
    y.sum().backward()
    assert x.grad.isfinite().all() and w2.grad.isfinite().all() and w13.grad is None


def test_choices_name_what_is_available():
    assert choose_experts("auto", "cpu", torch.float32, 24, 40)[0] == "grouped_mm"
    assert choose_experts("auto", "cuda", torch.float32, 64, 64)[0] == "loop"
    assert choose_experts("auto", "cuda", torch.bfloat16, 64, 64)[0] == "grouped_mm"
    with pytest.raises(ValueError, match="16-byte multiples.*loop"):
        choose_experts("grouped_mm", "cuda", torch.bfloat16, 64, 12)
    assert choose_dispatcher("auto", 1)[0] == "local" and choose_dispatcher("auto", 4)[0] == "dedup"
