"""No process outlives the run, and a signal reaches only the one that knows what to do with it (Linux).

A run on one node is a chain: supervise.py, which the scheduler and the user know, its torchrun, and torchrun's workers.
A scheduler may send a signal to the first alone or to all of them at once; a kill -9 hits any. So

- each of the chain is killed by the kernel when the one above it ends (`die_with`), however that ends;
- what they started besides, and left, becomes a child of the supervisor (`adopt_orphans`), which ends it at last;
- torchrun and its workers have the signals that ask for a stop blocked. A worker still obeys its own torchrun, which
  ends workers by SIGTERM when another has failed (`obey_only`).

Imports no torch, and does nothing by itself but in a worker of torchrun.py: importing torch takes seconds, and a worker
must be safe before.
"""

import ctypes
import os
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""What schedulers and users end a run with"""
TORCHRUN = "TITAN_MOE_TORCHRUN"
"""Environment variable of the workers: the process that torchrun.py is"""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends. Where there is no prctl (macOS) nothing
    does."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process that a descendant leaves behind."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants() -> list[int]:
    """The processes below this one that still run, as /proc tells."""
    children: dict[int, list[int]] = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything: state, parent.
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended in between
            continue
        if state != "Z":
            children[int(parent)].append(int(process.name))
    found, new = [], [os.getpid()]
    while new:
        new = [child for pid in new for child in children[pid]]
        found += new
    return found


def obey_only(parent: int) -> None:
    """Let `parent` end this process by one of the blocked STOP_SIGNALS, and nobody else. A thread waits for them: it
    learns who sent one, and hears it while the main thread waits in a collective."""

    def listen() -> None:
        while True:
            sent = signal.sigwaitinfo(STOP_SIGNALS)
            if sent.si_pid == parent:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {sent.si_signo})
                os.kill(os.getpid(), sent.si_signo)

    threading.Thread(target=listen, name="signals", daemon=True).start()


def _begin_worker() -> None:
    torchrun = os.getppid()
    die_with(torchrun)
    obey_only(torchrun)
    # A data loader's worker is a fork of us: the signal is blocked there too, and this process may end it.
    os.register_at_fork(after_in_child=lambda: obey_only(os.getppid()))


if os.environ.get(TORCHRUN) == str(os.getppid()):
    _begin_worker()
