"""DeepEP and HybridEP, two libraries whose kernels dispatch and combine by themselves, through torchtitan's ops.

torchtitan registers the libraries' calls as ops with a backward: `deepep::dispatch`, `hybridep::dispatch` and a
`combine` for each. Its token dispatchers on top of them have another contract than ours: they keep the received routing
weights and multiply by them in combine, which would apply them twice here; HybridEP's rounds them to the dtype of the
rows first, and DeepEP's takes a weight of zero for "not chosen", so that weight never gets a gradient. So these two
dispatchers call the ops, and hand the weights to the experts as they came.

What arrives:

- DeepEP, on Hopper and newer: each token once per rank, in the order of arrival, with the local expert of each of its
  K choices, or -1. Its copies are gathered into slabs here and added up here, as `dedup` does it; the number of rows is
  known on the host, for which the library waits for the device. torchtitan rounds the gradient of the weights to the
  dtype of the rows.
- HybridEP, for NVLink domains such as GB200's: finished slabs. With `recv_buffer` "exact" the library waits for the
  device too. Otherwise it fills a buffer of given size and waits for nothing, and raises a flag when rows are missing:
  the plan's `overflow`. The counts that it returns are then those of all rows, more than the buffer holds.

Both plan inside dispatch. So `plan` here only counts, the rest of the plan is known once `dispatch` has run, and
recompute must keep what dispatch returned (`dispatch_ops`): sending the rows again (`moe.redispatch`) would plan again.

Both are told one number of tokens for all ranks, `max_tokens`. A rank with fewer sends padding: to nobody with DeepEP;
as zeros of weight 0 to experts taken in turn with HybridEP, whose backward cannot skip a choice.

Shape letters: T tokens of this rank, D model width, K top-k, E experts, e experts of one rank, V tokens received (once
per rank), R rows of the padded slabs.
"""

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.moe import layout
from titan_moe.moe.contract import Dispatcher, Plan, Received
from titan_moe.moe.rows import CopyMap, RowMap, gather_rows, select_copies, sum_rows


@dataclass
class LibraryPlan(Plan):
    """A plan that `dispatch` completes: `padded_counts_e` and `overflow`, and with DeepEP `rows` and `copies`."""

    padded_counts_e: Tensor = field(init=False)
    rows: RowMap = field(init=False)
    copies: CopyMap = field(init=False)
    ids_TK: Tensor = field(kw_only=True)
    handle: Any = field(init=False)  # what the library's combine wants of its dispatch
    received: int = field(init=False)  # V


class LibraryDispatcher(Dispatcher):
    """What the two share. The libraries make their buffers for `dim`, which is D, and `max_tokens`."""

    package: ClassVar[str]  # what has to be installed,
    buffer: ClassVar[str]  # and what of it
    fixed_buffers: ClassVar[bool]  # whether the rows can have a number that does not follow the routing

    def __init__(self, *, dim: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dim = dim
        problems = []
        if self.ranks == 1:
            problems.append(f"dispatcher {self.name} exchanges rows between ranks, but there is one: use local")
        if self.capacity_factor is not None:
            problems.append(
                f"capacity_factor = {self.capacity_factor}: {self.name} drops nothing; leave it out, or use dedup"
            )
        if self.recv_buffer != "exact" and not self.fixed_buffers:
            problems.append(
                f"recv_buffer = {self.recv_buffer!r}: {self.name} has a fixed number of rows only in inference; use "
                '"exact", or hybridep'
            )
        if self.max_tokens is None:
            problems.append(f"dispatcher {self.name} makes its buffers for max_tokens, the most that any rank brings")
        if problems:
            raise ValueError("; ".join(problems))
        self.ops = self._import()
        self._prepare()

    def _import(self) -> ModuleType:
        """torchtitan's module, which registers the ops."""
        try:
            module = importlib.import_module(f"torchtitan.distributed.deepep.{self.name}")
            getattr(importlib.import_module("deep_ep"), self.buffer)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f'moe.dispatcher = "{self.name}": needs deep_ep.{self.buffer} of {self.package}, but {error}; build it '
                'from github.com/deepseek-ai/DeepEP, or use "dedup", which needs no library'
            ) from error
        return module

    def _prepare(self) -> None:
        raise NotImplementedError

    def _plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None) -> LibraryPlan:
        counts_E = layout.expert_counts(topk_ids_TK.reshape(-1), self.num_experts)
        return LibraryPlan(counts_E, counts_E.new_zeros(()), None, topk_ids_TK.shape[0], ids_TK=topk_ids_TK)

    def _missing(self, tokens: int) -> int:
        """How many rows of padding make `tokens` the number that all ranks bring."""
        assert self.max_tokens is not None and tokens <= self.max_tokens, f"{tokens} tokens, {self.max_tokens=}"
        return self.max_tokens - tokens

    def max_rows(self, tokens: int) -> int:
        """Whatever `tokens`, padding makes it `max_tokens`."""
        assert self.max_tokens is not None
        return super().max_rows(self.max_tokens)


