"""Dry runs of the debug model on meshes of every kind: that they run, what they count, and which are refused."""

import resource
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import CP2, EP2, FULL, HSDP2, MTP1, PP2, SELECTIVE, TP2
from tests.dry_run.harness import REPO, dry_runs
from titan_moe import config_file
from titan_moe.dry_run.__main__ import main
from titan_moe.dry_run.check import place

SEQUENCE, WIDTH, EXPERTS, TOP_K = 512, 256, 8, 3  # of the debug model, which has 4 layers, 3 of them with experts
DEBUG = [
    *("train_configs/debug_model.toml", "--training.mixed_precision_param=bfloat16"),
    *(f"--training.seq_len={SEQUENCE}", "--training.local_batch_size=2", "--checkpoint.enable"),
]
SCHEDULE, LAYERS = "--parallelism.pipeline_parallel_schedule", "--parallelism.pipeline_parallel_layers_per_stage"
FOUR_STAGES = f"{LAYERS}=[1, 1, 1, 1]"
EIGHT = "--training.local_batch_size=8"  # microbatches of a pipeline
ACCUMULATED = "--training.global_batch_size=24"  # 3 microbatches on each of 4 data-parallel ranks
CASES = {
    "fsdp4_ep2": [EP2, ACCUMULATED, "--compile.enable"],
    "pp2_1f1b": [PP2, EP2, EIGHT, "--optimizer.moments_dtype=bfloat16", "--activation_offload.tensors=attn_out"],
}
OTHERS = {
    "full_redispatch": [EP2, FULL, "--moe.redispatch"],
    "hsdp2_mtp": [EP2, HSDP2, MTP1],
    "cp2": [EP2, CP2, SELECTIVE],
    "tp2": [EP2, TP2],
    "two_hops": ["--parallelism.expert_parallel_degree=4", "--moe.ranks_per_node=2", "--moe.capacity_factor=1"],
    "chunks": ["--parallelism.expert_parallel_degree=4", "--moe.ranks_per_node=2", "--moe.hop_chunks=3", SELECTIVE],
    "alltoall": [EP2, "--moe.dispatcher=alltoall"],
    "local": [],
    "interleaved": [PP2, EIGHT, f"{SCHEDULE}=Interleaved1F1B", FOUR_STAGES],
    "dualpipe": [PP2, EIGHT, f"{SCHEDULE}=DualPipeV", FOUR_STAGES, SELECTIVE],
    "zero_bubble": [PP2, EIGHT, f"{SCHEDULE}=ZBVZeroBubble", FOUR_STAGES],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {name: (4, 1, [*DEBUG, *arguments]) for name, arguments in CASES.items()}
    return dry_runs(cases, tmp_path_factory.mktemp("dry"))


def close_to_the_plan(run: dict[str, Any]) -> None:
    """States within 3 %; activations, which planner and dry run come to on quite different ways, within 5."""
    most, planned = run["most"], run["planned"]
    for kind in ("parameters", "gradients", "optimizer"):
        assert planned[kind] == pytest.approx(most[kind], rel=0.03), kind
    assert planned["activations"] == pytest.approx(most["activations"], rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_the_planner_says_the_same(runs, name: str) -> None:
    close_to_the_plan(runs[name])


@pytest.mark.slow
def test_every_mesh_and_schedule_runs_and_is_close_to_the_plan(tmp_path: Path) -> None:
    found = dry_runs({name: (4, 3, [*DEBUG, *arguments]) for name, arguments in OTHERS.items()}, tmp_path)
    for run in found.values():
        close_to_the_plan(run)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(path.name for path in (REPO / "train_configs").glob("*.toml")))
def test_every_configuration_that_is_shipped_runs_at_its_size(tmp_path: Path, path: str) -> None:
    arguments = [f"train_configs/{path}", "--training.mixed_precision_param=bfloat16"]
    gpus = config_file.load(arguments).plan.gpus or 2
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = dry_runs({"it": (gpus, gpus - 1, arguments)}, tmp_path)["it"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 5 * 60 and after.ru_maxrss < 16 * 2**20  # s of processor time, KiB
    for kind in ("parameters", "gradients", "optimizer"):
        assert run["planned"][kind] == pytest.approx(run["most"][kind], rel=0.03), kind


def test_accumulation_holds_whole_gradients_and_runs_two_microbatches(runs) -> None:
    run = runs["fsdp4_ep2"]
    assert run["microbatches"] == 2 and run["place"] == {"dp_shard": 1, "ep": 1, "efsdp": 0}
    # In fp32, of all layers: four times the shard, or of the experts twice.
    assert run["most"]["unreduced gradients"] > 2 * run["most"]["gradients"]


def test_collectives_of_expert_parallelism_move_the_mean_load(runs) -> None:
    calls = {(op, axes, ranks): (count, size) for op, axes, ranks, count, size in runs["fsdp4_ep2"]["collectives"]}
    count, size = calls["all-to-all", "ep", 2]
    # Each of 3 layers and 2 microbatches plans with two exchanges, and moves rows four times, twice with weights.
    assert count == 3 * 2 * (2 + 4 + 2)
    tokens = 2 * SEQUENCE
    rows = 3 * 2 * 4 * tokens * WIDTH * 2  # at most, in bf16: a token goes to one rank or two
    numbers = 3 * 2 * 3 * tokens * TOP_K * 4  # row numbers, weights and their gradients
    assert 1.5 * rows + numbers < size < 2 * rows + 1.1 * numbers


def test_a_pipeline_sends_as_many_microbatches_as_it_takes_to_fill_it(runs) -> None:
    run = runs["pp2_1f1b"]
    assert run["microbatches"] == 8 and run["place"] == {"pp": 0, "dp_shard": 1, "ep": 1}
    calls = {(op, axes): (count, size) for op, axes, _, count, size in run["collectives"]}
    each = SEQUENCE * WIDTH * 2
    assert calls["send", "pp"] == calls["receive", "pp"] == (8, 8 * each)
    assert run["most"]["pipeline's buffers"] == 2 * each, "the gradient that backward takes, and the one before"


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def test_the_report(runs) -> None:
    text = runs["fsdp4_ep2"]["report"]
    assert "rank 1 of 4: dp_shard 1, ep 1" in text and "2 of 3 microbatches of 2 x 512 tokens" in text
    assert "Not run: data, validation, checkpoints, torch.compile" in text
    for line in ("parameters", "gradients", "optimizer", "activations", "together", "all-to-all", "reduce-scatter"):
        assert f"\n  {line} " in text, text
    assert "1F1B, stages of this rank: 0 (2 layers)" in runs["pp2_1f1b"]["report"]
    assert "activation offload (what is counted stays on the device)" in runs["pp2_1f1b"]["report"]


@pytest.mark.parametrize(
    ("env", "words", "told"),
    [
        ({"NGPU": "4", "RANK": "4"}, [], "RANK = '4' in the environment: which rank to look at; choose one of 0 to"),
        ({"NGPU": "4", "RANK": "-1"}, [], "NNODES x NGPU - 1 = 1 x 4 - 1 = 3"),
        ({"NGPU": "many"}, [], "NGPU = 'many' in the environment: must be a whole number"),
        ({}, ["--training.mixed_precision_param=float32"], "a loop over the tokens of each, which a dry run does not"),
        ({}, ["--moe.experts=loop"], 'moe.experts = "loop": on a GPU'),
        ({"NGPU": "2"}, [EP2, "--moe.dispatcher=te_ep"], 'use "dedup", which moves the same rows'),
        (
            {},
            ["--precision.recipe=mxfp8", "--precision.backend=te"],
            "kernels of a library, which a dry run does not see",
        ),
        ({}, ["--checkpoint.create_seed_checkpoint"], "a dry run has no weights to save"),
        ({"NGPU": "6"}, ["--parallelism.expert_parallel_degree=4"], "must divide data_parallel_shard_degree = 6"),
        ({}, ["--comm.mode=local_tensor"], "comm.mode"),
    ],
)
def test_what_cannot_be_run_is_refused_before_torch_is_there(capsys, env, words, told) -> None:
    assert main([*DEBUG, *words], env) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and "Traceback" not in err


def test_mistakes_of_the_environment_and_of_the_file_come_together(capsys) -> None:
    assert main([*DEBUG, "--training.steps=0"], {"NGPU": "2", "RANK": "7"}) == 2
    err = capsys.readouterr().err
    assert "RANK" in err and "training.steps = 0" in err


def test_a_rank_is_one_of_all_nodes() -> None:
    problems: list[str] = []
    assert place({"NNODES": "32", "NGPU": "8", "RANK": "255"}, None, problems) == (256, 255) and not problems
    assert place({}, None, problems) == (1, 0) and not problems


def test_without_a_number_there_are_as_many_ranks_as_the_file_is_for(capsys) -> None:
    problems: list[str] = []
    assert place({"RANK": "255"}, 256, problems) == place({"NNODES": "32", "RANK": "255"}, 256, problems) == (256, 255)
    assert place({"NGPU": "8"}, 256, problems) == (8, 0) and not problems
    assert main(["train_configs/deepseek_v3_671b.toml"], {"RANK": "256"}) == 2
    assert "choose one of 0 to NNODES x NGPU - 1 = 1 x 256 - 1 = 255" in capsys.readouterr().err
