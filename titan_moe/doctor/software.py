"""What there is on each rank: devices, packages, driver, NCCL, Transformer Engine."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scripts import setup_env
from titan_moe import run_folder
from titan_moe.config_check import model_flavor
from titan_moe.doctor.contract import Examined, Finding, count, dots, few
from titan_moe.moe import te, te_experts
from titan_moe.precision.recipes import RECIPES


def place(at: Examined) -> dict[str, str]:
    if at.device.type == "cpu" and os.environ.get("GPUS", "0") != "0":
        raise RuntimeError(
            f"nvidia-smi shows GPUs, but torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees none; "
            "install a driver that runs this CUDA"
        )
    device = torch.cuda.get_device_name(at.device) if at.device.type == "cuda" else "CPU"
    return {"host": platform.node(), "device": device, "domain": _nvlink_domain()}


def _nvlink_domain() -> str:
    script = Path(setup_env.__file__).with_name("nvlink_domain.sh")
    return subprocess.run([script], capture_output=True, text=True, check=True).stdout.strip()


def judge_places(at: Examined, answers: dict[int, dict[str, str]]) -> list[Finding]:
    at.places = answers
    kinds = sorted({place["device"] for place in answers.values()})
    nodes, domains = at.world_size // at.per_node, len({place["domain"] for place in answers.values()})
    text = f"{at.world_size} on {count(nodes, 'node')} in {count(domains, 'NVLink domain')}; {', '.join(kinds)}"
    if len(kinds) > 1:
        odd = [at.name(rank) for rank, place in answers.items() if place["device"] != kinds[0]]
        return [Finding("wrong", "ranks", f"{text}: one kind expected, other than {kinds[0]}: {few(odd)}")]
    return [Finding("ok", "ranks", text)]


def packages(at: Examined) -> dict[str, Any]:
    versions = run_folder.provenance()["versions"].items()
    shown = ", ".join(f"{package} {version}" for package, version in versions if version)
    return {"versions": shown, "unmet": setup_env.unmet(dev=False)}


def judge_packages(at: Examined, answers: dict[int, dict[str, Any]]) -> list[Finding]:
    way_out = "remove .venv and start again, or install what pyproject.toml asks for"
    wrong = {at.name(rank): answer["unmet"] for rank, answer in answers.items() if answer["unmet"]}
    found = [
        Finding("wrong", "packages", f"{who} lacks {', '.join(unmet)}, as in requirement (installed); {way_out}")
        for who, unmet in wrong.items()
    ]
    return found or [_same(at, "packages", {rank: answer["versions"] for rank, answer in answers.items()})]


def driver(at: Examined) -> list[int]:
    """The newest CUDA that the driver runs."""
    number = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))  # as in 13000
    return [number.value // 1000, number.value % 1000 // 10]


def judge_driver(at: Examined, answers: dict[int, list[int]]) -> list[Finding]:
    assert torch.version.cuda is not None
    major = int(torch.version.cuda.split(".")[0])
    old = [f"{at.name(rank)} {dots(version)}" for rank, version in answers.items() if version[0] < major]
    if old:
        text = f"runs CUDA up to: {few(old)}; torch is built for {torch.version.cuda}; install a newer driver"
        return [Finding("wrong", "driver", text)]
    return [_same(at, "driver", {rank: f"for CUDA {dots(version)}" for rank, version in answers.items()})]


def judge_nccl(at: Examined, answers: dict[int, list[int]]) -> list[Finding]:
    return [_same(at, "NCCL", {rank: dots(version) for rank, version in answers.items()})]


def _same(at: Examined, name: str, shown: Mapping[int, str]) -> Finding:
    other = [f"{at.name(rank)} {text}" for rank, text in shown.items() if text != shown[0]]
    if other:
        return Finding("wrong", name, f"rank 0 has {shown[0]}, but {few(other)}; give all nodes the same")
    return Finding("ok", name, f"{shown[0]} on all ranks")


def transformer_engine(at: Examined) -> dict[str, Any]:
    m = at.config.moe
    experts, dispatcher = m.experts in ("te", "te_fused"), m.dispatcher == "te_ep"
    quantizes = at.config.precision.backend
    if not experts and not dispatcher and quantizes != "te":
        return {"asked": [], "problems": []}
    found = te.facts()
    keys = {"moe.experts": m.experts, "moe.dispatcher": m.dispatcher, "precision.backend": quantizes}
    asked = [f'{key} = "{value}"' for key, value in keys.items()]
    shown = {"TE": found.version, "cuBLASLt": found.cublaslt, "NCCL": dots(found.nccl or ()), "nvcc": found.nvcc}
    problems = te_problems(found, dispatcher)
    if experts and not problems and m.recv_buffer != "exact":  # sizes that the host must not need to know
        flavor, dtype = model_flavor(at.config), getattr(torch, at.config.training.mixed_precision_param)
        p, sizes = at.config.precision, (flavor.dim, flavor.moe_hidden_dim)
        recipe = RECIPES.get(p.recipe or "") if p.experts else None
        problem = te_experts.device_splits_problem(found, dtype, *sizes, recipe)
        problems = [problem] if problem else []
    return {
        "asked": [text for text, wanted in zip(asked, (experts, dispatcher, quantizes == "te"), strict=True) if wanted],
        "problems": problems,
        "shown": ", ".join(f"{name} {value}" for name, value in shown.items() if value),
    }


def te_problems(found: te.Facts, expert_parallel: bool) -> list[str]:
    """What keeps TE, and with `expert_parallel` its NCCL EP, from running on what was found; each with the way out."""
    problem = te.problem(found)
    if problem or not expert_parallel:
        return [problem] if problem else []
    build = dots(te.NCCL_EP_BUILD)
    problems = []
    if not found.nccl_ep:
        problems.append("libnccl_ep.so is not there; build TE with NVTE_WITH_NCCL_EP=1")
    if found.nccl is None or found.nccl < te.NCCL_EP_BUILD:
        now = dots(found.nccl or ()) or "not found"
        problems.append(f"NCCL is {now}, NCCL EP needs {build}; pip install --no-deps nvidia-nccl-cu13=={build}")
    if found.nvcc is None:
        problems.append("NCCL EP compiles with nvcc when a run starts, and finds none; set NCCL_EP_JIT_NVCC")
    if found.nccl_headers is None:
        problems.append("NCCL EP finds no nccl.h; set NCCL_EP_JIT_BUILD_INCLUDE_DIR, as scripts/cluster_env.sh does")
    return problems


def judge_transformer_engine(at: Examined, answers: dict[int, dict[str, Any]]) -> list[Finding]:
    name = "Transformer Engine"
    if not answers[0]["asked"]:
        return []
    asked = " and ".join(answers[0]["asked"])
    wrong = [
        Finding("wrong", name, f"{at.name(rank)}, for {asked}: {problem}")
        for rank, answer in answers.items()
        for problem in answer["problems"]
    ]
    return wrong or [Finding("ok", name, f"{answers[0]['shown']}, for {asked}")]
