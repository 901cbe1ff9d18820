"""DeepEP 2's ElasticBuffer, as far as training uses it: compact layout, backward by handle.

Held to: bf16 rows of whole 16 bytes, int64 ids, float32 weights, everything contiguous, the same number of tokens
announced by all ranks and no more of them, nobody looks at a result before waiting for it. Rows arrive in a random
order; what the library leaves undefined is NaN.
"""

import itertools
import random
from types import SimpleNamespace

import torch

from .gathering import check_rows, gather

NAN = float("nan")
seeds = itertools.count()


class Event:
    def __init__(self, finish):
        self.finish = finish

    def current_stream_wait(self) -> None:
        self.finish()


class ElasticBuffer:
    dispatches = 0  # that plan; for tests to count

    def __init__(
        self,
        group,
        num_bytes=None,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        explicitly_destroy=False,
    ):
        assert num_bytes % 2**21 == 0 and not use_fp8_dispatch
        self.group, self.num_bytes, self.num_max_tokens_per_rank = group, num_bytes, num_max_tokens_per_rank

    @staticmethod
    def get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False) -> int:
        assert num_max_tokens_per_rank > 0 and hidden > 0
        return -(-group.size() * num_max_tokens_per_rank * hidden * 2 // 2**21) * 2**21

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        return 20

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        num_sms=0,
        handle=None,
        do_cpu_sync=None,
        do_expand=False,
    ):
        check_rows(x)
        assert x.shape[1] * x.element_size() % 16 == 0 and num_sms > 0 and not do_expand
        if handle is not None:
            assert topk_idx is None and topk_weights is None and not do_cpu_sync
            all_x = gather(self.group, x)
            return self._rows(all_x, handle), None, None, handle, Event(lambda: None)
        assert do_cpu_sync
        T, K = topk_idx.shape
        assert T == x.shape[0] <= num_max_tokens_per_rank
        assert self.get_buffer_size_hint(self.group, num_max_tokens_per_rank, x.shape[1], K) <= self.num_bytes
        assert topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        assert topk_weights.is_contiguous() and topk_weights.dtype == torch.float32 and topk_weights.shape == (T, K)
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        type(self).dispatches += 1
        ranks, me = self.group.size(), self.group.rank()
        everyone = gather(self.group, (x, topk_idx, topk_weights, num_max_tokens_per_rank))
        assert len({announced for *_, announced in everyone}) == 1
        e = num_experts // ranks
        local = [torch.where(ids // e == me, ids % e, -1) for _, ids, *_ in everyone]
        tokens = [(rank, t) for rank in range(ranks) for t in range(len(local[rank])) if (local[rank][t] >= 0).any()]
        random.Random(next(seeds)).shuffle(tokens)
        recv_idx = torch.stack([local[rank][t] for rank, t in tokens]) if tokens else topk_idx.new_empty(0, K)
        weights = [everyone[rank][2][t] for rank, t in tokens]
        recv_weights = torch.stack(weights) if tokens else topk_weights.new_empty(0, K)
        counts = [int((recv_idx == expert).sum()) for expert in range(e)]
        handle = SimpleNamespace(
            tokens=tokens, recv_idx=recv_idx, T=T, num_sms=num_sms, num_recv_tokens_per_expert_list=counts
        )
        recv_weights = torch.where(recv_idx >= 0, recv_weights, NAN)
        return self._rows([x for x, *_ in everyone], handle), recv_idx, recv_weights, handle, Event(lambda: None)

    @staticmethod
    def _rows(all_x, handle):
        rows = [all_x[rank][t] for rank, t in handle.tokens]
        return torch.stack(rows) if rows else all_x[0].new_empty(0, all_x[0].shape[1])

    def combine(self, x, handle, topk_weights=None, async_with_compute_stream=False):
        check_rows(x)
        V, K = handle.recv_idx.shape
        assert x.shape[0] == V
        if topk_weights is not None:
            assert topk_weights.shape == (V, K) and topk_weights.dtype == torch.float32
            assert topk_weights.is_contiguous()
        sum_TD = torch.zeros(handle.T, x.shape[1])
        weights_TK = torch.zeros(handle.T, K)
        for tokens, idx, rows, weights in gather(self.group, (handle.tokens, handle.recv_idx, x, topk_weights)):
            for i, (rank, t) in enumerate(tokens):
                if rank == self.group.rank():
                    sum_TD[t] += rows[i]
                    if weights is not None:
                        weights_TK[t] += torch.where(idx[i] >= 0, weights[i], 0)
        out = torch.full((handle.T, x.shape[1]), NAN, dtype=x.dtype)
        event = Event(lambda: out.data.copy_(sum_TD))
        if not async_with_compute_stream:
            event.current_stream_wait()
        return out, None if topk_weights is None else weights_TK, event
