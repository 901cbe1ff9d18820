"""scripts/train.slurm with stand-ins for SLURM's commands, the driver's and run_train.sh: no cluster, no torch."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

SRUN = """#!/usr/bin/env bash
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
printf '%s\\n' "${options[*]}" >>"$OUT/srun"
nodes=($NODES)
[[ " ${options[*]} " != *" --nodes=1 "* ]] || nodes=("${nodes[0]}")
for i in "${!nodes[@]}"; do SLURM_NODEID=$i SLURMD_NODENAME=${nodes[i]} "$@" & done
status=0
for task in $(jobs -p); do wait "$task" || status=$?; done
exit "$status"
"""

# Nodes called r1-... are in rack 1; others have no fabric, as an 8-GPU server shows it.
NVIDIA_SMI = """#!/usr/bin/env bash
uuid=00000000-0000-0000-0000-000000000000
[[ $SLURMD_NODENAME != r* ]] || uuid=ab${SLURMD_NODENAME%%-*}
printf '    Fabric\\n        State       : Completed\\n'
printf '        CliqueId                          : 0\\n        ClusterUUID                       : %s\\n' "$uuid"
"""

RUN_TRAIN = """#!/usr/bin/env bash
if [[ $* == *--print_config* ]]; then
    [[ -z ${MISTAKE:-} ]] || { echo "$MISTAKE" >&2; exit 2; }
    mkdir -p .venv/lib/python3.12/site-packages/nvidia/nccl/include
    printf '[validation]\\nenable = true\\n\\n[checkpoint]\\nenable = %s  # a.toml:3\\n' "${CHECKPOINTS:-false}"
    exit
fi
printf '%s\\n' "host=$SLURMD_NODENAME" "NNODES=$NNODES" "MASTER=$MASTER_ADDR:$MASTER_PORT" "DOMAINS=$NVLINK_DOMAINS" \\
    "NUMA_BINDING=$NUMA_BINDING" "${NCCL_EP_JIT_NVCC:+nvcc}" "$@" >"$OUT/rank-$NODE_RANK"
if [[ -n ${WAITS:-} ]]; then
    trap 'echo ended >>"$OUT/ended"; exit "${STOPS:-75}"' TERM
    echo $$ >"$OUT/pid-$NODE_RANK"
    while :; do sleep 0.05; done
fi
exit "${STATUS:-0}"
"""

SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>"$OUT/slurm"
kill -TERM $(cat "$OUT"/pid-*)
"""

SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$OUT/slurm"
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Cluster:
    """A repository with its own run_train.sh, and a batch script's environment on the first of `NODES`."""

    def __init__(self, folder: Path) -> None:
        self.root, tools, self.out = folder / "a repository", folder / "bin", folder / "out"
        for made in (self.root / "scripts", tools, self.out):
            made.mkdir(parents=True)
        for script in ("train.slurm", "cluster_env.sh", "nvlink_domain.sh"):
            shutil.copy(REPO / "scripts" / script, self.root / "scripts")
        executable(self.root / "run_train.sh", RUN_TRAIN)
        for name, text in {"srun": SRUN, "nvidia-smi": NVIDIA_SMI, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
            executable(tools / name, text)
        self.env = {"PATH": f"{tools}:{os.environ['PATH']}", "OUT": str(self.out), "SLURM_JOB_ID": "4321"}

    def start(self, *args: str, nodes: str, **env: str) -> subprocess.Popen:
        slurm = {"SLURM_SUBMIT_DIR": str(self.root), "SLURM_JOB_NUM_NODES": str(len(nodes.split())), "NODES": nodes}
        spooled = self.out.parent / "slurm_script"  # SLURM runs a copy
        shutil.copy(self.root / "scripts" / "train.slurm", spooled)
        command = ["bash", str(spooled), *args]
        return subprocess.Popen(command, env={**self.env, **slurm, **env}, text=True, stderr=subprocess.PIPE)

    def run(self, *args: str, nodes: str, **env: str) -> tuple[int, str]:
        process = self.start(*args, nodes=nodes, **env)
        _, stderr = process.communicate(timeout=60)
        return process.returncode, stderr

    def tasks(self) -> list[list[str]]:
        """What run_train.sh was given on each node, by rank."""
        return [(self.out / f"rank-{rank}").read_text().splitlines() for rank in range(len([*self.out.glob("rank-*")]))]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_one_task_per_node_with_the_same_run(cluster):
    arguments = ["my configs/a b.toml", "--training.dataset=my data/*.jsonl"]
    status, stderr = cluster.run(*arguments, nodes="n9 n10", CHECKPOINTS="true")
    assert status == 0
    # nvcc: of the .venv that the first step makes.
    expected = ["NNODES=2", "MASTER=n9:24321", "DOMAINS=0 1", "NUMA_BINDING=node", "nvcc", *arguments]
    assert cluster.tasks() == [["host=n9", *expected], ["host=n10", *expected]]  # SLURM's order, not that of the names
    assert "2 nodes, attempt 1, in the order of ranks: n9 n10" in stderr
    for options in (cluster.out / "srun").read_text().splitlines():
        assert options.startswith("--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --export=ALL")
        assert "container" not in options
    assert not (cluster.out / "slurm").exists()  # nothing to queue again


def test_nodes_of_a_rack_follow_each_other(cluster):
    assert cluster.run("a.toml", nodes="r2-1 r1-1 x1 r2-2 r1-2 x2")[0] == 0
    tasks = cluster.tasks()
    assert [task[0] for task in tasks] == [f"host={host}" for host in ("r2-1", "r2-2", "r1-1", "r1-2", "x1", "x2")]
    assert {task[3] for task in tasks} == {"DOMAINS=0 0 1 1 2 5"}
    assert {task[2] for task in tasks} == {"MASTER=r2-1:24321"}


def test_one_node_and_a_container(cluster):
    status, _ = cluster.run(
        "a.toml", nodes="n1", CONTAINER="my/image:1", CONTAINER_MOUNTS="/data:/data", NUMA_BINDING=""
    )
    assert status == 0
    (task,) = cluster.tasks()
    assert task == ["host=n1", "NNODES=1", "MASTER=n1:24321", "DOMAINS=0", "NUMA_BINDING=", "nvcc", "a.toml"]
    check, domains, train = (cluster.out / "srun").read_text().splitlines()
    root = cluster.root
    inside = f"--container-image=my/image:1 --container-workdir={root} --container-mounts={root}:{root},/data:/data"
    assert check.endswith(f"--nodes=1 --ntasks=1 {inside}") and train.endswith(inside) and "container" not in domains


def test_mistakes_end_the_job_before_it_starts(cluster):
    status, stderr = cluster.run("a.toml", nodes="n1 n2", MISTAKE="a.toml: 1 mistake")
    assert (status, cluster.tasks()) == (2, []) and "a.toml: 1 mistake" in stderr
    status, stderr = cluster.run("a.toml", nodes="n1", SLURM_SUBMIT_DIR="/")
    assert status == 2 and "from the repository's root" in stderr
    assert cluster.run(nodes="n1")[0] == 2


def test_a_run_that_fails_is_not_queued_again(cluster):
    assert cluster.run("a.toml", nodes="n1 n2", STATUS="3", CHECKPOINTS="true")[0] == 3
    assert not (cluster.out / "slurm").exists()


def test_the_doctor_runs_on_all_nodes(cluster):
    assert cluster.run("--doctor", nodes="n1 n2", STATUS="1")[0] == 1
    assert [task[-1] for task in cluster.tasks()] == ["--doctor"] * 2


ARRAY = {"SLURM_ARRAY_JOB_ID": "4321", "SLURM_ARRAY_TASK_ID": "7"}  # the last task has the number of the array


@pytest.mark.parametrize(
    ("checkpoints", "stops", "array", "queued"),
    [
        ("true", "75", {}, "4321"),
        ("true", "75", ARRAY, "4321_7"),
        ("true", "1", {}, "4321"),  # it could not save: the newest checkpoint is older
        ("true", "0", {}, None),  # that was its last step
        ("false", "143", {}, None),
    ],
)
def test_the_time_limit_stops_the_run_and_queues_it_again_if_it_can_go_on(cluster, checkpoints, stops, array, queued):
    process = cluster.start("a.toml", nodes="n1 n2", WAITS="yes", CHECKPOINTS=checkpoints, STOPS=stops, **array)
    deadline = time.monotonic() + 30
    while len([path for path in cluster.out.glob("pid-*") if path.read_text()]) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=30)
    assert (cluster.out / "ended").read_text() == "ended\n" * 2  # before the job is queued again
    asked = (cluster.out / "slurm").read_text().splitlines()
    assert asked[0] == f"scancel --signal=TERM {'4321_7' if array else '4321'}"
    assert asked[1:] == ([] if queued is None else [f"scontrol requeue {queued}"])
    assert process.returncode == (1 if checkpoints == "false" else 0)
    assert ("checkpoint.enable" in stderr) == (checkpoints == "false")
    assert ("without saving" in stderr) == (stops == "1")


def test_there_is_time_to_finish_a_step_and_to_save_it():
    """The script itself gets the signal, and has ten minutes."""
    assert "#SBATCH --signal=B:USR1@600\n" in (REPO / "scripts" / "train.slurm").read_text()
