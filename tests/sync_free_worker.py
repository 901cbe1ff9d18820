"""Whole steps in which nothing may read the device: `python -m tests.sync_free_worker OUT`.

OUT/cases.json maps a name to [ranks, arguments of train.py]. The step is a dry run's: one rank, built as for a GPU, on
fake tensors. Its masks are made outside, as with CUDA graphs; the rest, forward and backward of all microbatches, runs
where any value asked of a tensor, and any copy to the host, raises. OUT/<name>.json gets the error, or null.
"""

from titan_moe.dry_run import build, gpu  # isort: skip - first: it decides what titan_moe.runtime sees

import json
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from tests.sync_free import _refuse
from titan_moe import config_file


def what_reads(world_size: int, arguments: list[str]) -> str | None:
    """The first thing in forward and backward that reads the device."""
    gpu.install()
    config = build.shortened(config_file.load(arguments), world_size)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    run = build.build(config, world_size, 0, fake)
    with fake:
        inputs = [train.inputs_of(run, build.batch_of(run)) for _ in range(run.microbatches)]
        valid_tokens = torch.ones((), dtype=torch.int64)
        with run.guard.watching(), mock.patch.multiple(torch.Tensor, cpu=_refuse, numpy=_refuse):
            for _ in range(2):  # the first makes what is made once
                try:
                    train.forward_backward(run, inputs, valid_tokens)
                except Exception as error:
                    return "".join(traceback.format_exception(error)[-3:])
                run.optimizers.zero_grad()
                run.optimizers.balancer.discard()
    return None


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name, case in json.loads((out / "cases.json").read_text()).items():
        child = os.fork()
        if child == 0:
            (out / f"{name}.json").write_text(json.dumps(what_reads(*case)))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            sys.exit(f"case {name} failed")
