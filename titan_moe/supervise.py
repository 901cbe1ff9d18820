"""`python -m titan_moe.supervise RUN_FOLDER TORCHRUN'S ARGUMENTS`: what run_train.sh becomes once all is checked.

It starts torchrun, waits for it, and is the process that signals go to:

- The first SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 asks the run to stop, by the file `stop` in the run folder
  (stop.py): the ranks agree on a step, finish it, save a checkpoint and end. torchrun alone would kill them 30 s after
  a SIGTERM, and die of a SIGUSR1. On several nodes one script's file stops the whole run.
- A second one ends everything at once. Schedulers may send one signal twice, to the script and to all that it started:
  what comes within a second of the first is the same one.

The exit status is as run_train.sh --help says. Imports no torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from titan_moe import processes
from titan_moe.stop_file import OUTCOME, Outcome, ask, withdraw

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SAME_SIGNAL_SECONDS = 1.0
LEAVING_SECONDS = 3.0
"""For what is left when torchrun has ended, as a process that removes shared memory"""
TOGETHER_SECONDS = 5.0
"""A scheduler ends the scripts of the other nodes once that of the first has returned anything but 0"""


class Supervisor:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signals: list[tuple[float, int]] = []  # when, which

    def hear(self) -> None:
        for number in processes.STOP_SIGNALS:
            # nohup, and a shell that starts something in the background, ignore these two for what they start.
            if number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) == signal.SIG_IGN:
                continue
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.signals.append((time.monotonic(), number))

    @property
    def second_signal(self) -> bool:
        return bool(self.signals) and self.signals[-1][0] - self.signals[0][0] > SAME_SIGNAL_SECONDS

    def run(self, argv: list[str]) -> int:
        """Exit status of the run that torchrun starts with `argv`."""
        processes.adopt_orphans()
        self.hear()
        with tempfile.TemporaryDirectory(prefix="titan_moe-") as private:
            outcome = Path(private, "outcome")
            withdraw(self.folder)  # what an attempt that was killed has left
            command = [sys.executable, "-u", "-m", "titan_moe.torchrun", str(os.getpid()), *argv]
            # A session of its own: the terminal's Ctrl-C is for us.
            torchrun = subprocess.Popen(command, env={**os.environ, OUTCOME: str(outcome)}, start_new_session=True)
            try:
                self._wait(torchrun)
            finally:
                self._leave_nothing(torchrun)
                withdraw(self.folder)
            return self._status(torchrun.returncode, Outcome.read(outcome))

    def _wait(self, torchrun: subprocess.Popen[bytes]) -> None:
        told = killed = False
        while torchrun.poll() is None:
            if self.second_signal and not killed:
                self._say("ends at once")
                torchrun.kill()  # the workers die with it
                killed = True
            elif self.signals and not killed:
                # Again and again: a script on another node that starts only now takes it for an old one.
                ask(self.folder, signal.Signals(self.signals[0][1]).name)
                if not told:
                    self._say("stops after a step, and saves it if checkpoint.enable; another signal ends it at once")
                told = True
            time.sleep(0.2)

    def _say(self, what: str) -> None:
        name = signal.Signals(self.signals[-1][1]).name
        # The terminal may have gone with the signal, or the `tee` behind a pipe, which Ctrl-C ends too. os.write: what
        # stayed in a buffer would fail again at the exit, with another status.
        with contextlib.suppress(OSError):
            os.write(2, f"run_train.sh: {name}: the run {what}\n".encode())

    def _leave_nothing(self, torchrun: subprocess.Popen[bytes]) -> None:
        torchrun.kill()  # does nothing if it has ended
        torchrun.wait()
        deadline = time.monotonic() + LEAVING_SECONDS
        while left := processes.descendants():
            if time.monotonic() > deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        with contextlib.suppress(ChildProcessError):  # those that we have adopted
            while os.waitpid(-1, 0):
                pass

    def _status(self, returned: int, outcome: Outcome | None) -> int:
        if outcome is None:
            if self.second_signal and returned < 0:
                return 128 + self.signals[-1][1]
            return returned if returned >= 0 else 128 - returned
        if int(os.environ.get("NNODES", "1")) > 1:
            time.sleep(TOGETHER_SECONDS)
        return REQUEUE if outcome.saves else 128 + (self.signals[0][1] if self.signals else signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(Supervisor(Path(sys.argv[1])).run(sys.argv[2:]))
