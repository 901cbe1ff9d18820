"""The te_ep cases of tests/distributed/dispatch_worker.py over TE's own ep.py, with the extension's double below it.

    torchrun --nproc_per_node N tests/te/ep_worker.py OUT.json

Over the doubles alone, both layers are ours. Here the upper one is TE's: its buffers, its checks, its operators. What
it takes for granted of a GPU is put in its way: a current device, an NCCL communicator, pinned memory, operators that
are registered for CUDA alone.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))
import titan_moe.runtime  # noqa: F401  isort: skip

import torch
import torch.distributed as dist

from tests import te_doubles
from tests.distributed import dispatch_worker
from titan_moe.moe import te


def replace_expert_parallelism() -> None:
    """Of the extension, whose other functions stay, by the double's."""
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    name = "transformer_engine_torch.ep"
    spec = importlib.util.spec_from_file_location(name, te_doubles.DOUBLES / "transformer_engine_torch" / "ep.py")
    tex.ep = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tex.ep)
    for function in [function for function in vars(tex.ep) if function.startswith("ep_")]:
        setattr(tex, function, after(getattr(tex, function), getattr(tex.ep, function)))


def after(compiled: Callable, double: Callable) -> Callable:
    """The double, after the compiled function has taken the same arguments. Without a GPU it gets no further than that:
    a TypeError if they are of the wrong types, a RuntimeError otherwise."""

    def call(*args, **options):
        if not torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):
                compiled(*args, **options)
        return double(*args, **options)

    return call


def pretend_a_gpu() -> None:
    """As far as TE's ep.py asks for one. This process does nothing else."""
    from transformer_engine.pytorch import ep

    barrier, empty = dist.barrier, torch.empty
    ep.dist = SimpleNamespace(barrier=lambda group, device_ids: barrier(group=group))
    ep.EpBuffer = functools.partial(ep.EpBuffer, device=torch.device("cpu"))
    ep._prepare_op.register_kernel("cpu")(ep._prepare_op._init_fn)
    torch.cuda.current_device = lambda: 0
    torch.empty = lambda *args, pin_memory=False, **options: empty(*args, **options)
    dist.ProcessGroup._get_backend = lambda group, device: SimpleNamespace(_comm_ptr=lambda: 0)
    te.facts = lambda: te_doubles.FACTS


def cases(world_size: int) -> list[dispatch_worker.Case]:
    """All but two: the one that breaks rules, because TE's own exceptions are not the doubles', and the one that
    compiles, because `torch.empty` is not torch's here."""
    found, left_out = dispatch_worker.cases(world_size), ("is_held_to_the_rules", "keeps_its_shapes")
    return [case for case in found if case.dispatcher == "te_ep" and case.check not in left_out]


if __name__ == "__main__":
    replace_expert_parallelism()
    pretend_a_gpu()
    dispatch_worker.main(Path(sys.argv[1]), cases)
