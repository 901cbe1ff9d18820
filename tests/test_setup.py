"""scripts/setup_env.py with stand-ins for pip and venv, run_train.sh with one for Python: nothing is installed, and no
torch starts."""

import ast
import importlib.util
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
SETUP = REPO / "scripts" / "setup_env.py"

spec = importlib.util.spec_from_file_location("setup_env", SETUP)
setup_env = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup_env)


@pytest.mark.parametrize(
    ("version", "specifiers", "expected"),
    [
        ("2.14.1", ">=2.14.1,<2.15", True),
        ("2.14.1+cu130", ">=2.14.1,<2.15", True),
        ("2.14.1+cu130", "==2.14.1", True),
        ("2.14.10", ">=2.14.9, <2.15", True),
        ("2.14.0", ">=2.14.1,<2.15", False),
        ("2.15.0", ">=2.14.1,<2.15", False),
        ("2.15.0.dev20261101+cu130", ">=2.14.1,<2.15", False),
        ("2.14.1rc2", ">=2.14.1", False),
        ("2.14.2a0+git1234", ">=2.14.1,<2.15", True),
        ("0.3", "==0.3.0", True),
        ("0.3.0.dev1", "==0.3.0", False),
        ("0.3.1", "==0.3.0", False),
        ("0.17.9", "~=0.17.5", True),
        ("0.17.4", "~=0.17.5", False),
        ("0.18.0", "~=0.17.5", False),
        ("9.0", "~=8.1", False),
        ("8.4.2", "~=8.1", True),
        ("2026.10.19.post1", ">=2026.1", True),
        ("1", "", True),
    ],
)
def test_version_check(version, specifiers, expected):
    assert setup_env.satisfies(version, specifiers) is expected


def test_our_own_requirements_are_understood_and_met():
    assert setup_env.unmet(dev=False) == []
    setup_env.unmet(dev=True)  # understood; a container need not have ruff and the like


def test_an_old_python_is_told_what_to_do(monkeypatch):
    ast.parse(SETUP.read_text(), feature_version=(3, 6))  # it gets as far as the check
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit, match=r"3\.11 or newer.* is 3\.9\. .*PYTHON=python3\.12 \./run_train\.sh"):
        runpy.run_path(str(SETUP), run_name="__main__")


PYPROJECT = """
[project]
dependencies = ["pytest>=1,<9999", "no-such-package==1.0; sys_platform == 'plan9'", {more}]
[project.optional-dependencies]
dev = ["no-such-dev-package"]
"""

FAKE_PIP = """
import os, sys, time
def log(event):
    with open(os.environ["LOG"], "a") as file:
        print(event, *sys.argv[1:], file=file, flush=True)
log("start")
time.sleep(float(os.environ.get("PIP_SECONDS", "0")))
log("end")
if os.environ.get("PIP_FAILS_ON", "nothing") in sys.argv:
    sys.exit(1)
if sys.argv[1] == "download":
    name, version = sys.argv[-3].split("==")
    os.makedirs(sys.argv[-1], exist_ok=True)
    open(f"{sys.argv[-1]}/{name.replace('-', '_')}-{version}-py3-none-any.whl", "w").close()
"""

FAKE_VENV = """
import os, shutil, sys
with open(os.environ["LOG"], "a") as file:
    print("venv", *sys.argv[1:-1], file=file)
if "--clear" in sys.argv:
    shutil.rmtree(sys.argv[-1], ignore_errors=True)
python = sys.argv[-1] + "/bin/python"
os.makedirs(os.path.dirname(python), exist_ok=True)
os.symlink(sys.executable, python)
"""


DOWNLOAD = "download --no-deps transformer-engine==2.20.2 --dest {}/wheels"


