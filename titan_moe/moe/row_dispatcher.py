"""What the portable dispatchers share: rows moved by a `RowPlan`, in one exchange between ranks or in several, or none.

Shape letters: T tokens of this rank, D model width, K top-k, R rows of the padded slabs.
"""

import torch
from torch import Tensor

from titan_moe.moe.contract import Dispatcher, Plan, Received, RowPlan
from titan_moe.moe.exchange import start_combine, start_dispatch
from titan_moe.moe.moving import Moving, Steps
from titan_moe.moe.rows import gather_rows, select_copies, sum_rows
from titan_moe.offload import offloaded


class RowDispatcher(Dispatcher):
    """Dispatchers whose plan is a `RowPlan`."""

    def dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: Plan) -> Received:
        return self.start_dispatch(x_TD, topk_weights_TK, plan).wait()

    def combine(self, y_RD: Tensor, state: Plan) -> Tensor:
        return self.start_combine(y_RD, state).wait()

    def start_dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: Plan) -> Moving[Received]:
        assert isinstance(plan, RowPlan)
        return Moving(self._dispatch(x_TD, topk_weights_TK, plan), len(plan.hops))

    def start_combine(self, y_RD: Tensor, state: Plan) -> Moving[Tensor]:
        assert isinstance(state, RowPlan)
        return Moving(self._combine(y_RD, state), len(state.hops))

    def _dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: RowPlan) -> Steps[Received]:
        rows, weights = x_TD, topk_weights_TK.reshape(-1)
        if weights.dtype != torch.float64:
            weights = weights.float()
        for hop in plan.hops:
            rows = gather_rows(rows, hop.rows, zero_fill=hop.empty_slots)
            weights = select_copies(weights, hop.copies)
            arrived = start_dispatch(rows, weights, hop.row_splits, hop.copy_splits, self.group)
            yield
            rows, weights = arrived()
            rows = offloaded("moe_expert_input", rows)  # under recompute these are kept, and the slabs are filled again
        x_RD = gather_rows(rows, plan.rows, zero_fill=not plan.hops)
        return Received(x_RD, select_copies(weights, plan.copies), plan.padded_counts_e, plan)

    def _combine(self, y_RD: Tensor, state: RowPlan) -> Steps[Tensor]:
        held = [state.tokens, *(sum(hop.row_splits[0]) + 1 for hop in state.hops)]  # see exchange.py about the 1
        rows = sum_rows(y_RD, state.rows, held[-1], zero_fill=not state.hops)
        for hop, inputs in zip(reversed(state.hops), reversed(held[:-1])):
            arrived = start_combine(rows, hop.row_splits, self.group, zero_row=hop.empty_slots)
            yield
            rows = sum_rows(arrived(), hop.rows, inputs, zero_fill=hop.empty_slots)
        return rows
