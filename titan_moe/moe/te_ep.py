"""Dispatch by Transformer Engine's NCCL EP, whose kernels plan, send, sort and add up rows on the device.

It sends a token once to each rank over NVLink, once to each node over RDMA, and lays out what arrives as contract.py
says: the contract is its own. The rows arrive in a buffer of a fixed size, or of exactly the size that they need
(`recv_buffer`), for which the host waits once per layer, in the plan. Backward sends by the plan of forward.

The calls, and the state of the library, which takes more care than they do, are in te_ep_ops.py.

Shape letters: T tokens of this rank, D model width, K top-k, R rows received.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_moe.moe import layout, te
from titan_moe.moe.contract import Dispatcher, Plan, Received
from titan_moe.moe.te_ep_ops import Ring, Signature, bootstrap, finalize
from titan_moe.precision import support
from titan_moe.te_ep_check import limits, payload_limits

TOKENS_PER_CHUNK = 128  # its kernels go through a rank's tokens in chunks of 64 or 128


@dataclass
class KernelPlan(Plan):
    """A plan whose rows are in an EpBuffer. ids_TK: int64 [T, K]; ticket: which buffer; rows: R."""

    ids_TK: Tensor
    ticket: int
    rows: int


class TEEPDispatcher(Dispatcher):
    """NCCL EP on Hopper and newer GPUs: bfloat16 rows, float32 weights, up to 8,192 tokens of a rank.

    Arguments, beside those of `Dispatcher`, of which `max_tokens` is needed:
        dim: D.
        in_flight: microbatches that are planned before the first of them has been through backward.
        payload: "bf16", or "mxfp8" for rows in dispatch, and in the backward of combine, in half of the bytes.
    Raises ValueError for what NCCL EP cannot do, or lacks on this machine.
    """

    name = "te_ep"
    deterministic = False  # nobody has promised it

    def __init__(self, *, dim: int, in_flight: int = 1, payload: str = "bf16", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dim, self.in_flight, self.quantized = dim, in_flight, payload == "mxfp8"
        if wrong := self._problems() + problems(te.facts(), self.quantized):
            raise ValueError("dispatcher te_ep: " + "; ".join(wrong))
        self.ring = Ring(self._signature(), self.local_experts, in_flight)

    def _problems(self) -> list[str]:
        if self.max_tokens is None:
            return ["its buffers are made for a number of tokens: pass max_tokens, the most that any rank will bring"]
        found = limits(
            num_experts=self.num_experts,
            top_k=self.top_k,
            dim=self.dim,
            alignment=self.alignment,
            max_tokens=self.max_tokens,
            ranks=self.ranks,
            node_ranks=min(self.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))),
        )
        if self.quantized:
            found += payload_limits(dim=self.dim, alignment=self.alignment, tokens=self.max_tokens)
        if self.capacity_factor is not None:
            found.append(
                f"capacity_factor = {self.capacity_factor}: what NCCL EP does with a dropped copy is not documented; "
                "leave it out, or use dedup or alltoall"
            )
        return found

    def _signature(self) -> Signature:
        assert self.max_tokens is not None
        return Signature(
            num_experts=self.num_experts,
            top_k=self.top_k,
            dim=self.dim,
            max_tokens=layout.round_up(self.max_tokens, TOKENS_PER_CHUNK),
            rows=None if self.recv_buffer == "exact" else self.fixed_rows(),
            drops=self.can_overflow,
            alignment=self.alignment,
            group=self.group.group_name,
        )

    def fixed_rows(self) -> int:
        assert self.max_tokens is not None
        # NCCL EP takes no buffer that the tokens of a rank would not fit in, whatever the routing needs.
        return max(super().fixed_rows(), layout.round_up(self.max_tokens, TOKENS_PER_CHUNK))

    def grow(self) -> None:
        """As `Dispatcher.grow`, of all layers together: NCCL EP is set up anew by the next plan, and all plans so far
        are over."""
        super().grow()
        if self._signature() != self.ring.signature:
            finalize()
            self.ring = Ring(self._signature(), self.local_experts, self.in_flight)

    def _plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor | None) -> KernelPlan:
        bootstrap(self.ring.signature, self.group)
        ids_TK = topk_ids_TK.contiguous()
        load_E, counts_e, overflow, ticket, rows = torch.ops.titan_moe.plan_te_ep(ids_TK, self.ring.number)
        return KernelPlan(
            counts_E=load_E,
            padded_counts_e=counts_e,
            dropped=load_E.new_zeros(()),
            kept_TK=None,
            tokens=ids_TK.shape[0],
            overflow=overflow if self.ring.signature.drops else None,
            ids_TK=ids_TK,
            ticket=ticket,
            rows=rows,
        )

    def dispatch(self, x_TD: Tensor, topk_weights_TK: Tensor, plan: Plan) -> Received:
        assert isinstance(plan, KernelPlan)
        _check_dtype(x_TD)
        weights_TK = topk_weights_TK.float().contiguous()
        x_RD, weight_R = torch.ops.titan_moe.te_ep_dispatch(
            x_TD.contiguous(), weights_TK, plan.ids_TK, plan.ticket, plan.rows, self.quantized
        )
        return Received(x_RD, weight_R, plan.padded_counts_e, plan)

    def combine(self, y_RD: Tensor, state: Plan) -> Tensor:
        assert isinstance(state, KernelPlan)
        _check_dtype(y_RD)
        return torch.ops.titan_moe.te_ep_combine(y_RD.contiguous(), state.ticket, state.tokens, self.quantized)


def _check_dtype(rows: Tensor) -> None:
    if rows.dtype != torch.bfloat16:
        raise ValueError(f"dispatcher te_ep moves rows in bfloat16, not in {rows.dtype}: compute in it, or use dedup")


def problems(found: te.Facts, quantized: bool = False) -> list[str]:
    """What NCCL EP lacks on this machine, for rows in MXFP8 if `quantized`; empty when nothing."""
    if (missing := te.problem(found)) is not None:
        return [missing]
    assert found.capability is not None
    lacks = []
    if quantized and (why := support.te_problem("mxfp8", "payload", found.capability)):
        lacks.append(f'moe.te_ep_payload = "mxfp8": {why}')
    if found.capability < (9, 0):
        lacks.append(f"NCCL EP needs compute capability 9.0 (Hopper), and this GPU has {_dotted(found.capability)}")
    if not found.nccl_ep:
        lacks.append("Transformer Engine was built without NCCL EP (libnccl_ep.so): install its wheel for CUDA 13")
    if found.nccl is None or found.nccl < te.NCCL_EP_BUILD:
        has = "none was found" if found.nccl is None else f"this process has {_dotted(found.nccl)}"
        needed = _dotted(te.NCCL_EP_BUILD)
        lacks.append(
            f"libnccl_ep.so takes no NCCL older than {needed}, which it was built with, and {has}: pip install "
            f"nvidia-nccl-cu13=={needed}, whatever torch asks for"
        )
    if found.nvcc is None:
        lacks.append(
            "NCCL EP compiles its kernels when a run starts, and there is no nvcc: install nvidia-cuda-nvcc, or a CUDA "
            "toolkit and set CUDA_HOME"
        )
    if found.nccl_headers is None:
        lacks.append(
            "NCCL EP compiles its kernels when a run starts, and there is no nccl.h: set NCCL_EP_JIT_BUILD_INCLUDE_DIR "
            "to the include folder of nvidia-nccl-cu13"
        )
    return lacks


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
