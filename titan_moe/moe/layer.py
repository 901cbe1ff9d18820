"""The MoE layer: torchtitan's nodes with the region between router and output replaced.

    scores, ids = router(x)                                    fp32, with the balancing bias in the choice alone
    plan        = dispatcher.plan(ids)                         who goes where; never computed twice
    received    = dispatcher.dispatch(x, scores, plan)         rows of the local experts, in padded slabs
    y           = experts(received)                            routing weight applied inside
    out         = dispatcher.combine(y) + shared_experts(x)

`FusedMoE`, `FusedRoutedExperts` and `FusedExperts` subclass torchtitan's `MoE`, `RoutedExperts` and `GroupedExperts`
and take over their configs with the sharding in them, so that FSDP2, EP, checkpointing and the model around see what
they saw before. `fuse` turns a stock MoE config into ours; `fused_moe` is the same as an override for stock torchtitan:

    --override.imports titan_moe.moe.layer.fused_moe

What the stock nodes do otherwise: they count loads in float32, and twice under recompute; they weight in combine; they
run the shared expert last, which would keep recompute from stopping before combine.

State dicts have torchtitan's names w1_EFD, w2_EDF, w3_EFD, whatever the parameter is called here.

Shape letters: B batch, L sequence, T = B*L tokens, D model width, K top-k, E experts, F expert hidden width, R rows
received.
"""

from dataclasses import dataclass, replace
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts, MoE

from titan_moe.moe import balance, health
from titan_moe.moe.layout import expert_counts
from titan_moe.moe.names import FUSED, GATE, UP, split_w13
from titan_moe.moe.region import FusedExperts, FusedRoutedExperts, UnderWay
from titan_moe.moe.router import Router, RouterGate, collect
from titan_moe.moe.te_router import TERouter
from titan_moe.torch_helpers import in_backward, local


