"""The search finds what looking at everything finds, its bounds hold, and it is the same each time."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.plan import (
    activations,
    bounds,
    constants,
    hardware,
    overlap,
    profiles,
    published,
    published_space,
    search,
    space,
    winner,
)
from titan_moe.plan.__main__ import main
from titan_moe.plan.choices import Choice
from titan_moe.plan.job import Job
from titan_moe.plan.search import Node
from titan_moe.plan.space import ConfigSpace
from titan_moe.plan.stages import from_counts
from titan_moe.plan.step import tokens_per_s

REPO = Path(__file__).parents[2]
CONFIGS = REPO / "train_configs"
SMALL = """
[model]
name = "qwen3"
flavor = "debugmodel"
[training]
dataset = "synthetic"
seq_len = 512
local_batch_size = 1
global_batch_size = 4
[plan]
hardware = "H100"
gpus = 2
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def everything(small: Path) -> list[Node]:
    return list(search.every(ConfigSpace(load(small), float("inf"))))


def load(path: Path, *overrides: str) -> Config:
    return config_file.load([str(path), *overrides])


def front(nodes: list[Node], limit: float, band: float) -> list[tuple[float, float]]:
    """By definition, all against all."""
    there = {(node.rate, node.memory) for node in nodes if node.memory <= limit}
    best = max((rate for rate, _ in there), default=0.0)
    there = {(rate, needs) for rate, needs in there if rate >= (1 - band) * best}
    return sorted(a for a in there if not any(b != a and b[0] >= a[0] and b[1] <= a[1] for b in there))[::-1]


@pytest.mark.parametrize("band", [0.0, 0.05, 0.9])
@pytest.mark.parametrize("place", [0.0, 0.01, 0.3, 1.0])
def test_pruning_loses_nothing(small: Path, everything: list[Node], place: float, band: float) -> None:
    """Against every job of a small space, with room for few of them, and for all."""
    assert len(everything) > 1000
    needs = sorted(node.memory for node in everything)
    limit = needs[round(place * (len(needs) - 1))]
    found = search.search(ConfigSpace(load(small), limit), limit, band)
    assert [(node.rate, node.memory) for node in found.front] == front(everything, limit, band)
    if band == 0.05 and place == 1.0:
        assert found.counts["exact"] < len(everything) / 20, "and it does not look at everything"


