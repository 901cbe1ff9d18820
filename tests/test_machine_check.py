"""A run that this machine cannot hold is refused with its plan before anything is allocated, and a sound one is not."""

import os
import re
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
import torch

from titan_moe import config_file, launch, machine_check, startup
from titan_moe.config import Config
from titan_moe.dry_run import check as dry_run_check
from titan_moe.machine_check import GIB, Machine, needed_bytes, occupied, refusal, this_machine, warning
from titan_moe.plan import report

ROOT = Path(__file__).parents[1]
BIG, SMALL = (f"train_configs/{name}.toml" for name in ("deepseek_v3_671b", "deepseek_v3_16b"))


def load(*argv: str, world: int = 1) -> Config:
    return config_file.load([*argv], world)


def machine(gib: float, gpu: bool = True) -> Machine:
    return Machine(name=f"something with {gib} GiB", memory=gib * GIB, gpu=gpu)


def test_the_671b_command_on_a_laptop_prints_the_plan_and_the_way_out(tmp_path):
    """The whole command, with whatever memory this machine has."""
    command = [str(ROOT / "run_train.sh"), str(ROOT / BIG)]
    env = {**os.environ, "NGPU": "1", "PYTHON": sys.executable}
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert time.monotonic() - start < 20
    first, *lines = done.stderr.splitlines()
    assert first.endswith("is laid out for 256 GPUs (plan.gpus), and 1 process cannot be laid out so")
    assert any(line.startswith("Plan     deepseek_v3 671B: 682.6 B parameters") for line in lines)
    assert any(line.startswith("Memory   fits") for line in lines)
    assert "each needs at least 10,172.1 GiB, of weights, gradients and optimizer alone" in done.stderr
    assert "train it on 256 GB300" in done.stderr


def test_what_to_do_can_be_done_as_it_is_written():
    """Each command is read and checked as it would be when typed, with what the user had set beside the file."""
    words = ["--training.dataset=my texts/*.txt", "--model.num_mtp_layers=0"]
    text = refusal(load(BIG, *words), [BIG, *words], 1, None, accelerator=False)
    assert text is not None
    dry, twin, plan = (shlex.split(command) for command in re.findall(r": \./run_train\.sh (.*)", text))
    assert dry[:3] == twin[:3] == plan[:3] == [BIG, *words]
    assert dry_run_check.place({}, load(*dry).plan.gpus, []) == (256, 0)
    assert config_file.check(load(*twin), 1) == [] and twin[3:] == ["--model.scale_down"]
    assert plan[3] == "--plan" and "fits" in report.to_text(report.make(load(*plan[:3], *plan[4:]), ""))


def test_what_does_not_fit_is_refused_and_what_may_not_is_warned_about():
    config = load(SMALL)
    needed = needed_bytes(config, 8, machine(1)) / GIB
    assert needed == pytest.approx(60.9, rel=0.04), "the planner's figure without its margin for fragmentation"
    text = refusal(config, [SMALL], 8, machine(needed / 1.2), accelerator=True)
    assert text is not None and text.startswith(f"{SMALL}: does not fit into the memory of 8 processes here\n\nPlan ")
    assert f"8 processes on something with {needed / 1.2} GiB; each needs {needed:.1f} GiB" in text
    for gib, warns in ((needed / 1.05, True), (needed * 1.01, False)):
        assert refusal(config, [SMALL], 8, machine(gib), accelerator=True) is None
        assert (warning(config, 8, machine(gib)) is not None) == warns


def test_the_launcher_asks_for_transformer_engine(capsys, monkeypatch):
    argv = ["train_configs/debug_model.toml", "--training.mixed_precision_param=bfloat16"]
    argv += ["--parallelism.expert_parallel_degree=2", "--moe.dispatcher=te_ep", "--moe.experts=te"]
    gpus = {"NGPU": "2", "GPUS": "2"}
    monkeypatch.setattr(machine_check, "TE", "no_such_package")
    assert launch.main(argv, gpus) == 2
    said = capsys.readouterr().err
    for part in (
        'moe.dispatcher = "te_ep": needs Transformer Engine',
        'moe.experts = "te": needs',
        'or choose "auto"',
    ):
        assert part in said
    assert launch.main(argv[:3], gpus) == 0
    monkeypatch.setattr(machine_check, "TE", "torch")
    assert launch.main(argv, gpus) == 0


def test_nccl_ep_is_told_how_much_to_make_room_for():
    """With exact sizes it takes more memory than with bounded ones, and whoever lacks it is told so."""
    te_ep = [SMALL, "--moe.dispatcher=te_ep", "--parallelism.expert_parallel_degree=8", "--training.local_batch_size=2"]
    exact, bounded = load(*te_ep, world=8), load(*te_ep, "--moe.recv_buffer=1.5", world=8)
    needed = needed_bytes(exact, 8, machine(1)) / GIB
    assert needed > 1.5 + needed_bytes(bounded, 8, machine(1)) / GIB
    said = "set moe.recv_buffer to a factor"
    for config in (exact, bounded):
        texts = [occupied(config, 8, machine(10)), refusal(config, [SMALL], 8, machine(10), accelerator=True)]
        texts.append(warning(config, 8, machine(needed_bytes(config, 8, machine(1)) / GIB / 1.05)))
        assert all((said in text) == (config is exact) for text in texts), texts


