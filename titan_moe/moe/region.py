"""The region between router and output: plan, dispatch, experts, combine, as one differentiable part of the MoE layer.

It is in three pieces, `send`, `compute` and `collect`, for those who have something to do between them: the shared
expert, or the other half of the microbatch (half_batch.py). `forward` is all three.

Shape letters: B batch, L sequence, T = B*L tokens, D model width, K top-k, E experts, F expert hidden width, R rows
received.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from titan_moe.moe import quantized_experts
from titan_moe.moe.choices import choose_dispatcher, choose_experts, slab_alignment
from titan_moe.moe.dispatch import Dispatcher, Plan, Received, make_dispatcher
from titan_moe.moe.experts import EXPERTS, Source
from titan_moe.moe.moving import Moving
from titan_moe.moe.names import FUSED, GATE, UP, merge_w13, split_w13
from titan_moe.offload import offloaded
from titan_moe.precision.recipes import RECIPES
from titan_moe.titan_dispatchers_check import IN_ONE_CALL
from titan_moe.torch_helpers import in_backward, local


class FusedExperts(GroupedExperts):
    """torchtitan's experts with gate and up in one parameter, on the backends of experts.py."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        backend: str = "auto"
        weighting: str = "early"
        recipe: str | None = None  # of precision/recipes.py

    def __init__(self, config: Config):
        super(GroupedExperts, self).__init__()
        self.num_experts = config.num_experts
        self.backend, self.late = config.backend, config.weighting == "late"
        self.recipe = config.recipe
        self.chosen: tuple[tuple, Callable[..., Tensor]] | None = None  # what for, and what computes it
        self.w13_EF2D = nn.Parameter(torch.empty(config.num_experts, config.hidden_dim, 2, config.dim))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))
        self.register_state_dict_post_hook(_split_on_save)
        self.register_load_state_dict_pre_hook(_merge_on_load)

    def forward(  # type: ignore[override]  # our contract: weights inside, padded counts
        self, x_RD: Tensor, counts_E: Tensor, weight_R: Tensor, source: Source | None = None
    ) -> Tensor:
        w13_EF2D, w2_EDF = (local(w).to(x_RD.dtype) for w in (self.w13_EF2D, self.w2_EDF))
        if source is None:
            x_RD = offloaded("moe_expert_input", x_RD)
        wanted = x_RD.device.type, x_RD.dtype, w2_EDF.shape
        if self.chosen is None or self.chosen[0] != wanted:
            self.chosen = wanted, self._choose(*wanted)
        return self.chosen[1](x_RD, counts_E, weight_R, w13_EF2D, w2_EDF, late=self.late, source=source)

    def _choose(self, device: str, dtype: torch.dtype, shape: torch.Size) -> Callable[..., Tensor]:
        """What computes experts of this shape [e, D, F]. It asks what the machine has, too slow for every forward."""
        local_experts, dim, hidden = shape
        backend, _ = choose_experts(self.backend, device, dtype, dim, hidden, local_experts, self.recipe)
        if self.recipe is None:
            return EXPERTS[backend]
        return partial(quantized_experts.EXPERTS[backend], recipe=RECIPES[self.recipe])


def _split_on_save(module, state_dict: dict[str, Any], prefix: str, local_metadata) -> None:
    w13_EF2D = state_dict.pop(prefix + FUSED)
    state_dict |= {f"{prefix}{name}": half for name, half in split_w13(w13_EF2D).items()}


def _merge_on_load(module, state_dict: dict[str, Any], prefix: str, *_) -> None:
    names = [prefix + GATE, prefix + UP]
    if all(name in state_dict for name in names):
        state_dict[prefix + FUSED] = merge_w13(*(state_dict.pop(name) for name in names))


@dataclass
class UnderWay:
    """A region between two of its parts. x_BLD: its input; dispatch, until `compute`, and combine, from then on: rows
    under way."""

    x_BLD: Tensor
    plan: Plan
    dispatch: Moving[Received] | None
    combine: Moving[Tensor] | None = None

    def advance(self) -> None:
        """See Moving."""
        if self.dispatch is not None:
            self.dispatch.advance()
        if self.combine is not None:
            with kept_as_it_is():
                self.combine.advance()


