"""Tests on CUDA GPUs, alone: `pytest -m gpu`. scripts/gpu_check.py runs them with its timings."""

import pytest
import torch


@pytest.fixture
def gpus() -> int:
    """How many there are."""
    return torch.cuda.device_count()
