import csv
from dataclasses import replace

import pytest

from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.flavors import FAMILIES
from titan_moe.plan import parameters, report, stages
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.published import RUNS

ROWS = list(csv.DictReader(RUNS.read_text().splitlines()))

QWEN = next(row for row in ROWS if (row["model"], row["hardware"], row["tp"]) == ("Qwen3-30B-A3B", "H100", "1"))

BF16 = "--training.mixed_precision_param=bfloat16"  # the debug file's own type has no rates in the planner


def row(**changes):
    """The DeepSeek-V3 run of release 26.06 with some columns changed."""
    return {**ROWS[1], **changes}


@pytest.mark.parametrize(
    ("layout", "layers", "ends"),
    [
        ("Et*4|(t*4|)*14tmL", 61, ("Etttt", "tmL")),
        ("Et|(tt|)*30mL", 61, ("Et", "mL")),
        ("Et*2|t*3|(tt|t|)*2tL", 12, ("Ett", "tL")),
    ],
)
def test_layout_strings_expand(layout, layers, ends):
    pieces = stages.expand(layout)
    assert (pieces[0], pieces[-1]) == ends
    assert sum(piece.count("t") for piece in pieces) == layers


@pytest.mark.parametrize("layout", ["Et*4|x", "Et(t|L", "Et*|L"])
def test_broken_layout_strings_are_refused(layout):
    with pytest.raises(ValueError, match="pp_layout"):
        stages.expand(layout)


def test_a_layout_that_does_not_fit_says_what_it_has_and_is_split_evenly():
    with pytest.raises(ValueError, match=r"16 stages, 61 layers and 1 MTP layers, but pp x vp = 32 stages"):
        stages.parse("Et*4|(t*4|)*14tmL", layers=61, n_dense=3, mtp=1, stages=32)
    job = Job.from_row(row(vp="16"))
    assert len(job.stages) == 32 and "an even split, because" in job.notes[0]


def test_dense_layers_come_first_and_the_ends_hold_embedding_and_head():
    job = Job.from_row(row())
    assert [s.dense for s in job.stages[:2]] == [3, 0]
    assert [s.layers for s in job.stages] == [4] * 15 + [2]
    assert job.stages[0].embedding and job.stages[-1].head and job.stages[-1].mtp == 1
    assert sum(s.layers for s in job.stages_of_rank(0)) == 32
    assert job.stage_indices(1) == list(range(1, 16, 2))


@pytest.mark.parametrize(("layers", "count", "mtp"), [(61, 32, 1), (61, 8, 0), (94, 48, 0), (48, 1, 0), (4, 6, 1)])
def test_even_splits_hold_every_layer(layers, count, mtp):
    split = stages.balanced(layers, count, 0, mtp)
    assert len(split) == count
    assert sum(s.moe for s in split) == layers and sum(s.mtp for s in split) == mtp
    weights = [s.layers + s.embedding + s.head * (1 + mtp) for s in split]
    assert max(weights[1:-1], default=0) - min(weights[1:-1], default=0) <= 1


def test_v_shaped_schedules_give_a_rank_one_stage_from_each_end():
    job = Job.from_row(ROWS[0])
    assert job.schedule == "DualPipeV" and job.stage_indices(0) == [0, 31] and job.stage_indices(15) == [15, 16]


def test_every_published_row_with_a_layout_gives_a_job():
    jobs = []
    for fields in ROWS:
        try:
            jobs.append(Job.from_row(fields))
        except LookupError as error:
            missing = [column for column in ("tp", "global_batch_size", "seq_len") if fields[column] == "-"]
            assert "no layout" in str(error) and missing
    assert len(jobs) == 29, "27 and two rungs of the ladder"
    for job in jobs:
        assert sum(s.dense + s.moe for s in job.stages) == job.model.n_layers
        assert job.microbatches * job.micro_batch_size * job.dp == job.global_batch_size


def test_columns_mean_what_they_say():
    job = Job.from_row(row())
    assert (job.precision, job.dispatcher, job.overlap, job.graphs) == (
        "mxfp8",
        "hybridep",
        "1f1b_delayed_wgrad",
        "full",
    )
    assert job.fp8_attention and job.fused_grouped_mlp and job.sync_free and job.comm_sms == 32
    assert (job.dp, job.edp, job.microbatches, job.tokens) == (128, 4, 32, 4096)
    assert Job.from_row(row(recompute="mla_up_proj+moe_act")).recompute == {"mla_up_proj", "swiglu"}
    assert Job.from_row(row(routing="forced round robin")).routing == "round_robin"


def test_missing_optional_columns_count_as_blank():
    needed = ["model", "hardware", "gpus", "precision", "global_batch_size", "seq_len", "tp", "pp", "ep"]
    job = Job.from_row({key: QWEN[key] for key in needed})
    assert (job.micro_batch_size, job.vp, job.overlap, job.dispatcher) == (1, 1, "none", "alltoall")


