"""One job that trains several configurations, one after the other; imports, which cost most of a start, happen
once.

    python tests/distributed/ranks.py N tests/distributed/worker.py OUT/CASES.json

CASES.json maps a name to a free port, the train.py to run, what is done to it (see Case) and its arguments. Each
case runs its `main` for real, in a fork of each rank with a process group of its own; its run folder is OUT/<name>.
Rank 0 adds OUT/<name>/step1.pt: the gradient of every parameter at step 1, whole, before clipping; the experts that
every token was routed to at step 1, by global sample; how often each collective was called in step 1; how experts are
cut. Every rank adds passes-<rank>.json: how often it ran each step, and the factors of its receive buffers in the end.
"""

import importlib.util
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # isort: skip - first: it tells torchtitan about CPUs; and once, for all cases
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from tests import te_doubles
from titan_moe import runtime, validation
from titan_moe.fsdp_traffic import GlooReduce
from titan_moe.moe import experts
from titan_moe.moe.layer import FusedMoE, moe_layers
from titan_moe.moe.names import to_stock_names


class Recorder:
    """Watches step 1 of one case from outside: train.py has no hooks for it, and needs none."""

    def __init__(self) -> None:
        self.run: Any = None  # a Run of the train.py under test
        self.gradients: dict[str, torch.Tensor] | None = None
        self.topk_ids: dict[nn.Module, list[torch.Tensor]] = {}  # by router, one tensor [B, L, K] a microbatch
        self.collectives: Counter[str] = Counter()
        self.load_without_content: list[float] = []  # heaviest over mean expert while a pipeline learned shapes
        self.gemms: Counter[str] = Counter()  # backward nodes of expert GEMMs that ran
        self.passes: Counter[int] = Counter()  # forward and backward of a whole step, by step
        self.validations = 0
        self.kernels: Counter[str] = Counter()  # calls of NCCL EP's doubles

    def record_gradients(self) -> None:
        assert self.run is not None
        self.gradients = {}
        for name, param in self.parameters().items():
            assert param.grad is not None, f"{name} has no gradient"
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            self.gradients[name] = grad.clone()
        self.gradients = to_stock_names(self.gradients)
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, self.gradients)
        self.gradients = {name: grad for stage in stages for name, grad in stage.items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """Of this rank's pipeline stages."""
        return {canonical_fqn(name): p for part in self.run.model_parts for name, p in part.named_parameters()}

    def routing_by_global_sample(self) -> torch.Tensor:
        """[moe layers, global samples of step 1, L, K], K sorted: data rank r's i-th sample is global sample i R + r.

        With EP, the tensor ranks split a context rank's tokens between them; context ranks hold pieces of the sequence
        in the load balancer's order.
        """
        dims = self.run.parallel_dims
        degrees = {"batch": dims.dp_replicate * dims.dp_shard, "cp": dims.cp, "tp": dims.tp if dims.ep > 1 else 1}
        meshes = {axis: dims.get_optional_mesh(axis) for axis in degrees}
        place = tuple(0 if mesh is None else mesh.get_local_rank() for mesh in meshes.values())
        place = place if dims.ep > 1 else (*place[:2], 0)
        local = {}
        for part in self.run.model_parts:
            for name, moe in moe_layers(part).items():
                local[name] = torch.cat(self.topk_ids[moe.router])
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (place, local))
        pieces = {(name, *place): ids for place, layers in found for name, ids in layers.items()}
        data, context, tensor = degrees.values()
        layers = []
        for name in sorted({name for name, *_ in pieces}):
            samples = []
            for r in range(data):
                parts = [pieces[name, r, c, t] for c in range(context) for t in range(tensor)]
                samples.append(self.in_text_order(torch.cat(parts, dim=1)))
            layers.append(torch.stack(samples, dim=1).flatten(0, 1))
        return torch.stack(layers).sort(dim=-1).values

    def in_text_order(self, ids_BLK: torch.Tensor) -> torch.Tensor:
        ranks = self.run.parallel_dims.cp
        if ranks == 1 or self.run.config.parallelism.context_parallel_load_balancer == "none":
            return ids_BLK
        pieces = ids_BLK.chunk(2 * ranks, dim=1)  # of rank 0: first, last; of rank 1: second, second to last; ...
        return torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim=1)

    def of_all_ranks(self, counts: Counter[str]) -> list[Counter[str]]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, counts)
        return found

    def expert_shards(self) -> list[list[int]]:
        """Shape of what each rank holds of layer 1's w1 and w3; empty for a rank of another pipeline stage."""
        w13_EF2D = self.parameters().get("layers.1.moe.routed_experts.inner_experts.w13_EF2D")
        local = w13_EF2D.to_local() if isinstance(w13_EF2D, DTensor) else w13_EF2D
        shapes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shapes, [] if local is None else list(local.shape))
        return shapes


