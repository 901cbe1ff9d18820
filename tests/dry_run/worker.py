"""Dry runs, one after the other: `python -m tests.dry_run.worker OUT`. Forks for each, as tests/distributed/worker.py
does, because a dry run has its process to itself.

OUT/cases.json maps a name to [ranks, rank, arguments of train.py]; OUT/<name>.json gets what was held and sent, and the
planner's figures, in bytes, and the report.
"""

from titan_moe.dry_run import build  # isort: skip - first: it decides what titan_moe.runtime sees

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from titan_moe import config_file
from titan_moe.dry_run import report
from titan_moe.dry_run.ledger import KINDS


def dry_run(world_size: int, rank: int, arguments: list[str]) -> dict[str, Any]:
    config = config_file.load(arguments)
    config_file.raise_on_problems(config, world_size, accelerator=True)
    run = build.dry_run(config, world_size, rank)
    return {
        "most": {kind: run.ledger.most(kind) for kind in KINDS},
        "peak": run.ledger.at_peak(),
        "planned": report.planned_states(run.job, run.place.get("pp", 0)),
        "collectives": [[*kind, *total] for kind, total in run.collectives.counts.items()],
        "place": run.place,
        "microbatches": run.microbatches,
        "report": report.to_text(run),
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name, case in json.loads((out / "cases.json").read_text()).items():
        child = os.fork()
        if child == 0:
            try:
                (out / f"{name}.json").write_text(json.dumps(dry_run(*case)))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            sys.exit(f"case {name} failed")
