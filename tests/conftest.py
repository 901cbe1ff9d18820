"""What tests marked `te` or `gpu` need: the real Transformer Engine (TE), a GPU, and to come last."""

from importlib import metadata
from types import ModuleType

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Once imported, TE stays: it registers its operators. Tests that put doubles in its place come before."""
    items.sort(key=lambda item: any(item.get_closest_marker(name) for name in ("te", "gpu")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")


@pytest.fixture(scope="session")
def tex() -> ModuleType:
    """TE's extension, loaded as TE does it. Only its absence is a reason to skip: failing to import is a failure."""
    try:
        metadata.version("transformer-engine-torch")
    except metadata.PackageNotFoundError:
        pytest.skip("transformer-engine-torch is not installed")
    import torch  # noqa: F401 - first: it loads the libraries that TE is linked to
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch

    return transformer_engine_torch
