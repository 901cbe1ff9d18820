"""A pipeline stage that holds what it receives, and what it sends, only while a microbatch is in flight.

One optimizer step is one run of the schedule here, so a step may have a thousand microbatches, of which few are in
flight at a time. torch's stages are made for few: they allocate, before the first of them, a buffer to receive every
microbatch's hidden states and one for its gradient, and keep them; its schedules keep every send's handle until the
step ends, and a handle keeps what was sent. With 960 microbatches of 56 MiB that is more than a GPU has.

Here a buffer is made when its receive is posted, and belongs to the microbatch as soon as that is computed with: torch
keeps the input of a forward until the backward, and a received gradient as long as the backward that takes it. It is
made on the stream that computes, and nothing else refers to it but what the schedule waits for, so that NCCL's stream
and the caching allocator get along as they do with torch's own.

This reaches into torch.distributed.pipelining as it is in torch 2.14. `Pipeline` asserts after every step that nothing
is left, which tells when another torch goes another way.
"""

from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.stage import _make_tensor_from_meta, _RecvInfo


class InFlightStage(PipelineStage):
    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        infos = {}
        for microbatch in range(num_microbatches):  # one at a time: each comes with a buffer
            super()._setup_forward_recv_info(1, has_backward)
            infos[microbatch] = emptied(self.args_recv_info[0])
        self.args_recv_info = infos

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple[_RecvInfo, ...]:
        return emptied(super()._create_grad_recv_info(act_send_info))

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...], group: dist.ProcessGroup | None) -> list[dist.P2POp]:
        for info in recv_infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                assert info.buffer is None, f"{info}: what was received before has not been used"
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)
        return super()._get_recv_ops(recv_infos, group)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        emptied(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        emptied(self.grad_recv_info[bwd_chunk_id])
        return received

    def forward_one_chunk(self, *args, **kwargs) -> Any:
        if not self.has_backward:
            self.fwd_cache.clear()  # the microbatch before, which has been sent
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """In schedules that split it, of the input: what the weights' still needs is in torch's parameter groups. (The
        first stage has no input to differentiate: all of its backward is the weights'.)"""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # schedules keep it until the step ends, and its graph keeps the stage's input
        if bwd_chunk_id in self.backward_state and not self.is_first:
            inputs, parameter_groups, _, _ = self.backward_state[bwd_chunk_id]
            for value in inputs:
                if isinstance(value, Tensor):
                    value.grad = None  # sent from bwd_cache
            self.backward_state[bwd_chunk_id] = ((), parameter_groups, None, None)

    def held(self) -> list[int]:
        """Microbatches that it has something of: none after a step."""
        infos = (*self.args_recv_info.items(), *self.grad_recv_info.items())
        received = {microbatch for microbatch, each in infos if any(info.buffer is not None for info in each)}
        return sorted(received | self.backward_state.keys() | (self.fwd_cache.keys() if self.has_backward else set()))


def emptied(infos: tuple[_RecvInfo, ...]) -> tuple[_RecvInfo, ...]:
    for info in infos:
        info.buffer = None
    return infos


_batch_p2p = schedules._batch_p2p
_sending: deque[list[dist.Work]] = deque()


def batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """torch's, whose list of a send's handles is emptied when that has ended. Only NCCL tells so without waiting."""
    works = _batch_p2p(p2p_ops, desc)
    if all(op.op is dist.isend for op in p2p_ops):
        _sending.append(works)
    while _sending and all(work.is_completed() for work in _sending[0]):
        _sending.popleft().clear()
    return works


schedules._batch_p2p = batch_p2p
