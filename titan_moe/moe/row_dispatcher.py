"""What the portable dispatchers share: rows moved by a `RowPlan`, in one exchange between ranks or in several, or none.

Shape letters: T tokens of this rank, D model width, K top-k, R rows of the padded slabs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.moe import layout
from titan_moe.moe.contract import Dispatcher, Hop, Plan, Received, RowPlan
from titan_moe.moe.exchange import start_combine, start_dispatch
from titan_moe.moe.moving import Moving, Steps
from titan_moe.moe.rows import gather_rows, select_copies, sum_rows
from titan_moe.offload import offloaded


class RowDispatcher(Dispatcher):
    """Dispatchers whose plan is a `RowPlan`."""

    hop_groups: tuple[ProcessGroup, ...] = ()  # of each hop, where they have groups of their own

    def dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: Plan) -> Received:
        return self.start_dispatch(x_TD, topk_weights_TK, plan).wait()

    def combine(self, y_RD: Tensor, state: Plan) -> Tensor:
        return self.start_combine(y_RD, state).wait()

    def start_dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: Plan) -> Moving[Received]:
        assert isinstance(plan, RowPlan)
        return Moving(self._dispatch(x_TD, topk_weights_TK, plan), plan.hops_each)

    def start_combine(self, y_RD: Tensor, state: Plan) -> Moving[Tensor]:
        assert isinstance(state, RowPlan)
        return Moving(self._combine(y_RD, state), state.hops_each)

    def _stages(self, plan: RowPlan) -> list[tuple[ProcessGroup, list[Hop]]]:
        """The first hop of all chunks and the group that it goes over, then the second."""
        each = plan.hops_each
        return [(self.hop_groups[i] if self.hop_groups else self.group, plan.hops[i::each]) for i in range(each)]

    # In both, a chunk goes on to its next hop as soon as it has arrived, while those behind it are still on their way.
    # Autograd's order being the reverse one, so it is in backward. `parts` are functions that wait for a chunk.

    def _dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: RowPlan) -> Steps[Received]:
        weights = topk_weights_TK.reshape(-1)
        if weights.dtype != torch.float64:
            weights = weights.float()
        tokens = layout.chunk_tokens(plan.tokens, plan.chunks)
        K = topk_weights_TK.shape[1]
        ready = zip(_cut(x_TD, tokens), _cut(weights, [n * K for n in tokens]))
        parts: list[Callable[[], Any]] = [partial(_as_it_is, part) for part in ready]
        for group, hops in self._stages(plan):
            for i, hop in enumerate(hops):
                rows, weights = parts[i]()
                rows = gather_rows(rows, hop.rows, zero_fill=hop.empty_slots)
                weights = select_copies(weights, hop.copies)
                arrived = start_dispatch(rows, weights, hop.row_splits, hop.copy_splits, group)
                parts[i] = partial(_expert_input, arrived)
            yield
        rows, weights = map(_join, zip(*(part() for part in parts)))
        x_RD = gather_rows(rows, plan.rows, zero_fill=not plan.hops)
        return Received(x_RD, select_copies(weights, plan.copies), plan.padded_counts_e, plan)

    def _combine(self, y_RD: Tensor, state: RowPlan) -> Steps[Tensor]:
        stages = self._stages(state)
        # Rows of each chunk before each hop, and after the last; exchange.py has the 1.
        held = [layout.chunk_tokens(state.tokens, state.chunks)]
        held += [[sum(hop.row_splits[0]) + 1 for hop in hops] for _, hops in stages]
        rows = sum_rows(y_RD, state.rows, sum(held[-1]), zero_fill=not state.hops)
        parts: list[Callable[[], Tensor]] = [partial(_as_it_is, part) for part in _cut(rows, held[-1])]
        for (group, hops), inputs in zip(reversed(stages), reversed(held[:-1])):
            for i, hop in enumerate(hops):
                arrived = start_combine(parts[i](), hop.row_splits, group, zero_row=hop.empty_slots)
                parts[i] = partial(_summed, arrived, hop, inputs[i])
            yield
        return _join([part() for part in parts])


def _as_it_is(part: Any) -> Any:
    return part


def _expert_input(arrived: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows, weights = arrived()
    return offloaded("moe_expert_input", rows), weights  # kept under recompute, and the slabs are filled again


def _summed(arrived: Callable[[], Tensor], hop: Hop, inputs: int) -> Tensor:
    return sum_rows(arrived(), hop.rows, inputs, zero_fill=hop.empty_slots)


def _cut(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return [x] if len(sizes) == 1 else x.split(sizes)


def _join(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
