"""What every rank of the doctor does: check after check, with its answer to rank 0 and the verdict back.

Answers go through the store that torchrun's agents keep, not through a process group: so a rank that hangs or has died
is the one whose answer is missing, and what was measured before it is on the screen already.
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titan_moe.config import Config
from titan_moe.doctor import bench
from titan_moe.doctor.checks import checks
from titan_moe.doctor.contract import Check, Examined, Finding

PATIENCE = 4
"""Times the limit of a check until a process that hangs ends itself: later than anybody waits for it"""

CRASHED = 70
"""Exit status of a rank that failed in a way that no check expects; its traceback is on stderr"""


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
    limit = check.patience * bench.LIMIT_SECONDS
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
            finding.show()
        broken = check.together and any("error" in answer for answer in answers.values())
        verdict = {"bad": any(finding.state in ("slow", "wrong") for finding in findings)}
        verdict["stop"] = bool(missing) or broken or (not at.places)
        at.store.set(f"{check.name}/verdict", json.dumps(verdict))
    else:
        try:
            at.store.wait([f"{check.name}/verdict"], timedelta(seconds=2 * limit))
        except dist.DistError:
            if at.rank == 1:
                text = f"{at.name(0)}: no answer within {2 * limit:.0f} s: hangs, or died"
                Finding("wrong", check.name, text).show()
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


def _leave(status: int) -> NoReturn:
    """End this process at once: collectives that never end must not hold it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
