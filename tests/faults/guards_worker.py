"""Trainings in which something goes wrong in the numbers, each in a fork of every rank of one job:

    python tests/distributed/ranks.py N tests/faults/guards_worker.py OUT

OUT/cases.json maps a name to a free port, a fault (a name of FAULTS with its arguments) and train.py's arguments. Every
rank leaves OUT/<name>/seen-<rank>.json: by step, this rank's share of the loss, the learning rate of the update, and
how many of this rank's parameters, moments, step counts and router biases it changed; what the guards told; the error
that ended the run; the guard's state; factors of the receive buffers; load counts left over.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # isort: skip - first: it tells torchtitan about CPUs; and once, for all cases

from titan_moe import guards, local_gradients, runtime
from titan_moe.moe.layer import moe_layers

NAN = float("nan")


# ---------------------------------------------------------------------------------------------------------------------
# Faults: run, and arguments of the case


def loss_times(run: Any, rank: int, steps: list[int], factor: float | None) -> None:
    """The loss of `rank`, and with it all its gradients."""
    loss_fn = run.loss_fn

    def wrong(*args, **kwargs):
        loss, parts = loss_fn(*args, **kwargs)
        if dist.get_rank() == rank and run.progress.step in steps and torch.is_grad_enabled():
            times = NAN if factor is None else factor
            return loss * times, {**parts, "loss": parts["loss"] * times}
        return loss, parts

    wrong.lm_head = loss_fn.lm_head
    run.loss_fn = wrong
    if run.pipeline is not None:
        run.pipeline.loss_fn = wrong


def nan_in_backward(run: Any, rank: int, steps: list[int], layer: str) -> None:
    """What a layer of `rank` is handed in backward."""

    def poison(module, args, output):
        if dist.get_rank() == rank and run.progress.step in steps and output.requires_grad:
            output.register_hook(lambda grad: grad * NAN)

    for part in run.model_parts:
        for name, module in part.named_modules():
            if name == layer:
                module.register_forward_hook(poison)


def nan_in_forward(run: Any, rank: int, steps: list[int], layer: str) -> None:
    """What a layer of `rank` returns, so that every token after it is no number."""

    def poison(module, args, output):
        return output * NAN if dist.get_rank() == rank and run.progress.step in steps else output

    run.model_parts[0].get_submodule(layer).register_forward_hook(poison)


def small_window(run: Any, rank: int, steps: list[int], factor: float) -> None:
    loss_times(run, rank, steps, factor)


def flip(x: torch.Tensor, bit: int) -> torch.Tensor:
    """`x` with one bit of its middle element flipped."""
    flipped = x.detach().clone().flatten()
    flipped.view(torch.int32)[flipped.numel() // 2] ^= 1 << bit
    return flipped.view_as(x)


def flipped_bit(run: Any, rank: int, where: str, passed: int) -> None:
    """In the `passed`-th forward and backward on `rank`: in what layer `where` returns; or, "gradient of X", in this
    rank's own gradient of the parameter whose name ends with X."""
    passes, forward_backward = [0], train.forward_backward

    def counting(*args, **kwargs):
        passes[0] += 1
        return forward_backward(*args, **kwargs)

    train.forward_backward = counting
    here = dist.get_rank() == rank
    if where.startswith("gradient of "):
        name = where.removeprefix("gradient of ")

        def flip_gradient(names: list[str], tensors: list[torch.Tensor]) -> None:
            for i, found in enumerate(names):
                if here and passes[0] == passed and found.endswith(name):
                    tensors[i] = flip(tensors[i], 3)

        local_gradients._observers.append(flip_gradient)
        return

    def flip_output(module, args, output):
        return output + (flip(output, 3) - output).detach() if here and passes[0] == passed else output

    for part in run.model_parts:
        for name, module in part.named_modules():
            if name == where:
                module.register_forward_hook(flip_output)


FAULTS: dict[str, Callable] = {
    f.__name__: f for f in (loss_times, nan_in_backward, nan_in_forward, small_window, flipped_bit)
}


# ---------------------------------------------------------------------------------------------------------------------
# What is seen


def state(run: Any) -> dict[str, torch.Tensor]:
    """All that an update may change on this rank."""
    found = {}
    for i, part in enumerate(run.model_parts):
        found |= {f"{i}.{name}": tensor for name, tensor in part.state_dict().items()}
        for name, moe in moe_layers(part).items():
            found[f"{i}.{name}.counts"] = moe.tokens_per_expert_E
    for i, optimizer in enumerate(run.optimizers.optimizers):
        for j, values in enumerate(optimizer.state.values()):
            found |= {f"optimizer.{i}.{j}.{name}": value for name, value in values.items()}
    return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in found.items()}


def changes(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same, bit for bit. A first update makes the optimizer's state, of zeros until then."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in after.items()}
    return [name for name, tensor in after.items() if not torch.equal(before.get(name, zeros[name]), tensor)]


class Watched:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, Any] = {"losses": {}, "rates": {}, "changed": {}, "read": {}, "log": [], "error": None}
        self.run: Any = None

    def watch(self, run: Any) -> None:
        self.run = run
        judge, step, settle, log = run.guard.judge, run.optimizers.step, run.guard.settle, self.seen

        def watched_judge(loss, grad_norm):
            log["losses"][run.progress.step] = float(loss)
            return judge(loss, grad_norm)

        def watched_step(**kwargs):
            log["rates"][run.progress.step] = run.optimizers.optimizers[0].param_groups[0]["lr"]
            before = state(run)
            step(**kwargs)
            names = changes(before, state(run))
            log["changed"][run.progress.step] = sum(not name.endswith(".counts") for name in names)

        def watched_settle():
            if run.guard.pending is not None:
                log["read"][run.guard.pending.step] = run.progress.step
            settle()

        run.guard.judge, run.optimizers.step, run.guard.settle = watched_judge, watched_step, watched_settle

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.run is not None:
            layers = [moe for part in self.run.model_parts for moe in moe_layers(part).values()]
            self.seen["factors"] = [moe.routed_experts.dispatcher.factor for moe in layers]
            self.seen["history"] = self.run.guard.history_2N.tolist()
            self.seen["counts"] = self.run.guard.counts_3.tolist()
            self.seen["left"] = sum(int(moe.tokens_per_expert_E.sum()) for moe in layers)
        (self.folder / f"seen-{dist.get_rank()}.json").write_text(json.dumps(self.seen))


class Warnings(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.INFO)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        if any(word in record.getMessage() for word in (" skipped: loss", "Corruption", "grows")):
            self.into.append(record.getMessage())


def run_case(folder: Path, fault: list | None, argv: list[str]) -> None:
    watched = Watched(folder)
    build = train.build

    def watched_build(config):
        if fault is not None and fault[0] == "small_window":
            guards.WINDOW = 4
        train.logger.addHandler(Warnings(watched.seen["log"]))  # now: the start takes all handlers away
        run = build(config)
        watched.watch(run)
        if fault is not None:
            FAULTS[fault[0]](run, *fault[1:])
        return run

    train.build = watched_build
    try:
        train.main(argv)
    except RuntimeError as error:
        watched.seen["error"] = str(error)
    watched.save()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 of each case hosts its own store
    for name, (port, fault, argv) in json.loads((out / "cases.json").read_text()).items():
        os.environ |= {"RUN_ID": name, "MASTER_PORT": str(port)}
        child = os.fork()
        if child == 0:
            try:
                run_case(out / name, fault, argv)
                runtime.leave_process_group()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            sys.exit(f"case {name} failed on rank {os.environ['RANK']}")
