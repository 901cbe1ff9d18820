"""`python -m titan_moe.doctor [CONFIG.toml] [--section.key=value ...]`, what ./run_train.sh --doctor calls: is this
node, or the allocation of NNODES nodes, fit to train?

One process per GPU goes through the checks of doctor_checks.py, all ranks at the same time. Answers go to rank 0
through the store that torchrun's agents keep, not through a process group: so a rank that hangs or has died is the one
whose answer is missing, and what could be measured before it is on the screen already. Rank 0 prints one line per
check, and every rank ends with the same exit status: 0 when all is well, 1 when something is slow, wrong or missing;
2 stands for a mistake in the command.
"""

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titan_moe import config_file, doctor_bench, launch
from titan_moe.config import Config
from titan_moe.config_file import ConfigError
from titan_moe.doctor_checks import Check, Examined, Finding, checks

MEETING_SECONDS = 60
"""How long nodes wait for each other, which SLURM need not start at once"""

PATIENCE = 4
"""Times the limit of a check until a process that hangs ends itself: later than anybody waits for it"""

CRASHED = 70
"""Exit status of a rank that failed in a way that no check expects; its traceback is on stderr"""


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
                show(Finding("wrong", "ranks", f"rank {rank} (process {failure.pid}): {_ended(failure.exitcode)}"))
    except (dist.DistError, RendezvousError):
        text = f"the {nodes} nodes have not all come to {endpoint} within {MEETING_SECONDS} s; is it the same on all?"
        show(Finding("wrong", "ranks", text))
    return 1


def _ended(status: int) -> str:
    if status == -signal.SIGALRM:
        return "hung, and ended itself"
    if status < 0:
        name = signal.Signals(-status).name
        return f"was ended by {name}" + ("; see dmesg: out of memory?" if status == -signal.SIGKILL else "")
    return f"failed with exit status {status}; its traceback is above"


def work(config: Config, asked: bool) -> int:
    """What each rank does; returns the exit status, the same on all ranks."""
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        at = Examined(config, asked, device, store, rank, world_size, per_node)
        bad = [run(check, at) for check in checks(device, world_size // per_node, per_node)]
        return int(any(bad))
    except Exception:
        traceback.print_exc()
        _leave(CRASHED)


def run(check: Check, at: Examined) -> bool:
    """One check on this rank; returns whether anything is slow or wrong, which all ranks hear from rank 0. Ends the
    process when it makes no sense to go on."""
    limit = check.patience * doctor_bench.LIMIT_SECONDS
    signal.alarm(int(PATIENCE * limit))  # a rank that hangs, on a node where no other can end it, ends itself
    try:
        answer = {"value": check.measure(at)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    at.store.set(f"{check.name}/{at.rank}", json.dumps(answer))
    if at.rank == 0:
        answers = _gather(check, at, limit)
        missing = [rank for rank in range(at.world_size) if rank not in answers]
        findings = _conclude(check, at, answers, missing, limit)
        for finding in findings:
            show(finding)
        broken = check.together and any("error" in answer for answer in answers.values())
        verdict = {"bad": any(finding.state in ("slow", "wrong") for finding in findings)}
        verdict["stop"] = bool(missing) or broken or (not at.places)
        at.store.set(f"{check.name}/verdict", json.dumps(verdict))
    else:
        try:
            at.store.wait([f"{check.name}/verdict"], timedelta(seconds=2 * limit))
        except dist.DistError:
            if at.rank == 1:
                show(Finding("wrong", check.name, f"{at.name(0)}: no answer within {2 * limit:.0f} s: hangs, or died"))
            _leave(1)
        verdict = json.loads(at.store.get(f"{check.name}/verdict"))
    if verdict["stop"]:
        _leave(1)
    return verdict["bad"]


def _gather(check: Check, at: Examined, limit: float) -> dict[int, dict[str, Any]]:
    """The answers that come within `limit` seconds, by rank."""
    keys = {rank: f"{check.name}/{rank}" for rank in range(at.world_size)}
    deadline = time.monotonic() + limit
    while not at.store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {rank: json.loads(at.store.get(key)) for rank, key in keys.items() if at.store.check([key])}


def _conclude(
    check: Check, at: Examined, answers: dict[int, dict[str, Any]], missing: list[int], limit: float
) -> list[Finding]:
    """What the check found; if not every rank measured something, only who did not."""
    silent = [
        Finding("wrong", check.name, f"{at.name(rank)}: no answer within {limit:.0f} s: hangs, or died")
        for rank in missing
    ]
    failed = [
        Finding("wrong", check.name, f"{at.name(rank)}: {answer['error']}")
        for rank, answer in answers.items()
        if "error" in answer
    ]
    if silent and check.together:  # the others only waited for them
        return silent
    if silent or failed:
        return silent + failed
    return check.judge(at, {rank: answer["value"] for rank, answer in answers.items()})


def show(finding: Finding) -> None:
    print(f"{finding.state:6}{finding.check:20}{finding.text}", flush=True)


def _leave(status: int) -> NoReturn:
    """End this process at once: collectives that never end must not hold it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
