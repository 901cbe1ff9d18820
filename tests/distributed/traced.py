"""What ranks of a forked job do for test_networks.py and benchmarks/overlap.py: compare FSDP's collectives with
FSDP2's own, and note when every transfer of a step was under way."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.distributed.overlap_ranks import SMALL, Trainee
from tests.faults.checkpoint_run import Job
from titan_moe import fsdp_traffic, in_flight, timeline
from titan_moe.clock import Mark

Job.context.set_forkserver_preload([Job.__module__, __name__])  # ranks start with the model's imports done


def param_groups(trainee: Trainee) -> list[FSDPParamGroup]:
    return [group for part in trainee.parts for group in fsdp_traffic.param_groups(part)]


def use_stock_collectives(trainee: Trainee) -> None:
    """What FSDP2 does by itself: the host waits in each."""
    for group in param_groups(trainee):
        group._all_gather_comm, group._reduce_scatter_comm = DefaultAllGather(), DefaultReduceScatter()
        group.unshard_async_op = False


def compare_with_stock(tell: Callable[[Any], None], argv: list[str]) -> None:
    """Tells what is wrong on this rank: names of gradients that differ, of groups that are shared."""
    trainee = Trainee([*SMALL, *argv])
    ours = trainee.run()
    use_stock_collectives(trainee)
    stock = trainee.run()
    assert {transfer.name for transfer in ours.fsdp} == {"gather", "reduce"} and not stock.fsdp
    assert ours.gradients.keys() == stock.gradients.keys() and ours.gradients
    wrong = [name for name, g in ours.gradients.items() if not torch.equal(g, stock.gradients[name])]
    wrong += [] if torch.equal(ours.loss, stock.loss) else ["loss"]
    dispatchers = [moe.routed_experts.dispatcher for moe in trainee.layers.values()]
    exchange = {d.group.group_name for d in dispatchers if d is not None and d.ep_group is not None}
    assert len(exchange) == (trainee.dims.ep > 1), "all layers exchange in one group"
    used = set[str]().union(*map(fsdp_traffic.group_names, param_groups(trainee)))
    assert used
    tell(wrong + sorted(exchange & (used | {dist.group.WORLD.group_name})))


def traced_steps(tell: Callable[[Any], None], argv: list[str], slowness: float, steps: int) -> None:
    """Tells the spans of each of `steps` steps, in seconds of the machine's clock. Links, of expert parallelism and of
    FSDP, are so slow that a step's transfers, one after the other, take `slowness` times as long as a step without."""
    trainee = Trainee([*SMALL, *argv])
    trainee.run()
    plain = trainee.run()
    slow = torch.tensor(slowness * plain.seconds / sum(t.received for t in (*plain.transfers, *plain.fsdp)))
    dist.all_reduce(slow, dist.ReduceOp.MAX)
    in_flight.seconds_per_byte = fsdp_traffic.seconds_per_byte = slow.item()
    for _ in range(steps):
        dist.barrier()
        found = trainee.run()
        tell(timeline.spans([*found.transfers, *found.fsdp], Mark(0.0)))
