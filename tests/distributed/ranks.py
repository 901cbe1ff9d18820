"""The ranks of a job as forks of one process, so that torch and torchtitan, 5 s of each process, are imported once.

    python tests/distributed/ranks.py N SCRIPT [ARGUMENTS]

runs SCRIPT on N ranks of this machine, with the environment that torchrun gives them. What rank 0 prints is shown, and
what another one has printed if it fails. The first that fails ends the others.
"""

import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from titan_moe.processes import die_with

import train  # noqa: F401 - for all ranks
from tests.distributed.harness import free_port


def run(script: str, arguments: list[str]) -> None:
    """In a rank: the script, until its end; returns no more."""
    status = 1
    try:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(ranks: int, script: str, arguments: list[str]) -> None:
    parent, logs = os.getpid(), [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115 - of this process
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    running: dict[int, int] = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            die_with(parent)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank > 0:
                os.dup2(logs[rank].fileno(), 1)
                os.dup2(logs[rank].fileno(), 2)
            run(script, arguments)
        running[child] = rank
    while running:
        child, status = os.wait()
        rank, code = running.pop(child), os.waitstatus_to_exitcode(status)
        if code != 0:
            for other in running:
                os.kill(other, signal.SIGKILL)
            logs[rank].seek(0)
            sys.exit(f"{logs[rank].read().decode(errors='replace')}rank {rank} of {script}: exit status {code}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
