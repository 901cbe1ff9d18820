"""A process group of one rank: the weights that tests load and save are whole."""

from collections.abc import Iterator

import titan_moe.runtime  # noqa: F401

import pytest
import torch.distributed as dist


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
