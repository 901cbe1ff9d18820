"""A job's ranks: the bytes that real training steps hold. Forks for each case, as tests/distributed/worker.py does.

    python tests/distributed/ranks.py N tests/plan/measure_memory.py OUT

OUT/cases.json maps a name to a free port and the arguments of train.py; rank 0 writes OUT/<name>.json. States are those
of its shards. Activations are the storages that forward made and that are still alive when it ends: what autograd,
activation checkpointing and the MoE region keep for backward, each counted once; of the mean rank, because experts that
are chosen more often only move rows from one rank to another.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # isort: skip - first: it tells torchtitan about CPUs

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.tools.logging import logger

from titan_moe import config_file

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Storages(TorchDispatchMode):
    """Remembers every storage that an operation made, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # A view, or a result written in place, made nothing: so rotary tables and parameters do not count.
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) in PLAIN}
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                known = self.made.get(storage._cdata)
                if known is None or known.expired():
                    self.made[storage._cdata] = StorageWeakRef(storage)
        return out

    def alive(self) -> int:
        """Bytes of those that are still there."""
        handles = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.made.values()]
        return sum(storage.nbytes() for storage in handles if storage is not None)


def local_bytes(tensors) -> int:
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in locals_)


def measure(arguments: list[str]) -> dict[str, float]:
    run = train.build(config_file.load(arguments))
    batches, (model,) = iter(run.dataloader), run.model_parts
    train.train_step(run, batches, validates=False, logs=False)  # what is made once and kept, is made here
    states = [s for o in run.optimizers for s in o.state.values()]
    found = {
        "parameters": local_bytes(model.parameters()),
        "moments": local_bytes(value for state in states for name, value in state.items() if name != "step"),
    }
    batch = train.to_device(next(batches), run.device)
    loss_fn, storages = run.loss_fn, Storages()
    offloader = getattr(model, "offloader", None)
    host = 0 if offloader is None else offloader.pool.allocated

    def ends(output, *args, **kwargs):
        dist.barrier()
        time.sleep(0.2)  # gloo's threads let go of what was sent a moment after it has arrived
        found["activations"] = storages.alive()
        if offloader is not None:  # more rows than before may have needed more host memory, which is no device's
            found["activations"] -= offloader.pool.allocated - host
        return loss_fn(output, *args, **kwargs)

    run.loss_fn = ends  # what the head does after it is not forward any more
    with run.spmd_context():
        with storages:
            loss, _ = train.forward(run, train.inputs_of(run, batch))
        loss.backward()
    found["gradients"] = local_bytes(p.grad for p in model.parameters())
    total = torch.tensor(found["activations"])
    dist.all_reduce(total)
    return found | {"activations": int(total) / dist.get_world_size()}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 of each case hosts its own store
    logger.setLevel("WARNING")
    for name, (port, arguments) in json.loads((out / "cases.json").read_text()).items():
        os.environ |= {"RUN_ID": name, "MASTER_PORT": str(port)}
        child = os.fork()
        if child == 0:
            try:
                found = measure([*arguments, f"--job.dump_folder={out / name}"])
                if dist.get_rank() == 0:
                    (out / f"{name}.json").write_text(json.dumps(found))
                dist.destroy_process_group()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            sys.exit(f"case {name} failed on rank {os.environ['RANK']}")