class CountCollectives(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def count_backward(node: Any, recorder: Recorder) -> None:
    """Count how often backward runs `node`, a torch.autograd.Function of moe/experts.py."""
    backward = node.backward

    def counting(*args):
        if recorder.gradients is None:
            recorder.gemms[node.__name__] += 1
        return backward(*args)

    node.backward = staticmethod(counting)


def count_unseen_collectives(recorder: Recorder) -> None:
    """Count those that CountCollectives does not see as what they are."""
    exchange, reduce = dist.all_to_all_single, GlooReduce.__call__

    def counting_exchange(*args, **kwargs):  # inside ops of our own, where a dispatch mode does not look
        if recorder.gradients is None:
            recorder.collectives["alltoall"] += 1
        return exchange(*args, **kwargs)

    def counting_reduce(self, *args, **kwargs):  # which gloo does as an all-reduce
        if recorder.gradients is None:
            recorder.collectives["reduce_scatter"] += 1
        return reduce(self, *args, **kwargs)

    dist.all_to_all_single, GlooReduce.__call__ = counting_exchange, counting_reduce


def hide_labels_and_compute_directly(train: ModuleType, run: Any) -> list[tuple[int, float, int]]:
    """Leaves data rank 1 three labels of each sequence; returns what each call of the loss should have come to:
    (step, 0 in validation; cross-entropy in float64, summed; labels), filled as the run goes on."""
    found: list[tuple[int, float, int]] = []
    to_device, loss_fn = train.to_device, run.loss_fn

    def hide_labels(batch, device):
        inputs, labels_BL = to_device(batch, device)
        if train.runtime.batch_coordinates(run.parallel_dims)[0] == 1:
            labels_BL = labels_BL.index_fill(1, torch.arange(3, labels_BL.shape[1]), IGNORE_INDEX)
        return inputs, labels_BL

    def computing(output, labels_BL, *args, **kwargs):
        weight = run.loss_fn.lm_head.weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        logits = (output.double() @ weight.double().T).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(
            logits, labels_BL.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
        )
        step = run.progress.step if torch.is_grad_enabled() else 0
        found.append((step, loss.item(), int((labels_BL != IGNORE_INDEX).sum())))
        return loss_fn(output, labels_BL, *args, **kwargs)

    train.to_device = hide_labels
    computing.lm_head = loss_fn.lm_head
    run.loss_fn = computing
    return found


def lose_rows(run: Any) -> None:
    """At step 2, and in a validation, layers.2 of rank 1 loses what it received and says that its buffer was too small,
    until that has grown."""
    layers = {name: moe for part in run.model_parts for name, moe in moe_layers(part).items()}
    region = layers["layers.2"].routed_experts
    dispatcher, lost = region.dispatcher, {}
    plan, dispatch = dispatcher.plan, dispatcher.start_dispatch

    def loses() -> bool:
        place = "step 2" if region.training else "validation"
        here = not region.training or run.progress.step == 2
        return here and lost.setdefault(place, dispatcher.factor) == dispatcher.factor

    def claiming_plan(*args):
        found = plan(*args)
        found.overflow = torch.ones_like(found.overflow) if loses() else found.overflow
        return found

    def losing_dispatch(x_TD, weights_TK, plan):
        return dispatch(x_TD * 0, weights_TK * 0, plan) if loses() else dispatch(x_TD, weights_TK, plan)

    if dist.get_rank() == 1:
        dispatcher.plan, dispatcher.start_dispatch = claiming_plan, losing_dispatch


def load(path: str) -> ModuleType:
    """The module train.py, or an edited copy of it."""
    if Path(path).resolve() == Path(train.__file__).resolve():
        return train
    spec = importlib.util.spec_from_file_location("edited_train", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["edited_train"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def run_case(
    train: ModuleType, argv: list[str], folder: Path, *, few_labels: bool, overflow: bool, stops: bool
) -> None:
    if any(word.endswith(("=te_ep", "=te", "=te_fused")) for word in argv):
        te_doubles.install()
    recorder = Recorder()
    direct: list[tuple[int, float, int]] = []
    build, train_step = train.build, train.train_step
    forward_backward, held_out_loss = train.forward_backward, validation.held_out_loss
    clip, route = train.dist_utils.clip_grad_norm_, TokenChoiceTopKRouter.forward

    def recording_build(config):
        recorder.run = build(config)
        if few_labels:
            nonlocal direct
            direct = hide_labels_and_compute_directly(train, recorder.run)
        if overflow:
            lose_rows(recorder.run)
        return recorder.run

    def recording_clip(*args, **kwargs):
        if recorder.gradients is None:
            recorder.record_gradients()
        return clip(*args, **kwargs)

    def recording_route(self, x_BLD, expert_bias_E=None):
        scores, ids, all_scores = route(self, x_BLD, expert_bias_E)
        recomputing = torch._C._current_graph_task_id() != -1  # inside a backward
        if recorder.gradients is None and torch.is_grad_enabled() and not recomputing:
            recorder.topk_ids.setdefault(self, []).append(ids.detach().clone())
        return scores, ids, all_scores

    def counting_step(*args, **kwargs):
        if stops and recorder.run.progress.step == 2 and dist.get_rank() == 0:
            (folder / "stop").touch()
        if recorder.gradients is not None:
            return train_step(*args, **kwargs)
        with CountCollectives(recorder.collectives):
            done = train_step(*args, **kwargs)
        recorder.kernels.update(te_doubles.kernel_calls())
        return done

    def counting_forward_backward(run, *args, **kwargs):
        recorder.passes[run.progress.step] += 1
        return forward_backward(run, *args, **kwargs)

    def counting_held_out_loss(*args):
        recorder.validations += 1
        return held_out_loss(*args)

    def forgetting(self):  # a pipeline has run its stages on nothing, to learn shapes
        if recorder.gradients is None:
            for ids in recorder.topk_ids.values():
                load = torch.cat([i.flatten() for i in ids]).bincount(minlength=8).double()
                recorder.load_without_content.append((load.max() / load.mean()).item())
            recorder.topk_ids.clear()
            recorder.gemms.clear()
        return forget(self)

    forget, FusedMoE.forget = FusedMoE.forget, forgetting
    for node in (experts._Dgrad, experts._Wgrad):
        count_backward(node, recorder)
    count_unseen_collectives(recorder)
    # No need to put anything back: the case has this process to itself.
    train.forward_backward, validation.held_out_loss = counting_forward_backward, counting_held_out_loss
    train.build, train.train_step = recording_build, counting_step
    train.dist_utils.clip_grad_norm_, TokenChoiceTopKRouter.forward = recording_clip, recording_route
    train.main(argv)
    if stops:
        (folder / f"last-step-{dist.get_rank()}").write_text(str(recorder.run.progress.step))
    if few_labels:
        (folder / f"direct-{dist.get_rank()}.json").write_text(json.dumps(direct))
    if recorder.gradients is not None:
        write_down(recorder, folder)


def write_down(recorder: Recorder, folder: Path) -> None:
    """What was recorded, for the tests."""
    layers = [moe for part in recorder.run.model_parts for moe in moe_layers(part).values()]
    factors = [moe.routed_experts.dispatcher.factor for moe in layers]
    passes = {"training": recorder.passes, "validation": recorder.validations, "factors": factors}
    folder.mkdir(exist_ok=True)  # a case may train in another's run folder
    (folder / f"passes-{dist.get_rank()}.json").write_text(json.dumps(passes))
    routing, shards = recorder.routing_by_global_sample(), recorder.expert_shards()
    gemms, kernels = recorder.of_all_ranks(recorder.gemms), recorder.of_all_ranks(recorder.kernels)
    if dist.get_rank() == 0:
        step1 = {"gradients": recorder.gradients, "routing": routing, "collectives": dict(recorder.collectives)}
        step1 |= {"expert_gemms": dict(sum(gemms, Counter())), "kernels": [dict(counts) for counts in kernels]}
        step1 |= {"load_without_content": recorder.load_without_content}
        torch.save({**step1, "expert_shards": shards}, folder / "step1.pt")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 of each case hosts its own store
    for name, (port, path, few_labels, overflow, stops, argv) in json.loads(file.read_text()).items():
        os.environ |= {"RUN_ID": name, "MASTER_PORT": str(port)}
        child = os.fork()
        if child == 0:
            try:
                run_case(load(path), argv, file.parent / name, few_labels=few_labels, overflow=overflow, stops=stops)
                runtime.leave_process_group()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            sys.exit(f"case {name} failed on rank {os.environ['RANK']}")
