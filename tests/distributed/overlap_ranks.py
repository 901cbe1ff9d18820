"""What ranks of a forked job (tests/faults/checkpoint_run.py) do for test_overlap.py: a small model's gradients under
each moe.overlap, and what was under way meanwhile.

Shape letters: B batch, L sequence.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import titan_moe.runtime as runtime

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_moe import config_file, in_flight, parallel
from titan_moe.in_flight import Transfer
from titan_moe.inputs import Batch, Inputs, model_inputs
from titan_moe.loss import build_loss
from titan_moe.mesh_check import microbatch_size, microbatches_per_step
from titan_moe.model import build_model, init_weights
from titan_moe.moe import exchange
from titan_moe.moe.layer import FusedMoE, moe_layers
from titan_moe.timeline import Interval, share_beside

BATCH = ("--training.dataset=synthetic", "--training.seq_len=32", "--training.local_batch_size=4")
SMALL = [
    "train_configs/debug_model.toml",
    *("--model.dim=64", "--model.n_layers=3", "--model.moe_hidden_dim=48", "--model.dense_hidden_dim=96"),
    *("--model.q_lora_rank=32", "--model.kv_lora_rank=32", "--model.n_heads=2"),
    *BATCH,
    *("--moe.sequence_loss_coeff=1e-2", "--moe.z_loss_coeff=1e-3"),
]
LAYER = [
    *("--model.dim=128", "--model.n_layers=2", "--model.moe_hidden_dim=128", "--model.num_shared_experts=2"),
    *("--training.seq_len=128", "--training.local_batch_size=8"),
]
"""Of SMALL, a model whose MoE layer has so much to compute that times can be told apart"""
MODES = ("none", "shared_expert", "half_batch")
"""Of moe.overlap"""


@dataclass
class Found:
    """Of one forward and backward of a step. gathers: FSDP's all-gathers and reduce-scatters; fsdp: the same as
    transfers, which are those of expert parallelism. intervals: "name", "start", "end" in seconds from its beginning,
    of transfers, of waits for them and of what `watched` watches."""

    loss: Tensor
    aux: Tensor
    gradients: dict[str, Tensor]
    loads: list[list[int]]
    gathers: Counter[str]
    transfers: list[Transfer]
    fsdp: list[Transfer]
    seconds: float
    intervals: list[dict[str, Any]]


_meshes: dict[str, ParallelDims] = {}


class Trainee:
    """A model laid out over the ranks, and the microbatches of a step."""

    def __init__(self, argv: list[str]) -> None:
        self.config = config = config_file.load(argv)
        config_file.raise_on_problems(config, dist.get_world_size())
        layout = str(runtime.titan_parallelism(config))
        if layout not in _meshes:  # torch takes equal meshes for one another, so there is one of each
            _meshes[layout] = runtime.build_meshes(config)
        self.dims = _meshes[layout]
        device = torch.device("cpu")
        self.parts, self.pipeline = parallel.parallelize(build_model(config), config, self.dims, device)
        for part in self.parts:
            part.to_empty(device=device)
            init_weights(part, 0)
            part.train()
        self.loss_fn = build_loss(config, self.parts[-1])
        if self.pipeline is not None:
            self.pipeline.loss_fn = self.loss_fn
        self.layers = {name: moe for part in self.parts for name, moe in moe_layers(part).items()}

    def inputs(self) -> list[Inputs]:
        size, L = microbatch_size(self.config), self.config.training.seq_len
        rank, _ = runtime.batch_coordinates(self.dims)
        found = []
        for i in range(microbatches_per_step(self.config, dist.get_world_size())):
            tokens_BL = torch.randint(0, 250, (size, L + 1), generator=torch.Generator().manual_seed(100 * rank + i))
            positions_BL = torch.arange(L).expand(size, L) % (L // 2 + 3)  # two documents
            batch: Batch = {"input": tokens_BL[:, :-1], "positions": positions_BL.contiguous()}, tokens_BL[:, 1:]
            found.append(
                model_inputs(self.parts[0], batch, self.dims, self.config.parallelism.context_parallel_load_balancer)
            )
        return found

    def run(self, watches: bool = False) -> Found:
        """Gradients of a step, from zero."""
        for part in self.parts:
            part.zero_grad()
        valid, context = torch.tensor(1000.0), dist_utils.get_spmd_context(parallel_dims=self.dims)
        in_flight.log = []
        inputs = self.inputs()
        dist.barrier()
        begun = time.perf_counter()
        with counted() as gathers, watched(self.layers if watches else {}) as computed, context():
            if self.pipeline is not None:
                loss = self.pipeline.step(inputs, valid)
            else:
                loss = torch.zeros(())
                for i, (tokens_BL, labels_BL, kwargs) in enumerate(inputs, start=1):
                    parallel.gradient_sync(self.parts[0], self.config, last=i == len(inputs))
                    output = self.parts[0](tokens_BL, **kwargs)
                    one, _ = self.loss_fn(output, labels_BL, valid, positions=kwargs["positions"])
                    one.backward()
                    loss = loss + one.detach()
        seconds = time.perf_counter() - begun
        logged, in_flight.log = in_flight.log, None
        fsdp = [each for each in logged if each.name in ("gather", "reduce")]
        transfers = [each for each in logged if each.name not in ("gather", "reduce")]
        assert not exchange._under_way, "somebody did not wait for what he started"
        loads = [moe.tokens_per_expert_E for moe in self.layers.values()]
        return Found(
            loss=loss,
            loads=[(each.to_local() if isinstance(each, DTensor) else each).tolist() for each in loads],
            aux=torch.stack([moe.forget() for moe in self.layers.values()]),
            gradients={
                name: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone()
                for part in self.parts
                for name, p in part.named_parameters()
                if p.grad is not None
            },
            gathers=gathers,
            transfers=transfers,
            fsdp=fsdp,
            seconds=seconds,
            intervals=[
                {"name": name, "start": start - begun, "end": end - begun}
                for name, start, end in (*computed, *intervals(transfers))
            ],
        )


def intervals(transfers: list[Transfer]) -> Iterator[tuple[str, float, float]]:
    for transfer in transfers:
        name, issued = transfer.name + " backward" * transfer.backward, transfer.issued.host
        assert transfer.waited is not None and transfer.done is not None
        yield name, issued, issued + transfer.in_flight
        yield f"wait {name}", transfer.waited.host, transfer.done.host


@contextmanager
def watched(layers: dict[str, FusedMoE]) -> Iterator[list[tuple[str, float, float]]]:
    """When the shared experts and the routed ones computed: (name, start, end), backward too. Backward of a part is
    from when the gradient of its output is there until that of its input is."""
    found: list[tuple[str, float, float]] = []
    hooks = []

    def watch(name: str, module: nn.Module) -> None:
        begun: list[float] = []

        def before(_module, args):
            begun.append(time.perf_counter())
            x = args[0]
            if x.requires_grad:
                started: list[float] = []

                def end_backward(grad):
                    found.append((f"{name} backward", started[0], time.perf_counter()))

                begun_backward.append(started)
                # a view, so that other users of x do not share the hook
                return (_marked(x, end_backward), *args[1:])
            return None

        begun_backward: list[list[float]] = []

        def after(_module, _args, output):
            found.append((name, begun.pop(), time.perf_counter()))
            if output.requires_grad:
                started = begun_backward.pop()
                output.register_hook(lambda grad: started.append(time.perf_counter()))

        hooks.extend([module.register_forward_pre_hook(before), module.register_forward_hook(after)])

    for moe in layers.values():
        if moe.shared_experts is not None:
            watch("shared expert", moe.shared_experts)
        watch("experts", moe.routed_experts.inner_experts)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _marked(x: Tensor, hook: Callable) -> Tensor:
    x = x.view_as(x)
    x.register_hook(hook)
    return x


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """FSDP's all-gathers and reduce-scatters."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable:
        original = getattr(_fsdp_param_group, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    names = ("foreach_all_gather", "foreach_reduce")
    with mock.patch.multiple(_fsdp_param_group, **{name: counting(name) for name in names}):
        yield calls


def compare(tell: Callable, modes: list[str], argv: list[str]) -> None:
    """What differs between moe.overlap = "none" and each mode."""
    plain = Trainee(argv).run()
    for mode in modes:
        found = Trainee([*argv, f"--moe.overlap={mode}"]).run()
        assert found.gradients.keys() == plain.gradients.keys()
        errors = {
            key: float((found.gradients[key] - g).norm() / g.norm().clamp(min=1e-12))
            for key, g in plain.gradients.items()
        }
        worst = max(errors, key=errors.__getitem__)
        tell(
            {
                "loss": float((found.loss - plain.loss).abs() / plain.loss.abs().clamp(min=1e-12)),
                "aux": float((found.aux - plain.aux).norm() / plain.aux.norm().clamp(min=1e-12)),
                "gradient": (worst, errors[worst]),
                "loads": found.loads == plain.loads,
                "gathers": (dict(found.gathers), dict(plain.gathers)),
                "calls": {key: total.calls for key, total in in_flight.summary(found.transfers).items()},
                "plain calls": {key: total.calls for key, total in in_flight.summary(plain.transfers).items()},
            }
        )


def measure(tell: Callable, argv: list[str], steps: int) -> None:
    """Some steps, after one that does not count: for each its seconds, the totals of its transfers, its intervals, and
    the share of the shared expert's time under which something was in flight."""
    trainee = Trainee(argv)
    trainee.run()
    told = []
    for _ in range(steps):
        found = trainee.run(watches=True)
        totals = in_flight.summary(found.transfers)
        told.append(
            {
                "seconds": found.seconds,
                "totals": {name: {"in_flight": t.in_flight, "exposed": t.exposed} for name, t in totals.items()},
                "intervals": found.intervals,
                "under shared": covered(found.intervals, ("shared expert", "shared expert backward"), TRANSFERS),
            }
        )
    tell(told)


TRANSFERS = ("dispatch", "combine", "dispatch backward", "combine backward")


def covered(found: list[dict[str, Any]], parts: tuple[str, ...], by: tuple[str, ...]) -> float:
    """The share of the time of `parts` in which at least one of `by` was going on. 0 without any."""

    def of(names: tuple[str, ...]) -> Iterator[Interval]:
        return ((each["start"], each["end"]) for each in found if each["name"] in names)

    return share_beside(of(parts), of(by))
