"""The te_ep cases of tests/distributed/dispatch_worker.py on GPUs, with NCCL EP itself.

    torchrun --nproc_per_node N tests/gpu/te_ep_worker.py OUT.json

The checks draw and compare their numbers on the CPU; rows cross over to the GPU and back around each call of the
dispatcher. Checks of how often the extension's double is called, or that fake tensors pass, need no GPU.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import titan_moe.runtime  # noqa: F401  isort: skip

import torch
from torch import Tensor

from tests.distributed import dispatch_worker
from titan_moe.moe.dispatch import Dispatcher, Plan, Received, make_dispatcher

CHECKS = (
    "equals_a_loop",
    "is_transposed",
    "rounds_once",
    "needs_no_other_gradient",
    "takes_any_strides_and_weights",
    "keeps_microbatches_apart",
    "serves_one_kind_of_layer",
    "grows_after_an_overflow",
)


class OnGpu:
    """A dispatcher of GPU tensors, for callers whose tensors are on the CPU."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def __getattr__(self, name: str):
        return getattr(self.dispatcher, name)

    def plan(self, ids_TK: Tensor, weights_TK: Tensor | None = None) -> Plan:
        return self.dispatcher.plan(ids_TK.cuda(), None if weights_TK is None else weights_TK.cuda())

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: Plan) -> Received:
        received = self.dispatcher.dispatch(x_TD.cuda(), weights_TK.cuda(), plan)
        return Received(received.x_RD.cpu(), received.weight_R.cpu(), received.counts_e.cpu(), received.state)

    def combine(self, y_RD: Tensor, state: Plan) -> Tensor:
        return self.dispatcher.combine(y_RD.cuda(), state).cpu()


def cases(world_size: int) -> list[dispatch_worker.Case]:
    """With numbers of tokens that NCCL EP takes of two ranks too, which te_ep_check.py tells of."""
    checks = (*CHECKS, *(["travels_as_mxfp8"] if torch.cuda.get_device_capability() >= (10, 0) else []))
    found = [case for case in dispatch_worker.cases(world_size) if case.dispatcher == "te_ep" and case.check in checks]
    return [replace(case, tokens=tuple(-(-tokens // 4) * 4 for tokens in case.tokens)) for case in found]


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dispatch_worker.make_dispatcher = lambda *args, **options: OnGpu(make_dispatcher(*args, **options))
    dispatch_worker.main(Path(sys.argv[1]), cases, "cpu:gloo,cuda:nccl")
