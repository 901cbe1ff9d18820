"""What the doctor measures on a rank: GEMMs, copies, the disk, and transfers between ranks.

Each function takes about a second and returns a rate: the best of three rounds, as other work on the machine only makes
a round slower. Rates are in 1e12 operations (TFLOP/s) or 1e9 bytes (GB/s) per second. Those of collectives are NCCL's
bus bandwidth, which compares with the speed of a rank's link whatever the number of ranks.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS, ROUND_SECONDS = 3, 0.1

LIMIT_SECONDS = 20.0
"""How long a rank may take for one check, and for an answer to one, before it counts as hanging or dead"""


def gemm(device: torch.device) -> float:
    """TFLOP/s of a square matrix product, in bf16 on an accelerator and in fp32 on a CPU."""
    size, dtype = (768, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return _rate(lambda: torch.mm(a, b), 2 * size**3, device) / 1e12


def memory_copy(device: torch.device) -> float:
    """GB/s read and written by copies inside the device's memory."""
    source = torch.ones(_size(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * source.numel(), device) / 1e9


def host_copy(device: torch.device) -> float:
    """GB/s between pinned host memory and an accelerator, in the slower direction."""
    host = torch.ones(_size(device), dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(host, device=device)
    ways = (lambda: on_device.copy_(host, non_blocking=True), lambda: host.copy_(on_device, non_blocking=True))
    return min(_rate(way, host.numel(), device) for way in ways) / 1e9


def disk_write(folder: Path) -> float:
    """GB/s written to a file in the folder, or in the first parent that exists, until the disk has it. Raises OSError
    where nothing can be written."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    piece = os.urandom(2**20)  # a file system may compress what repeats
    with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(64):
            file.write(piece)
        os.fsync(file.fileno())
        return 64 * len(piece) / (time.perf_counter() - start) / 1e9


def all_reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s of bus bandwidth: each of n ranks sends 2 (n - 1) / n of the tensor's bytes."""
    ranks = group.size()
    x = torch.ones(_size(device) // 4, device=device)
    sent = 2 * (ranks - 1) / ranks * x.numel() * 4
    return _rate(lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group), sent, device, group) / 1e9


def all_to_all(group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s of bus bandwidth: each of n ranks sends (n - 1) / n of the tensor's bytes."""
    ranks = group.size()
    source = torch.ones(_size(device) // 4 // ranks * ranks, device=device)
    target = torch.empty_like(source)
    sent = (ranks - 1) / ranks * source.numel() * 4
    return _rate(lambda: dist.all_to_all_single(target, source, group=group), sent, device, group) / 1e9


def pair_exchange(group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s that this rank sends and receives at once, with the better of its two neighbours in the group.

    A pair is as slow as its slower rank. Because every rank is in two pairs, only a slow rank is slow in both.
    """
    ranks, me = group.size(), group.rank()
    source = torch.ones(_size(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    for shift in (0, 1):  # pairs (0 1) (2 3) ..., then (1 2) (3 4) ... (n-1 0); of an odd number one rank has to wait
        peer = me + 1 if (me + shift) % 2 == 0 else me - 1
        if shift == 1 and ranks % 2 == 0:
            peer %= ranks
        if 0 <= peer < ranks:
            at = dist.get_global_rank(group, peer)
            rates.append(_rate(lambda at=at: _exchange(target, source, at, group), source.numel(), device, times=4))
    return max(rates) / 1e9


def _exchange(target: torch.Tensor, source: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    sends = [dist.P2POp(dist.isend, source, peer, group), dist.P2POp(dist.irecv, target, peer, group)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()


def _size(device: torch.device) -> int:
    """Bytes of one transfer: enough to be bound by bandwidth, little enough for a second on a slow link."""
    return 2**24 if device.type == "cpu" else 2**28


def _rate(
    run: Callable[[], object],
    units: float,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    times: int | None = None,
) -> float:
    """Units per second of `run`, which handles `units`, when called again and again: `times` a round, or as often as
    fits ROUND_SECONDS. With a group its ranks agree on that: a collective has to be called alike by all."""
    run()  # allocates, chooses kernels, connects
    if times is None:
        seconds = torch.tensor([_seconds(run, 1, device)], device=device)
        if group is not None:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
            _finish(device)
        times = max(int(ROUND_SECONDS / seconds.item()), 1)
    return units * times / min(_seconds(run, times, device) for _ in range(ROUNDS))


def _seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    """Wait for the device, but not for ever: a collective that another rank does not join never ends on it."""
    if device.type == "cpu":  # gloo raises by itself
        return
    event = torch.Event(device)
    event.record()
    deadline = time.monotonic() + LIMIT_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{device} has not finished within {LIMIT_SECONDS:.0f} s")
        time.sleep(1e-4)
