"""The research edits of docs/research.md, applied to copies of train.py."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.distributed.harness import REPO


def research_edits() -> dict[str, str]:
    """{name of the edit: its diff} for every ```diff block of docs/research.md; the name is in its first line, `#
    name`."""
    page = (REPO / "docs" / "research.md").read_text()
    blocks = re.findall(r"```diff\n# (\w+)\n(.*?)```", page, flags=re.DOTALL)
    return dict(blocks)


def edited_copies(folder: Path) -> dict[str, Path]:
    """{name: train.py with that edit alone applied}."""
    copies = {}
    for name, diff in research_edits().items():
        copy = folder / name / "train.py"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((REPO / "train.py").read_text())
        command = ["git", "apply", "-"]
        applied = subprocess.run(command, cwd=copy.parent, input=diff, text=True, capture_output=True, check=False)
        assert applied.returncode == 0, f"docs/research.md: edit {name} does not apply: {applied.stderr}"
        copies[name] = copy
    return copies


SLOWER = 0.05
"""Seconds that rank 1 sleeps in each forward of a layer's experts, in `slow_copy`"""


def slow_copy(folder: Path) -> Path:
    """train.py with a rank whose experts are slow."""
    text, built = (REPO / "train.py").read_text(), "    run = build(config)\n"
    assert text.count(built) == 1
    copy = folder / "train.py"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(
        text.replace(built, f"{built}    from tests.distributed.edits import slow_experts\n\n    slow_experts(run)\n")
    )
    return copy


def slow_experts(run: Any) -> None:
    from titan_moe.moe.layer import moe_layers  # no other edit needs torch

    def slowed(forward):
        def slow(*args):
            time.sleep(SLOWER)
            return forward(*args)

        return slow

    if run.telemetry.profiling.rank == 1:
        for moe in moe_layers(run.model_parts[0]).values():
            experts = moe.routed_experts.inner_experts
            experts.forward = slowed(experts.forward)
