"""`python -m titan_moe.doctor [CONFIG.toml] [--section.key=value ...]`, what ./run_train.sh --doctor calls: is this
node, or the allocation of NNODES nodes, fit to train?

One process per GPU goes through the checks (checks.py), all ranks at the same time (ranks.py). Rank 0 prints one line
per check, and every node ends with the same exit status: 0 when all is well, 1 when something is slow, wrong or
missing; 2 stands for a mistake in the command.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titan_moe import config_file, launch
from titan_moe.config import Config
from titan_moe.config_file import ConfigError
from titan_moe.doctor.contract import Finding
from titan_moe.doctor.ranks import work

MEETING_SECONDS = 60
"""How long nodes wait for each other, which SLURM need not start at once"""


def main(argv: list[str], env: Mapping[str, str]) -> int:
    problems: list[str] = []
    for name in ("NNODES", "NGPU"):
        launch.count(env, name, problems)
    config = Config()
    try:
        if argv:
            loaded = config_file.read(argv)
            config, problems = loaded.config, loaded.problems + problems
        if problems:
            raise ConfigError(argv[0] if argv else "--doctor", problems)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return examine(work, config, bool(argv), env)


def examine(work: Callable[[Config, bool], int], config: Config, asked: bool, env: Mapping[str, str]) -> int:
    """Run `work` in NGPU processes of this node, as one of NNODES; returns the exit status."""
    nodes, per_node = int(env.get("NNODES", "1")), int(env.get("NGPU", "1"))
    endpoint = f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT', '29500')}" if nodes > 1 else "localhost:0"
    fixed = nodes > 1 and bool(env.get("NODE_RANK"))  # as in run_train.sh, so that ranks lie where the run's would
    nodes_and_processes = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=per_node,
        run_id="doctor",
        rdzv_backend="static" if fixed else "c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={"timeout": MEETING_SECONDS, "join_timeout": MEETING_SECONDS}
        | ({"rank": int(env["NODE_RANK"])} if fixed else {}),
        max_restarts=0,
        shutdown_timeout=2,
    )
    logging.disable()  # what is said here in a line, torch's launcher reports in a page of its own
    try:
        return max(elastic_launch(nodes_and_processes, work)(config, asked).values())
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode != 1:  # 1: it has seen what is wrong, and it is said
                text = f"rank {rank} (process {failure.pid}): {_ended(failure.exitcode)}"
                Finding("wrong", "ranks", text).show()
    except (dist.DistError, RendezvousError):
        text = f"the {nodes} nodes have not all come to {endpoint} within {MEETING_SECONDS} s; is it the same on all?"
        Finding("wrong", "ranks", text).show()
    return 1


def _ended(status: int) -> str:
    if status == -signal.SIGALRM:
        return "hung, and ended itself"
    if status < 0:
        name = signal.Signals(-status).name
        return f"was ended by {name}" + ("; see dmesg: out of memory?" if status == -signal.SIGKILL else "")
    return f"failed with exit status {status}; its traceback is above"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
