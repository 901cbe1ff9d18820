"""Tests on CUDA GPUs, alone: `pytest -m gpu`. scripts/gpu_check.py runs them with its timings."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpus() -> int:
    """How many there are; without one the test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")
    return torch.cuda.device_count()
