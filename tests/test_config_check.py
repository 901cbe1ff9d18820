"""What is refused about meshes, sequences and pipelines, sentence by sentence; and that torch and torchtitan agree."""

from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.distributed import ParallelDims

from titan_moe import config_file, mesh_check
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.mesh_check import (
    data_parallel_degree,
    gradient_accumulation_steps,
    microbatch_size,
    microbatches_per_step,
    sequences_per_step,
)
from titan_moe.pipeline_layout import V_SHAPED, default_stages

DP, HSDP = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
EP, TP = "parallelism.expert_parallel_degree", "parallelism.tensor_parallel_degree"
CP, PP = "parallelism.context_parallel_degree", "parallelism.pipeline_parallel_degree"
SCHEDULE, LAYERS = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_layers_per_stage"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
LOCAL, GLOBAL, LENGTH = "training.local_batch_size", "training.global_batch_size", "training.seq_len"


def read(words: str = "") -> Config:
    """The debug model: 4 layers, 4 heads, 8 experts, 8 sequences of 128 tokens per rank, with `words` changed."""
    return config_file.load(["train_configs/debug_model.toml", *(f"--{word}" for word in words.split())])


def problems(words: str, world: int, accelerator: bool = False) -> list[str]:
    return check(read(words), world, accelerator=accelerator)


