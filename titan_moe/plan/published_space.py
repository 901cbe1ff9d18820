"""The layouts that a published run could have had: the same model, GPUs, batch and software, so that a search can say
whether the published one was the best by this planner, and what it would have changed.

Pipeline, expert and tensor degrees, sequences per microbatch and Megatron's recompute of modules are chosen; what the
run's release brings (kernels, transport, graphs, overlap, precision) stays, and so does context parallelism. The limits
are Megatron-Core's: every degree divides what it cuts, interleaved schedules run whole rounds of microbatches. Imports
no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from titan_moe.plan import bounds, memory, profiles, search, step, traffic
from titan_moe.plan import constants as constants_file
from titan_moe.plan import stages as stage_layout
from titan_moe.plan.choices import LARGEST_MICROBATCH, Choice, divisors
from titan_moe.plan.job import Job
from titan_moe.plan.published import Run
from titan_moe.plan.space import Node, Worth

MODULES = ("mla_up_proj", "mlp", "norms", "shared_expert", "swiglu")
STAGES_PER_RANK = (1, 2, 3, 4, 6, 8, 12)


class PublishedSpace:
    """See `space.Space`. Its levels are the same, of which "route" and "offload" decide nothing."""

    def __init__(self, job: Job, limit: float) -> None:
        self.given, self.limit = job, limit
        self.software, self.constants = profiles.of_release(job.release)[0], constants_file.fitted()

    def roots(self) -> Iterator[Node]:
        job = self.given
        domain = traffic.ranks_per_domain(job.hardware)
        for tp, ep in product(divisors(job.gpus), divisors(job.model.num_experts)):
            if tp > domain or job.model.n_heads % tp or job.gpus % (tp * job.cp):
                continue
            for size in [d for d in divisors(job.global_batch_size) if d <= LARGEST_MICROBATCH]:
                choice = {"tp": tp, "ep": ep, "micro_batch_size": size}
                first = next((each for mesh in self._meshes(choice) if (each := self._job(mesh)) is not None), None)
                if first is not None:
                    rate = bounds.layers(first, self.software, self.constants)
                    yield Node(level=1, job=first, choice=choice, rate=rate, memory=0.0)

    def _meshes(self, choice: Choice) -> Iterator[Choice]:
        job = self.given
        for pp in divisors(job.gpus // (choice["tp"] * job.cp)):
            for vp in STAGES_PER_RANK if pp > 1 else (1,):
                if job.schedule == "DualPipeV" and vp != 2:  # a schedule of two stages per rank
                    continue
                yield choice | {"pp": pp, "vp": vp}

    def _job(self, mesh: Choice) -> Job | None:
        job, count = self.given, mesh["pp"] * mesh["vp"]
        ranks = job.gpus // (mesh["pp"] * mesh["tp"] * job.cp)
        microbatches, rest = divmod(job.global_batch_size, ranks * mesh["micro_batch_size"])
        if rest or count > job.model.n_layers or job.gpus // mesh["pp"] % mesh["ep"]:
            return None
        if mesh["pp"] > 1 and (microbatches < mesh["pp"] or (mesh["vp"] > 1 and microbatches % mesh["pp"])):
            return None
        stages = job.stages
        if count != len(stages):
            f = job.model
            stages = stage_layout.balanced(f.n_layers, count, f.n_dense_layers, job.num_mtp_layers)
        kind = "local" if mesh["ep"] == 1 else job.dispatcher if job.ep > 1 else "alltoall"
        schedule = job.schedule if job.schedule == "DualPipeV" else "Interleaved1F1B" if mesh["vp"] > 1 else "1F1B"
        return replace(
            job,
            **mesh,
            dp_shard=ranks,
            dp_replicate=1,
            stages=stages,
            schedule=schedule,
            dispatcher=kind,
            recompute_mode="none",
            recompute=frozenset(),
        )

    def children(self, node: Node, worth: Worth) -> Iterator[Node]:
        return (self._mesh, self._recompute, self._unchanged, self._exact)[node.level - 1](node)

    def _mesh(self, node: Node) -> Iterator[Node]:
        for mesh in self._meshes(node.choice):
            if (job := self._job(mesh)) is not None:
                fixed = bounds.fixed_memory(job)
                needs = bounds.least_memory(replace(job, recompute_mode="full"), fixed)
                if needs <= self.limit:
                    rate = min(node.rate, bounds.mesh(job, self.software, self.constants))
                    yield Node(level=2, job=job, choice=mesh, rate=rate, memory=needs, fixed=fixed)

    def _recompute(self, node: Node) -> Iterator[Node]:
        there = [name for name in MODULES if name != "mla_up_proj" or node.job.model.attention == "mla"]
        if not node.job.model.num_shared_experts:
            there.remove("shared_expert")
        if not node.job.model.n_dense_layers:
            there.remove("mlp")
        choices: list[tuple[Any, tuple[str, ...]]] = [
            ("none", some) for n in range(len(there) + 1) for some in combinations(there, n)
        ] + [("full", ())]
        for mode, some in choices:
            job = replace(node.job, recompute_mode=mode, recompute=frozenset(some))
            needs = max(node.memory, bounds.least_memory(job, node.fixed))
            if needs <= self.limit:
                rate = min(node.rate, bounds.mesh(job, self.software, self.constants))
                choice = node.choice | {"recompute": "+".join(some) or mode}
                yield Node(level=3, job=job, choice=choice, rate=rate, memory=needs, fixed=node.fixed)

    def _unchanged(self, node: Node) -> Iterator[Node]:
        yield replace(node, level=4)

    def _exact(self, node: Node) -> Iterator[Node]:
        needs = memory.predict_memory(node.job).needed
        if needs <= self.limit:
            rate = step.tokens_per_s(node.job, self.software, self.constants)
            yield replace(node, level=5, rate=rate, memory=needs)

    def allowed(self, node: Node) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A published run and the best layout for it."""

    run: Run
    given: Node
    best: Node

    @property
    def gain(self) -> float:
        """Of the best over the published layout, as predicted."""
        return self.best.rate / self.given.rate - 1


def compare(run: Run) -> Compared:
    """The best layout may need as much memory as the GPU has, or as the planner says that the published one needs,
    where that is more: it ran."""
    job, room = run.job, memory.predict_memory(run.job)
    limit = max(room.capacity, room.needed)
    given = Node(level=search.EXACT, job=job, choice={}, rate=step.tokens_per_s(job), memory=room.needed)
    found = search.search(PublishedSpace(job, limit), limit, band=0.0, known=given)
    return Compared(run=run, given=given, best=found.front[0])
