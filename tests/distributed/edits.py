"""README's research edits, applied to copies of train.py."""

import re
import subprocess
from pathlib import Path

from tests.distributed.harness import REPO


def readme_edits() -> dict[str, str]:
    """{name of the edit: its diff} for every ```diff block of README; the name is in the diff's first line, `#
    name`."""
    readme = (REPO / "README.md").read_text()
    blocks = re.findall(r"```diff\n# (\w+)\n(.*?)```", readme, flags=re.DOTALL)
    return dict(blocks)


def edited_copies(folder: Path) -> dict[str, Path]:
    """{name: train.py with that edit alone applied}."""
    copies = {}
    for name, diff in readme_edits().items():
        copy = folder / name / "train.py"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((REPO / "train.py").read_text())
        command = ["git", "apply", "-"]
        applied = subprocess.run(command, cwd=copy.parent, input=diff, text=True, capture_output=True, check=False)
        assert applied.returncode == 0, f"README's edit {name} does not apply: {applied.stderr}"
        copies[name] = copy
    return copies
