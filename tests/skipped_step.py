"""A step that an optimizer leaves out on the device, for the tests of each of ours."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def assert_skipped(optimizer: Any, params: Sequence[Tensor]) -> None:
    """With `found_inf` = 1, gradients that are not numbers change neither parameters nor state. Leaves it at 0."""
    before = copy.deepcopy([(parameter.detach(), optimizer.state[parameter]) for parameter in params])
    for parameter in params:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for parameter, (value, state) in zip(params, before):
        assert torch.equal(parameter, value) and state.keys() == optimizer.state[parameter].keys() != set()
        assert all(torch.equal(optimizer.state[parameter][name], kept) for name, kept in state.items())
    optimizer.found_inf = torch.zeros(())
