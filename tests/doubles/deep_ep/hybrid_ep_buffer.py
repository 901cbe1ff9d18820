"""HybridEPBuffer, the calls with permutation, blocking and not.

Held to: bf16 rows of a multiple of 512, an even number of ranks, experts of a domain in fours, float32 probabilities,
the same number of tokens on all ranks, a fixed buffer of whole slabs. Rows behind the last slab, and those that a full
buffer leaves out, are NaN; the counts are those of all rows all the same.
"""

from types import SimpleNamespace

import torch

from .gathering import check_rows, gather

NAN = float("nan")


def indices_to_map(topk_idx, topk_weights, num_of_tokens: int, num_of_experts: int):
    assert topk_idx.shape[0] == num_of_tokens and ((topk_idx >= 0) & (topk_idx < num_of_experts)).all()
    routing_map = torch.zeros(num_of_tokens, num_of_experts, dtype=torch.bool).scatter(1, topk_idx, True)
    assert routing_map.sum() == topk_idx.numel(), "an expert twice for one token"
    return routing_map, torch.zeros(num_of_tokens, num_of_experts).scatter(1, topk_idx, topk_weights)


class HybridEPBuffer:
    dispatches = 0  # that plan; for tests to count

    def __init__(
        self,
        group,
        hidden_dim,
        max_num_of_tokens_per_rank,
        num_local_experts,
        use_fp8=False,
        num_sms_dispatch_api=None,
        num_sms_combine_api=None,
        load_cached_kernels=False,
        use_shared_buffer=True,
        enable_custom_allgather=False,
    ):
        assert hidden_dim % 512 == 0 and group.size() % 2 == 0 and num_local_experts * group.size() % 4 == 0
        self.group = group
        sizes = SimpleNamespace(
            hidden_dim=hidden_dim,
            max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
            num_of_experts_per_rank=num_local_experts,
        )
        self.configurer = SimpleNamespace(buffer_config=sizes)

    def dispatch_with_permute(
        self,
        *,
        hidden,
        scaling_factor,
        routing_map=None,
        probs=None,
        num_of_experts_per_rank=None,
        pad_multiple=None,
        num_permuted_tokens=None,
        non_blocking=False,
        handle=None,
    ):
        check_rows(hidden)
        assert scaling_factor is None and pad_multiple >= 1
        if handle is None:
            assert routing_map.dtype == torch.bool and probs.dtype == torch.float32 and probs.is_contiguous()
            assert routing_map.shape == probs.shape == (hidden.shape[0], num_of_experts_per_rank * self.group.size())
            type(self).dispatches += 1
            everyone = gather(self.group, (hidden, routing_map, probs))
            handle, rows = self._plan(
                [routed for _, routed, _ in everyone], pad_multiple, num_permuted_tokens if non_blocking else None
            )
        else:
            assert probs is None and routing_map is None
            everyone, rows = gather(self.group, (hidden, None, None)), num_permuted_tokens
        assert hidden.shape[1] == self.configurer.buffer_config.hidden_dim
        copies, padding, counts, *_ = handle
        out, out_probs = torch.full((rows, hidden.shape[1]), NAN, dtype=hidden.dtype), torch.full((rows,), NAN)
        for row in padding:
            out[row], out_probs[row] = 0, 0
        for row, rank, t, expert in copies:
            out[row] = everyone[rank][0][t]
            if probs is not None:
                out_probs[row] = everyone[rank][2][t, expert]
        return out, None if probs is None else out_probs, None, counts, handle

    def _plan(self, routed: list, pad_multiple: int, room: int | None):
        assert len({len(rows) for rows in routed}) == 1, "ranks bring different numbers of tokens"
        assert len(routed[0]) <= self.configurer.buffer_config.max_num_of_tokens_per_rank
        assert room is None or room % pad_multiple == 0
        E = routed[0].shape[1]
        e = E // self.group.size()
        copies, padding, counts, row = [], [], [], 0
        for expert in range(self.group.rank() * e, (self.group.rank() + 1) * e):
            start = row
            for rank, rows in enumerate(routed):
                for t in rows[:, expert].nonzero().flatten().tolist():
                    copies.append((row, rank, t, expert))
                    row += 1
            end = start + -(-(row - start) // pad_multiple) * pad_multiple
            padding += range(row, end)
            row = end
            counts.append(end - start)
        room = row if room is None else room
        overflow = torch.tensor([row > room], dtype=torch.int32)
        copies, padding = [copy for copy in copies if copy[0] < room], [r for r in padding if r < room]
        T = torch.tensor(len(routed[0]))
        return (copies, padding, torch.tensor(counts, dtype=torch.int32), T, E, overflow), room

    def combine_with_unpermute(self, *, hidden, handle, probs=None):
        check_rows(hidden)
        copies, _, _, T, E, _ = handle
        assert probs is None or (probs.dtype == torch.float32 and probs.is_contiguous() and len(probs) == len(hidden))
        sum_TD, probs_TE = torch.zeros(int(T), hidden.shape[1]), torch.zeros(int(T), E)
        for places, rows, row_probs in gather(self.group, (copies, hidden, probs)):
            for row, rank, t, expert in places:
                if rank == self.group.rank():
                    sum_TD[t] += rows[row]
                    if row_probs is not None:
                        probs_TE[t, expert] = row_probs[row]
        return sum_TD.to(hidden.dtype), None if probs is None else probs_TE
