"""How a stop is asked for and answered between processes: two small files. Imports no torch.

`stop` in the run folder asks: a supervisor writes it, or anybody who can write there (`touch outputs/<run>/stop`). Its
text says why. The answer is a file that each node's supervisor names to its own workers: the run folder's file system
may show other nodes late what is new in it.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from titan_moe.whole_file import replacing

STOP = "stop"
OUTCOME = "TITAN_MOE_OUTCOME"
"""Environment variable of the workers: the file that tells their supervisor how they ended"""


def ask(folder: Path, why: str) -> None:
    """Ask the run in `folder` to stop."""
    folder.mkdir(parents=True, exist_ok=True)  # before rank 0 has taken it
    if (folder / STOP).exists():
        return
    with replacing(folder / STOP) as file:
        file.write_text(f"{why} on {socket.gethostname()}\n")


def asked(folder: Path) -> bool:
    """Whether somebody has; one stat."""
    return (folder / STOP).exists()


def why(folder: Path) -> str:
    try:
        return (folder / STOP).read_text().strip() or f"by {folder / STOP}"
    except OSError:  # withdrawn, by a supervisor that has ended
        return "by a file that is gone"


def withdraw(folder: Path) -> None:
    (folder / STOP).unlink(missing_ok=True)


@dataclass(frozen=True)
class Outcome:
    """That the run stopped because it was asked to."""

    saves: bool
    """Whether nothing of it is lost, as the newest checkpoint has all"""

    def write(self) -> None:
        """For this node's supervisor, if there is one."""
        if path := os.environ.get(OUTCOME):
            Path(path).write_text("saved" if self.saves else "not saved")

    @staticmethod
    def read(path: Path) -> "Outcome | None":
        return Outcome(path.read_text() == "saved") if path.exists() else None