class Sandbox:
    """A repository of its own, whose pyproject.toml asks for a package that does not exist."""

    def __init__(self, folder: Path):
        self.root, modules, self.bin = folder / "a repository", folder / "modules", folder / "bin"
        for made in (self.root / "scripts", modules / "pip", modules / "transformer_engine", self.bin):
            made.mkdir(parents=True)
        shutil.copy(SETUP, self.root / "scripts")
        (modules / "pip" / "__init__.py").touch()
        (modules / "pip" / "__main__.py").write_text(FAKE_PIP)
        (modules / "venv.py").write_text(FAKE_VENV)
        for name in ("torch.py", "transformer_engine/__init__.py", "transformer_engine/pytorch.py"):
            (modules / name).touch()
        self.log = folder / "log"
        path = f"{self.bin}:{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "PYTHONPATH": str(modules), "LOG": str(self.log), "TITAN_MOE_TE": "0"}
        self.venv, self.python = self.root / ".venv", f"{self.root}/.venv/bin/python"
        self.needs("'no-such-package>=1'")

    def needs(self, more: str) -> None:
        (self.root / "pyproject.toml").write_text(PYPROJECT.format(more=more))

    def start(self, *args: str, **env: str) -> subprocess.Popen:
        command = [sys.executable, str(self.root / "scripts" / "setup_env.py"), *args]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env={**self.env, **env}, text=True, **pipes)

    def setup(self, *args: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def pip_calls(self) -> list[str]:
        """What pip was asked since the last call of this."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.removeprefix("start ") for line in lines if line.startswith("start ")]


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def test_a_python_that_has_everything_is_used_as_it_is(sandbox):
    sandbox.needs("'numpy'")
    status, out, err = sandbox.setup()
    assert (status, out, err) == (0, f"{sys.executable}\n", "")
    assert not sandbox.venv.exists()
    assert not sandbox.log.exists()


def test_the_venv_is_made_once_for_each_pyproject(sandbox):
    status, out, err = sandbox.setup()
    assert (status, out) == (0, f"{sandbox.python}\n")
    assert "lacks no-such-package>=1 (not installed)\n" in err
    assert "once: about 3 GB to download and 6 GB to write" in err
    assert sandbox.log.read_text().startswith("venv --clear\n")
    assert sandbox.pip_calls() == ["install -e ."]

    assert sandbox.setup() == (0, f"{sandbox.python}\n", "")  # ready
    assert sandbox.pip_calls() == []
    sandbox.setup("--dev")  # the extra is missing
    assert sandbox.pip_calls() == ["install -e .[dev]", DOWNLOAD.format(sandbox.venv)]
    sandbox.setup()  # a .venv with the extra serves without it too
    assert sandbox.pip_calls() == []
    sandbox.needs("'no-such-package>=2'")
    sandbox.setup()
    assert sandbox.pip_calls() == ["install -e ."]


def test_a_half_made_venv_is_completed(sandbox):
    status, out, err = sandbox.setup(PIP_FAILS_ON="-e")
    assert (status, out) == (1, "")
    assert "pip failed, see above;" in err
    assert "GB of disk are free. Run this again" in err
    assert len(sandbox.pip_calls()) == 1

    # pip counts a package as installed by its METADATA, but was stopped before it had copied all of it.
    packages = sandbox.venv / "lib" / "python3.11" / "site-packages"
    for name, files in {"half-1.0.dist-info": ["METADATA"], "whole-1.0.dist-info": ["METADATA", "RECORD"]}.items():
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).touch()
    assert sandbox.setup()[:2] == (0, f"{sandbox.python}\n")
    assert sandbox.pip_calls() == ["install -e ."]
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_a_venv_whose_python_is_gone_is_made_again(sandbox):
    sandbox.setup()
    sandbox.pip_calls()
    Path(sandbox.python).unlink()
    Path(sandbox.python).symlink_to("/no/such/python")
    assert sandbox.setup()[:2] == (0, f"{sandbox.python}\n")
    assert sandbox.log.read_text().startswith("venv --clear\n")
    assert sandbox.pip_calls() == ["install -e ."]


def test_two_at_once_install_once(sandbox):
    both = [sandbox.start(PIP_SECONDS="1") for _ in range(2)]
    outcomes = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [out for out, _ in outcomes] == [f"{sandbox.python}\n"] * 2
    assert sorted("waiting for it" in err for _, err in outcomes) == [False, True]
    assert sandbox.pip_calls() == ["install -e ."]


def test_a_killed_run_keeps_others_out_while_its_pip_works(sandbox):
    killed = sandbox.start(PIP_SECONDS="1")
    while not (sandbox.log.exists() and "start" in sandbox.log.read_text()):
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert sandbox.setup()[:2] == (0, f"{sandbox.python}\n")
    killed.communicate()
    events = [line.split()[0] for line in sandbox.log.read_text().splitlines() if not line.startswith("venv")]
    assert events == ["start", "end"] * 2  # never two pips on one .venv


def test_te_commands(tmp_path):
    commands = setup_env.te_commands(str(tmp_path / "bin" / "python"))
    core, extension, runtime, check = [argv for _, argv in commands]
    assert "transformer-engine[core-cu13]==2.20.2" in core
    assert "transformer-engine-torch==2.20.2" in extension
    assert {"--no-build-isolation", "--no-cache-dir"} < set(extension)
    # Last, and without dependencies: every other pip install would bring back what torch pins.
    assert runtime[-3:] == ["--no-deps", "nvidia-nccl-cu13==2.32.3", "nvidia-cublas==13.10.0.20"]
    assert check[-1] == "import torch, transformer_engine.pytorch"
    assert all(argv[0] == str(tmp_path / "bin" / "python") for _, argv in commands)
    env = commands[1][0]
    assert env["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"
    assert env["PATH"].split(":")[0] == str(tmp_path / "bin")
    assert int(env["MAX_JOBS"]) > 0


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_te_is_built_without_a_gpu_when_asked_for(sandbox):
    executable(sandbox.bin / "nvidia-smi", "#!/bin/sh\necho 'No devices found.'\n")
    assert sandbox.setup(TITAN_MOE_TE="")[0] == 0
    assert sandbox.pip_calls() == ["install -e ."]
    for _ in range(2):
        assert sandbox.setup(TITAN_MOE_TE="1")[:2] == (0, f"{sandbox.python}\n")
    assert len(sandbox.pip_calls()) == 3  # once


def test_te_is_built_once_with_a_gpu_and_never_required(sandbox):
    sandbox.setup()
    sandbox.pip_calls()

    executable(sandbox.bin / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'\n")
    assert sandbox.setup(TITAN_MOE_TE="0") == (0, f"{sandbox.python}\n", "")
    status, out, err = sandbox.setup(TITAN_MOE_TE="", PIP_FAILS_ON="transformer-engine-torch==2.20.2")
    assert (status, out) == (0, f"{sandbox.python}\n")
    assert "transformer-engine-torch==2.20.2` failed, see above: training goes on without TE" in err
    assert len(sandbox.pip_calls()) == 2

    status, out, err = sandbox.setup(TITAN_MOE_TE="")  # not tried again by itself
    assert (status, out) == (0, f"{sandbox.python}\n")
    assert "To try again remove" in err
    assert sandbox.pip_calls() == []

    (sandbox.venv / ".titan_moe_te").unlink()
    assert sandbox.setup(TITAN_MOE_TE="")[:2] == (0, f"{sandbox.python}\n")
    assert [" ".join(call.split()[-2:]) for call in sandbox.pip_calls()] == [
        "cuda-toolkit[nvcc,cccl] nvidia-cudnn-frontend>=1.32.0",
        "--no-cache-dir transformer-engine-torch==2.20.2",
        "nvidia-nccl-cu13==2.32.3 nvidia-cublas==13.10.0.20",
    ]
    assert sandbox.setup(TITAN_MOE_TE="") == (0, f"{sandbox.python}\n", "")

    sandbox.setup("--dev", TITAN_MOE_TE="")  # the install brings torch's NCCL back, so TE's follows again
    assert len(sandbox.pip_calls()) == 5  # and TE's sources, for the tests


def test_tes_sources_are_fetched_once_for_tests(sandbox):
    """Also beside a Python that has everything else; without the network other tests still run."""
    sandbox.needs("'numpy'")
    (sandbox.root / "pyproject.toml").write_text(
        PYPROJECT.format(more="'numpy'").replace("no-such-dev-package", "numpy")
    )
    status, out, err = sandbox.setup("--dev", PIP_FAILS_ON="download")
    assert (status, out) == (0, f"{sys.executable}\n")
    assert "-m pip download --no-deps transformer-engine==2.20.2` failed, see above: without transformer_eng" in err
    assert sandbox.setup("--dev") == (0, f"{sys.executable}\n", "")  # tried again
    assert sandbox.pip_calls() == [DOWNLOAD.format(sandbox.venv)] * 2
    assert sandbox.setup("--dev") == (0, f"{sys.executable}\n", "")
    assert sandbox.setup() == (0, f"{sys.executable}\n", "")
    assert sandbox.pip_calls() == []

    sandbox.needs("'no-such-package>=1'")  # a .venv that is made later starts empty
    sandbox.setup("--dev")
    assert [call.split()[0] for call in sandbox.pip_calls()] == ["install", "download"]


FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *setup_env.py) echo "$0" ;;
    "-m titan_moe.config_help"*) echo "help on ${*:3}" ;;
    "-m titan_moe.launch "*)
        printf '%s\\n' "NGPU=$NGPU NNODES=$NNODES" "${@:3}" >"$OUT/launch"
        [[ -z ${MISTAKE:-} ]] || { echo "$MISTAKE" >&2; exit 2; }
        printf '%s\\n' "${RUN_ID:-new-run}" "a run/folder" ;;
    *)
        printf '%s\\n' "$@" >"$OUT/torchrun"
        echo "pid=$$" >"$OUT/env"
        env >>"$OUT/env" ;;
esac
"""


@pytest.fixture
def launcher(tmp_path):
    """run_train.sh in a folder of its own, with its commands alone on PATH: (status, stderr, torchrun's argv, env)."""
    root, tools, cwd = tmp_path / "the repository", tmp_path / "bin", tmp_path / "else where"
    for folder in (root, tools, cwd):
        folder.mkdir()
    shutil.copy(REPO / "run_train.sh", root)
    for tool in ("bash", "dirname", "env", "grep", "sed", "tr"):
        (tools / tool).symlink_to(shutil.which(tool))
    executable(tools / "nproc", "#!/usr/bin/env bash\necho 8\n")
    executable(tools / "my python", FAKE_PYTHON)

    def launch(*args, gpus=0, **env):
        for left in ("launch", "torchrun", "env"):
            (tmp_path / left).unlink(missing_ok=True)
        if gpus:
            lines = "".join(f"GPU {i}: NVIDIA GB200 (UUID: GPU-{i})\n" for i in range(gpus))
            executable(tools / "nvidia-smi", f"#!/usr/bin/env bash\nprintf '{lines}'\n")
        env = {"PATH": str(tools), "PYTHON": str(tools / "my python"), "OUT": str(tmp_path), **env}
        process = subprocess.Popen(
            [str(root / "run_train.sh"), *args], cwd=cwd, env=env, text=True, stderr=subprocess.PIPE
        )
        _, stderr = process.communicate(timeout=60)
        if not (tmp_path / "torchrun").exists():
            return process.returncode, stderr, None, None
        seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
        assert seen["pid"] == str(process.pid)  # exec: signals reach what knows what to do with them
        return process.returncode, stderr, (tmp_path / "torchrun").read_text().splitlines(), seen

    launch.root, launch.out = root, tmp_path
    return launch


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_run_train_passes_configuration_and_overrides_on(launcher):
    overrides = ["--training.steps=5", '--training.dataset=my data/*.jsonl "quoted"']
    status, _, argv, env = launcher("my configs/a b.toml", *overrides)
    assert status == 0
    assert argv[:3] == ["-m", "titan_moe.supervise", "a run/folder"]
    assert argv[argv.index("3") + 1 :] == [f"{launcher.root}/train.py", "my configs/a b.toml", *overrides]
    assert (launcher.out / "launch").read_text().splitlines() == ["NGPU=1 NNODES=1", "my configs/a b.toml", *overrides]
    expected = {
        "--nnodes": "1",
        "--nproc_per_node": "1",
        "--max-restarts": "0",
        "--rdzv_backend": "c10d",
        "--rdzv_id": "new-run",
        "--rdzv_endpoint": "localhost:0",
        "--local-ranks-filter": "0",
        "--role": "rank",
        "--tee": "3",
    }
    assert {name: option(argv, name) for name in expected} == expected
    assert (env["RUN_ID"], env["PYTORCH_ALLOC_CONF"]) == ("new-run", "expandable_segments:True")
    assert env["PYTHONPATH"] == str(launcher.root)

    status, _, by_variable, _ = launcher(*overrides, CONFIG_FILE="my configs/a b.toml")
    assert (status, by_variable) == (0, argv)


def test_run_train_knobs(launcher):
    knobs = {
        "NGPU": "4",
        "LOG_RANK": "0,3",
        "RUN_ID": "r1",
        "MAX_RESTARTS": "2",
        "PYTORCH_ALLOC_CONF": "",
        "PYTHONPATH": "/x",
    }
    status, _, argv, env = launcher("a.toml", NNODES="2", MASTER_ADDR="node-1", **knobs)
    assert status == 0
    assert [option(argv, name) for name in ("--nnodes", "--nproc_per_node", "--rdzv_id")] == ["2", "4", "r1"]
    assert [option(argv, name) for name in ("--local-ranks-filter", "--max-restarts")] == ["0,3", "2"]
    assert option(argv, "--rdzv_endpoint") == "node-1:29500"
    assert (launcher.out / "launch").read_text().startswith("NGPU=4 NNODES=2\n")
    assert (env["PYTORCH_ALLOC_CONF"], env["PYTHONPATH"]) == ("", f"{launcher.root}:/x")
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # each attempt has a store of its own

    _, _, argv, _ = launcher("a.toml", NNODES="2", MASTER_ADDR="node-1", MASTER_PORT="1234", RUN_ID="r1")
    assert option(argv, "--rdzv_endpoint") == "node-1:1234"
    status, stderr, argv, _ = launcher("a.toml", NNODES="2", RUN_ID="r1")
    assert (status, argv) == (2, None)
    assert "NNODES=2 needs MASTER_ADDR" in stderr


def test_run_train_keeps_nodes_in_a_given_order(launcher):
    nodes = {"NNODES": "2", "MASTER_ADDR": "node-1", "RUN_ID": "r1"}
    status, _, argv, _ = launcher("a.toml", **nodes, NODE_RANK="1")
    assert status == 0
    assert [option(argv, name) for name in ("--rdzv_backend", "--node_rank")] == ["static", "1"]
    assert option(argv, "--rdzv_endpoint") == "node-1:29500"
    status, stderr, argv, _ = launcher("a.toml", **nodes, NODE_RANK="1", MAX_RESTARTS="2")
    assert (status, argv) == (2, None) and "unset NODE_RANK" in stderr
    _, _, argv, _ = launcher("a.toml", NODE_RANK="0")  # of one node
    assert option(argv, "--rdzv_backend") == "c10d" and "--node_rank" not in argv


def test_run_train_binds_processes_to_cpus_near_their_gpus(launcher):
    _, stderr, argv, _ = launcher("a.toml", NUMA_BINDING="node")
    assert "--numa-binding" not in argv and stderr == ""  # there are no GPUs to be near
    _, stderr, argv, _ = launcher("a.toml", gpus=2, NUMA_BINDING="node")
    assert "--numa-binding" not in argv and "needs numactl" in stderr
    executable(launcher.out / "bin" / "numactl", "#!/bin/sh\n")
    assert option(launcher("a.toml", gpus=2, NUMA_BINDING="node")[2], "--numa-binding") == "node"
    assert "--numa-binding" not in launcher("a.toml", gpus=2)[2]


def test_run_train_examines_with_a_configuration_or_without(launcher):
    for args in (["--doctor"], ["--doctor", "a.toml", "--moe.experts=te"], ["a.toml", "--moe.experts=te", "--doctor"]):
        status, _, argv, env = launcher(*args, gpus=4, NNODES="2", MASTER_ADDR="node-1", NODE_RANK="1")
        assert status == 0 and not (launcher.out / "launch").exists()  # what is no mistake of the nodes stops nothing
        assert argv == ["-m", "titan_moe.doctor", *(word for word in args if word != "--doctor")]
        assert [env[name] for name in ("NNODES", "NGPU", "NODE_RANK", "GPUS")] == ["2", "4", "1", "4"]
    assert "needs MASTER_ADDR" in launcher("--doctor", NNODES="2")[1]
    for word in ("--print_config", "--plan"):
        assert launcher("--doctor", word)[1].startswith("usage:")


@pytest.mark.parametrize(
    ("gpus", "env", "processes", "threads"),
    [
        (0, {}, "1", "8"),
        (0, {"NGPU": "3"}, "3", "2"),
        (0, {"NGPU": "16"}, "16", "1"),
        (0, {"NGPU": "2", "OMP_NUM_THREADS": "5"}, "2", "5"),
        (0, {"CUDA_VISIBLE_DEVICES": "0,1"}, "1", "8"),
        (4, {}, "4", None),
        (4, {"NGPU": "2"}, "2", None),
        (4, {"CUDA_VISIBLE_DEVICES": "0,3"}, "2", None),
        (4, {"CUDA_VISIBLE_DEVICES": "2"}, "1", None),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, "1", "8"),
        (4, {"CUDA_VISIBLE_DEVICES": "-1"}, "1", "8"),
    ],
)
def test_run_train_processes_and_threads(launcher, gpus, env, processes, threads):
    _, _, argv, seen = launcher("a.toml", gpus=gpus, **env)
    assert option(argv, "--nproc_per_node") == processes
    assert seen.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("gpus", "env", "spins"),
    [
        (0, {}, "1000"),
        (0, {"GOMP_SPINCOUNT": "7"}, "7"),
        (0, {"OMP_WAIT_POLICY": "active"}, None),  # which the other would overrule
        (2, {}, None),
    ],
)
def test_run_train_lets_threads_on_cpus_sleep_early(launcher, gpus, env, spins):
    assert launcher("a.toml", gpus=gpus, **env)[3].get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize("name", ["NGPU", "NNODES"])
