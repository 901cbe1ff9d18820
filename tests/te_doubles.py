"""Doubles of Transformer Engine (tests/doubles): they hold our calls to its documented rules and compute right results
on a CPU, over gloo. `install` puts them where `import transformer_engine` finds them, in this process alone."""

import sys
from pathlib import Path

from titan_moe.moe import te

DOUBLES = Path(__file__).parent / "doubles"
FACTS = te.Facts(
    version=te.PINNED,
    extension="",
    capability=(10, 0),
    cublaslt=131000,
    nccl=te.NCCL_EP_BUILD,
    nccl_ep=True,
    nvcc="/usr/local/cuda/bin/nvcc",
    nccl_headers="/usr/include",
)
"""A Blackwell GPU with everything in place"""


def install(facts: te.Facts = FACTS) -> None:
    """From now on this process finds the doubles, and a machine with `facts`."""
    assert not any(name.split(".")[0] in ("transformer_engine", "transformer_engine_torch") for name in sys.modules)
    sys.path.insert(0, str(DOUBLES))
    te.facts = lambda: facts  # type: ignore[assignment]
