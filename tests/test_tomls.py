"""Every TOML that users see, shipped or in the docs, is read and resolved; and that takes no time."""

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import config_table
from titan_moe import config_file, launch
from titan_moe.config_file import check, read

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "train_configs").rglob("*.toml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [
    pytest.param(text, id=f"{page.name}-{i}")
    for page in PAGES
    for i, text in enumerate(
        re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )
]
WORLDS = [2**n for n in range(14)]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place beside the shipped files, so that a snippet may be based on one."""
    shutil.copytree(ROOT / "train_configs", tmp_path / "train_configs")
    monkeypatch.chdir(tmp_path)
    return Path("train_configs") / "short.toml"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_sound_and_nobody_has_to_be_told_anything(path: Path) -> None:
    loaded = read([str(path)])
    assert (loaded.problems, loaded.notes) == ([], [])
    if loaded.config.plan.gpus is not None:
        assert check(loaded.config, loaded.config.plan.gpus, accelerator=True) == []
    else:
        assert any(check(loaded.config, world) == [] for world in WORLDS), check(loaded.config, 1)


def test_shipped_layouts_fit_their_hardware_with_a_margin_and_their_headers_are_current() -> None:
    """A tenth is left for routing that is uneven. te_ep takes at most 8,192 tokens of a rank and microbatch, and TE
    whole multiples of 4 experts: switching to them is no new layout."""
    plans = config_table.planned()
    assert {path.name for path in plans} == {path.name for path in SHIPPED} - {"debug_model.toml"}
    for path, plan in plans.items():
        job, memory = plan.job, plan.memory
        assert memory.needed < 0.9 * memory.capacity, path
        assert config_table.line(plan) in path.read_text(), f"{path}: python -m scripts.config_table"
        if job.ep > 1:
            assert job.ep <= job.hardware.nvlink_domain or config_file.load([str(path)]).moe.ranks_per_node, path
            if job.model.attention == "mla":
                assert job.tokens <= 8192 and job.model.num_experts // job.ep % 4 == 0, path


def test_no_shipped_file_is_elsewhere() -> None:
    files = subprocess.run(["git", "ls-files", "*.toml"], cwd=ROOT, capture_output=True, text=True, check=True)
    others = [name for name in files.stdout.split() if ROOT / name not in SHIPPED and not name.startswith("tests/")]
    assert others == ["pyproject.toml", "titan_moe/plan/constants.toml"], "none of these configures a run"


@pytest.mark.parametrize("text", SNIPPETS)
def test_snippets_are_sound(beside: Path, text: str) -> None:
    beside.write_text(text, encoding="utf-8")
    loaded = read([str(beside)])
    assert (loaded.problems, loaded.notes) == ([], [])
    assert any(check(loaded.config, world) == [] for world in WORLDS), check(loaded.config, 1)


def test_the_mistakes_that_the_page_shows(beside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    snippet, words, shown = re.findall(
        r"```toml\n(base = .*?)```.*?\n`train_configs/short.toml`, with `(.*?)` gives\n\n```text\n(.*?)```",
        page,
        re.DOTALL,
    )[0]
    beside.write_text(snippet)
    assert launch.main([str(beside), *words.split()], {}) == 2
    assert capsys.readouterr().err == shown


def test_reading_and_checking_takes_less_than_half_a_second() -> None:
    """In a process of its own, with Python's start and all imports; processor time, as others may use this machine."""
    code = "from titan_moe.config_file import check, read; check(read(['train_configs/debug_model.toml']).config, 8)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
