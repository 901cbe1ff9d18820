"""Mistakes that a user can make, shown as a message instead of a traceback.

By this code's convention a ValueError raised in it is about something the user can mend, and says how; our own faults
are AssertionErrors. So where an error was raised decides how it is shown: a ValueError of a library, or of Python
itself as by int("x"), keeps its traceback.
Imports neither torch nor torchtitan.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path

OURS = Path(__file__).parent, Path(__file__).parent.parent / "train.py"


class ConfigError(ValueError):
    """Everything wrong with one configuration, listed under its name."""

    def __init__(self, name: str, problems: list[str]) -> None:
        super().__init__(name, problems)
        self.name, self.problems = name, problems

    def __str__(self) -> str:
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        return "".join([f"{self.name}: {count}", *(f"\n    {problem}" for problem in self.problems)])


def readable(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """`main`, but a user's mistake ends it with the message and exit status 2. Where memory has run out, the traceback
    ends with what to change.

    torchrun hides the output of most ranks, and shows what those that failed have left in a file for it; so under
    torchrun the message goes there. A configuration is the same on all ranks, so only rank 0 tells what is wrong with
    it; another mistake may be one rank's alone.
    """

    @wraps(main)
    def wrapped(argv: list[str]) -> None:
        try:
            main(argv)
        except ValueError as error:
            if not is_mistake(error):
                raise
            if isinstance(error, ConfigError) and os.environ.get("RANK", "0") != "0":
                sys.exit(2)
            if not tell_torchrun(str(error)):
                print(error, file=sys.stderr, flush=True)
            sys.exit(2)
        except (RuntimeError, MemoryError, OSError) as error:
            from titan_moe import out_of_memory, runtime

            if out_of_memory.is_out_of_memory(error):
                gpu = runtime.DEVICE_TYPE != "cpu"
                error.add_note(out_of_memory.advice(argv, int(os.environ.get("WORLD_SIZE", "1")), gpu))
            raise

    return wrapped


def tell_torchrun(text: str) -> bool:
    """Leave torchrun what it shows as this process's error; False if none has started it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return False
    shown = {"py_callstack": text, "timestamp": str(int(time.time()))}
    Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": shown}}))
    return True


def is_mistake(error: ValueError) -> bool:
    """Whether this code raised it, and not a library or Python on the way."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (frames[-1].line or "").startswith("raise"):
        return False
    return any(Path(frames[-1].filename).is_relative_to(ours) for ours in OURS)
