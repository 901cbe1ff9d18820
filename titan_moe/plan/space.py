"""What a search chooses from: every way to lay a configuration out on its GPUs, as a tree that decides on one group of
settings at each level.

    shape      precision, tensor, context and expert degrees, sequences per microbatch
    route      how tokens reach their experts, what runs meanwhile, what computes the experts
    mesh       pipeline degree, schedule and stages, replicas (the rest of the GPUs shard: FSDP2); when gradients are
               reduced and gathered parameters freed
    recompute  what backward makes again, and whether tokens are sent again for it
    offload    what waits in host memory

Each node is a whole job, in which what is not decided yet is the fastest there is, and has bounds (bounds.py) for all
below it. What there is to choose from says choices.py. Everything else stays as the file has it: the model, the batch,
the sequence length, the types of parameters and moments.

Which combinations a training refuses is asked of the training's own checks (config_check.py); none is written down
here. Imports no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, Protocol, get_args

from titan_moe import mesh_check
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.config_keys import LEAVES
from titan_moe.pipeline_layout import PipelineLayout, balanced_layers, default_stages
from titan_moe.plan import bounds, memory, profiles, step, traffic
from titan_moe.plan import constants as constants_file
from titan_moe.plan import stages as stage_layout
from titan_moe.plan.bounds import Fixed, Pipeline
from titan_moe.plan.check import plan_problems
from titan_moe.plan.choices import (
    FSDP,
    LARGEST_MICROBATCH,
    OFFLOADED_LAST,
    PP,
    Choice,
    Choices,
    P,
    changed,
    divisors,
    keys,
    offloads,
    recomputes,
)
from titan_moe.plan.job import Job

Worth = Callable[[float, float], bool]
"""Whether a node may be useful that reaches at most so many tokens per second and GPU, and needs at least so many
bytes"""
LEVELS = ("shape", "route", "mesh", "recompute", "offload", "exact")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A job of which the first levels are decided."""

    level: int
    """The last level that is, in LEVELS"""
    job: Job
    choice: Choice
    rate: float
    """Tokens per second and GPU that nothing below exceeds; at the last level what is predicted"""
    memory: float
    """Bytes that nothing below goes under; at the last level what is predicted"""
    fixed: list[Fixed] = field(default_factory=list)
    """From "mesh" on: bytes that no saving touches"""
    tensors: list[list[str]] = field(default_factory=list)
    """At "recompute": what can be offloaded together"""


class Saving(NamedTuple):
    part: Choice
    """What is recomputed"""
    tensors: list[list[str]]
    """What can be offloaded with that"""


class Space(Protocol):
    """A tree of jobs that `search` goes through."""

    def roots(self) -> Iterator[Node]: ...

    def children(self, node: Node, worth: Worth) -> Iterator[Node]:
        """The next level below a node; what is not `worth` it may be left out."""
        ...

    def allowed(self, node: Node) -> bool:
        """Whether a node of the last level can be had; asked of few of them."""
        ...


