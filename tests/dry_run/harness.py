"""Starts the worker and reads what it left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]


def dry_runs(cases: dict[str, tuple[int, int, list[str]]], out: Path) -> dict[str, dict[str, Any]]:
    """What the dry run of each case, (ranks, rank, arguments of train.py), held and sent."""
    (out / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.dry_run.worker", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-6000:]
    return {name: json.loads((out / f"{name}.json").read_text()) for name in cases}
