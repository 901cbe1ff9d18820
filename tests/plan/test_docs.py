"""README.md, docs/planner.md and docs/scaling.md show what the planner says now."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def planner_docs(*arguments: str):
    return subprocess.run(
        [sys.executable, "scripts/planner_docs.py", *arguments], cwd=REPO, capture_output=True, text=True, timeout=120
    )


def test_generated_parts_are_current():
    done = planner_docs("--check")
    assert done.returncode == 0, f"{done.stderr}\npython scripts/planner_docs.py brings them up to date"


def test_pages_have_every_block_they_should():
    held = {
        "README.md": ("configurations", "short report", "headline"),
        "docs/planner.md": ("command", "report", "validation", "memory"),
        "docs/scaling.md": ("scaling", "four times", "published four times"),
    }
    for page, names in held.items():
        for name in names:
            block = (REPO / page).read_text().split(f"<!-- planner: {name} -->")[1].split("<!-- end -->")[0]
            assert block.strip(), name
