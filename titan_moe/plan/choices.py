"""What a search may choose: the values of a configuration's keys, group by group, whether or not they go together.

Which combinations a training refuses is asked of the training's own checks (space.py); none is written down here. What
changes numbers, the precision, or needs libraries that the file does not ask for, only changes where `plan.search_also`
says so. Imports no torch.
"""

import copy
from collections.abc import Iterator
from functools import cached_property
from itertools import combinations, product
from typing import Any, get_args

from titan_moe import mesh_check
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.config_keys import LEAVES
from titan_moe.pipeline_layout import ONE_STAGE, V_SHAPED, balanced_layers
from titan_moe.plan import traffic
from titan_moe.plan.hardware import resolve
from titan_moe.precision.recipes import RECIPES

Choice = dict[str, Any]
"""Values of keys"""
LARGEST_MICROBATCH = 16
"""Sequences"""
STAGES_PER_RANK = (2, 3, 4, 6, 8)
"""Of interleaved schedules"""
SCHEDULES = get_args(LEAVES["parallelism.pipeline_parallel_schedule"])
OFFLOADABLE: tuple[tuple[str, ...], ...] = (
    ("layer_input",),
    ("attn_q", "attn_k", "attn_v"),
    ("attn_out",),
    ("moe_expert_input",),
)
"""What is offloaded together or not at all"""
OFFLOADED_LAST = ("layer_input", "moe_expert_input")
"""What is left to offload when whole layers are recomputed"""
LIBRARIES = ("te_ep", "deepep", "hybridep")

P = "parallelism."
PP = P + "pipeline_parallel_degree"
FSDP = (P + "fsdp_reduce_every_microbatch", P + "fsdp_reshard_after_forward")


def changed(config: Config, choice: Choice) -> Config:
    """A copy of `config` with other values of some keys; what did not change is shared."""
    new = copy.copy(config)
    for section in {key.partition(".")[0] for key in choice}:
        setattr(new, section, copy.copy(getattr(config, section)))
    for key, value in choice.items():
        section, _, name = key.partition(".")
        setattr(getattr(new, section), name, value)
    return new


def divisors(whole: int) -> list[int]:
    return [d for d in range(1, whole + 1) if whole % d == 0]


