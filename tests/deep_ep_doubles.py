"""A double of DeepEP (tests/doubles/deep_ep): it holds torchtitan's calls, and ours through them, to the library's
documented rules and computes right results on a CPU, over gloo. `install` puts it where torchtitan finds it, in this
process alone, and lets torchtitan's ops, which are for CUDA, run on a CPU too."""

import sys

import torch

from tests.te_doubles import DOUBLES


def install() -> None:
    assert "deep_ep" not in sys.modules
    sys.path.insert(0, str(DOUBLES))
    from torchtitan.distributed.deepep import deepep, hybridep

    for name in ("dispatch", "combine"):
        torch.library.impl(deepep._lib, name, "CPU")(getattr(deepep, f"_{name}_op_impl"))
    for op in (
        hybridep._dispatch_impl,
        hybridep._combine_impl,
        hybridep._dispatch_bwd_impl,
        hybridep._combine_bwd_impl,
    ):
        op.register_kernel("cpu")(op._init_fn)
