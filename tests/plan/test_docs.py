"""README.md and docs/planner.md show what the planner says now."""

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


def test_readme_and_page_have_every_block_they_should():
    readme, page = ((REPO / name).read_text() for name in ("README.md", "docs/planner.md"))
    in_readme, on_page = ("configurations", "short report", "headline"), ("command", "report", "validation", "memory")
    for text, names in ((readme, in_readme), (page, on_page)):
        for name in names:
            block = text.split(f"<!-- planner: {name} -->")[1].split("<!-- end -->")[0]
            assert block.strip(), name
