"""The calls into NCCL EP, as ops, and the state behind them.

What there is of state is the process's, or a buffer's, not a call's:

- One group per process. `ep_bootstrap` borrows the communicator of the expert-parallel group for one number of
  experts, tokens and rows, one width, one top_k and one alignment. All layers must want the same; the first plan of any
  of them sets it up, and `finalize` gives the communicator back while its group still exists.
- A routing lives in an `EpBuffer`, from its plan until the last backward that follows it. So a layer has as many as
  there are microbatches in flight and takes them in turn, from a `Ring`. NCCL EP sets up a handle when it first meets a
  buffer, perhaps collectively and outside any CUDA graph: a ring keeps its buffers for good, so new ones come in the
  same order on all ranks, whatever their allocators do, and after the first step there are none.
- A plan holds a ticket for its buffer. When the ring comes round, the buffer gets a new ticket and the old one is worth
  nothing: a plan that is still needed then is found out, not answered with another microbatch's routing.

A row of bf16 may travel as MXFP8 (`quantized`), in half of its bytes and 1/32 for scales: from token to expert, and in
the backward of combine, where the library has that. It is quantized before it leaves and comes out as bf16 again, for
any experts. Experts that quantize rows to MXFP8 get back, bit for bit, what travelled: the scale of a block and the
numbers in it are already those that its largest number would choose, or all of them can be said with the next one.

The ops are there for the same reason as those of exchange.py: activation checkpointing keeps their results by name.
Ops take and return tensors and numbers, so they speak of rings by number and of buffers by ticket.

Shape letters: T tokens of this rank, D model width, K top-k, E experts, e experts of this rank, R rows received.
"""

import atexit
import itertools
import os
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.moe import layout, te
from titan_moe.moe.plan_tensors import refuse_fake


@dataclass(frozen=True)
class Signature:
    """What NCCL EP is set up for, once per process; the same on all ranks of the group."""

    num_experts: int
    top_k: int
    dim: int
    max_tokens: int  # of a rank, whole chunks
    rows: int | None  # of the receive buffer; None: exactly what is needed
    drops: bool  # rows beyond the buffer; otherwise they would stop the kernel
    alignment: int
    group: str

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in asdict(self).items())


class Ring:
    """The `size` EpBuffers of one layer, taken in turn. Each is made when its turn first comes."""

    def __init__(self, signature: Signature, local_experts: int, size: int) -> None:
        self.signature, self.local_experts, self.size = signature, local_experts, size
        self.tickets: deque[int] = deque()  # of the buffers, the one that was planned with longest ago first
        self.number = next(_numbers)  # ops take no objects
        _rings[self.number] = self

    def take(self) -> tuple[int, Any]:
        """(ticket, buffer) for the next plan; the plan that had this buffer before is over."""
        from transformer_engine.pytorch.ep import EpBuffer

        if len(self.tickets) < self.size:
            s = self.signature
            buffer = EpBuffer(s.top_k, s.max_tokens, s.dim, self.local_experts, s.rows, alignment=s.alignment)
        else:
            buffer = _planned.pop(self.tickets.popleft())
        ticket = next(_numbers)
        self.tickets.append(ticket)
        _planned[ticket] = buffer
        return ticket, buffer


_signature: Signature | None = None  # what NCCL EP is set up for
_numbers = itertools.count()
_rings: WeakValueDictionary[int, Ring] = WeakValueDictionary()
_planned: dict[int, Any] = {}  # the EpBuffer of each ticket; holds on to them until `finalize`


def bootstrap(signature: Signature, group: ProcessGroup) -> None:
    """Set NCCL EP up, if nobody has. Collective. Raises ValueError if it is set up for something else, or cannot be."""
    global _signature
    if _signature == signature:
        return
    if _signature is not None:
        raise ValueError(
            f"NCCL EP serves one kind of MoE layer per process, and is set up for ({_signature}); a layer wants "
            f"({signature}): give all layers the same sizes, or use dedup for some"
        )
    from transformer_engine.pytorch.ep import ep_bootstrap

    if compiler := te.facts().nvcc:  # it may be where NCCL EP would not look
        os.environ["NCCL_EP_JIT_NVCC"] = compiler
    try:
        ep_bootstrap(
            group,
            signature.num_experts,
            signature.max_tokens,
            signature.dim,
            signature.top_k,
            recv_capacity_per_rank=signature.rows,
            drop_on_overflow=signature.drops,
        )
    except RuntimeError as error:
        raise ValueError(
            f"NCCL EP cannot be set up for ({signature}): {error}; what it printed itself may say more. It needs "
            "NVLink between the GPUs of a node, and NCCL's GPU-initiated networking between nodes; or choose dedup"
        ) from error
    _signature = signature