REFUSED = [
    # degrees
    (
        f"{TP}=2 {CP}=2",
        6,
        "parallelism.context_parallel_degree x tensor_parallel_degree = 2 x 2 = 4: must divide the 6 processes (nodes "
        "x processes per node); lower one of them, or start a multiple of 4",
    ),
    (
        f"{PP}=2",
        5,
        "parallelism.pipeline_parallel_degree = 2: must divide the 5 processes (nodes x processes per node); choose "
        "one of 1, 5",
    ),
    (
        f"{TP}=2 {DP}=4",
        4,
        "parallelism.data_parallel_shard_degree = 4: data_parallel_replicate_degree x it x tensor_parallel_degree = "
        "1 x 4 x 2 = 8, but there are 4 processes (nodes x processes per node); start 8, or choose -1 for all that are "
        "left",
    ),
    (
        f"{HSDP}=2 {DP}=4 {PP}=2",
        6,
        "parallelism.data_parallel_shard_degree = 4: data_parallel_replicate_degree x it x pipeline_parallel_degree = "
        "2 x 4 x 2 = 16, but there are 6 processes (nodes x processes per node); start 16, or lower a degree",
    ),
    # experts
    (
        f"{EP}=8 {TP}=2",
        4,
        "parallelism.expert_parallel_degree = 8: must divide data_parallel_shard_degree x tensor_parallel_degree = "
        "2 x 2 = 4; choose one of 1, 2, 4",
    ),
    (
        f"{EP}=16 {PP}=2",
        64,
        "parallelism.expert_parallel_degree = 16: must divide model.num_experts = 8; choose one of 1, 2, 4, 8",
    ),
    (
        "",
        12,
        "parallelism.data_parallel_shard_degree = 12: FSDP would cut each expert into 12 pieces, because 12 ranks are "
        "more than model.num_experts = 8, but 12 does not divide model.moe_hidden_dim = 256 and model.dim = 256; "
        "choose other degrees: more of expert_parallel_degree leaves fewer pieces",
    ),
    # heads and widths
    (f"{TP}=8", 8, "parallelism.tensor_parallel_degree = 8: must divide model.n_heads = 4; choose one of 1, 2, 4"),
    (
        f"{TP}=2 model.vocab_size=289",
        2,
        "parallelism.tensor_parallel_degree = 2: must divide model.vocab_size = 289; choose one of 1",
    ),
    (
        f"{TP}=4 model.moe_hidden_dim=250 model.dense_hidden_dim=766",
        4,
        "parallelism.tensor_parallel_degree = 4: must divide model.dense_hidden_dim = 766 and model.moe_hidden_dim x "
        "num_shared_experts = 250 and model.moe_hidden_dim = 250; choose one of 1, 2",
    ),
    (
        f"{TP}=4 {EP}=4 model.moe_hidden_dim=250",
        4,
        "parallelism.tensor_parallel_degree = 4: must divide model.moe_hidden_dim x num_shared_experts = 250; choose "
        "one of 1, 2",
    ),
    # sequences
    (
        f"{CP}=4 {LENGTH}=100",
        4,
        "training.seq_len = 100: must be a multiple of 2 (headtail) x context_parallel_degree = 2 x 4 = 8; choose 96 "
        "or 104",
    ),
    (
        f"{CP}=3 {TP}=2 {LENGTH}=4 parallelism.context_parallel_load_balancer=none",
        6,
        "training.seq_len = 4: must be a multiple of context_parallel_degree x tensor_parallel_degree = 3 x 2 = 6; "
        "choose 6",
    ),
    (
        f"{TP}=4 {LENGTH}=102",
        4,
        "training.seq_len = 102: must be a multiple of tensor_parallel_degree = 4; choose 100 or 104",
    ),
    # multi-token prediction
    (
        f"model.num_mtp_layers=1 {PP}=2",
        2,
        "model.num_mtp_layers = 1: multi-token prediction needs the embedding where the last layer is, which "
        "torchtitan 0.3.0 does not do across parallelism.pipeline_parallel_degree = 2 ranks; choose num_mtp_layers = "
        "0, or pipeline_parallel_degree = 1",
    ),
    (
        f"model.num_mtp_layers=1 {CP}=2",
        2,
        "model.num_mtp_layers = 1: multi-token prediction shifts whole sequences, which torchtitan 0.3.0 does not do "
        "across parallelism.context_parallel_degree = 2 ranks; choose num_mtp_layers = 0, or context_parallel_degree = "
        "1",
    ),
    (
        f"model.num_mtp_layers=8 {LENGTH}=8",
        1,
        "model.num_mtp_layers = 8: must be less than training.seq_len = 8, because the last of them predicts that many "
        "tokens further ahead",
    ),
    # stages
    (
        f"{PP}=2 {SCHEDULE}=ZBVZeroBubble model.n_layers=2 {LOCAL}=8",
        2,
        "parallelism.pipeline_parallel_degree = 2: ZBVZeroBubble makes 2 x 2 = 4 stages, but model.n_layers = 2; "
        "choose at most 1",
    ),
    (
        f"{PP}=5 {LOCAL}=8",
        5,
        "parallelism.pipeline_parallel_degree = 5: 1F1B makes 5 x 1 = 5 stages, but model.n_layers = 4; choose at most "
        "4, or give the last stage 0 in pipeline_parallel_layers_per_stage",
    ),
    (
        f"{LAYERS}=2,2",
        1,
        "parallelism.pipeline_parallel_layers_per_stage = [2, 2]: lays out a pipeline, but pipeline_parallel_degree = "
        "1; leave it out, or raise it",
    ),
    (
        f"{PP}=2 {LAYERS}=1,1,2",
        2,
        "parallelism.pipeline_parallel_layers_per_stage = [1, 1, 2]: has 3 stages, but 1F1B has one per rank: "
        "pipeline_parallel_degree = 2; give 2",
    ),
    (
        f"{PP}=2 {SCHEDULE}=DualPipeV {LAYERS}=2,2",
        2,
        "parallelism.pipeline_parallel_layers_per_stage = [2, 2]: has 2 stages, but DualPipeV has two per rank: 2 x "
        "pipeline_parallel_degree = 2 x 2 = 4; give 4",
    ),
    (
        f"{PP}=2 {SCHEDULE}=Interleaved1F1B {LAYERS}=2,2",
        2,
        "parallelism.pipeline_parallel_layers_per_stage = [2, 2]: has 2 stages, but Interleaved1F1B has two or more on "
        "every rank: a multiple of pipeline_parallel_degree = 2, at least 4",
    ),
    (
        f"{PP}=2 {LAYERS}=1,4",
        2,
        "parallelism.pipeline_parallel_layers_per_stage = [1, 4]: 1 + 4 = 5 layers, but model.n_layers = 4; give each "
        "layer to one stage",
    ),
    (
        f"{PP}=2 {LAYERS}=5,-1",
        2,
        "parallelism.pipeline_parallel_layers_per_stage = [5, -1]: -1 layers cannot be; give 0 or more",
    ),
    (
        f"{PP}=2 {SCHEDULE}=Interleaved1F1B {LAYERS}=0,3,0,1",
        2,
        "parallelism.pipeline_parallel_layers_per_stage = [0, 3, 0, 1]: stage 1, 3, counted from 1, has no layers; "
        "only the last, which has the head, may have 0",
    ),
    # microbatches
    (
        f"{PP}=2 {MICROBATCH}=3",
        2,
        "parallelism.pipeline_parallel_microbatch_size = 3: must divide training.local_batch_size = 8; choose one of "
        "1, 2, 4, 8",
    ),
    (
        f"{PP}=2 {SCHEDULE}=DualPipeV {LOCAL}=6 {MICROBATCH}=2",
        2,
        'parallelism.pipeline_parallel_schedule = "DualPipeV": needs at least a microbatch per stage, 4, but a step '
        "has local_batch_size / microbatch_size x accumulation = 6 / 2 x 1 = 3; raise training.global_batch_size or "
        "local_batch_size, or lower pipeline_parallel_microbatch_size",
    ),
    (
        f"{PP}=2 {SCHEDULE}=InterleavedZeroBubble {LOCAL}=1 {GLOBAL}=5",
        2,
        'parallelism.pipeline_parallel_schedule = "InterleavedZeroBubble": runs microbatches in equal rounds of at '
        "least pipeline_parallel_degree = 2, but a step has local_batch_size / microbatch_size x accumulation = "
        "1 / 1 x 5 = 5; 2 rounds do not divide them; choose 4 or 6 by training.global_batch_size, local_batch_size or "
        "pipeline_parallel_microbatch_size",
    ),
    # compile
    (
        f"{PP}=2 {SCHEDULE}=ZBVZeroBubble activation_checkpoint.mode=none compile.enable",
        2,
        "compile.components = ['model', 'loss']: ZBVZeroBubble runs backward in two halves, which torch cannot do with "
        'a compiled model; choose ["loss"], or parallelism.pipeline_parallel_schedule = "1F1B" or "Interleaved1F1B"',
    ),
    (
        f"{PP}=2 {SCHEDULE}=DualPipeV parallelism.fsdp_reshard_after_forward=always",
        2,
        'parallelism.fsdp_reshard_after_forward = "always": DualPipeV runs backward in two halves, which loses '
        'gradients of parameters that were freed after forward; choose "default" or "never", or '
        'pipeline_parallel_schedule = "1F1B" or "Interleaved1F1B"',
    ),
]


