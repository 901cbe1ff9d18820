"""The contract of token dispatch, and the part of it that all dispatchers share.

A router says which K of E experts each token goes to. The experts want the opposite: for each of their experts, the
rows of all its tokens in one contiguous slab, so that one grouped GEMM runs over all slabs. A dispatcher goes there and
back:

    plan     = dispatcher.plan(topk_ids_TK)                        who goes where: index arithmetic, once per layer
    received = dispatcher.dispatch(x_TD, topk_weights_TK, plan)    the rows move
    y_RD     = experts(received.x_RD, received.counts_e, received.weight_R)
    out_TD   = dispatcher.combine(y_RD, received.state)            and come back, added up

The contract (it is that of Transformer Engine's expert parallelism, so what holds here holds there):

- The rows are sorted by expert. `counts_e` are slab sizes, each a multiple of the alignment; the true loads are in the
  plan. A slab's padding rows are zero and have weight 0. Rows past `counts_e.sum()` are undefined: nobody reads them.
- An expert, or a rank, without a token is ordinary; so is a rank without tokens of its own.
- `combine` adds up a token's copies without weighting them (the experts have applied `weight_R`), in fp32, and rounds
  once. It is the transpose of `dispatch`, so the backward of each does what the other does forward.
- Backward carries the gradient of x_TD and of each (token, k) weight. A dropped copy adds nothing; its gradient is
  zero.
- Everything that depends on ids alone is in the plan: counts, destinations, sizes, the host sync if there is one. It is
  one op of `titan_moe`, as are the start and the end of each exchange of rows (see exchange.py), so that activation
  checkpointing can keep its result by name; backward and recompute then move rows at most, and never plan again.
- Both may be started and waited for later, with something else to do in between (`start_dispatch`, `start_combine`).

`recv_buffer` is the shape policy of the received rows. "exact": as many as there are, which the host must learn, so it
waits for the device once per layer. "worst_case" or a factor: a fixed number R, the same on all ranks, so that nobody
waits. A factor is of the mean, T K rows, and routing may overflow it: then the plan's `overflow`, on the device, is
true, rows are missing, and the whole step must be thrown away on all ranks and repeated after `grow`.

`drop_policy` says which copies lose when a (source rank, expert) pair has more than C = ceil(f T K / E), f being
`capacity_factor`. Without a factor nothing is dropped.

Shape letters: T tokens of this rank, D model width, K top-k, N = T*K copies, E experts, e experts of one rank,
R rows of the padded slabs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.moe import layout
from titan_moe.moe.moving import Moving
from titan_moe.moe.rows import CopyMap, RowMap

DROP_POLICIES = ("probs", "position")
RECV_BUFFERS = ("exact", "worst_case")  # or a factor


@dataclass
class Hop:
    """One exchange between ranks: which rows and routing weights go out, and how many to and from each rank."""

    rows: RowMap  # from the rows held to the rows on the wire
    copies: CopyMap  # from the routing weights held to those on the wire
    row_splits: tuple[list[int], list[int]]  # received from, sent to each rank
    copy_splits: tuple[list[int], list[int]]
    empty_slots: bool = False  # some rows on the wire stand for none: the maps then count on a row of zeros behind them


@dataclass
class Plan:
    """Where every copy goes. Made by `Dispatcher.plan`; these fields are for others to read.

    counts_E: int64 [E], how many of this rank's copies the router gave each expert, dropped ones included.
    padded_counts_e: int64 [e], slab sizes on this rank, multiples of the alignment.
    dropped: int64 scalar, copies of this rank dropped by the capacity; 0 without one.
    kept_TK: bool [T, K], or None when nothing can be dropped.
    tokens: T.
    overflow: bool scalar on the device, rows are missing; None where that cannot be.
    """

    counts_E: Tensor
    padded_counts_e: Tensor
    dropped: Tensor
    kept_TK: Tensor | None
    tokens: int
    overflow: Tensor | None = field(default=None, kw_only=True)


@dataclass
class RowPlan(Plan):
    """The plan of the portable dispatchers: row by row, and in as many exchanges as it takes."""

    rows: RowMap  # from the rows that arrive (without hops: the tokens) to the slabs
    copies: CopyMap  # the same for routing weights
    hops: list[Hop] = field(default_factory=list)  # those of the first chunk of the tokens, of the second, ...
    chunks: int = 1

    @property
    def hops_each(self) -> int:
        """Hops that each chunk takes."""
        return len(self.hops) // self.chunks


@dataclass
class Received:
    """What the experts of this rank work on.

    x_RD: the rows, in the dtype of the tokens.
    weight_R: routing weight of each row; float32 (float64 for float64 weights).
    counts_e: int64 [e] on the device, padded slab sizes.
    state: to be handed to `combine`.
    """

    x_RD: Tensor
    weight_R: Tensor
    counts_e: Tensor
    state: Any


class Dispatcher:
    """The contract; no module, it has no parameters. What the portable dispatchers share is in row_dispatcher.py.

    Arguments:
        num_experts, top_k: E and K. The E experts lie in contiguous blocks of e = E / EP on the ranks.
        alignment: slab sizes are multiples of it.
        capacity_factor: drop copies beyond C per (source rank, expert); None drops nothing.
        drop_policy: "probs" drops the lowest weights, "position" the last tokens.
        ep_group: the expert-parallel ranks; None for one rank.
        ranks_per_node: only for dedup.
        recv_buffer: "exact", "worst_case" or a factor of the mean number of rows.
        max_tokens: the most tokens that any of the ranks will bring; fixed buffers are made for it.
    Raises ValueError for numbers that do not fit together.
    """

    name = ""
    sync_free = False  # may run without the host knowing any result of the device, in a CUDA graph for example
    deterministic = True  # the same input gives the same bits

    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        alignment: int,
        capacity_factor: float | None = None,
        drop_policy: str = "probs",
        ep_group: ProcessGroup | None = None,
        ranks_per_node: int | None = None,
        recv_buffer: str | float = "exact",
        max_tokens: int | None = None,
    ) -> None:
        self.num_experts, self.top_k, self.alignment = num_experts, top_k, alignment
        self.recv_buffer, self.max_tokens = recv_buffer, max_tokens
        self.factor = None if isinstance(recv_buffer, str) else float(recv_buffer)  # the present one: `grow` raises it
        self.capacity_factor, self.drop_policy = capacity_factor, drop_policy
        self.ep_group, self.ranks_per_node = ep_group, ranks_per_node
        self.ranks = 1 if ep_group is None else ep_group.size()
        _check(self)
        self.local_experts = num_experts // self.ranks
        self.sync_free = self.sync_free or recv_buffer != "exact"

    @property
    def group(self) -> ProcessGroup:
        """The expert-parallel ranks, where there are any."""
        assert self.ep_group is not None
        return self.ep_group

    def capacity(self, tokens: int) -> int | None:
        """C for `tokens` tokens of this rank; None when nothing is dropped."""
        if self.capacity_factor is None:
            return None
        return layout.copies_per_expert(self.capacity_factor, tokens, self.top_k, self.num_experts)

    def fixed_rows(self) -> int:
        """R of buffers that do not follow the routing; without "exact" only."""
        assert self.max_tokens is not None
        T, K, e = self.max_tokens, self.top_k, self.local_experts
        return min(layout.static_rows(self.factor, T, K, e, self.alignment, self.ranks), self.max_rows(T))

    @property
    def can_overflow(self) -> bool:
        """Whether a plan's `overflow` can be true at the present factor."""
        if self.factor is None or self.name == "local":
            return False
        assert self.max_tokens is not None
        return self.fixed_rows() < self.max_rows(self.max_tokens)

    def grow(self) -> None:
        """Make the fixed buffers larger, after one of them overflowed on any rank. All ranks must call it, between
        steps. Raises ValueError at the bound of `layout.next_factor`."""
        assert self.factor is not None and not isinstance(self.recv_buffer, str), "only a factor can overflow"
        self.factor = layout.next_factor(self.recv_buffer, self.factor)

    def max_rows(self, tokens: int) -> int:
        """The most rows R that this rank can receive when every rank has `tokens` tokens."""
        rows = layout.worst_rows(tokens, self.top_k, self.local_experts, self.alignment, self.ranks)
        capacity = self.capacity(tokens)
        if capacity is None:
            return rows
        return min(rows, self.local_experts * layout.round_up(self.ranks * capacity, self.alignment))

    def plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None = None) -> Plan:
        """Decide where every copy goes.

        topk_ids_TK: int64 [T, K], different experts in each row.
        topk_weights_TK: [T, K], only needed to drop by "probs".
        """
        assert topk_ids_TK.dtype == torch.int64 and topk_ids_TK.shape[1] == self.top_k
        if self.max_tokens is not None and topk_ids_TK.shape[0] > self.max_tokens:
            raise ValueError(
                f"this rank brought {topk_ids_TK.shape[0]} tokens to buffers made for {self.max_tokens}: raise "
                "max_tokens, the most tokens that any rank brings"
            )
        if self.capacity_factor is None or self.drop_policy != "probs":
            topk_weights_TK = None
        elif topk_weights_TK is None:
            raise ValueError(
                'drop_policy "probs" drops the copies of lowest routing weight, but plan() got no weights: pass '
                'topk_weights_TK, or use drop_policy "position"'
            )
        else:
            topk_weights_TK = topk_weights_TK.detach()
        return self._plan(topk_ids_TK, topk_weights_TK)

    def _plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None) -> Plan:
        raise NotImplementedError

    def dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: Plan) -> Received:
        """Move the rows x_TD, of any float dtype, and the routing weights to the experts. Differentiable in both."""
        raise NotImplementedError

    def combine(self, y_RD: Tensor, state: Any) -> Tensor:
        """The sum of each token's copies, [T, D], in the dtype of y_RD. Differentiable."""
        raise NotImplementedError

    def start_dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: Plan) -> Moving[Received]:
        """`dispatch` that returns when the first rows are under way. A library that sends and receives in one call is
        done by then."""
        return Moving.done(self.dispatch(x_TD, topk_weights_TK, plan))

    def start_combine(self, y_RD: Tensor, state: Any) -> Moving[Tensor]:
        """`combine` that returns when the first rows are under way."""
        return Moving.done(self.combine(y_RD, state))