def kept_as_it_is() -> saved_tensors_hooks:
    """Behind these hooks activation checkpointing does not see what is kept for backward, and recompute need not make
    it. Combine keeps a part of the plan: the last thing that recompute has to make is in the experts, and it stops
    before combine."""
    return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class FusedRoutedExperts(RoutedExperts):
    """plan -> dispatch -> experts -> combine on this rank's tokens, one differentiable region.

    `dropped` counts the copies that training forwards dropped, until the balancer collects it. `overflow` says whether
    rows were missing in any forward, until `replay.py` asks. `token_dispatcher` of torchtitan's config is not built.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        dispatcher: str = "auto"
        ranks_per_node: int | None = None
        hop_chunks: int = 1
        capacity_factor: float | None = None
        drop_policy: str = "probs"
        recv_buffer: str | float = "exact"
        max_tokens: int | None = None
        in_flight: int = 1
        te_ep_payload: str = "bf16"

    def __init__(self, config: Config):
        super(RoutedExperts, self).__init__()
        self.inner_experts = config.inner_experts.build()
        self.config = config
        self.dispatcher = self._make_dispatcher(None)
        self.dropped: Tensor | None = None
        self.overflow: Tensor | None = None

    def _make_dispatcher(self, ep_group) -> Dispatcher | None:
        name, _ = choose_dispatcher(self.config.dispatcher, 1 if ep_group is None else ep_group.size())
        if name != "local" and ep_group is None:
            return None  # until `parallelize` brings the ranks
        sizes = {"dim": self.config.inner_experts.dim} if name in IN_ONE_CALL else {}
        if name == "te_ep":
            sizes |= {"in_flight": self.config.in_flight, "payload": self.config.te_ep_payload}
        if name == "dedup":
            sizes["hop_chunks"] = self.config.hop_chunks
        return make_dispatcher(
            name,
            num_experts=self.config.token_dispatcher.num_experts,
            top_k=self.config.token_dispatcher.top_k,
            alignment=slab_alignment(self.inner_experts.backend, self.inner_experts.recipe),
            capacity_factor=self.config.capacity_factor,
            drop_policy=self.config.drop_policy,
            ep_group=ep_group,
            ranks_per_node=self.config.ranks_per_node if name == "dedup" else None,
            recv_buffer=self.config.recv_buffer,
            max_tokens=self.config.max_tokens,
            **sizes,
        )

    def parallelize(self, parallel_dims) -> None:
        super(RoutedExperts, self).parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        self.dispatcher = self._make_dispatcher(None if ep_mesh is None else ep_mesh.get_group())

    @torch.compiler.disable
    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,  # not used: the plan counts; sharding binds arguments by name
    ) -> Tensor:
        under_way = self.send(x_BLD, topk_scores_BLK, topk_expert_ids_BLK)
        self.compute(under_way)
        return self.collect(under_way)

    # The region in three parts, for those who have something to do between them. With EP none of torchtitan's wrappers
    # around `forward` has anything to move, so they can be called without.

    @torch.compiler.disable
    def send(self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor) -> UnderWay:
        """Plan, and the dispatch, which is under way then."""
        dispatcher = self.dispatcher
        assert dispatcher is not None, "parallelize() has not been called: there are no ranks to dispatch to"
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        ids_TK, scores_TK = topk_expert_ids_BLK.flatten(0, 1), topk_scores_BLK.flatten(0, 1)
        plan = dispatcher.plan(ids_TK, scores_TK)
        if self.training and not in_backward() and dispatcher.capacity_factor is not None:
            self.dropped = plan.dropped if self.dropped is None else self.dropped + plan.dropped
        return UnderWay(x_BLD, plan, dispatcher.start_dispatch(x_TD, scores_TK, plan))

    @torch.compiler.disable
    def compute(self, under_way: UnderWay, *, returns: bool = True) -> None:
        """The experts, after which the combine is under way, if `returns`."""
        dispatcher, plan, x_BLD = self.dispatcher, under_way.plan, under_way.x_BLD
        assert dispatcher is not None and under_way.dispatch is not None
        received, under_way.dispatch = under_way.dispatch.wait(), None  # or what was received would stay
        if plan.overflow is not None and not in_backward():  # HybridEP tells only now
            self.overflow = plan.overflow if self.overflow is None else self.overflow | plan.overflow
        # On one rank rows are copies of tokens that the layer before keeps anyway, and copying again costs little.
        gather = getattr(dispatcher, "regather", None)
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        source = None if gather is None else Source(x_TD, partial(gather, plan=plan))
        with maybe_set_sparse_mesh():
            y_RD = self.inner_experts(received.x_RD, received.counts_e, received.weight_R, source)
        if returns:
            with kept_as_it_is():
                under_way.combine = dispatcher.start_combine(y_RD, received.state)

    @torch.compiler.disable
    def collect(self, under_way: UnderWay) -> Tensor:
        """What comes back, [B, L, D]."""
        assert under_way.combine is not None
        with kept_as_it_is():
            return under_way.combine.wait().view_as(under_way.x_BLD)
