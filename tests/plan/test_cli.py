"""`./run_train.sh CONFIG.toml --plan` as a user calls it: quick, without torch, starting and leaving nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe import config_file
from titan_moe.config_check import check
from titan_moe.plan.check import plan_problems
from titan_moe.plan.hardware import HARDWARE

REPO = Path(__file__).parents[2]
CONFIG = str(REPO / "tests" / "plan" / "deepseek_v3_671b.toml")


def run(*arguments: str, cwd: Path, **env: str):
    return subprocess.run(
        [str(REPO / "run_train.sh"), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_plan_answers_and_leaves_nothing(tmp_path):
    """Neither NGPU nor NNODES matter, and no run folder is made."""
    done = run(CONFIG, "--plan", "--plan.gpus=512", cwd=tmp_path, NGPU="3", NNODES="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan     deepseek_v3 671B") and "512 x GB300" in done.stdout
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


def test_plan_as_json_with_pictures(tmp_path):
    done = run(CONFIG, "--plan.json", "--plan.png", "pictures", cwd=tmp_path, CONFIG_FILE="")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"memory.png", "timeline.png"}


def test_a_pipe_that_is_closed_early_is_no_error():
    command = f"{sys.executable} -m titan_moe.plan {CONFIG} --plan.json | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_plan_imports_no_torch_and_is_quick():
    """Schema, flavors and planner: nothing that takes seconds to import, whatever the machine has; under 5 s of CPU."""
    program = (
        "import resource, sys; from titan_moe.plan.__main__ import main; status = main(sys.argv[1:]); "
        "heavy = {'torch', 'torchtitan', 'numpy', 'matplotlib', 'PIL', 'transformer_engine'} & sys.modules.keys(); "
        "used = resource.getrusage(resource.RUSAGE_SELF); print(status, heavy, used.ru_utime + used.ru_stime < 5)"
    )
    done = subprocess.run([sys.executable, "-c", program, CONFIG], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 set() True", done.stdout + done.stderr


def test_plan_needs_only_the_standard_library():
    """Before the training environment exists: no tomli, no site packages at all."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "titan_moe.plan", CONFIG],
        cwd=REPO,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "tokens/s per GPU" in done.stdout, done.stderr


def test_mistakes_are_listed_together_with_exit_2(tmp_path):
    done = run(CONFIG, "--plan", "--plan.hardware=H1000", "--parallelism.expert_parallel_degree=48", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert 'plan.hardware "H1000": is not known; choose one of A100, H100' in done.stderr
    assert "or give the path of a TOML file that describes another one: name, architecture" in done.stderr
    assert "parallelism.expert_parallel_degree = 48: must divide" in done.stderr


def problems(*overrides: str) -> list[str]:
    loaded = config_file.read([CONFIG, *overrides])
    return loaded.problems or plan_problems(loaded.config)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--plan.hardware="], "plan.hardware: is not set; choose one of A100"),
        (["--plan.gpus=none"], "plan.gpus: is not set; give the number of GPUs of the whole job"),
        (["--plan.gpus=0"], "plan.gpus = 0: must be at least 1"),
        (
            ["--plan.hardware=A100", "--precision.recipe=mxfp8"],
            'precision.recipe = "mxfp8": plan.hardware A100 has no rate of it, so that it would be emulated, which '
            "saves no time and is not in the planner; A100 has bf16",
        ),
        (["--plan.hardware=H100", "--precision.recipe=mxfp8"], "H100 has bf16, fp8_current, fp8_block"),
        (["--precision.backend=emulated", "--precision.recipe=mxfp8"], 'plan with "auto"'),
        (["--plan.precision=mxfp8"], "plan.precision was renamed to precision.recipe"),
        (["--moe.recv_buffer=1.5"], "moe.recv_buffer = 1.5: the planner counts the rows that arrive"),
        (["--training.mixed_precision_param=float32"], 'plan with "bfloat16"'),
        (["--plan.gpus=96"], "parallelism.expert_parallel_degree = 64: must divide data_parallel_shard_degree = 96"),
        (["--model.top_k=300"], "model.top_k = 300: must lie in 1 .. num_experts = 256"),
    ],
)
def test_what_cannot_be_planned(overrides, expected):
    assert any(expected in problem for problem in problems(*overrides)), problems(*overrides)


def test_layouts_are_refused_as_training_refuses_them():
    config = config_file.load([CONFIG, "--plan.gpus=96", "--training.global_batch_size=1000"])
    found = check(config, 96)
    assert len(found) >= 2 and plan_problems(config) == found


def test_hardware_of_ones_own(tmp_path):
    """The remedy of an unknown name works."""
    described = {"name": "NEXT", "architecture": "blackwell_ultra", "bf16_tflops": 5000, "fp8_tflops": 10000}
    described |= {"hbm_gb": 576, "hbm_tb_s": 16, "nvlink_gb_s": 1800, "nvlink_domain": 144, "nic_gb_s": 200}
    (tmp_path / "next.toml").write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in described.items()))
    done = run(CONFIG, "--plan", f"--plan.hardware={tmp_path / 'next.toml'}", cwd=tmp_path)
    assert done.returncode == 0 and "256 x NEXT" in done.stdout and "of 536.4 GiB" in done.stdout, done.stderr
    assert "NEXT" not in HARDWARE
