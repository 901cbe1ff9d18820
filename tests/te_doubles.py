"""Doubles of Transformer Engine and of the kernels in cuDNN's frontend (tests/doubles): they hold our calls to their
documented rules and compute right results on a CPU, over gloo. `install` puts them where `import transformer_engine`
finds them, in this process alone."""

import contextlib
import sys
from collections.abc import Iterator
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
    cudnn_frontend="1.32.0",
)
"""A Blackwell GPU with everything in place"""


PACKAGES = ("transformer_engine", "transformer_engine_torch", "cudnn")
LOOK = te.facts
"""What finds the facts of the real machine"""


def install(facts: te.Facts = FACTS) -> None:
    """From now on this process finds the doubles, and a machine with `facts`."""
    assert not _imported()
    sys.path.insert(0, str(DOUBLES))
    te.facts = lambda: facts  # type: ignore[assignment]


def uninstall() -> None:
    """Undo `install`: the doubles, and what they remember, are gone."""
    sys.path.remove(str(DOUBLES))
    for name in _imported():
        del sys.modules[name]
    te.facts = LOOK


@contextlib.contextmanager
def installed(facts: te.Facts = FACTS) -> Iterator[None]:
    """The doubles for a while."""
    install(facts)
    try:
        yield
    finally:
        uninstall()


def _imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in PACKAGES]


def rows_sent() -> list[tuple[str, int]]:
    """Bytes of rows that the doubles sent to other ranks so far, by call. Empty without doubles."""
    double = sys.modules.get("transformer_engine_torch.ep")
    return [] if double is None else double.sent


def kernel_calls() -> list[str]:
    """What the doubles of NCCL EP were asked to do in this process so far: prepare, dispatch, combine, dispatch_bwd,
    combine_bwd, and set-up. Empty without doubles."""
    double = sys.modules.get("transformer_engine_torch.ep")
    return [] if double is None else double.calls