def test_pruning_loses_nothing_of_pipelines_and_context_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few routes and few ways to save memory, so that everything can be looked at; then with one pipeline degree
    alone, which no faster one hides."""
    recomputed = ([], ["mla_up_proj"], ["norms", "shared_expert"])
    few = [each for each in space.recomputes() if each["activation_checkpoint.recompute"] in recomputed]
    few = [each for each in few if each["activation_checkpoint.mode"] == "full" or not each["moe.redispatch"]]
    routes, meshes = ConfigSpace._routes, ConfigSpace._meshes
    monkeypatch.setattr(space, "recomputes", lambda: few)
    monkeypatch.setattr(space, "offloads", lambda: [[], ["layer_input", "moe_expert_input"]])
    monkeypatch.setattr(ConfigSpace, "_routes", lambda self, ep: routes(self, ep)[:1])
    path = tmp_path / "pipelines.toml"
    path.write_text(SMALL.replace("qwen3", "deepseek_v3"))
    config = load(path, "--model.num_mtp_layers=0", "--plan.gpus=4")
    nodes = list(search.every(ConfigSpace(config, float("inf"))))
    there = {(node.job.pp, node.job.cp) for node in nodes}
    assert there == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert len({node.job.schedule for node in nodes if node.job.pp > 1}) == 5
    assert {node.job.overlap for node in nodes if node.job.pp > 1} == {"none", "shared_expert", "half_batch"}
    for only in (None, 2, 4):
        some = [node for node in nodes if only in (None, node.job.pp)]
        if only is not None:

            def of_degree(*words: Any, pp: int = only, **named: Any) -> Iterator[Choice]:
                return (mesh for mesh in meshes(*words, **named) if mesh[space.PP] == pp)

            monkeypatch.setattr(ConfigSpace, "_meshes", of_degree)
        needs = sorted(node.memory for node in some)
        for place, band in ((0.003, 0.9), (0.03, 0.3), (0.2, 0.05), (1.0, 0.9), (1.0, 0.0)):
            limit = needs[round(place * (len(needs) - 1))]
            found = search.search(ConfigSpace(config, limit), limit, band)
            assert [(node.rate, node.memory) for node in found.front] == front(some, limit, band), (only, place)


def test_what_needs_least_is_found_too(small: Path, everything: list[Node]) -> None:
    least = search.least(ConfigSpace(load(small), float("inf")))
    assert least is not None and least.memory == min(node.memory for node in everything)
    assert search.search(ConfigSpace(load(small), least.memory - 1), least.memory - 1).front == []


def test_no_job_is_better_than_the_bounds_above_it() -> None:
    """Down random paths through a space with all that the small one lacks: latent attention, shared experts, pipelines,
    recompute and offloading of them."""
    overrides = ["--plan.search", "--plan.search_also=precision,libraries", "--plan.hardware=B200", "--plan.gpus=4"]
    overrides += ["--training.global_batch_size=8", "--training.local_batch_size=1"]
    overrides += ["--precision.recipe=mxfp8", "--precision.keep_high_precision_layers=first 1, last 2"]
    space = ConfigSpace(load(CONFIGS / "deepseek_v3_16b.toml", *overrides), float("inf"))
    draw = random.Random(0)
    roots = draw.sample(list(space.roots()), 5)
    reached = 0
    for root in roots:
        for _ in range(3):
            path = [root]
            while path[-1].level < search.EXACT:
                below = list(space.children(path[-1], lambda rate, needs: True))
                path.append(draw.choice(below))
            *above, exact = path
            for node in above:
                assert exact.rate <= node.rate * (1 + 1e-9), (node, exact)
                assert exact.memory >= node.memory * (1 - 1e-9), (node, exact)
            reached += space.allowed(exact)
    assert reached > 7


CHANGES = {
    "model_name": "another",
    "kept_layers": frozenset({1}),
    "global_batch_size": 128,
    "schedule": "ZBVZeroBubble",
    "reshard_after_forward": False,
    "prefetch_layers": 3,
    "reduce_every_microbatch": True,
    "recv_buffer": 1.5,
    "release": "26.04",
    "param_dtype": "float32",
    "grad_dtype": "bfloat16",
    "moment_dtype": "bfloat16",
    "loss_chunks": 8,
    "notes": ("a note",),
    "muon": True,
    "offload": frozenset({"layer_input"}),
}
MESH = {"gpus", "pp", "vp", "stages", "dp_replicate", "dp_shard"}
OF_TENSORS = {"sharding": "fsdp", "ranks_per_node": 4}
OF_KERNELS = {
    "hardware": hardware.resolve("H100"),
    "low_precision": frozenset({"experts"}),
    "mxfp8_payload": True,
    "overlap": "half_batch",
    "comm_sms": 8,
    "graphs": "full",
    "fp8_attention": True,
    "fused_grouped_mlp": True,
    "sync_free": True,
}


def test_layers_are_remembered_by_all_that_they_read() -> None:
    """What is not a part of the key changes neither kernels nor tensors, whatever field of a job it is."""
    path = CONFIGS / "deepseek_v3_16b.toml"
    config = load(path, "--parallelism.expert_parallel_degree=8", "--training.local_batch_size=4")
    job = Job.from_config(config, 8, hardware.resolve("B200"))
    job = replace(job, sharding="zero1", global_batch_size=64)
    meshed = replace(
        job, gpus=32, pp=2, vp=2, dp_replicate=2, stages=from_counts([7, 7, 7, 6], 1, 0), schedule="Interleaved1F1B"
    )
    same = [*(replace(job, **{name: value}) for name, value in CHANGES.items()), meshed]
    software, c = profiles.of_release("titan")[0], constants.fitted()
    of_tensors, of_kernels = (
        [replace(job, **{name: value}) for name, value in changes.items()] for changes in (OF_TENSORS, OF_KERNELS)
    )
    every = {field.name for field in fields(Job)}
    assert every == {*overlap.READ, *CHANGES, *MESH, *OF_TENSORS}, "a new field: do kernels read it?"
    assert every == {*activations.READ, *CHANGES, *MESH, *OF_KERNELS}, "a new field: do tensors?"
    alone = overlap.alone_of.__wrapped__  # type: ignore[attr-defined]
    for kind in ("dense", "moe"):
        for other in (*same, *of_tensors):
            assert alone(other, kind, software, c) == alone(job, kind, software, c)
        for other in (*same, *of_kernels):
            assert activations.megatron_layer(other, kind) == activations.megatron_layer(job, kind)
            assert activations.titan_layer(other, kind) == activations.titan_layer(job, kind)


def plan(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPO / "run_train.sh"), *words],
        env={**os.environ, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_winner_is_a_file_that_means_it_and_wins_again(small: Path, tmp_path: Path) -> None:
    """Through run_train.sh, twice with other hashes of strings; the file passes --print_config."""
    best = tmp_path / "found" / "best.toml"
    words = [str(small), "--plan.search", "--training.global_batch_size=8"]
    first, second = (plan(*words, f"--plan.toml={best}", PYTHONHASHSEED=seed) for seed in "12")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout and first.stderr == f"Configuration: {best}\n"
    assert [path.name for path in best.parent.iterdir()] == ["best.toml"]
    assert "base = " in best.read_text() and "global_batch_size = 8  # 4: from the command line" in best.read_text()
    printed = plan(str(best), "--print_config")
    assert printed.returncode == 0 and "global_batch_size = 8" in printed.stdout, printed.stderr
    planned = plan(str(best), "--plan")
    assert planned.stdout.splitlines()[5] in first.stdout, "the same speed"
    assert f"{best} is that layout" in plan(str(best), "--plan.search").stdout


def test_nothing_fits(small: Path, tmp_path: Path) -> None:
    """Then it is said what comes nearest; nothing is written."""
    described = 'name = "TINY"\narchitecture = "hopper"\nbf16_tflops = 100\nhbm_gb = 3\nhbm_tb_s = 1\n'
    (tmp_path / "tiny.toml").write_text(described + "nvlink_gb_s = 100\nnvlink_domain = 8\nnic_gb_s = 10\n")
    to = tmp_path / "best.toml"
    config = load(small, "--plan.search", f"--plan.hardware={tmp_path / 'tiny.toml'}", f"--plan.toml={to}")
    searched = winner.run(config, "small.toml")
    text = winner.to_text(searched, "small.toml", "")
    near = searched.found.nearest
    assert near is not None and searched.best is None and near.memory > searched.limit
    assert "NOTHING FITS into 2.5 GiB (90% of 2.8). Nearest:" in text
    assert f"{(near.memory - searched.limit) / 2**30:.1f} GiB too much" in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--plan.hardware="], "plan.hardware: is not set; choose one of"),
        (["--plan.gpus=none"], "plan.gpus: is not set"),
        (["--plan.search_also=speed"], "plan.search_also[0] = 'speed': choose from 'precision', 'libraries'"),
        (["--plan.toml=small.toml"], 'plan.toml = "small.toml": is the file that is searched for; name another'),
        (["--plan.toml=/tmp"], 'plan.toml = "/tmp": /tmp is a folder; name a file'),
        (["--plan.toml=/dev/null/best.toml"], 'plan.toml = "/dev/null/best.toml": /dev/null is no folder; name a file'),
    ],
)
def test_refusals(small: Path, monkeypatch: pytest.MonkeyPatch, capsys, overrides: list[str], expected: str) -> None:
    monkeypatch.chdir(small.parent)
    assert main(["small.toml", "--plan.search", *overrides]) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err
    assert [path.name for path in small.parent.iterdir()] == ["small.toml"]


def test_precision_and_libraries_only_change_when_asked_for(small: Path) -> None:
    config = load(small)
    for also, recipes, dispatchers in (
        ([], [None], {"dedup", "alltoall"}),
        (["precision"], [None, "fp8_current", "fp8_block"], {"dedup", "alltoall"}),
        (["libraries"], [None], {"dedup", "alltoall", "te_ep", "deepep", "hybridep"}),
    ):
        config.plan.search_also = also
        space = ConfigSpace(config, float("inf"))
        assert space.recipes == recipes
        named = {route["moe.dispatcher"] for route in space._routes(2)}
        assert named == (dispatchers - {"dedup"}) | {"auto"}


SAID = [path for path in sorted(CONFIGS.glob("*.toml")) if "# Search: " in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("path", SAID, ids=lambda path: path.stem)
def test_shipped_files_are_winners_or_say_why_not(path: Path) -> None:
    """And a search for 256 GPUs takes less than a minute of processor time."""
    start = process_time()
    searched = winner.run(load(path), path.name)
    assert process_time() - start < 60 and searched.best is not None and searched.diff is not None
    assert searched.best.memory.needed <= searched.limit
    said = path.read_text()
    if more := re.search(r"# Search: finds about (\d+) % more", said):
        assert abs(100 * searched.diff.gain - int(more[1])) <= 3 and "Not taken" in said
    else:
        assert "# Search: this is what --plan.search finds." in said and searched.diff.gain < 0.01


@pytest.mark.slow
def test_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/search_docs.py", "--check"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_published_layouts_are_near_the_best_or_the_page_says_what_is_better() -> None:
    """Five percent, on H800, GB200 and GB300."""
    page = (REPO / "docs" / "planner_search.md").read_text()
    for run in published.runs_of(published.read(published.RUNS)):
        if run.job.hardware.name in ("H800", "GB200", "GB300"):
            found = published_space.compare(run)
            assert found.gain <= 0.05 or f"Change from line {run.row.line} to the best" in page


def test_bounds_of_a_whole_job_are_near_it() -> None:
    """Bounds that are far off would prune nothing."""
    config = load(CONFIGS / "qwen3_30b_a3b.toml", "--activation_checkpoint.mode=none")
    job = Job.from_config(config, 16, hardware.resolve("H100"))
    software, c = profiles.of_release("titan")[0], constants.fitted()
    rate = tokens_per_s(job, software, c)
    assert rate * (1 - 1e-9) <= bounds.mesh(job, software, c) < 1.02 * rate
    assert bounds.mesh(job, software, c) <= bounds.layers(job, software, c) <= bounds.compute(job, software, c)
    assert bounds.compute(job, software, c) < 1.3 * rate