class DeepEPDispatcher(LibraryDispatcher):
    """One row per (token, destination rank), sent by DeepEP. Rows arrive in no fixed order, so that sums over a slab
    repeat to the bit only under `torch.use_deterministic_algorithms`."""

    name = "deepep"
    package, buffer = "DeepEP 2", "ElasticBuffer"
    fixed_buffers = False

    def _prepare(self) -> None:
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.ops.get_buffer(self.group, hidden=self.dim, num_max_tokens_per_rank=self.max_tokens, num_topk=self.top_k)

    def dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: LibraryPlan) -> Received:  # type: ignore[override]
        missing = self._missing(plan.tokens)
        ids_TK, weights_TK = plan.ids_TK, topk_weights_TK.float()
        if missing:
            x_TD, weights_TK = pad_rows(x_TD, missing), pad_rows(weights_TK, missing)
            ids_TK = F.pad(ids_TK, (0, 0, 0, missing), value=-1)
        x_VD, ids_VK, weights_VK, counts_e, plan.handle = torch.ops.deepep.dispatch(
            x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous(), self.num_experts, self.max_tokens, False
        )
        plan.received = x_VD.shape[0]
        plan.padded_counts_e, *maps = torch.ops.titan_moe.plan_deepep(ids_VK, counts_e, self.alignment)
        plan.rows, plan.copies = RowMap(*maps[:3]), CopyMap(*maps[3:])
        x_RD = gather_rows(x_VD, plan.rows, zero_fill=True)
        return Received(x_RD, select_copies(weights_VK.reshape(-1), plan.copies), plan.padded_counts_e, plan)

    def combine(self, y_RD: Tensor, state: LibraryPlan) -> Tensor:  # type: ignore[override]
        y_VD = sum_rows(y_RD, state.rows, state.received, zero_fill=True)
        # The op forgets the handle at once unless a backward will ask for it.
        needs_backward = torch.is_grad_enabled() and y_VD.requires_grad
        out_TD = torch.ops.deepep.combine(y_VD, state.handle, needs_backward)
        self.ops.sync_combine()
        return _own_tokens(out_TD, state.tokens)


@torch.library.custom_op("titan_moe::plan_deepep", mutates_args=())
def _plan_deepep(ids_VK: Tensor, counts_e: Tensor, alignment: int) -> list[Tensor]:
    """From tokens that came once per rank to slabs: padded counts, then the fields of a RowMap and of a CopyMap.

    ids_VK: int64, local expert ids, -1 for choices of other ranks. counts_e: true counts, on the CPU.
    """
    V, K = ids_VK.shape
    copies, rows = int(counts_e.sum()), int(layout.round_up(counts_e, alignment).sum())
    counts_e = counts_e.to(ids_VK.device, torch.int64)
    padded_e = layout.round_up(counts_e, alignment)
    ids_N = ids_VK.reshape(-1)
    chosen_N = ids_N >= 0
    order_M = torch.argsort(torch.where(chosen_N, ids_N, counts_e.shape[0]), stable=True)[:copies]
    row_M = layout.slab_rows(counts_e[None], layout.exclusive_cumsum(padded_e), copies)
    row_N = torch.full_like(ids_N, rows).scatter_(0, order_M, row_M)
    copy_R = ids_N.new_full((rows,), V * K).scatter_(0, row_M, order_M)
    by_token_M = row_N[torch.argsort(~chosen_N, stable=True)[:copies]]
    offsets_V = layout.exclusive_cumsum(chosen_N.view(V, K).sum(1))
    return [padded_e, copy_R // K, by_token_M, offsets_V, copy_R, row_N]


class HybridEPDispatcher(LibraryDispatcher):
    """Slabs made by HybridEP's kernels; with a fixed buffer nobody waits for the device."""

    name = "hybridep"
    package, buffer = "DeepEP's branch hybrid-ep", "HybridEPBuffer"
    fixed_buffers = True

    def _prepare(self) -> None:
        self.ops.get_buffer(
            group=self.group,
            hidden_dim=self.dim,
            num_max_tokens_per_rank=self.max_tokens,
            num_local_experts=self.local_experts,
        )

    def _factor(self) -> float | None:
        """What makes torchtitan's buffer R rows. Its "worst case" of 1.0 leaves no room for the slabs' padding, so
        this may be more."""
        if not self.sync_free:
            return None
        assert self.max_tokens is not None
        return self.fixed_rows() / (self.max_tokens * self.ranks * min(self.local_experts, self.top_k))

    def dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: LibraryPlan) -> Received:  # type: ignore[override]
        missing = self._missing(plan.tokens)
        ids_TK, weights_TK = plan.ids_TK, topk_weights_TK.float()
        if missing:
            x_TD, weights_TK = pad_rows(x_TD, missing), pad_rows(weights_TK, missing)
            in_turn = torch.arange(missing * self.top_k, device=ids_TK.device) % self.num_experts
            ids_TK = torch.cat([ids_TK, in_turn.view(missing, self.top_k)])
        x_RD, weight_R, counts_e, plan.handle = torch.ops.hybridep.dispatch(
            x_TD.contiguous(),
            ids_TK.contiguous(),
            weights_TK.contiguous(),
            self.num_experts,
            self.ranks,
            self.group.group_name,
            self.sync_free,
            self._factor(),
            self.alignment,
        )
        counts_e = counts_e.to(torch.int64)
        if self.sync_free:
            if self.can_overflow:
                plan.overflow = plan.handle.value[-1].view(()) != 0  # the last of the library's handle is its flag
            ends_e = counts_e.cumsum(0).clamp(max=x_RD.shape[0])
            counts_e = ends_e.diff(prepend=ends_e.new_zeros(1))
        plan.padded_counts_e = counts_e
        x_RD, weight_R = _ContiguousGradient.apply(x_RD), _ContiguousGradient.apply(weight_R)
        return Received(x_RD, weight_R, counts_e, plan)

    def combine(self, y_RD: Tensor, state: LibraryPlan) -> Tensor:  # type: ignore[override]
        out_TD = torch.ops.hybridep.combine(y_RD.contiguous(), state.handle, self.max_tokens, self.alignment)
        return _own_tokens(out_TD, state.tokens)


def dispatch_ops() -> tuple:
    """The dispatch ops that this process has registered, for recompute to keep."""
    namespaces = (torch.ops.deepep, torch.ops.hybridep)
    return tuple(namespace.dispatch.default for namespace in namespaces if hasattr(namespace, "dispatch"))


def pad_rows(rows: Tensor, missing: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, missing))


def _own_tokens(out_TD: Tensor, tokens: int) -> Tensor:
    """What combine returned, without padding, with a backward that gives the library what it can read."""
    out_TD = _ContiguousGradient.apply(out_TD)
    return out_TD if out_TD.shape[0] == tokens else out_TD[:tokens]


class _ContiguousGradient(torch.autograd.Function):
    """The libraries read memory as it lies; torchtitan's backward hands them the gradient as it comes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad.contiguous()