def _check(d: Dispatcher) -> None:
    """All that can be wrong with the numbers, in one ValueError."""
    problems = []
    if d.num_experts % d.ranks:
        problems.append(
            f"{d.num_experts} experts cannot be shared equally by {d.ranks} expert-parallel ranks: make "
            f"expert_parallel_degree a divisor of num_experts"
        )
    if not 1 <= d.top_k <= d.num_experts:
        problems.append(
            f"top_k = {d.top_k} of {d.num_experts} experts: a token goes to different experts, so 1 <= top_k <= "
            f"num_experts must hold: lower top_k or add experts"
        )
    if d.alignment < 1:
        problems.append(f"alignment = {d.alignment}: slabs are multiples of it, so it must be at least 1")
    if d.capacity_factor is not None and not 0 < d.capacity_factor < float("inf"):
        problems.append(
            f"capacity_factor = {d.capacity_factor} would leave no copy: it must be a finite number above 0 (1.25 "
            f"leaves a quarter over the mean), or absent to drop nothing"
        )
    if d.drop_policy not in DROP_POLICIES:
        problems.append(f"drop_policy = {d.drop_policy!r} is not one of {', '.join(DROP_POLICIES)}")
    if d.name == "local" and d.ranks > 1:
        problems.append(
            f"dispatcher local keeps every token on its rank, but the experts are on {d.ranks} ranks: use alltoall or "
            f"dedup, or expert_parallel_degree = 1"
        )
    if d.name != "local" and d.ep_group is None:
        problems.append(f"dispatcher {d.name} exchanges rows between ranks and needs ep_group: use local for one rank")
    if d.ranks_per_node is not None:
        if d.name != "dedup":
            problems.append(f"ranks_per_node is for dispatcher dedup, not for {d.name}: remove it, or use dedup")
        elif d.ranks_per_node < 1 or d.ranks % d.ranks_per_node:
            problems.append(
                f"ranks_per_node = {d.ranks_per_node} does not divide the {d.ranks} expert-parallel ranks: choose a "
                f"divisor, or leave it out to send each row straight to its rank"
            )
    problems += _buffer_problems(d)
    if problems:
        raise ValueError("; ".join(problems))


def _buffer_problems(d: Dispatcher) -> list[str]:
    """What is wrong with the receive buffer."""
    problems = []
    if isinstance(d.recv_buffer, str):
        if d.recv_buffer not in RECV_BUFFERS:
            known = ", ".join(map(repr, RECV_BUFFERS))
            problems.append(f"recv_buffer = {d.recv_buffer!r} is not one of {known}, and no factor")
    elif not 1 <= d.recv_buffer < float("inf"):
        problems.append(
            f"recv_buffer = {d.recv_buffer} would not hold an even load: a factor of the mean number of rows is finite "
            f"and at least 1 (1.5 leaves half of the mean as room)"
        )
    if d.recv_buffer == "exact" or d.name == "local":
        return problems
    if d.max_tokens is None or d.max_tokens < 1:
        problems.append(f"recv_buffer = {d.recv_buffer!r} needs max_tokens, the most tokens that any rank brings")
    if d.ranks_per_node is not None:
        problems.append(
            f"recv_buffer = {d.recv_buffer!r} is for rows that go straight to their ranks, and ranks_per_node = "
            f"{d.ranks_per_node} sends them by node: leave out ranks_per_node, or keep recv_buffer = 'exact'"
        )
    return problems