class ConfigSpace(Choices):
    """The layouts of `config` on plan.gpus GPUs of plan.hardware. `plan_problems` has found nothing wrong."""

    def __init__(self, config: Config, limit: float) -> None:
        """`limit`: bytes beyond which a job need not be looked at."""
        super().__init__(config)
        self.software, self.constants = profiles.of_release("titan")[0], constants_file.fitted()
        self.limit = limit
        self._savings: dict[tuple, list[Saving]] = {}

    def job(self, choice: Choice) -> Job | None:
        """The job of the file with these values; None if training refuses it."""
        config = changed(self.config, choice)
        if mesh_check.check_accelerator(config):
            return None
        try:  # which makes all other checks
            return Job.from_config(config, self.gpus, self.hardware)
        except ValueError:
            return None

    # -----------------------------------------------------------------------------------------------------------------
    # Shapes

    def roots(self) -> Iterator[Node]:
        most = traffic.ranks_per_domain(self.hardware)  # tensor parallelism stays inside one: it is in every layer
        degrees = divisors(self.gpus)
        for recipe, tp, cp, ep in product(
            self.recipes, [d for d in degrees if d <= most], degrees, divisors(self.model.num_experts)
        ):
            if self.gpus % (tp * cp) or self.gpus % ep:
                continue
            for size in [d for d in divisors(self.batch) if d <= LARGEST_MICROBATCH]:
                choice = {
                    "precision.recipe": recipe,
                    P + "tensor_parallel_degree": tp,
                    P + "context_parallel_degree": cp,
                    P + "expert_parallel_degree": ep,
                }
                if (found := self._some_mesh(choice, size)) is not None:
                    yield found

    def _some_mesh(self, choice: Choice, size: int) -> Node | None:
        """The shape on the shortest pipeline that it can have, with routes that are not decided yet."""
        route = self._routes(choice[P + "expert_parallel_degree"])[0]
        for mesh in self._meshes(choice, size, replicas=(1,)):
            if mesh[P + "pipeline_parallel_schedule"] not in ("1F1B", "Interleaved1F1B"):
                continue
            whole = choice | route | {"moe.overlap": "none"} | mesh | self._fastest(mesh)
            if (job := self.job(whole)) is None:
                continue
            rate = max(
                bounds.compute(self._with_route(job, other), self.software, self.constants)
                for other in self._routes(job.ep)
            )
            return Node(level=0, job=job, choice=choice | {"size": size}, rate=rate, memory=0.0)
        return None

    def _with_route(self, job: Job, route: Choice) -> Job:
        """For a bound, whether or not they go together."""
        named = route["moe.dispatcher"]
        kind: Any = self._auto(job.ep) if named == "auto" else named
        return replace(job, dispatcher=kind, fused_grouped_mlp=route["moe.experts"] == "te_fused")

    # -----------------------------------------------------------------------------------------------------------------
    # Routes and meshes

    def _shape_children(self, node: Node) -> Iterator[Node]:
        kinds = get_args(LEAVES["moe.overlap"])
        for route, overlap in product(self._routes(node.job.ep), kinds):
            choice = node.choice | route | {"moe.overlap": overlap}
            for mesh in self._meshes(choice, choice["size"], replicas=(1,)):
                if (job := self.job(keys(choice) | mesh | self._fastest(mesh))) is not None:
                    rate = min(node.rate, bounds.layers(job, self.software, self.constants))
                    yield Node(level=1, job=job, choice=choice, rate=rate, memory=0.0)
                    break

    def _route_children(self, node: Node, worth: Worth) -> Iterator[Node]:
        """A pipeline whose layers are all recomputed balances them otherwise, so it is a node of its own."""
        jobs = {whole: replace(node.job, recompute_mode="full" if whole else "none") for whole in (False, True)}
        times = {whole: bounds.layer_times(job, self.software, self.constants) for whole, job in jobs.items()}
        rates: dict[tuple, float] = {}
        no_room: set[tuple] = set()
        for mesh, whole in product(self._meshes(node.choice, node.choice["size"]), (False, True)):
            pp, schedule = mesh[PP], mesh[P + "pipeline_parallel_schedule"]
            if whole and pp == 1:
                continue
            pipeline = pp, schedule, tuple(mesh[P + "pipeline_parallel_layers_per_stage"]), whole
            if pipeline not in rates:
                stages = self._pipeline(*pipeline)
                rates[pipeline] = bounds.pipelined(node.job, times[whole], stages, self.constants) if stages else 0.0
            if pipeline in no_room or not worth(min(node.rate, rates[pipeline]), 0.0):
                continue
            choice = keys(node.choice) | mesh | self._fastest(mesh)
            if whole:
                choice["activation_checkpoint.mode"] = "full"
            if (job := self.job(choice)) is None:
                continue
            reduce = (False, True) if job.pp == 1 and job.microbatches > 1 else (False,)
            reshard = ("never", "default") if job.pp == 1 else ("default", "always")
            if job.schedule not in ("1F1B", "Interleaved1F1B"):
                reshard = ("default",)
            variants = [choice | dict(zip(FSDP, variant)) for variant in product(reduce, reshard)]
            found = [self._mesh(node, variant, job) for variant in variants]
            if all(each.memory > self.limit for each in found):
                no_room.add(pipeline)  # for more replicas, which come next and share less, neither
            for each in found:
                if each.memory <= self.limit and worth(each.rate, each.memory):
                    rate = min(each.rate, bounds.mesh(each.job, self.software, self.constants))
                    yield replace(each, rate=rate)

    def _mesh(self, node: Node, choice: Choice, job: Job) -> Node:
        job = _saved(job, choice)
        fixed = bounds.fixed_memory(job)
        least = replace(job, recompute_mode="full", offload=frozenset(OFFLOADED_LAST), redispatch=True)
        needs = bounds.least_memory(least, fixed)
        return Node(level=2, job=job, choice=choice, rate=node.rate, memory=needs, fixed=fixed)

    def _pipeline(self, pp: int, schedule: str, layers: tuple[int, ...], whole: bool) -> Pipeline | None:
        """None if there are more stages than layers. `whole`: recomputing all layers."""
        counts = layers or (self.model.n_layers,)
        if pp > 1 and not layers:
            number = default_stages(schedule, pp)
            if number > self.model.n_layers:
                return None
            counts = balanced_layers(self.model, number, self.config.training.seq_len, recompute=whole)
        stages = stage_layout.from_counts([*counts], self.model.n_dense_layers, self.model.num_mtp_layers)
        layout = PipelineLayout(schedule=schedule, pp=pp, layers=tuple(counts), flops=())
        return Pipeline(schedule, stages, [layout.stages_of(rank) for rank in range(pp)])

    # -----------------------------------------------------------------------------------------------------------------
    # What saves memory

    def _savings_of(self, node: Node) -> list[Saving]:
        """What can be recomputed and offloaded of a layer. It depends on the mesh only through what is 1."""
        job = node.job
        key = (job.cp == 1, job.pp == 1, job.ep == 1, job.dispatcher)
        if key not in self._savings:
            self._savings[key] = [
                Saving(part, [names for names in offloads() if self._goes(node.choice | part, names)])
                for part in recomputes()
                if (not part["moe.redispatch"] or (job.ep > 1 and part["activation_checkpoint.mode"] != "none"))
                and self._goes(node.choice | part, [])
            ]
        return self._savings[key]

    def _goes(self, choice: Choice, tensors: list[str]) -> bool:
        return not check(changed(self.config, choice | {"activation_offload.tensors": tensors}), self.gpus)

    def _mesh_children(self, node: Node) -> Iterator[Node]:
        whole = node.job.recompute_mode == "full"
        for saving in self._savings_of(node):
            if node.job.pp > 1 and (saving.part["activation_checkpoint.mode"] == "full") != whole:
                continue
            choice = node.choice | saving.part
            job = _saved(node.job, choice)
            least = replace(job, offload=frozenset(name for names in saving.tensors for name in names))
            needs = max(node.memory, bounds.least_memory(least, node.fixed))
            if needs > self.limit:
                continue
            rate = min(node.rate, bounds.mesh(job, self.software, self.constants))
            yield Node(
                level=3, job=job, choice=choice, rate=rate, memory=needs, fixed=node.fixed, tensors=saving.tensors
            )

    def _recompute_children(self, node: Node) -> Iterator[Node]:
        for tensors in node.tensors:
            job = replace(node.job, offload=frozenset(tensors))
            needs = max(node.memory, bounds.least_memory(job, node.fixed))
            if needs <= self.limit:
                rate = min(node.rate, bounds.mesh(job, self.software, self.constants))
                choice = node.choice | {"activation_offload.tensors": tensors}
                yield Node(level=4, job=job, choice=choice, rate=rate, memory=needs)

    def _offload_children(self, node: Node) -> Iterator[Node]:
        needs = memory.predict_memory(node.job).needed
        if needs <= self.limit:
            rate = step.tokens_per_s(node.job, self.software, self.constants)
            yield replace(node, level=5, rate=rate, memory=needs)

    def children(self, node: Node, worth: Worth) -> Iterator[Node]:
        match LEVELS[node.level]:
            case "shape":
                return self._shape_children(node)
            case "route":
                return self._route_children(node, worth)
            case "mesh":
                return self._mesh_children(node)
            case "recompute":
                return self._recompute_children(node)
            case _:
                return self._offload_children(node)

    def allowed(self, node: Node) -> bool:
        config = changed(self.config, node.choice)
        if plan_problems(config):
            return False
        assert Job.from_config(config, self.gpus, self.hardware) == node.job, "the file means another job"
        return True


def _saved(job: Job, choice: Choice) -> Job:
    """The job with a choice's savings. `ConfigSpace.allowed` compares what comes out with what the file means."""
    early, freed = (choice[key] for key in FSDP)
    return replace(
        job,
        recompute_mode=choice["activation_checkpoint.mode"],
        recompute=frozenset(choice["activation_checkpoint.recompute"]),
        offload=frozenset(choice["activation_offload.tensors"]),
        redispatch=choice["moe.redispatch"],
        reduce_every_microbatch=early,
        reshard_after_forward={"always": True, "never": False}.get(freed, job.pp == 1),
    )