@pytest.mark.parametrize("value", ["many", "0", "08", "1.5"])
def test_run_train_leaves_counts_that_are_none_to_the_list_of_mistakes(launcher, name, value):
    status, stderr, argv, _ = launcher("a.toml", MISTAKE="a.toml: 1 mistake", **{name: value})
    assert (status, stderr, argv) == (2, "a.toml: 1 mistake\n", None)
    assert f"{name}={value}" in (launcher.out / "launch").read_text()


def test_run_train_stops_on_mistakes(launcher):
    status, stderr, argv, _ = launcher("a.toml", MISTAKE="a.toml:\n    unknown key training.stpes")
    assert (status, stderr, argv) == (2, "a.toml:\n    unknown key training.stpes\n", None)
    status, stderr, argv, _ = launcher()
    assert (status, argv) == (2, None)
    assert stderr.startswith("usage: ./run_train.sh CONFIG.toml")
    status, _, argv, _ = launcher("a.toml", PYTHON="/no/such/python")
    assert status != 0
    assert argv is None


def test_run_train_helps_without_a_set_up(launcher):
    """The usage and all keys, or the keys that are asked for; no packages are needed, and nothing is started."""

    def asked(*args):
        env = {"PATH": str(launcher.out / "bin"), "PYTHON": str(launcher.out / "bin" / "my python"), "OUT": "/nowhere"}
        done = subprocess.run([launcher.root / "run_train.sh", *args], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    for args in (["--help"], ["-h"], ["a.toml", "--training.steps=5", "--help"]):
        usage, *_, keys = asked(*args)
        assert usage.startswith("usage: ./run_train.sh CONFIG.toml")
        assert keys.strip() == "help on"
    assert asked("--help", "moe") == asked("a.toml", "--help", "moe") == ["help on moe"]


def test_run_train_prints_the_configuration_and_starts_nothing(launcher):
    status, _, argv, _ = launcher("a.toml", "--training.steps=5", "--print_config")
    assert (status, argv) == (0, None)
    assert (launcher.out / "launch").read_text().splitlines()[1:] == ["a.toml", "--training.steps=5", "--print_config"]
    assert launcher("a.toml", "--print-config", MISTAKE="a.toml: 1 mistake")[:3] == (2, "a.toml: 1 mistake\n", None)


def test_run_train_starts_one_process_for_a_dry_run(launcher):
    for words in (["--comm.mode=fake_backend"], ["--comm.mode", "fake_backend"]):
        status, _, argv, env = launcher("a.toml", *words, "--training.steps=5", NGPU="256", RANK="3")
        assert (status, argv) == (0, ["-m", "titan_moe.dry_run", "a.toml", *words, "--training.steps=5"])
        assert (env["NGPU"], env["NNODES"], env["RANK"]) == ("256", "1", "3")
        assert "NGPU" not in launcher("a.toml", *words, gpus=4)[3], "this machine's GPUs do not matter"
        assert not (launcher.out / "launch").exists()