class FusedMoE(MoE):
    """torchtitan's MoE with int64 load counts, taken once per token, and the sequence-wise auxiliary loss.

    `tokens_per_expert_E`, `decisions_2` (of health.py) and `loss` collect over the microbatches of a step until the
    balancer takes them.
    """

    routed_experts: FusedRoutedExperts
    router: Router
    tokens_per_expert_E: Tensor
    expert_bias_E: Tensor | None

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        sequence_loss_coeff: float = 0.0
        sequences_per_step: int = 1  # over all ranks and microbatches: what makes the loss a mean
        overlap_shared: bool = False

    def __init__(self, config: Config):
        super().__init__(config)
        self.overlap_shared = config.overlap_shared
        self.sequence_loss_coeff, self.sequences_per_step = config.sequence_loss_coeff, config.sequences_per_step
        self.loss: Tensor | None = None
        self.decisions_2: Tensor | None = None
        self.sequence_ranks = balance.WHOLE
        self.register_buffer(
            "tokens_per_expert_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False
        )

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        self.sequence_ranks = balance.SequenceRanks.of(parallel_dims)

    def forward(self, x_BLD: Tensor) -> Tensor:
        # The shared expert comes before combine, so that recompute has made all it needs when it comes to that.
        if self.overlap_shared and self.shared_experts is not None:
            under_way = self.send(x_BLD)
            shared_BLD = self.shared_experts(x_BLD)
            self.routed_experts.compute(under_way)
            return self.routed_experts.collect(under_way) + shared_BLD
        routing = self.route(x_BLD)
        shared_BLD = self.shared_experts(x_BLD) if self.shared_experts is not None else None
        out_BLD = self.routed_experts(x_BLD, *routing)
        return out_BLD if shared_BLD is None else out_BLD + shared_BLD

    def send(self, x_BLD: Tensor) -> UnderWay:
        """Route the tokens and send them to their experts. For the rest see FusedRoutedExperts."""
        scores_BLK, ids_BLK, _ = self.route(x_BLD)
        return self.routed_experts.send(x_BLD, scores_BLK, ids_BLK)

    def route(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The router's weights [B, L, K], with the auxiliary loss in their gradient, and ids [B, L, K]; and the load
        [E], which is noted."""
        scores_BLK, ids_BLK, all_scores_BLE = self.router(x_BLD, self.expert_bias_E)
        counts_E = expert_counts(ids_BLK.flatten(), all_scores_BLE.shape[-1])
        if self.training:
            if not in_backward():
                self.tokens_per_expert_E.add_(counts_E)
                self.decisions_2 = collect(self.decisions_2, health.decisions(all_scores_BLE))
            if self.sequence_loss_coeff:
                loss = balance.sequence_loss(all_scores_BLE, ids_BLK, self.sequence_ranks)
                loss = loss * (self.sequence_loss_coeff / self.sequences_per_step)
                scores_BLK = balance.with_loss(scores_BLK, loss, self.sequence_ranks)
                self.loss = collect(self.loss, loss)
        return scores_BLK, ids_BLK, counts_E

    def take_losses(self) -> Tensor:
        """The auxiliary losses of the step so far, of this rank; and forget them."""
        losses = [loss for loss in (self.loss, self.router.gate.loss) if loss is not None]
        self.loss = self.router.gate.loss = None
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.tokens_per_expert_E.device)

    def forget(self) -> Tensor:
        """Forget what was collected since the last step. Returns this rank's auxiliary losses of it."""
        local(self.tokens_per_expert_E).zero_()
        self.decisions_2 = self.routed_experts.dropped = self.routed_experts.overflow = None
        return self.take_losses()

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        self.tokens_per_expert_E = self.tokens_per_expert_E.to(torch.int64)


def moe_layers(model: nn.Module) -> dict[str, FusedMoE]:
    """Every MoE layer, multi-token prediction's included, by a short name: layers.3, mtp_layers.0."""
    return {
        canonical_fqn(name).removesuffix(".moe"): module
        for name, module in model.named_modules()
        if isinstance(module, FusedMoE)
    }


# ---------------------------------------------------------------------------------------------------------------------
# Configs


def fuse(
    config: MoE.Config,
    *,
    dispatcher: str = "auto",
    experts: str = "auto",
    weighting: str = "early",
    ranks_per_node: int | None = None,
    hop_chunks: int = 1,
    capacity_factor: float | None = None,
    drop_policy: str = "probs",
    recv_buffer: str | float = "exact",
    max_tokens: int | None = None,
    in_flight: int = 1,
    te_ep_payload: str = "bf16",
    force_balance: str = "none",
    sequence_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    sequences_per_step: int = 1,
    router: str = "torch",
    scores_per_group: int = 2,
    recipe: str | None = None,
    overlap_shared: bool = False,
) -> FusedMoE.Config:
    """A stock MoE config, sharding set or not, as one of ours. `sequences_per_step` is over all ranks and microbatches
    of an optimizer step; only the auxiliary losses need it. `max_tokens` is of one rank and microbatch; only te_ep,
    deepep, hybridep and a `recv_buffer` other than "exact" need it. `in_flight`, for te_ep: microbatches that may wait
    for their backward; `te_ep_payload`: what rows travel as there. `recipe` is what the experts' GEMMs are quantized
    to. `overlap_shared`: the shared expert runs while tokens are on their way to their experts. `scores_per_group`: see
    router.py."""
    routed, chooser = config.routed_experts, config.router
    inner = routed.inner_experts
    if type(inner) is not GroupedExperts.Config:
        raise ValueError(
            f"fused_moe replaces torchtitan's GroupedExperts, not {type(inner).__qualname__}: leave such layers out "
            "with fqns, or drop the override that put it there"
        )
    inner = derive(
        inner,
        FusedExperts.Config,
        backend=experts,
        weighting=weighting,
        recipe=recipe,
        param_init=_fused_init(inner.param_init),
        sharding_config=_fused_sharding(inner.sharding_config),
    )
    routed = derive(
        routed,
        FusedRoutedExperts.Config,
        inner_experts=inner,
        dispatcher=dispatcher,
        ranks_per_node=ranks_per_node,
        hop_chunks=hop_chunks,
        capacity_factor=capacity_factor,
        drop_policy=drop_policy,
        recv_buffer=recv_buffer,
        max_tokens=max_tokens,
        in_flight=in_flight,
        te_ep_payload=te_ep_payload,
    )
    router_config = (TERouter if router == "te" else Router).Config
    gate = derive(chooser.gate, RouterGate.Config, z_loss_coeff=z_loss_coeff, sequences_per_step=sequences_per_step)
    return derive(
        config,
        FusedMoE.Config,
        routed_experts=routed,
        router=derive(
            chooser, router_config, gate=gate, force_balance=force_balance, scores_per_group=scores_per_group
        ),
        sequence_loss_coeff=sequence_loss_coeff,
        sequences_per_step=sequences_per_step,
        overlap_shared=overlap_shared,
    )


@override(target=MoE.Config, description="Dispatch, grouped-GEMM experts and combine as one region (TitanMoE).")
def fused_moe(config: MoE.Config, **settings: Any) -> MoE.Config:
    """`fuse` for stock torchtitan; `settings` are its keyword arguments. Raises ValueError for a factor as
    `recv_buffer`: that trainer would go on with rows missing, where ours repeats the step."""
    if not isinstance(settings.get("recv_buffer", "exact"), str):
        raise ValueError(
            f"recv_buffer = {settings['recv_buffer']}: a factor may overflow, and torchtitan's trainer does not repeat "
            "a step whose buffer did; use 'exact' or 'worst_case', or TitanMoE's train.py"
        )
    return config if isinstance(config, FusedMoE.Config) else fuse(config, **settings)


def _fused_init(param_init: dict | None) -> dict | None:
    """Initializers by torchtitan's names, and one for w13 made of two of them."""
    if param_init is None:
        return None

    def init_w13(w13_EF2D: Tensor) -> None:
        for name, half in split_w13(w13_EF2D).items():
            param_init[name](half)

    return {**param_init, FUSED: init_w13}


def _fused_sharding(sharding):
    """w13 is cut as w1 is: E by expert parallelism, F by tensor parallelism; the 2 never."""
    if sharding is None:
        return None
    states = {name: layout for name, layout in sharding.state_shardings.items() if name not in (GATE, UP)}
    return replace(sharding, state_shardings={**states, FUSED: sharding.state_shardings[GATE]})