def finalize() -> None:
    """Give back the communicator, before its process group goes. All plans are over. Harmless if there is nothing."""
    global _signature
    if _signature is None:
        return
    from transformer_engine.pytorch.ep import ep_finalize

    try:
        ep_finalize()
    finally:
        _signature = None
        _planned.clear()
        for ring in _rings.values():
            ring.tickets.clear()


def abandon() -> bool:
    """Whether NCCL EP is set up; then Transformer Engine will not give the communicator back when the process ends. For
    a rank that fails: all ranks give it back together, and the others may be in the middle of a step, waiting for it.
    They end sooner when it just ends."""
    if _signature is None:
        return False
    from transformer_engine.pytorch import ep

    atexit.unregister(ep._atexit_finalize)
    return True


def planned(ticket: int) -> Any:
    """The EpBuffer of a plan that is not over."""
    assert ticket in _planned, (
        "this plan is older than its EpBuffer, which serves another microbatch by now: more microbatches are in flight "
        "than the dispatcher's in_flight says"
    )
    return _planned[ticket]


# ---------------------------------------------------------------------------------------------------------------------
# The ops


@torch.library.custom_op("titan_moe::plan_te_ep", mutates_args=())
def _plan_te_ep(ids_TK: Tensor, ring: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """(load_E, padded counts_e, overflow, ticket, R)."""
    from transformer_engine.pytorch import ep

    signature = _rings[ring].signature
    ticket, buffer = _rings[ring].take()
    counts_e = ep.ep_prepare(buffer, ids_TK).clone()
    load_E = layout.expert_counts(ids_TK.reshape(-1), signature.num_experts)
    if signature.rows is not None:
        return load_E, counts_e, buffer.total_recv_tokens[0] > signature.rows, ticket, signature.rows
    if ids_TK.is_cuda:  # the kernel writes the total into pinned memory of the host
        torch.cuda.current_stream().synchronize()
    return load_E, counts_e, ids_TK.new_zeros((), dtype=torch.bool), ticket, int(buffer.total_recv_tokens)


@_plan_te_ep.register_fake
def _(ids_TK, ring):
    signature = _rings[ring].signature
    if signature.rows is None:
        refuse_fake(torch.ops.titan_moe.plan_te_ep.default)
    load_E, counts_e = ids_TK.new_empty(signature.num_experts), ids_TK.new_empty(_rings[ring].local_experts)
    return load_E, counts_e, ids_TK.new_empty((), dtype=torch.bool), next(_numbers), signature.rows


@torch.library.custom_op("titan_moe::te_ep_dispatch", mutates_args=())
def _dispatch(
    x_TD: Tensor, w_TK: Tensor, ids_TK: Tensor, ticket: int, rows: int, quantized: bool
) -> tuple[Tensor, Tensor]:
    from transformer_engine.pytorch import ep

    w_R = w_TK.new_empty(rows)
    if quantized:
        import transformer_engine_torch as tex

        data_TD, scales_TS, data_RD, scales_RS = _payload(x_TD, rows)
        tex.ep_dispatch(planned(ticket).handle_mem, ids_TK, data_TD, w_TK, data_RD, w_R, scales_TS, scales_RS)
        return _plain(data_RD, scales_RS), w_R
    x_RD = x_TD.new_empty((rows, x_TD.shape[1]))
    ep._ep_dispatch_raw(planned(ticket), ids_TK, x_TD, w_TK, x_RD, w_R)
    return x_RD, w_R


@_dispatch.register_fake
def _(x_TD, w_TK, ids_TK, ticket, rows, quantized):
    return x_TD.new_empty((rows, x_TD.shape[1])), w_TK.new_empty(rows)


@torch.library.custom_op("titan_moe::te_ep_dispatch_backward", mutates_args=())
def _dispatch_backward(grad_RD: Tensor, grad_R: Tensor, ticket: int, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    import transformer_engine_torch as tex

    grad_TD, grad_TK = grad_RD.new_empty((tokens, grad_RD.shape[1])), grad_R.new_empty((tokens, top_k))
    tex.ep_dispatch_bwd(planned(ticket).handle_mem, grad_RD.contiguous(), grad_R.contiguous(), grad_TD, grad_TK)
    return grad_TD, grad_TK


@_dispatch_backward.register_fake
def _(grad_RD, grad_R, ticket, tokens, top_k):
    return grad_RD.new_empty((tokens, grad_RD.shape[1])), grad_R.new_empty((tokens, top_k))


def _dispatch_setup(ctx, inputs, output):
    _, w_TK, _, ticket, *_ = inputs
    ctx.sizes = (ticket, *w_TK.shape)


_dispatch.register_autograd(
    lambda ctx, *grads: (*torch.ops.titan_moe.te_ep_dispatch_backward(*grads, *ctx.sizes), *(None,) * 4),
    setup_context=_dispatch_setup,
)


@torch.library.custom_op("titan_moe::te_ep_combine", mutates_args=())
def _combine(y_RD: Tensor, ticket: int, tokens: int, quantized: bool) -> Tensor:
    from transformer_engine.pytorch import ep

    out_TD = y_RD.new_empty((tokens, y_RD.shape[1]))
    ep._ep_combine_raw(planned(ticket), y_RD, out_TD)
    return out_TD


@_combine.register_fake
def _(y_RD, ticket, tokens, quantized):
    return y_RD.new_empty((tokens, y_RD.shape[1]))


@torch.library.custom_op("titan_moe::te_ep_combine_backward", mutates_args=())
def _combine_backward(grad_TD: Tensor, ticket: int, rows: int, quantized: bool) -> Tensor:
    import transformer_engine_torch as tex

    if quantized:
        data_TD, scales_TS, data_RD, scales_RS = _payload(grad_TD.contiguous(), rows)
        tex.ep_combine_bwd(planned(ticket).handle_mem, data_TD, data_RD, scales_TS, scales_RS)
        return _plain(data_RD, scales_RS)
    grad_RD = grad_TD.new_empty((rows, grad_TD.shape[1]))
    tex.ep_combine_bwd(planned(ticket).handle_mem, grad_TD.contiguous(), grad_RD)
    return grad_RD


@_combine_backward.register_fake
def _(grad_TD, ticket, rows, quantized):
    return grad_TD.new_empty((rows, grad_TD.shape[1]))


def _combine_setup(ctx, inputs, output):
    y_RD, ticket, _, quantized = inputs
    ctx.sizes = (ticket, y_RD.shape[0], quantized)


_combine.register_autograd(
    lambda ctx, grad_TD: (torch.ops.titan_moe.te_ep_combine_backward(grad_TD, *ctx.sizes), *(None,) * 3),
    setup_context=_combine_setup,
)


# ---------------------------------------------------------------------------------------------------------------------
# Rows as MXFP8


def _payload(rows_TD: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What leaves, data [T, D] and scales [T, D / 32], and room for what arrives, [R, D] and [R, D / 32]."""
    from transformer_engine.pytorch import ep

    quantized, scales_TS = ep._quantize_mxfp8(rows_TD)
    data_TD = quantized._rowwise_data.view(torch.float8_e4m3fn)  # the library goes by the type
    received = data_TD.new_empty((rows, data_TD.shape[1])), scales_TS.new_empty((rows, scales_TS.shape[1]))
    return data_TD, scales_TS, *received


def _plain(data_RD: Tensor, scales_RS: Tensor) -> Tensor:
    """bf16 again, exactly."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    if data_RD.shape[0] == 0:
        return data_RD.new_empty(data_RD.shape, dtype=torch.bfloat16)
    data, element = data_RD.view(torch.uint8), DType.kFloat8E4M3
    quantized = MXFP8TensorStorage(data, scales_RS, None, None, element, None, False, fake_dtype=torch.bfloat16)
    return quantized.dequantize(dtype=torch.bfloat16)
