"""Expert parallelism over gloo, under TE's rules: what TE's own ep.py is to its extension. The extension's double does
the work and holds the rules of a call; here are those of the process and of a buffer."""

import atexit
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformer_engine_torch as tex

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

_STATE = SimpleNamespace(bootstrapped=False, eager=False)


def ep_bootstrap(
    ep_group: dist.ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
) -> None:
    eager = recv_capacity_per_rank is None
    assert not _STATE.bootstrapped, "ep_bootstrap was already called in this process"
    assert ep_group.size() >= 2, f"ep_bootstrap requires ep_group.size() >= 2 (got {ep_group.size()})"
    assert num_topk >= 1, "ep_bootstrap requires num_topk >= 1"
    assert not (zero_copy and eager), "ep_bootstrap: zero_copy requires recv_capacity_per_rank"
    assert not (drop_on_overflow and eager), "ep_bootstrap: drop_on_overflow requires recv_capacity_per_rank"
    dist.barrier(group=ep_group)
    tex.ep_initialize(
        id(ep_group),
        str(ep_group.group_name),
        num_experts,
        max_tokens_per_rank,
        int(recv_capacity_per_rank or 0),
        hidden_dim,
        max_num_sms,
        max_token_dtype,
        zero_copy,
        num_topk,
        drop_on_overflow,
    )
    _STATE.bootstrapped, _STATE.eager = True, eager
    atexit.register(_atexit_finalize)


def _atexit_finalize() -> None:
    ep_finalize()


def ep_finalize() -> None:
    if _STATE.bootstrapped:
        _STATE.bootstrapped = False
        tex.ep_finalize()


class EpBuffer:
    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        dispatch_fwd_quant_recipe=None,
        combine_bwd_quant_recipe=None,
    ) -> None:
        assert _STATE.bootstrapped, "EpBuffer requires ep_bootstrap() to be called first"
        assert alignment & (alignment - 1) == 0, "alignment must be 0, 1, or a power of two"
        assert _STATE.eager == (recv_capacity_per_rank is None), "EpBuffer's capacity is not the group's"
        self.top_k, self.alignment = top_k, alignment
        self.handle_mem = torch.empty(tex.ep_handle_mem_size(top_k, alignment), dtype=torch.uint8)
        self.tokens_per_expert = torch.full((num_local_experts,), -1)
        self.total_recv_tokens = torch.full((1,), -1)


def ep_prepare(buffer: "EpBuffer", topk_idx: torch.Tensor) -> torch.Tensor:
    tex.ep_prepare(
        buffer.handle_mem,
        topk_idx,
        buffer.tokens_per_expert,
        buffer.top_k,
        buffer.alignment,
        buffer.total_recv_tokens,
    )
    return buffer.tokens_per_expert


def _quantize_mxfp8(x: torch.Tensor):
    """(quantized, its scales in compact order): a token's row of scales travels in pieces of 16 bytes."""
    assert x.shape[0] % 32 == 0 and x.shape[1] % 512 == 0, f"{tuple(x.shape)}: MXFP8 dispatch takes other sizes"
    assert x.dtype == torch.bfloat16 and x.is_contiguous()
    data, scales = tex.mxfp8._quantized(x)
    quantized = MXFP8TensorStorage(data, scales, None, None, DType.kFloat8E4M3, None, False, fake_dtype=x.dtype)
    return quantized, scales


def _ep_dispatch_raw(
    buffer: "EpBuffer",
    topk_idx: torch.Tensor,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor,
    recv_tokens: torch.Tensor,
    recv_topk_weights: torch.Tensor,
) -> None:
    tex.ep_dispatch(buffer.handle_mem, topk_idx, tokens, topk_weights, recv_tokens, recv_topk_weights)


def _ep_combine_raw(buffer: "EpBuffer", expert_out: torch.Tensor, result: torch.Tensor) -> None:
    tex.ep_combine(buffer.handle_mem, expert_out, result)