class Choices:
    """Those of `config` on plan.gpus GPUs of plan.hardware. `plan_problems` has found nothing wrong."""

    def __init__(self, config: Config) -> None:
        assert config.plan.gpus is not None
        self.gpus, self.hardware = config.plan.gpus, resolve(config.plan.hardware)
        # The batch is what is asked for; it must not follow the mesh.
        whole = mesh_check.sequences_per_step(config, self.gpus)
        self.config = changed(config, {"training.global_batch_size": whole})
        self.batch, self.model = whole, model_flavor(config)
        self.also = set(config.plan.search_also)

    @cached_property
    def recipes(self) -> list[str | None]:
        own = self.config.precision.recipe
        if "precision" not in self.also:
            return [own]
        others = ["bf16", *(name for name in RECIPES if name in self.hardware.precisions)]
        return [own, *(name for name in others if name != (own or "bf16"))]

    @staticmethod
    def _auto(ep: int) -> str:
        return "local" if ep == 1 else "dedup"

    def _routes(self, ep: int) -> list[Choice]:
        """Dispatchers, and what computes the experts."""
        moe = self.config.moe
        own = "auto" if ep == 1 or moe.dispatcher == "local" else moe.dispatcher
        named = [own]
        if ep > 1:
            others = ("dedup", "alltoall", *(LIBRARIES if "libraries" in self.also else ()))
            named += [name for name in others if name not in (own, self._auto(ep) if own == "auto" else "")]
        experts = [moe.experts]
        if "libraries" in self.also and moe.experts != "te_fused":
            experts.append("te_fused")
        found = []
        for name, computes in product(named, experts):
            by_node = None
            if name in ("auto", "dedup") and ep > self.hardware.nvlink_domain:
                by_node = moe.ranks_per_node or traffic.ranks_per_domain(self.hardware)
            found.append(
                {
                    "moe.dispatcher": name,
                    "moe.experts": computes,
                    "moe.ranks_per_node": by_node,
                    "moe.hop_chunks": moe.hop_chunks if by_node else 1,
                    "moe.te_ep_payload": moe.te_ep_payload if name == "te_ep" else "bf16",
                }
            )
        return found

    def _meshes(self, choice: Choice, size: int, replicas: tuple[int, ...] | None = None) -> Iterator[Choice]:
        """Every pipeline and number of replicas that divide the rest of the GPUs and the batch, shortest first."""
        tp, cp = choice[P + "tensor_parallel_degree"], choice[P + "context_parallel_degree"]
        for pp in divisors(self.gpus // (tp * cp)):
            data = self.gpus // (tp * cp * pp)
            if self.batch % (data * size):
                continue
            local = size if pp == 1 else self.batch // data
            # Replicas shorten what FSDP sends; with a pipeline that is once per step, and hardly shows.
            copies = (1,) if pp > 1 else replicas or divisors(data)
            for pipeline, replicate in product(self._pipelines(pp, size), copies):
                yield {
                    P + "pipeline_parallel_degree": pp,
                    **pipeline,
                    P + "data_parallel_replicate_degree": replicate,
                    P + "data_parallel_shard_degree": -1,
                    "training.local_batch_size": local,
                }

    def _pipelines(self, pp: int, size: int) -> Iterator[Choice]:
        p = self.config.parallelism
        names = ("schedule", "layers_per_stage", "microbatch_size")

        def keys(*values: Any) -> Choice:
            return {f"{P}pipeline_parallel_{name}": value for name, value in zip(names, values)}

        if pp == 1:  # the schedule then means nothing
            yield keys("1F1B", [], 1)
            return
        for schedule in SCHEDULES:
            if schedule in (*ONE_STAGE, *V_SHAPED):
                yield keys(schedule, [], size)
                continue
            for each in STAGES_PER_RANK if schedule == "Interleaved1F1B" else (2,):
                if pp * each > self.model.n_layers + 1:
                    break
                layers = []
                if each > 2:
                    layers = balanced_layers(self.model, pp * each, self.config.training.seq_len)
                yield keys(schedule, layers, size)
        own = p.pipeline_parallel_layers_per_stage
        if own and pp == p.pipeline_parallel_degree:
            yield keys(p.pipeline_parallel_schedule, own, size)

    def _fastest(self, mesh: Choice) -> Choice:
        """No recompute and nothing offloaded or freed: most memory, least time."""
        return {
            "activation_checkpoint.mode": "none",
            "activation_checkpoint.recompute": [],
            "activation_offload.tensors": [],
            "moe.redispatch": False,
            **dict(zip(FSDP, (False, "never" if mesh[P + "pipeline_parallel_degree"] == 1 else "default"))),
        }


def keys(choice: Choice) -> Choice:
    return {key: value for key, value in choice.items() if key in LEAVES}


def recomputes() -> list[Choice]:
    """Every choice of what backward makes again, whether or not a model has it."""
    parts = get_args(get_args(LEAVES["activation_checkpoint.recompute"])[0])
    modes = [("none", list(some)) for n in range(len(parts) + 1) for some in combinations(parts, n)]
    modes += [("selective", []), ("full", [])]
    names = ("activation_checkpoint.mode", "activation_checkpoint.recompute", "moe.redispatch")
    return [dict(zip(names, (mode, parts, again))) for (mode, parts), again in product(modes, (False, True))]


def offloads() -> list[list[str]]:
    """Every choice of what waits in host memory."""
    every = get_args(get_args(LEAVES["activation_offload.tensors"])[0])
    assert {name for group in OFFLOADABLE for name in group} == {*every}
    return [
        [name for group in some for name in group]
        for n in range(len(OFFLOADABLE) + 1)
        for some in combinations(OFFLOADABLE, n)
    ]
