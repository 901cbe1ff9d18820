"""Pipeline parallelism: the model cut into stages, and a schedule that runs a step's microbatches through them.

torchtitan cuts the model and torch runs the schedule. What is ours: the layout (pipeline_layout.py), and that one
optimizer step is one run of the schedule: microbatches of gradient accumulation go through the pipeline behind each
other, so that it fills and drains once per step and gradients are reduced once. That makes many microbatches, so stages
hold no more than those in flight (pipeline_stage.py).

A rank holds one stage or several, each a model with only its modules left; a stage without the embedding takes hidden
states, one without the head returns them. Only the rank of the last stage knows the loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import titan_moe.runtime  # noqa: F401
from titan_moe.runtime import titan_parallelism

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.deepseek_v3 import MTPDecoder

from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.inputs import Inputs
from titan_moe.moe.layer import moe_layers
from titan_moe.pipeline_layout import pipeline_layout
from titan_moe.pipeline_stage import InFlightStage

pipeline_parallel.PipelineStage = InFlightStage  # type: ignore[misc]  # what pipeline_llm cuts the model into


class Pipeline:
    """This rank's stages and the schedule that runs them.

    Arguments:
        model: the whole model, on the meta device.
        microbatches: of one optimizer step.
        parallelize: shards one stage in place.
    """

    def __init__(
        self,
        model: MTPDecoder,
        config: Config,
        parallel_dims: ParallelDims,
        device: torch.device,
        *,
        microbatches: int,
        parallelize: Callable[[MTPDecoder], None],
    ) -> None:
        self.loss_fn: Callable | None = None  # set when the stages have memory: it applies the last one's head
        parallelism = titan_parallelism(config)
        parallelism.module_fqns_per_model_part = pipeline_layout(config, model_flavor(config)).modules()

        def parallelize_stage(stage: MTPDecoder, **_) -> MTPDecoder:
            parallelize(stage)
            return stage

        def loss_fn(*args, **kwargs):
            assert self.loss_fn is not None
            return self.loss_fn(*args, **kwargs)

        self.schedule, parts, self.first, self.last = pipeline_llm(
            model,
            parallel_dims=parallel_dims,
            training=TrainingConfig(local_batch_size=microbatches * parallelism.pipeline_parallel_microbatch_size),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
            device=device,
            model_config=model.config,
            parallelize_fn=parallelize_stage,
            loss_fn=loss_fn,
        )
        self.parts: list[MTPDecoder] = parts  # type: ignore[assignment]
        several = isinstance(self.schedule, schedules.PipelineScheduleMulti)
        self.stages: list[InFlightStage] = self.schedule._stages if several else [self.schedule._stage]  # type: ignore
        assert all(isinstance(stage, InFlightStage) for stage in self.stages)
        self.device = device
        # Before the first step, and where training and validation alternate, torch runs the stages once on tensors
        # without content to learn their shapes.
        learn_shapes = self.schedule._initialize_pp_stages

        def learn_shapes_evenly(stages, args, kwargs, target, fwd_initialized, bwd_initialized, loss_kwargs=None):
            known = fwd_initialized and bwd_initialized == self.schedule._has_backward
            with nullcontext() if known else routing_without_content(self.parts):
                return learn_shapes(stages, args, kwargs, target, fwd_initialized, bwd_initialized, loss_kwargs)

        self.schedule._initialize_pp_stages = learn_shapes_evenly

    def step(self, microbatches: list[Inputs], valid_tokens: Tensor) -> Tensor:
        """Forward and backward of a whole optimizer step. Returns this rank's share of the loss, 0 on ranks without the
        last stage."""
        return self._run(self.schedule.step, microbatches, loss_kwargs={"valid_tokens": valid_tokens})

    def evaluate(self, microbatches: list[Inputs]) -> Tensor:
        """The summed cross-entropy of as many microbatches as a step has, without gradients."""
        schedule = self.schedule
        if not isinstance(schedule, schedules._PipelineScheduleRuntime):
            return self._run(schedule.eval, microbatches)
        # torch's eval walks the backward actions too, which V-shaped schedules cannot without gradients.
        order = schedule.pipeline_order_with_comms
        assert order is not None
        schedule.pipeline_order_with_comms = {rank: forward_only(actions) for rank, actions in order.items()}
        try:
            return self._run(schedule.eval, microbatches)
        finally:
            schedule.pipeline_order_with_comms = order

    def _run(self, schedule: Callable, microbatches: list[Inputs], **kwargs) -> Tensor:
        losses: list[Tensor] = []
        schedule(
            arg_mbs=[(tokens_BL,) for tokens_BL, _, _ in microbatches] if self.first else None,
            kwarg_mbs=[kwargs for _, _, kwargs in microbatches],
            target_mbs=[labels_BL for _, labels_BL, _ in microbatches] if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
            **kwargs,
        )
        for stage in self.stages:
            assert not stage.held(), f"stage {stage.stage_index} still holds microbatches {stage.held()}"
        # torch may leave a loss on the CPU when FSDP runs inside a stage.
        total = torch.zeros((), device=self.device)
        return total + sum(loss.detach().to(self.device) for loss in losses)


@contextmanager
def routing_without_content(parts: list[MTPDecoder]) -> Iterator[None]:
    """Inside, tokens are spread evenly over the experts: rows without content are all alike, and routers would send all
    of them to the same few, on ranks that could not hold them. What the layers counted is forgotten."""
    layers = [moe for part in parts for moe in moe_layers(part).values()]
    routers = [(moe.router, moe.router._debug_force_load_balance, moe.router.force_balance) for moe in layers]
    for router, _, _ in routers:
        router._debug_force_load_balance, router.force_balance = True, "balanced_random"
    try:
        yield
    finally:
        for router, forced, how in routers:
            router._debug_force_load_balance, router.force_balance = forced, how
        for moe in layers:
            moe.forget()


def forward_only(actions: list) -> list:
    """What is left of a rank's schedule without backward: forwards, their transfers, and FSDP's gathering."""
    kept = (schedules.FORWARD, schedules.SEND_F, schedules.RECV_F, schedules.UNSHARD, schedules.RESHARD)
    flat = [part for action in actions for part in action.sub_actions or (action,)]
    return [action for action in flat if action.computation_type in kept]
