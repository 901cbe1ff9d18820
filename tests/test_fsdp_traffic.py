"""FSDP2 on one rank: gradients to the bit as without it, and in one buffer instead of three."""

import titan_moe.runtime  # noqa: F401
from titan_moe.runtime import prepare_for_backend

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

from titan_moe import fsdp_traffic

WIDTH = 64


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Buffers(TorchDispatchMode):
    """Counts new tensors of as many fp32 numbers as a layer has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.kept: list[torch.Tensor] = []  # so that no storage's place is taken by another

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.numel() == WIDTH * WIDTH + WIDTH:
            self.kept.append(out)
            self.storages.add(out.untyped_storage().data_ptr())
        return out


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_rank_copies_its_gradients_once(process_group, microbatches):
    inputs = torch.randn(microbatches, 8, WIDTH)
    plain = two_layers().bfloat16()
    for x in inputs:
        plain(x.bfloat16()).square().sum().backward()

    model = two_layers()
    for module in (*model, model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(module, mp_policy=policy)
    disable_fsdp_gradient_division(model)
    prepare_for_backend(model)
    fsdp_traffic.prepare(model, None)
    with Buffers() as buffers:
        for i, x in enumerate(inputs):
            model.set_requires_gradient_sync(i == microbatches - 1)
            model(x).square().sum().backward()

    assert len(buffers.storages) == len(model)  # one for each layer
    for mine, expected in zip(model.parameters(), plain.parameters()):
        assert isinstance(mine.grad, DTensor) and expected.grad is not None
        assert mine.grad.dtype == torch.float32
        if microbatches == 1:  # more are added up in fp32 here, in bf16 there
            assert torch.equal(mine.grad.to_local(), expected.grad.float())
        torch.testing.assert_close(mine.grad.to_local(), expected.grad.float(), rtol=2e-2, atol=2e-2)
