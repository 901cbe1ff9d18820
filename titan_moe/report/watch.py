"""A report that is written again while the runs train.

The page is replaced in one go, so that a browser never loads half of one; it loads itself again, and stops doing so
with the last version, which is written once no process trains in any of the folders. A run may be between two attempts
then, so that has to last for a minute, unless it has done all of its steps.
"""

import time
from collections.abc import Callable, Sequence

from titan_moe.report.read import Run, read

SHORTEST = 0.5
"""Seconds between two reports, at least"""
GRACE = 60.0
"""Seconds without a process after which a run that is not complete counts as ended"""


def watch(folders: Sequence[str], seconds: float, write: Callable[[list[Run], float | None], None]) -> None:
    """Call `write` with the runs every so many seconds, with None instead of the seconds for the last time. Ctrl-C
    ends it too, with a last report."""
    last_alive = time.monotonic()
    try:
        while True:
            runs = [read(folder) for folder in folders]
            if any(run.alive for run in runs):
                last_alive = time.monotonic()
            over = all(run.finished for run in runs) or time.monotonic() - last_alive >= GRACE
            write(runs, None if over else seconds)
            if over:
                return
            time.sleep(seconds)
    except KeyboardInterrupt:
        write([read(folder) for folder in folders], None)
