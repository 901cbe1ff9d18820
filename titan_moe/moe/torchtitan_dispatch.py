"""Token dispatch over expert-parallel ranks.

torchtitan's all-to-all dispatcher, with the collective replaced: under `spmd_types` torchtitan sends a list of tensors,
and gloo, which CPU runs use, refuses lists of unequal sizes. `all_to_all_single` with split sizes works on gloo and
NCCL alike.

Shape letters (torchtitan's): N routed copies on the source rank, R copies received for the local experts, D model
width, e local experts, EP expert-parallel ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


class AllToAll(torch.autograd.Function):
    """Rows to the ranks that want them; backward sends the gradients the same way back."""

    @staticmethod
    def forward(ctx, x_ND, group, output_splits: list[int], input_splits: list[int]):
        ctx.group, ctx.output_splits, ctx.input_splits = group, output_splits, input_splits
        return exchange_rows(x_ND, group, output_splits, input_splits)

    @staticmethod
    def backward(ctx, grad_RD):  # type: ignore[override]
        return exchange_rows(grad_RD, ctx.group, ctx.input_splits, ctx.output_splits), None, None, None


def exchange_rows(x_ND: torch.Tensor, group, output_splits: list[int], input_splits: list[int]) -> torch.Tensor:
    """Send `input_splits[r]` rows of x_ND to rank r of `group`, receive `output_splits[r]` from it. Not
    differentiable."""
    out_RD = x_ND.new_empty((sum(output_splits), *x_ND.shape[1:]))
    dist.all_to_all_single(out_RD, x_ND.contiguous(), output_splits, input_splits, group=group)
    return out_RD


class TokenDispatcher(AllToAllTokenDispatcher):
    """torchtitan's dispatcher (local when EP is 1), exchanging rows in a way that gloo can do as well."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _token_count_exchange(self, num_local_tokens_per_expert_E, pg, ep_size):
        if torch.compiler.is_compiling():  # torch.compile traces torchtitan's functional collectives
            return super()._token_count_exchange(num_local_tokens_per_expert_E, pg, ep_size)
        counts = num_local_tokens_per_expert_E.view(ep_size, -1)
        return exchange_rows(counts, pg, [1] * ep_size, [1] * ep_size)

    def _dispatch_token_exchange(self, routed_input_ND, pg, output_splits, input_splits):
        if torch.compiler.is_compiling():
            return super()._dispatch_token_exchange(routed_input_ND, pg, output_splits, input_splits)
        return AllToAll.apply(routed_input_ND, pg, output_splits, input_splits)

    def _combine_token_exchange(self, routed_output_RD, pg, input_splits, output_splits):
        if torch.compiler.is_compiling():
            return super()._combine_token_exchange(routed_output_RD, pg, input_splits, output_splits)
        return AllToAll.apply(routed_output_RD, pg, input_splits, output_splits)
