"""Dispatchers by name, and `local`, the one for a single expert-parallel rank. What a dispatcher promises is in
contract.py; the ones that exchange rows are in alltoall.py, dedup.py and, on libraries, te_ep.py and
titan_dispatchers.py.

Locally, dispatch is a gather: row r of the slabs copies token `source_R[r]`. What takes care is to do without the host.
The number of padded rows depends on the routing, so the buffer has the most rows that any routing of T tokens needs,
and what is beyond the last slab is left over. The same on a CPU, where nothing is gained, because a path that is tested
on every machine is worth more than the few rows.

Shape letters: T tokens of this rank, D model width, K top-k, N = T*K copies, E experts, R rows of the padded slabs.
"""

from typing import Any

import torch
from torch import Tensor

from titan_moe.moe import layout
from titan_moe.moe.alltoall import AllToAllDispatcher
from titan_moe.moe.contract import DROP_POLICIES, Dispatcher, Plan, Received, RowPlan
from titan_moe.moe.dedup import DedupDispatcher
from titan_moe.moe.row_dispatcher import RowDispatcher
from titan_moe.moe.rows import CopyMap, RowMap, gather
from titan_moe.moe.te_ep import TEEPDispatcher
from titan_moe.moe.titan_dispatchers import DeepEPDispatcher, HybridEPDispatcher

__all__ = [
    "DISPATCHERS",
    "DROP_POLICIES",
    "PAYLOAD_OPS",
    "PLAN_OPS",
    "RECEIVE_OPS",
    "Dispatcher",
    "LocalDispatcher",
    "Plan",
    "Received",
    "make_dispatcher",
]


class LocalDispatcher(RowDispatcher):
    """All experts on this rank: rows are copied into slabs and added up again. Shapes depend on T alone (R is
    `max_rows(T)`, the tail undefined) and the host waits for nothing."""

    name = "local"
    sync_free = True

    def _plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None) -> RowPlan:
        T, K = topk_ids_TK.shape
        capacity, rows = self.capacity(T), self.max_rows(T)
        tensors = plan_local(topk_ids_TK, topk_weights_TK, self.num_experts, self.alignment, capacity, rows)
        load_E, padded_E, dropped, copy_R, row_N, kept_TK, copies, offsets = tensors
        if capacity is None:
            kept_TK, copies, offsets = None, row_N, torch.arange(0, T * K, K, device=row_N.device)
        # Copy n is of token n // K; N, which stands for none, becomes T, which does so too.
        rows_map, copies_map = RowMap(copy_R // K, copies, offsets), CopyMap(copy_R, row_N)
        return RowPlan(load_E, padded_E, dropped, kept_TK, T, rows_map, copies_map)

    def regather(self, x_TD: Tensor, plan: RowPlan) -> Tensor:
        """x_RD of `dispatch` again, not differentiable: copying is cheaper than keeping K times the rows for
        backward."""
        return gather(x_TD, plan.rows.source_R, zero_fill=True)


@torch.library.custom_op("titan_moe::plan_local", mutates_args=())
def plan_local(
    ids_TK: Tensor, weights_TK: Tensor | None, num_experts: int, alignment: int, capacity: int | None, rows: int
) -> list[Tensor]:
    return _plan_local(ids_TK, weights_TK, num_experts, alignment, capacity, rows)


@plan_local.register_fake
def _plan_local(ids_TK, weights_TK, num_experts, alignment, capacity, rows):
    """The plan of one rank. It is its own fake kernel: nothing in it needs a value on the host."""
    N = ids_TK.numel()
    own = layout.sort_copies(ids_TK, num_experts, capacity, weights_TK)
    padded_E = layout.round_up(own.kept_E, alignment)
    # The copy at place p of the sorted order is in row p of its expert's slab, counted from the expert's first copy.
    expert_N = ids_TK.reshape(-1)[own.order_N]
    shift_E = layout.exclusive_cumsum(padded_E) - layout.exclusive_cumsum(own.kept_E)
    arange_N = torch.arange(N, device=ids_TK.device)
    row_N = torch.empty_like(arange_N).scatter_(0, own.order_N, arange_N + shift_E[expert_N])
    kept_TK = copies = offsets = arange_N.new_empty(0)
    if own.kept_N is not None:
        row_N = torch.where(own.kept_N, row_N, rows)
        kept_TK = own.kept_N.view_as(ids_TK)
        # First each token's kept copies, then each token's dropped ones: how many were kept only the device knows, so
        # the dropped ones stay in the list, in parts of their own that nobody reads. They may point at any row.
        copies = row_N[torch.argsort(~own.kept_N, stable=True)] % max(rows, 1)
        offsets = layout.exclusive_cumsum(torch.cat([kept_TK.sum(1), (~kept_TK).sum(1)]))
    copy_R = arange_N.new_full((rows + 1,), N).scatter_(0, row_N, arange_N)[:rows]
    dropped = (own.load_E - own.kept_E).sum()
    return [own.load_E, padded_E, dropped, copy_R, row_N, kept_TK.clone(), copies.clone(), offsets.clone()]


DISPATCHERS: dict[str, type[Dispatcher]] = {
    dispatcher.name: dispatcher
    for dispatcher in (
        LocalDispatcher,
        AllToAllDispatcher,
        DedupDispatcher,
        TEEPDispatcher,
        DeepEPDispatcher,
        HybridEPDispatcher,
    )
}

# What activation checkpointing keeps so that recompute does not plan again. With RECEIVE_OPS too it sends no token to
# its experts again; all that send are PAYLOAD_OPS.
PLAN_OPS = tuple(
    getattr(torch.ops.titan_moe, f"plan_{name}").default
    for name in ("local", "alltoall", "dedup", "alltoall_fixed", "dedup_fixed", "te_ep", "deepep")
)
RECEIVE_OPS = tuple(
    getattr(torch.ops.titan_moe, name).default for name in ("start_dispatch", "wait_dispatch", "te_ep_dispatch")
)
PAYLOAD_OPS = (
    *RECEIVE_OPS,
    *(getattr(torch.ops.titan_moe, name).default for name in ("start_combine", "wait_combine", "te_ep_combine")),
)


def make_dispatcher(name: str, **arguments: Any) -> Dispatcher:
    """The dispatcher of that name; `arguments` are those of `Dispatcher`."""
    if name not in DISPATCHERS:
        raise ValueError(f"dispatcher = {name!r} is not one of {', '.join(DISPATCHERS)}: use one of these")
    return DISPATCHERS[name](**arguments)
