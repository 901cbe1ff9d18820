"""The Dockerfile and .dockerignore, without an engine to build images with: what a linter would say, that what is
copied is there, and that the versions named fit those of pyproject.toml and scripts/setup_env.py. The set-up step
itself runs as the image runs it, with stand-ins for pip and venv."""

import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.test_setup import REPO, Sandbox, setup_env

INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "RUN", "SHELL", "USER", "WORKDIR"}
HOSTS = {"download.pytorch.org"}
PYTHONS = {"ubuntu24.04": "3.12"}  # as python3 of the distribution


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) in order, with continued lines joined and comments left out."""
    lines = [line for line in (REPO / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Name -> instructions of a stage, FROM among them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            match = re.fullmatch(r"\S+:\S+ AS (\w+)", rest)
            assert match, (
                f"FROM {rest}: without a tag it is another image tomorrow, without a name nobody can ask for it"
            )
            found[match[1]] = []
        list(found.values())[-1].append((name, rest))
    return found


def of(stage: str, name: str) -> list[str]:
    return [rest for instruction, rest in stages()[stage] if instruction == name]


def environment(stage: str) -> dict[str, str]:
    pairs = [word.partition("=") for rest in of(stage, "ENV") for word in shlex.split(rest)]
    assert all(equals for _, equals, _ in pairs)
    return {name: value for name, _, value in pairs}


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves `path` out, or a folder that it lies in. As Docker: patterns are of whole paths."""
    patterns = [line for line in (REPO / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        start = "/".join(parts[:depth])
        for pattern in patterns:
            anywhere = pattern.removeprefix("**/")
            if fnmatch(start, pattern) if anywhere == pattern else fnmatch(parts[depth - 1], anywhere):
                return True
    return False


def test_instructions_are_dockers():
    assert list(stages()) == ["cpu", "gpu"], "the last one is built when no target is named"
    for name, rest in instructions():
        assert name in INSTRUCTIONS and rest, f"{name} {rest}"
    for stage in stages():
        assert stages()[stage][0][0] == "FROM"
        assert [Path(folder).is_absolute() for folder in of(stage, "WORKDIR")] == [True]
        assert len(of(stage, "CMD")) == 1, "of several the last one alone counts"
    urls = re.findall(r"https?://([^/\s]+)", (REPO / "Dockerfile").read_text())
    assert set(urls) <= HOSTS, "all the world can build it, without a password"


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_commands_are_shells(stage):
    for command in of(stage, "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
        if "apt-get" in command:
            update, install, clean = (shlex.split(part) for part in command.split("&&"))
            assert update == ["apt-get", "update"], "in the same layer, or the list is an old one"
            assert install[:4] == ["apt-get", "install", "--yes", "--no-install-recommends"]
            assert install[4:] == sorted(set(install[4:]))
            assert clean == ["rm", "-rf", "/var/lib/apt/lists/*"]
    argv = re.findall(r'"([^"]*)"', of(stage, "CMD")[0])
    assert all((REPO / word).exists() for word in argv), argv


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_what_is_copied_is_there(stage):
    copied = []
    for rest in of(stage, "COPY"):
        *sources, target = rest.split()
        assert len(sources) == 1 or target.endswith("/"), "several files go to a folder"
        for source in sources:
            assert (REPO / source).exists() and not ignored(source), source
        copied += sources
    # Layers of the set-up are kept until what it reads has changed, so all else is copied after it.
    names = [name if "setup_env" in rest or rest == ". ." else "" for name, rest in stages()[stage]]
    assert [name for name in names if name] == ["COPY", "RUN", "COPY"]
    assert set(copied[:-1]) == {"pyproject.toml", "LICENSE", "scripts/setup_env.py"}


def test_images_hold_all_of_the_code_and_nothing_else():
    files = subprocess.run(["git", "ls-files"], cwd=REPO, check=True, capture_output=True, text=True).stdout.split("\n")
    assert [path for path in files if path and ignored(path)] == []
    for path in (".git/config", ".venv/bin/python", "outputs/run/metrics.jsonl", "titan_moe/moe/__pycache__/a.pyc"):
        assert ignored(path), path
    for pattern in (REPO / ".gitignore").read_text().split("\n"):
        if pattern and pattern[0] != "#":
            example = pattern.strip("/").replace("*", "a").replace("[cod]", "c")
            assert ignored(example), f"git ignores {example}, an image would hold it"


def test_versions_fit_the_set_ups():
    project = setup_env.tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    image = of("cpu", "FROM")[0]
    assert setup_env.satisfies(re.match(r"python:([\d.]+)", image)[1], project["requires-python"])

    image = of("gpu", "FROM")[0]
    version, system = re.match(r"nvidia/cuda:([\d.]+)-base-(\S+) ", image).groups()
    packages = " ".join(setup_env.TE_PACKAGES + setup_env.TE_RUNTIME)
    assert set(re.findall(r"-cu(\d+)", packages)) == {version.split(".")[0]}
    python = PYTHONS[system]
    assert setup_env.satisfies(python, project["requires-python"])
    root = of("gpu", "WORKDIR")[0]
    nvidia = f"{root}/.venv/lib/python{python}/site-packages/nvidia"
    # Those of scripts/cluster_env.sh, which looks for them beside itself.
    names = re.findall(r"export (NCCL_EP\w+)=\S+-\$_nvidia(\S+)}", (REPO / "scripts" / "cluster_env.sh").read_text())
    assert len(names) == 3
    assert environment("gpu") == {
        "PIP_NO_CACHE_DIR": "1",
        "PYTHON": f"{root}/.venv/bin/python",
        **{name: nvidia + path for name, path in names},
    }
    # A second place for a version would be forgotten at the next one.
    assert not re.findall(r"[=~<>]=\s*\d", (REPO / "Dockerfile").read_text())
    page = (REPO / "docs" / "cluster.md").read_text()
    named = dict(re.findall(r"(NCCL|cuBLAS) (\d[\d.]*\d)", page[page.index("## Container") :]))
    assert {f"nvidia-nccl-cu13=={named['NCCL']}", f"nvidia-cublas=={named['cuBLAS']}"} == set(setup_env.TE_RUNTIME)


def set_up(stage: str, sandbox: Sandbox, **env: str) -> subprocess.CompletedProcess[str]:
    """The stage's set-up step, in a folder that holds what has been copied before it."""
    (command,) = [rest for rest in of(stage, "RUN") if "setup_env.py" in rest]
    sandbox.bin.joinpath("python3").symlink_to(sys.executable)
    own = {"TITAN_MOE_TE": "", "PIP_NO_CACHE_DIR": "1", "MAX_JOBS": "", **env}
    return subprocess.run(
        ["sh", "-ec", command], cwd=sandbox.root, env={**sandbox.env, **own}, capture_output=True, text=True, timeout=60
    )


def test_the_cpu_image_sets_up_what_tests_need(tmp_path):
    sandbox = Sandbox(tmp_path)
    done = set_up("cpu", sandbox)
    assert (done.returncode, done.stdout) == (0, f"{sandbox.python}\n"), done.stderr
    assert [call.split()[:3] for call in sandbox.pip_calls()] == [
        ["install", "-e", ".[dev]"],
        ["download", "--no-deps", f"transformer-engine=={setup_env.TE_VERSION}"],
    ]


def test_the_gpu_image_has_transformer_engine_or_is_none(tmp_path):
    sandbox = Sandbox(tmp_path / "built")
    assert set_up("gpu", sandbox).returncode == 0
    assert len(sandbox.pip_calls()) == 4, "the packages, TE, its extension, and its NCCL and cuBLAS"
    sandbox = Sandbox(tmp_path / "failed")
    failed = set_up("gpu", sandbox, PIP_FAILS_ON=setup_env.TE_PACKAGES[1])
    assert failed.returncode != 0 and "failed, see above" in failed.stderr
