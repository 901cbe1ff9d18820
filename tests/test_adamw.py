"""AdamW with bf16 moments: the update that it says it makes, whatever the implementation; what is lost to rounding; a
step that is skipped on the device; its state through load_state_dict. Whole runs of it are in tests/distributed."""

import copy

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor, nn

from tests.skipped_step import assert_skipped
from titan_moe import adamw
from titan_moe.adamw import MOMENTS, Bf16MomentsAdamW
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.optimizer_check import LOST

IMPLEMENTATIONS = {"fused": (True, False), "foreach": (False, True), "for-loop": (False, False)}
SHAPES = [(33, 7), (5,), (4, 3, 2, 6), (1,)]
DECAYS = [0.1, 0.1, 0.0, 0.0]
LR, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-8


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    """Of very different sizes, as those of a model are."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (-3 * i) for i, shape in enumerate(SHAPES)]


def optimizer_of(params: list[nn.Parameter], implementation: str = "fused") -> Bf16MomentsAdamW:
    fused, foreach = IMPLEMENTATIONS[implementation]
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    return Bf16MomentsAdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=fused, foreach=foreach)


def take(optimizer: Bf16MomentsAdamW, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, grad in zip(params, gradients(step)):
            parameter.grad = grad
        optimizer.step()


def in_float64(steps: range) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(parameters, first moments, second moments) by the formula, with nothing rounded but the moments, to bf16."""
    params = [p.detach().double() for p in parameters()]
    ms, vs = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for step in steps:
        for i, grad in enumerate(gradients(step)):
            grad = grad.double()
            m = BETAS[0] * ms[i] + (1 - BETAS[0]) * grad
            v = BETAS[1] * vs[i] + (1 - BETAS[1]) * grad**2
            m_hat, v_hat = m / (1 - BETAS[0] ** (step + 1)), v / (1 - BETAS[1] ** (step + 1))
            params[i] = params[i] * (1 - LR * DECAYS[i]) - LR * m_hat / (v_hat.sqrt() + EPS)
            ms[i], vs[i] = m.bfloat16().double(), v.bfloat16().double()
    return params, ms, vs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_are_those_of_adamw_with_rounded_moments(implementation):
    """20 steps: parameters within the fp32 rounding of so many updates, moments equal but for ties in fp32 that
    float64 does not see. Moments that are not rounded, or rounded before the update, are 50 times as far away."""
    params = parameters()
    optimizer = optimizer_of(params, implementation)
    take(optimizer, params, range(20))
    expected, ms, vs = in_float64(range(20))
    for parameter, wanted, m, v in zip(params, expected, ms, vs):
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=0, atol=2e-6)
        for moment, reference in zip((optimizer.state[parameter][name] for name in MOMENTS), (m, v)):
            assert moment.dtype == torch.bfloat16
            torch.testing.assert_close(moment.double(), reference, rtol=2**-7, atol=0)
            assert (moment.double() != reference).double().mean() < 0.02


def test_moments_take_four_bytes_and_batches_change_nothing(monkeypatch):
    whole, cut = parameters(), parameters()
    take(first := optimizer_of(whole), whole, range(3))
    monkeypatch.setattr(adamw, "BATCH_ELEMENTS", 40)  # the first parameter is larger, the others fit together
    assert [(b.start, b.stop) for b in adamw._batches([231, 5, 30, 9, 0])] == [(0, 1), (1, 3), (3, 5)]
    assert list(adamw._batches([])) == []
    take(second := optimizer_of(cut), cut, range(3))
    for a, b in zip(whole, cut):
        assert torch.equal(a, b) and sum(first.state[a][name].nbytes for name in MOMENTS) == 4 * a.numel()
        assert all(torch.equal(first.state[a][name], second.state[b][name]) for name in (*MOMENTS, "step"))


def test_a_step_is_skipped_on_the_device():
    """`found_inf` = 1: gradients that are not numbers change nothing, not even the count of steps; 0: as without."""
    params, plain = parameters(), parameters()
    optimizer, other = optimizer_of(params), optimizer_of(plain)
    take(optimizer, params, range(2))
    assert_skipped(optimizer, params)
    assert optimizer.state[params[0]].keys() == {*MOMENTS, "step"}
    take(optimizer, params, range(2, 4))
    take(other, plain, range(4))
    assert all(torch.equal(a, b) for a, b in zip(params, plain))


def test_skipping_needs_the_fused_implementation():
    """As with torch's AdamW."""
    params = parameters()
    optimizer = optimizer_of(params, "foreach")
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(AssertionError, match="found_inf to be None"):
        take(optimizer, params, range(1))


def test_a_loaded_state_goes_on_bit_for_bit():
    """torch casts what an optimizer loads to the type of its parameters."""
    params, copied = parameters(), parameters()
    take(first := optimizer_of(params), params, range(3))
    second = optimizer_of(copied)
    with torch.no_grad():
        torch._foreach_copy_(copied, params)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(second.state[p][name].dtype == torch.bfloat16 for p in copied for name in MOMENTS)
    take(first, params, range(3, 6))
    take(second, copied, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(params, copied))


def fallen(beta2: float, start: float) -> float:
    """A second moment after 2,000 steps without gradients."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Bf16MomentsAdamW([parameter], lr=LR, betas=(0.9, beta2), fused=True)
    parameter.grad = torch.zeros(1)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(start)
    for _ in range(2000):
        optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].item()


def test_decays_that_bf16_cannot_follow_are_refused():
    """A second moment without gradients should vanish: with the largest decay that is taken it falls, from just above a
    power of two, where bf16 is coarsest; with 0.999 it does not move at all."""
    start = 1 + 2**-7
    assert fallen(0.999, start) == start
    assert fallen(1 - LOST, start) < start / 2 and fallen(0.95, start) < 1e-30
    config = Config()
    config.optimizer.moments_dtype = "bfloat16"
    assert check(config, 1) == []
    config.optimizer.beta2 = 0.999
    (problem,) = check(config, 1)
    assert problem.startswith("optimizer.beta2 = 0.999: ") and "1 - beta2 = 0.001" in problem
    config.optimizer.moments_dtype = "float32"
    assert check(config, 1) == []
    config.training.dtype = "bfloat16"
    (problem,) = check(config, 1)
    assert problem.startswith('optimizer.moments_dtype = "float32": parameters of training.dtype = "bfloat16"')
