"""What a check of the doctor is, what it knows of this rank and of the others, and what it says.

A check is a pair of functions. `measure` runs on every rank, at the same time, and returns something that JSON can
hold; what it raises becomes that rank's answer too. `judge` runs on rank 0, gets all answers, and returns findings:
"ok", "slow" or "wrong" with the value, what was expected, and the way out; "note" for what could not be judged.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from titan_moe.config import Config
from titan_moe.plan.hardware import Hardware, of_device


class Finding(NamedTuple):
    state: Literal["ok", "note", "slow", "wrong"]
    check: str
    text: str

    def show(self) -> None:
        print(f"{self.state:6}{self.check:20}{self.text}", flush=True)


@dataclass
class Examined:
    """This rank, the ranks around it, and what the run is to be."""

    config: Config
    asked: bool
    """A configuration was given: `config` is what the run will be, and not just the defaults"""
    device: torch.device
    store: dist.Store
    """For answers, and for process groups to find each other"""
    rank: int
    world_size: int
    per_node: int
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """"inside": the ranks of this node; "across": one rank of each node, at the same place"""
    places: dict[int, dict[str, str]] = field(default_factory=dict)
    """On rank 0, by rank: host, device and NVLink domain; filled by the first check"""

    @property
    def hardware(self) -> Hardware | None:
        return of_device(self.places[0]["device"])

    def name(self, rank: int) -> str:
        place = self.places.get(rank)
        return f"rank {rank} ({place['host']})" if place else f"rank {rank} (node {rank // self.per_node})"


class Check(NamedTuple):
    name: str
    measure: Callable[[Examined], Any]
    judge: Callable[[Examined, dict[int, Any]], list[Finding]]
    together: bool = False
    """Ranks measure it with each other: if one fails, none can go on"""
    patience: float = 1.0
    """In bench.LIMIT_SECONDS: how long answers may take"""


def few(words: list[str]) -> str:
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def dots(version: Any) -> str:
    return ".".join(map(str, version))
