"""The shell commands of README.md and docs/, cut out of the pages and run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(REPO)) for path in (REPO / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (REPO / page).read_text(encoding="utf-8")


def fenced(page: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return FENCE.findall(text_of(page))


def shell_blocks(page: str) -> list[str]:
    return [block for language, block in fenced(page) if language in ("bash", "sh")]


def commands(block: str) -> list[list[str]]:
    """The words of each line, continued lines joined, comments and settings of variables in front left out."""
    lines = block.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines is no command of ours
            continue
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


def clone(folder: Path) -> Path:
    """What a clone of this working tree would hold."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPO / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    return folder


def bash(block: str, folder: Path, **variables: str) -> str:
    """What it prints. With this Python first on the path the scripts find all packages there and set up no .venv."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHON": sys.executable, **variables}
    env.pop("PYTHONPATH", None)  # of the copy, not of this repository
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr
