"""What a run learns about itself while it trains: times of phases, communication, and whatever else has statistics.

One Telemetry per run. Everything is counted on each rank by itself; on a logged step the ranks tell each other their
numbers in one all-gather.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe import in_flight
from titan_moe.config import Config
from titan_moe.phase_hooks import watch
from titan_moe.phase_names import NAMES, OWN
from titan_moe.phases import Phases
from titan_moe.pipeline import Pipeline
from titan_moe.profiling import Profiling
from titan_moe.wire import Wire

Statistics = Callable[[], Mapping[str, float]]
"""Quantities by name; all ranks call it on a logged step"""


class Telemetry:
    """All ranks must call `statistics` together.

    Arguments:
        sources: others that have something to tell on logged steps.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        phases: Phases,
        model_parts: Sequence[nn.Module],
        pipeline: Pipeline | None,
        device: torch.device,
        sources: Sequence[Statistics],
    ) -> None:
        self.phases, self.device, self.sources = phases, device, sources
        self.profiling = Profiling(config, folder, phases)
        self.counts_rows = False
        self.wire = Wire(config, model_parts, device, lambda: self.counts_rows and not phases.repeats)
        watch(phases, model_parts, pipeline)

    @contextmanager
    def step(self, step: int, *, logs: bool) -> Iterator[None]:
        """Around an optimizer step; `logs`: it will be logged."""
        self.counts_rows = logs
        self.wire.step()
        self.phases.step()
        with self.profiling.step(step):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around what is one phase, whatever is done inside."""
        with in_flight.unnoted(), self.phases.whole(name):  # what is sent there is not of training
            yield

    def backward(self) -> AbstractContextManager[None]:
        return self.phases.backward()

    def statistics(self) -> dict[str, float]:
        """Of the steps since the last call. Seconds of "phase/..." are those of one step."""
        found: dict[str, float] = {}
        with self.phases.whole("logging"):
            for source in self.sources:
                found |= source()
        seconds, steps = self.phases.take()
        with self.phases.whole("logging"):  # of the next line
            mine = [seconds[name] / max(steps, 1) for name in NAMES] + self.wire.take(steps)
            everyone = gathered(torch.tensor(mine, dtype=torch.float64), self.device)
        found |= phase_statistics(everyone[:, : len(NAMES)])
        return found | self.wire.statistics(everyone[:, len(NAMES) :])


def gathered(mine: Tensor, device: torch.device) -> Tensor:
    """The numbers of all ranks: float64 [ranks, n]."""
    everyone = torch.empty(dist.get_world_size(), len(mine), dtype=torch.float64, device=device)
    dist.all_gather_single(everyone.view(-1), mine.to(device))
    return everyone.cpu()


def phase_statistics(seconds_RP: Tensor) -> dict[str, float]:
    """What is told of the seconds of each rank in each phase of NAMES. R ranks, P phases."""
    found = {"phase/step": seconds_RP.sum(1).mean().item()}
    means, (largest, ranks) = seconds_RP.mean(0).tolist(), (x.tolist() for x in seconds_RP.max(0))
    for name, mean, most, rank in zip(NAMES, means, largest, ranks):
        if most:
            found |= {f"phase/{name}": mean, f"phase_max/{name}": most, f"phase_rank/{name}": rank}
    own_P = torch.tensor([name.split(".")[0] in (*OWN, "data", "optimizer") for name in NAMES])
    own_R = seconds_RP[:, own_P].sum(1)
    return found | {"slowest_rank": int(own_R.argmax()), "slowest_rank_s": (own_R.max() - own_R.mean()).item()}
