"""Two ranks of tiny pipelines, with torch's stages and with ours.

    python tests/distributed/ranks.py 2 tests/pipeline_stage_worker.py OUT

OUT/<rank>.json maps "<schedule> <class of stage>" to what a step of it computed and how many of its receive buffers
were alive at most, in the step and in an evaluation.
"""

import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))
import titan_moe.runtime  # noqa: F401  # isort: skip - first: it tells torchtitan about CPUs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as torchs

from titan_moe import pipeline_stage
from titan_moe.pipeline import Pipeline
from titan_moe.pipeline_stage import InFlightStage

MICROBATCHES, WIDTH = 24, 16
NAMES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
alive: "weakref.WeakSet[Tensor]" = weakref.WeakSet()
counts: list[int] = []
make = torchs._make_tensor_from_meta


def counting(meta, device) -> Tensor:
    buffer = make(meta, device)
    if torch.device(device).type != "meta":
        alive.add(buffer)
        counts.append(len(alive))
        assert all(each.grad is None for each in alive), "the gradient of an input outlives its backward"
    return buffer


def allowed(schedule: Any, evaluates: bool) -> int:
    """Buffers that are in flight at once: from when their receive is posted to the weights' backward, which needs
    those of the first and last layer; in evaluation to the next forward of the stage."""
    rank = dist.get_rank()
    if not isinstance(schedule, schedules._PipelineScheduleRuntime):
        return 3  # two microbatches in flight, and torch has a variable for the last gradient received
    held, most, last = set(), 0, {}
    actions = schedule.pipeline_order_with_comms[rank]
    for action in (part for each in actions for part in each.sub_actions or (each,)):
        kind, stage, microbatch = action.computation_type, action.stage_index, action.microbatch_index
        if kind == schedules.RECV_F or (kind == schedules.RECV_B and not evaluates):
            held.add((kind, stage, microbatch))
        most = max(most, len(held))
        if kind == schedules.FORWARD and evaluates:
            held.discard((schedules.RECV_F, stage, last.get(stage)))
            last[stage] = microbatch
        if kind in (schedules.FULL_BACKWARD, schedules.BACKWARD_WEIGHT) and not evaluates:
            held -= {(received, stage, microbatch) for received in (schedules.RECV_F, schedules.RECV_B)}
    return most


def run(name: str, stage_class: type[PipelineStage]) -> dict[str, Any]:
    rank, several = dist.get_rank(), name != "1F1B"
    places = {"1F1B": [rank], "ZBVZeroBubble": [rank, 3 - rank], "DualPipeV": [rank, 3 - rank]}.get(
        name, [rank, rank + 2]
    )
    parts = []
    for place in places:
        torch.manual_seed(place)
        parts.append(nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)))
    stages = [stage_class(part, place, 4 if several else 2, torch.device("cpu")) for part, place in zip(parts, places)]
    schedule = schedules.get_schedule_class(name)(
        cast(Any, stages if several else stages[0]), MICROBATCHES, loss_fn=lambda out, goal: (out - goal).square().sum()
    )
    torch.manual_seed(7)
    x_MLD, goal_MLD = torch.randn(2, MICROBATCHES, 4, WIDTH).unbind()
    inputs = [(x_LD,) for x_LD in x_MLD] if 0 in places else None
    has_last = max(places) == (3 if several else 1)
    losses: list[Tensor] = []

    def call(step, microbatches=None) -> None:
        found: list[Tensor] = []
        targets: dict[str, Any] = {"target_mbs": list(goal_MLD), "losses": found} if has_last else {}
        step(arg_mbs=inputs, **targets, return_outputs=False)
        losses.extend(found)

    counts.clear()
    call(schedule.step)
    found = {"most": max(counts, default=0), "allowed": allowed(schedule, evaluates=False)}
    counts.clear()
    with torch.no_grad():
        Pipeline.evaluate(cast(Any, SimpleNamespace(schedule=schedule, _run=call)), [])
    found |= {"most_evaluating": max(counts, default=0), "allowed_evaluating": allowed(schedule, evaluates=True)}
    assert stage_class is PipelineStage or not any(cast(InFlightStage, stage).held() for stage in stages)
    gradients = [p.grad for part in parts for p in part.parameters()]
    return found | {
        "losses": [loss.item() for loss in losses],
        "gradients": [cast(Tensor, g).tolist() for g in gradients],
    }


if __name__ == "__main__":
    torchs._make_tensor_from_meta = pipeline_stage._make_tensor_from_meta = counting
    dist.init_process_group("gloo")
    found = {f"{name} {kind.__name__}": run(name, kind) for name in NAMES for kind in (PipelineStage, InFlightStage)}
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