@pytest.mark.parametrize(("release", "taken"), [("26.03", "26.02"), ("27.01", "26.06"), ("nightly", "26.04")])
def test_an_unknown_release_is_taken_for_a_near_one_and_said(release, taken):
    job = Job.from_row(row(release=release))
    assert job.release == taken and any(release in note and taken in note for note in job.notes)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("gpus", "many", "gpus = 'many'"),
        ("seq_len", "nan", "seq_len"),
        ("tp", "-1", "tp"),
        ("micro_batch_size", "1.5", "whole number"),
        ("precision", "int3", "precision"),
        ("gpus", "255", "must be a multiple of tp x cp x pp"),
        ("vp", "1000000000", "2000000000 stages: more than the 64 pieces of the model"),
        ("ep", "7", "must divide the 256 experts"),
        ("global_batch_size", "4097", "must be a multiple"),
    ],
)
def test_bad_values_name_their_column(column, value, message):
    with pytest.raises(ValueError, match=message):
        Job.from_row(row(**{column: value}))


def test_unknown_models_are_listed_not_guessed():
    with pytest.raises(LookupError, match=r'model "GPT-9": its sizes are not known; known: .*Mixtral-8x22B'):
        Job.from_row(row(model="GPT-9"))


def config(**overrides) -> Config:
    arguments = [f"--{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return config_file.load(["train_configs/debug_model.toml", "--model.flavor=671B", BF16, *arguments])


def test_a_configuration_gives_the_run_it_would_make():
    job = Job.from_config(config(parallelism__expert_parallel_degree=64), 256, HARDWARE["GB300"])
    assert (job.sharding, job.dispatcher, job.dp_shard, job.ep, job.edp) == ("fsdp", "dedup", 256, 64, 4)
    assert job.reshard_after_forward and len(job.stages) == 1 and job.stages[0].moe == 58
    assert job.global_batch_size == job.micro_batch_size * 256


@pytest.mark.parametrize(("family", "flavor"), [(family, name) for family in FAMILIES for name in FAMILIES[family]])
def test_every_flavor_can_be_planned(family, flavor):
    """Tokens take their time, and memory is at least what the parameters need with their gradients and moments."""
    load = [f"--model.name={family}", f"--model.flavor={flavor}", "--training.seq_len=4096", BF16]
    load += ["--plan.hardware=GB300", "--plan.gpus=256", "--parallelism.expert_parallel_degree=2"]
    plan = report.make(config_file.load(["train_configs/debug_model.toml", *load]), "debug_model.toml")
    found, sizes = report.to_json(plan), FAMILIES[family][flavor]
    total, active = parameters.total(sizes), parameters.total(sizes, active=True)
    assert (found["model"], found["parameters"], found["active_parameters"]) == (f"{family} {flavor}", total, active)
    assert 0 < found["tokens_per_s_per_gpu"] < 1e9 and found["memory"]["allocated_bytes"] > 12 * total / 256


def test_a_configuration_with_an_impossible_layout_gives_the_trainers_own_error():
    with pytest.raises(config_file.ConfigError, match="expert_parallel_degree = 7: must divide"):
        Job.from_config(config(parallelism__expert_parallel_degree=7), 256, HARDWARE["GB300"])


def test_a_layout_that_does_not_add_up_is_refused():
    job = Job.from_row(row())
    with pytest.raises(ValueError, match="but there are 512 GPUs"):
        replace(job, gpus=512)
    with pytest.raises(ValueError, match="16 stages: must be pp x vp"):
        replace(job, vp=4)


@pytest.mark.parametrize(
    ("schedule", "stages_", "overlap", "first_rank"),
    [
        ("1F1B", 8, "none", [0]),
        ("Interleaved1F1B", 16, "none", [0, 8]),
        ("ZBVZeroBubble", 16, "none", [0, 15]),
        ("DualPipeV", 16, "none", [0, 15]),
    ],
)
def test_pipeline_schedules(schedule, stages_, overlap, first_rank):
    made = config(
        parallelism__pipeline_parallel_degree=8,
        parallelism__pipeline_parallel_schedule=schedule,
        parallelism__expert_parallel_degree=32,
        training__local_batch_size=16,
    )
    job = Job.from_config(made, 256, HARDWARE["GB300"])
    assert (job.pp, len(job.stages), job.overlap, job.stage_indices(0)) == (8, stages_, overlap, first_rank)
    assert (job.dp, job.micro_batch_size, job.microbatches) == (32, 1, 16)
    assert not job.reshard_after_forward


def test_layers_per_stage_are_taken_as_they_are():
    made = config(
        parallelism__pipeline_parallel_degree=4,
        parallelism__pipeline_parallel_layers_per_stage="[14,16,16,15]",
        training__local_batch_size=8,
        parallelism__expert_parallel_degree=8,
    )
    job = Job.from_config(made, 64, HARDWARE["GB300"])
    assert [s.layers for s in job.stages] == [14, 16, 16, 15] and job.stages[0].dense == 3