@pytest.mark.parametrize(("words", "world", "sentence"), REFUSED)
def test_refused_in_these_words(words, world, sentence):
    assert problems(words, world) == [sentence]


def test_flex_attention_hands_out_whole_blocks_of_a_sequence():
    words = f"{CP}=2 {LENGTH}=320"
    assert problems(words, 2) == []
    assert problems(words, 2, accelerator=True) == [
        "training.seq_len = 320: must be a multiple of context_parallel_degree x 128 = 2 x 128 = 256 on an "
        "accelerator, whose FlexAttention masks whole blocks; choose 256 or 512"
    ]
    assert problems(f"{CP}=2 {LENGTH}=512", 2, accelerator=True) == problems(f"{LENGTH}=320", 2, accelerator=True) == []


def test_what_does_not_fit_comes_all_at_once():
    words = f"{TP}=8 {CP}=3 {PP}=2 {SCHEDULE}=DualPipeV {LAYERS}=1,0,9 {MICROBATCH}=3 model.num_mtp_layers=1 {EP}=3"
    found = problems(words, 7)
    assert [problem.split(":")[0].split(" =")[0] for problem in found] == [
        "parallelism.context_parallel_degree x tensor_parallel_degree x pipeline_parallel_degree",
        "parallelism.expert_parallel_degree",
        "parallelism.tensor_parallel_degree",
        "training.seq_len",
        *["model.num_mtp_layers"] * 2,
        *[LAYERS] * 3,
        MICROBATCH,
    ]