def test_fewer_gpus_than_the_file_is_for_are_judged_by_what_they_have():
    config = load(SMALL)
    assert refusal(config, [SMALL], 4, machine(141), accelerator=True) is None, "4 H200 hold what 8 H100 do"
    assert refusal(config, [SMALL], 1, machine(141), accelerator=True) is not None


def test_other_mistakes_are_left_to_those_who_list_them():
    """One in the file itself is none of the machine."""
    assert refusal(load(BIG, "--model.top_k=300"), [BIG], 1, machine(80), accelerator=True) is None
    assert refusal(load(BIG, "--model.top_k=300"), [BIG], 256, machine(80), accelerator=True) is None
    assert refusal(load(SMALL), [SMALL], 8, None, accelerator=True) is None, "nothing tells the memory"


def test_host_memory_is_room_beside_a_gpu_and_none_beside_a_cpu():
    for gpu in (True, False):
        there, away = (
            needed_bytes(load(SMALL, f"--activation_offload.tensors={name}"), 1, machine(64, gpu))
            for name in ("", "layer_input")
        )
        assert away < there if gpu else away == there


def test_fp32_takes_more_than_bf16_and_processes_share_a_machine():
    argv = ["train_configs/debug_model.toml", "--training.seq_len=1024"]
    fp32, bf16 = (
        needed_bytes(load(*argv, f"--training.mixed_precision_param={dtype}"), 1, machine(1, gpu=False))
        for dtype in ("float32", "bfloat16")
    )
    assert 1.4 * bf16 < fp32 < 2 * bf16
    one, four = this_machine(1, gpus=False), this_machine(4, gpus=False)
    assert one is not None and four is not None and four.memory == pytest.approx(one.memory / 4, rel=0.2)


def test_the_debug_model_needs_what_was_measured():
    """README's log: 1.07 GiB."""
    needed = needed_bytes(load("train_configs/debug_model.toml"), 1, machine(1, gpu=False))
    assert needed / GIB == pytest.approx(1.07, rel=0.15)


@pytest.fixture
def eight_h100(tmp_path, monkeypatch) -> None:
    """A driver that shows eight, one with less memory."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    lines = "\\n".join(["81559, NVIDIA H100 80GB HBM3"] * 7 + ["40000, NVIDIA H100 80GB HBM3"])
    tool.write_text(f'#!/bin/sh\ncase "$*" in *memory.total,name*) printf "{lines}\\n";; *) exit 1;; esac\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def test_gpus_are_asked_and_the_smallest_decides(eight_h100, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    smallest = this_machine(8, gpus=True)
    assert smallest is not None and (smallest.memory, smallest.gpu) == (40000 * 2**20, True)
    env = {"NGPU": "8", "GPUS": "8", "RUN_ID": "r"}
    assert launch.main([SMALL], env) == 2
    shown = capsys.readouterr().err
    assert "8 processes on NVIDIA H100 80GB HBM3 with 39.1 GiB; each needs" in shown
    assert "./data/tokens" not in shown, "what this machine lacks besides is not the point"


def test_a_gpu_that_others_use_is_refused_before_anything_is_allocated(monkeypatch):
    left = 100 * GIB
    gpu = SimpleNamespace(mem_get_info=lambda device: (left, 141 * GIB), get_device_name=lambda device: "NVIDIA H200")
    monkeypatch.setattr(startup, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(startup.torch, "get_device_module", lambda device: gpu)
    monkeypatch.setattr(startup.dist, "get_world_size", lambda: 8)
    startup.require_memory(load(SMALL), torch.device("cuda:3"))
    left = 20 * GIB
    with pytest.raises(ValueError, match=r"^cuda:3, NVIDIA H200, has 20.0 GiB left, .* need 5\d\.\d GiB of it; end"):
        startup.require_memory(load(SMALL), torch.device("cuda:3"))


def test_a_driver_that_does_not_answer_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine(8, gpus=True) is None


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    class Elsewhere(type(Path())):
        def __new__(cls, *parts):
            return super().__new__(cls, *(str(part).replace("/sys/fs/cgroup", str(tmp_path)) for part in parts))

    (tmp_path / "memory.max").write_text(f"{3 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon {2**30}\ninactive_file {2**30}\n")
    monkeypatch.setattr(machine_check, "Path", Elsewhere)
    found = this_machine(2, gpus=False)
    assert found is not None and found.memory == 2**30
