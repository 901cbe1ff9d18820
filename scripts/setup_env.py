#!/usr/bin/env python3
"""Print the path of a Python that can run TitanMoE, made first if need be: `python3 scripts/setup_env.py [--dev]`.

The Python that runs this script is used as it is when it has what pyproject.toml asks for (a container). Otherwise
.venv in the repository is made, or completed; with a GPU it gets Transformer Engine (TE) too. With --dev, TE's Python
sources are fetched for the tests, 1 MB that nothing imports. The path is the only line on stdout. Several nodes of a
shared file system may start at once: one installs, the others wait for it.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - and no syntax in this file that Python 3.6 would not get past
    sys.exit(
        "TitanMoE needs Python 3.11 or newer, as torchtitan does; %s is %d.%d. Install a newer one, or name one that "
        "you have: PYTHON=python3.12 ./run_train.sh ..." % (sys.executable, sys.version_info[0], sys.version_info[1])
    )

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MARKER = VENV / ".titan_moe_ready"  # written last: a .venv without it was left half made
TE_MARKER = VENV / ".titan_moe_te"  # how the Transformer Engine build ended, so that it is tried once

TE_VERSION = "2.20.2"
TE_PACKAGES = [f"transformer-engine[core-cu13]=={TE_VERSION}", f"transformer-engine-torch=={TE_VERSION}"]
# TE's expert parallelism refuses an NCCL older than the one it was built with and is unproven on a newer one; its
# sync-free grouped GEMM needs cuBLAS 13.6 in FP8. torch pins older ones exactly, and runs with these.
TE_RUNTIME = ["nvidia-nccl-cu13==2.32.3", "nvidia-cublas==13.10.0.20"]
TE = " ".join(TE_PACKAGES + TE_RUNTIME)
TE_SOURCES = VENV / "wheels" / f"transformer_engine-{TE_VERSION}-py3-none-any.whl"  # its Python; tests read signatures


def say(text: str) -> None:
    print("[setup]", text, file=sys.stderr, flush=True)


def unmet(dev: bool) -> list[str]:
    """What this Python lacks, and what it has instead. From package metadata: importing torch takes seconds."""
    project, problems = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], []
    for requirement in project["dependencies"] + (project["optional-dependencies"]["dev"] if dev else []):
        text, _, marker = requirement.partition(";")
        if marker and sys.platform not in marker:  # the one kind of marker in our file: sys_platform == '...'
            continue
        match = re.fullmatch(r"([\w.-]+)\s*(.*?)\s*", text)
        assert match, f"{requirement!r} in pyproject.toml is more than this script understands"
        version = next((found.version for found in metadata.distributions(name=match[1])), None)
        if not version or not satisfies(version, match[2]):
            problems.append(f"{requirement} ({version or 'not installed'})")
    return problems


def satisfies(version: str, specifiers: str) -> bool:
    """Whether "2.14.1+cu130" satisfies ">=2.14.1,<2.15": a local version counts as the release it was made from."""

    def release(text: str) -> tuple[int, ...]:
        return (*map(int, re.findall(r"\d+", re.sub(r"[^\d.].*", "", text))), 0, 0, 0, 0, 0)[:6]

    public = version.partition("+")[0]
    have = release(public), not re.search(r"\d[._-]?(a|b|c|rc|alpha|beta|pre|dev)", public)  # a pre-release is lower
    for specifier in filter(None, specifiers.split(",")):
        match = re.fullmatch(r"\s*(==|>=|<|~=)\s*(\d+(?:\.\d+)*)\s*", specifier)
        assert match, f"{specifier!r} in pyproject.toml is more than this script understands"
        wanted, prefix = (release(match[2]), True), match[2].count(".")
        holds = {
            "==": have == wanted,
            ">=": have >= wanted,
            "<": have[0] < wanted[0],  # a pre-release of 2.15 is no "<2.15"
            "~=": have >= wanted and have[0][:prefix] == wanted[0][:prefix],
        }
        if not holds[match[1]]:
            return False
    return True


def venv_version() -> str:
    """The version of .venv's Python, e.g. "3.11"; empty when there is none or it does not run."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([PYTHON, "-S", "-c", program], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def fingerprint(dev: bool, version: str) -> str:
    """What .venv was made for: this pyproject.toml, with or without the dev extra, and its own Python."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + f"{dev} {version}".encode()).hexdigest()


def ready(dev: bool) -> bool:
    version = venv_version()  # one made with the dev extra serves without it too
    return MARKER.exists() and MARKER.read_text() in {fingerprint(dev, version), fingerprint(True, version)}


def lock() -> IO[str]:
    """Waits for and takes the lock on .venv, which lasts until this process and the commands it ran have ended."""
    # flock, not lockf: the commands inherit it, so while the pip of a killed run still works on .venv no other starts.
    # On NFS, Linux makes it a byte-range lock, which holds between nodes.
    file = open(ROOT / ".venv.lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another process is setting up .venv; waiting for it")
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def run(argv: list[str], held: IO[str], **env: str) -> int:
    options = {"cwd": ROOT, "env": {**os.environ, **env}, "pass_fds": [held.fileno()]}
    return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=2, **options).returncode


def install(dev: bool, missing: list[str], held: IO[str]) -> None:
    say(f"{sys.executable} lacks {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
    say(f"setting up {VENV}, once: about 3 GB to download and 6 GB to write")
    MARKER.unlink(missing_ok=True)
    TE_MARKER.unlink(missing_ok=True)  # pip puts back the libraries that torch pins
    base, python = getattr(sys, "_base_executable", sys.executable), str(PYTHON)
    if not venv_version() and run([base, "-m", "venv", "--clear", str(VENV)], held):
        sys.exit(f"[setup] {base} could not make {VENV}, see above; Debian and Ubuntu need the package python3-venv")
    # A package's RECORD is written last: without it pip was stopped half-way, but would count the package as installed.
    for package in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (package / "RECORD").exists():
            shutil.rmtree(package)
    if run([python, "-c", "import pip"], held) and run([python, "-m", "ensurepip"], held):
        sys.exit(f"[setup] {VENV} has no pip, see above; remove that folder and run this again")
    if run([python, "-m", "pip", "install", "-e", ".[dev]" if dev else "."], held):
        free = shutil.disk_usage(ROOT).free / 1e9
        sys.exit(f"[setup] pip failed, see above; {free:.1f} GB of disk are free. Run this again to go on from here.")
    MARKER.write_text(fingerprint(dev, venv_version()))


def te_commands(python: str) -> list[tuple[dict[str, str], list[str]]]:
    """(environment, command) in order: TE and its build tools, its torch extension from source, its NCCL and cuBLAS.

    Headers and nvcc are those of the CUDA packages that torch itself uses, whatever toolkit the machine has. NCCL and
    cuBLAS come last and without dependencies because every other install brings back the ones that torch pins.
    """
    prefix = Path(python).parent.parent
    site_packages = next(prefix.glob("lib/python*/site-packages"), prefix / "lib")
    build = {
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # look for no binary, which would be for another torch
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "CUDA_HOME": str(site_packages / "nvidia" / "cu13"),
        "MAX_JOBS": os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, 16)),  # about 2 GB of memory each
        "PATH": f"{prefix / 'bin'}:{os.environ.get('PATH', os.defpath)}",  # ninja
    }
    pip = [python, "-m", "pip", "install"]
    tools = ["setuptools", "wheel", "packaging", "ninja", "cuda-toolkit[nvcc,cccl]", "nvidia-cudnn-frontend>=1.32.0"]
    return [
        ({}, [*pip, TE_PACKAGES[0], *tools]),
        # No cache: pip would take an extension that it once built against another torch.
        (build, [*pip, "--no-build-isolation", "--no-cache-dir", TE_PACKAGES[1]]),
        ({}, [*pip, "--no-deps", *TE_RUNTIME]),
        ({}, [python, "-c", "import torch, transformer_engine.pytorch"]),
    ]


def te_wanted() -> bool:
    """Whether to build TE now: there is a GPU and these versions were not tried yet. TITAN_MOE_TE=0: never; 1: without
    a GPU too, for the tests marked te."""
    outcome = TE_MARKER.read_text() if TE_MARKER.exists() else ""
    if outcome == f"failed {TE}":
        say(f"without Transformer Engine, whose build failed: portable backends. To try again remove {TE_MARKER}")
    asked = os.environ.get("TITAN_MOE_TE")
    if outcome in (f"failed {TE}", f"built {TE}") or asked == "0":
        return False
    if asked == "1":
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and "GPU " in subprocess.run([smi, "-L"], capture_output=True, text=True).stdout


def build_te(held: IO[str]) -> None:
    say("building Transformer Engine in .venv, once: some 20 minutes on two cores (TITAN_MOE_TE=0 does without it)")
    for env, argv in te_commands(str(PYTHON)):
        if run(argv, held, **env):
            say(f"`{' '.join(argv)}` failed, see above: training goes on without TE, with the portable backends")
            TE_MARKER.write_text(f"failed {TE}")
            return
    TE_MARKER.write_text(f"built {TE}")


def fetch_te_sources(python: str, held: IO[str]) -> None:
    argv = [python, "-m", "pip", "download", "--no-deps", f"transformer-engine=={TE_VERSION}"]
    if run([*argv, "--dest", str(TE_SOURCES.parent)], held):
        say(f"`{' '.join(argv)}` failed, see above: without {TE_SOURCES.name} the tests of TE's signatures fail")


def main(argv: list[str]) -> None:
    dev = argv == ["--dev"]
    if argv and not dev:
        sys.exit("[setup] usage: setup_env.py [--dev]")
    missing = unmet(dev)
    python = str(PYTHON) if missing else sys.executable
    if (dev and not TE_SOURCES.exists()) or (missing and (not ready(dev) or te_wanted())):
        held = lock()
        if missing and not ready(dev):
            install(dev, missing, held)
        if missing and te_wanted():
            build_te(held)
        if dev and not TE_SOURCES.exists():
            fetch_te_sources(python, held)
    print(python)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (KeyboardInterrupt, OSError) as error:
        sys.exit(f"[setup] {VENV} is not ready: {error or 'interrupted'}. Run this again to go on from here.")