@pytest.mark.parametrize(
    ("words", "world"),
    [
        (f"{HSDP}=2 {DP}=2 {EP}=2 {TP}=2 {CP}=2 {PP}=2", 32),
        (f"{EP}=8 {TP}=2 {CP}=2", 8),  # experts on data, context and tensor ranks
        (f"{DP}=1 {EP}=2 {TP}=2", 2),
        (f"{PP}=2 {SCHEDULE}=Interleaved1F1B {LAYERS}=1,1,1,1,1,0 model.n_layers=5", 2),
        (f"{PP}=2 {SCHEDULE}=Interleaved1F1B {LOCAL}=1", 2),  # fewer microbatches than stages: slow, but right
        (f"{PP}=2 {SCHEDULE}=DualPipeV {LOCAL}=1 {GLOBAL}=4", 2),  # accumulation fills the pipeline
        (f"{PP}=2 {SCHEDULE}=DualPipeV activation_checkpoint.mode=none compile.enable compile.components=loss", 2),
        (f"{PP}=2 compile.enable", 2),
        (f"{CP}=2 {LENGTH}=66 parallelism.context_parallel_load_balancer=none", 2),
        (f"{SCHEDULE}=DualPipeV", 1),  # as in torchtitan 0.2's own files; without a pipeline it says nothing
    ],
)
def test_accepted(words, world):
    assert problems(words, world) == []


# ---------------------------------------------------------------------------------------------------------------------
# Agreement with torchtitan and torch


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=4), st.sampled_from([-1, 1, 2, 3]), st.integers(1, 64))
def test_degrees_fit_when_torchtitan_says_so(others, shard, world):
    config = Config()
    p = config.parallelism
    p.data_parallel_shard_degree = shard
    p.data_parallel_replicate_degree, p.context_parallel_degree, p.tensor_parallel_degree = others[:3]
    p.pipeline_parallel_degree = others[3]
    try:
        dims = ParallelDims(
            dp_replicate=others[0], dp_shard=shard, cp=others[1], tp=others[2], pp=others[3], ep=1, world_size=world
        )
    except AssertionError:
        assert mesh_check.degrees(config, world)
        return
    assert mesh_check.degrees(config, world) == []
    assert data_parallel_degree(config, world) == (dims.dp_replicate, dims.dp_shard)
    assert sequences_per_step(config, world) == 8 * dims.dp_replicate * dims.dp_shard


def torch_takes(schedule: str, pp: int, microbatches: int) -> bool:
    """Whether torch makes this schedule for rank 0."""
    stages = default_stages(schedule, pp)
    held = (0, stages - 1) if schedule in V_SHAPED else range(0, stages, pp)
    parts = [
        SimpleNamespace(
            stage_index=i, num_stages=stages, group_rank=0, group_size=pp, submod=None, is_first=i == 0, is_last=False
        )
        for i in held
    ]
    try:
        get_schedule_class(schedule)(parts[0] if schedule == "1F1B" else parts, microbatches, loss_fn=lambda: None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_microbatches_fit_when_torch_says_so(schedule):
    for pp in (2, 3, 4):
        for microbatches in range(1, 15):
            words = f"{PP}={pp} {SCHEDULE}={schedule} {LOCAL}={microbatches} model.n_layers=8"
            words += " activation_checkpoint.mode=none"
            assert (problems(words, pp) == []) is torch_takes(schedule, pp, microbatches), (pp, microbatches)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def test_only_data_parallel_ranks_have_sequences_of_their_own():
    """32 ranks as 2 copies of 2 shards x CP 2 x TP 2 x PP 2: 4 ranks with 8 sequences each; 96 per step are 3 passes,
    each 4 microbatches of 2 through the pipeline."""
    config = read(f"{HSDP}=2 {TP}=2 {CP}=2 {PP}=2 {GLOBAL}=96 {MICROBATCH}=2")
    assert data_parallel_degree(config, 32) == (2, 2)
    assert gradient_accumulation_steps(config, 32) == 3
    assert (microbatch_size(config), microbatches_per_step(config, 32)) == (2, 12)
    assert sequences_per_step(config, 32) == 96
    config.parallelism.pipeline_parallel_degree = 1
    assert (microbatch_size(config), microbatches_per_step(config, 16)) == (8, 3)
