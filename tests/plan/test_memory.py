"""Memory: published layer tables and peaks, and the bytes of real steps of this repository's model."""

import json
from dataclasses import replace

import pytest

from tests.distributed.cases import LAYERS, PP2, SCHEDULE
from tests.distributed.harness import forked, free_port
from tests.dry_run.harness import dry_runs
from titan_moe import config_file, flavors, offload_check, recompute_facts
from titan_moe.plan import activations, memory_runs, parameters
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.memory import activations_held, entries_of_rank, in_flight, predict_memory
from titan_moe.plan.model_states import states
from titan_moe.plan.published import RUNS, read, runs_of

MIB = 2**20
DEEPSEEK = flavors.FLAVORS["671B"]


def megatron(model=DEEPSEEK, hardware="B200", gpus=256, ep=8, **settings) -> Job:
    return memory_runs.job_of(model, hardware, gpus, ep=ep, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Published figures

# One MoE layer of DeepSeek-V3, one microbatch of 4,096 tokens, BF16, balanced, routing weights on the output: MiB.
LAYER_TABLE = {
    "layer input": 56,
    "attention norm": 56,
    "query latent and its norm": 24,
    "key/value latent and its norm": 8,
    "query": 192,
    "key": 192,
    "value": 128,
    "attention output": 128,
    "residual": 56,
    "feed-forward norm": 56,
    "shared gate and up": 32,
    "shared activation": 16,
    "router": 2,
    "row map": 8,
    "expert input": 448,
    "expert gate and up": 256,
    "expert activation": 128,
    "expert output": 448,
}


def layer_mib(job: Job) -> dict[str, float]:
    return {item.name: item.size / MIB for item in activations.kept(job, activations.layer(job, "moe"))}


def test_a_deepseek_layer_keeps_what_was_published():
    """Each item within 3 % of the table (which rounds 8.5 to 8), the layer within 3 % in BF16 and in FP8."""
    job = megatron(early_weighting=False)
    items = layer_mib(job)
    for name, mib in LAYER_TABLE.items():
        assert items.pop(name) == pytest.approx(mib, rel=0.03, abs=0.5), name
    assert list(items) == ["log-sum-exp"]
    assert sum(layer_mib(job).values()) == pytest.approx(2236, rel=0.03)
    assert sum(layer_mib(replace(job, precision="mxfp8")).values()) == pytest.approx(1924, rel=0.03)


@pytest.mark.parametrize(
    ("change", "saved"),
    [
        ({"recompute": frozenset({"mla_up_proj"})}, 512),
        ({"early_weighting": True}, 448),
        ({"offload": frozenset({"moe_expert_input"})}, 448),
        ({"recompute": frozenset({"swiglu"})}, 144),
        ({"recompute": frozenset({"norms"})}, 112),
        ({"recompute": frozenset({"shared_expert"})}, 48),
    ],
)
def test_what_recompute_and_offload_save_in_a_deepseek_layer(change: dict, saved: float):
    job = megatron(early_weighting=False)
    after = layer_mib(replace(job, **change))
    assert sum(layer_mib(job).values()) - sum(after.values()) == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("peak", memory_runs.published_peaks(), ids=lambda peak: peak.name)
def test_published_peaks(peak: memory_runs.PublishedPeak):
    if peak.scored:
        assert peak.error == pytest.approx(0, abs=0.07)
    else:
        assert peak.assumed, "what keeps it from being scored is said"


def test_hybridep_buffers_have_room_for_all_tokens_of_all_ranks():
    job = megatron(ep=64, dispatcher="hybridep")
    (buffers,) = (entry.size for entry in predict_memory(job).entries if entry.name == "hybridep buffers")
    assert buffers == pytest.approx(3.75e9, rel=0.01)


def te_ep_entries(**settings) -> dict[str, float]:
    job = megatron(ep=64, hardware="GB200", dispatcher="te_ep", **settings)
    return {entry.name: entry.size for entry in predict_memory(job).entries if entry.name.startswith("te_ep")}


def test_nccl_ep_assumes_the_worst_of_exact_sizes():
    """64 ranks of 4,096 tokens, top-8, rows of 14,336 bytes: 262,144 tokens that are staged twice, and 8 times as many
    slots, each with as much room for scales again, and 256 probabilities twice. A routing takes of each slot 4 flags
    and 8 places and weights, and there is one for each of 58 MoE layers."""
    exact, fixed = te_ep_entries(), te_ep_entries(recv_buffer=1.5)
    tokens = 64 * 4096
    assert exact["te_ep staging"] == 2 * tokens * 14336 + 8 * tokens * (14336 + 2 * 256 * 4)
    assert exact["te_ep staging"] > 4 * fixed["te_ep staging"] > 8 * tokens * 14336
    by_token = tokens * 16 + 4096 * (256 * 4 + 64)
    assert exact["te_ep routings"] == 58 * (8 * tokens * 68 + by_token)
    assert fixed["te_ep routings"] == 58 * (1.5 * 4096 * 8 * 68 + by_token)
    worst = te_ep_entries(recv_buffer="worst_case")["te_ep staging"]
    assert fixed["te_ep staging"] < worst < exact["te_ep staging"]


def test_published_runs_fit_their_hardware():
    """They did run. Two do not here: DeepSeek's own recomputed more than the file says (arXiv 2412.19437, 3.2.3), and
    Qwen3-30B's overlap keeps a second microbatch of four sequences, less whatever its full graph recomputed."""
    too_big = set()
    for run in runs_of(read(RUNS)):
        job, row = run.job, run.row.fields
        if row["source"].startswith("Megatron-Bridge") and row["model"].startswith("DeepSeek"):
            # Its DeepSeek-V3 recipes: use_precision_aware_optimizer with BF16 gradients and moments.
            job = replace(job, grad_dtype="bfloat16", moment_dtype="bfloat16")
        if not predict_memory(job).fits:
            too_big.add((row["model"], row["hardware"], row["a2a_overlap"]))
    assert too_big == {("DeepSeek-V3 671B", "H800", "yes (DualPipe)"), ("Qwen3-30B-A3B", "GB200", "yes")}


def test_parameter_counts_are_the_published_ones():
    assert parameters.total(DEEPSEEK) == pytest.approx(671.03e9, rel=1e-4)
    assert parameters.total(replace(DEEPSEEK, num_mtp_layers=1)) == pytest.approx(682.5e9, rel=1e-3)
    without_embedding = parameters.total(DEEPSEEK, active=True) - parameters.of_embedding(DEEPSEEK)
    assert without_embedding == pytest.approx(36.6e9, rel=1e-3)
    assert parameters.total(flavors.PUBLISHED["Mixtral-8x7B"]) == pytest.approx(46.7e9, rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# How it depends on the layout


def test_zero1_states_are_6_plus_12_over_the_shards():
    job = megatron(gpus=8, ep=1)
    size = sum(entry.size for entry in states(job, rank=0))
    assert size / parameters.total(DEEPSEEK) == pytest.approx(6 + 12 / 8)


def test_pipelines_hold_what_their_schedule_has_in_flight():
    first, last = (in_flight(megatron(pp=8), rank) for rank in (0, 7))
    assert (first, last) == ({(8,)}, {(1,)})
    # Two stages per rank, rank 0: 8 microbatches of its first stage, then 8 of its second, then 7 more of the first;
    # and one more of that after the first backward, which is one of the second.
    assert in_flight(megatron(pp=8, vp=2), 0) == {(15, 8), (16, 7)}
    assert max(in_flight(megatron(pp=8, vp=2), 7)) == (9, 0)
    assert in_flight(megatron(pp=8, vp=2, schedule="DualPipeV"), 3) == {(13, 4)}
    assert in_flight(megatron(pp=8, global_batch_size=64), 0) == {(2,)}


def test_of_unequal_stages_the_worst_moment_counts():
    """Layers [1, 1, 2, 0] on two ranks: the second has three microbatches of its one layer, or two and one of none."""
    words = [PP2, f"{SCHEDULE}=Interleaved1F1B", "--training.local_batch_size=8", f"{LAYERS}=[1, 1, 2, 0]"]
    job = Job.from_config(config_file.load(["train_configs/debug_model.toml", *words]), 2, HARDWARE["H100"])
    assert in_flight(job, 1) == {(3, 0), (2, 1)}
    items = {entry.name: entry.size for entry in activations_held(job, 1)}
    layer = {item.name: item.size for item in activations.layer(job, "moe")}
    assert items["residual"] == 3 * layer["residual"]


def test_what_is_received_ahead_is_one_of_this_trainers_buffers():
    """The first rank of an interleaved pipeline of 16 has a round of 16 microbatches waiting for its second stage."""
    job = megatron(pp=16, vp=2, schedule="Interleaved1F1B", sharding="fsdp", global_batch_size=1024)
    (received,) = (entry.size for entry in entries_of_rank(job, 0) if entry.group == "pipeline's buffers")
    assert received == 16 * job.tokens * 2 * DEEPSEEK.dim
    other = entries_of_rank(replace(job, sharding="zero1"), 0)
    assert "pipeline's buffers" not in {entry.group for entry in other}


def test_recompute_keeps_what_both_hops_received():
    """4,096 tokens x 3.95 nodes of 8 x 14 KiB; sent again it is not kept, and without recompute nothing needs it."""
    job = megatron(ep=64, sharding="fsdp", dispatcher="dedup", ranks_per_node=8, recompute_mode="full")
    assert layer_mib(job)["rows of the first hop"] == pytest.approx(221, abs=1)
    assert "rows of the first hop" not in layer_mib(replace(job, redispatch=True))
    assert layer_mib(replace(job, recompute_mode="none"))["rows of the first hop"] == 0


def test_accumulation_keeps_whole_gradients_with_fsdp():
    job = megatron(ep=64, sharding="fsdp", param_dtype="float32", global_batch_size=256)
    one, two = predict_memory(job), predict_memory(replace(job, global_batch_size=512))
    whole = parameters.total(DEEPSEEK) - 58 * parameters.of_layer(DEEPSEEK, "moe")["routed experts"] * 63 / 64
    groups, more = one.by_group(), two.by_group()
    assert "gradients" not in groups, "sharded gradients come as activations go"
    assert more["unreduced gradients"] - groups["unreduced gradients"] == pytest.approx(4 * whole)
    assert more["activations"] == groups["activations"] and two.allocated > one.allocated + 3.8 * whole


def test_reducing_every_microbatch_keeps_only_shards():
    job = megatron(ep=64, sharding="fsdp", param_dtype="float32", global_batch_size=512)
    reduced = predict_memory(replace(job, reduce_every_microbatch=True)).by_group()
    (shards,) = (entry.size for entry in states(job, rank=0) if entry.group == "gradients")
    one = predict_memory(replace(job, global_batch_size=256)).by_group()
    assert {**one, "gradients": shards} == reduced, "as without accumulation, and the shards of the microbatch before"


OFFLOADABLE = ("layer_input", "attn_q", "attn_k", "attn_v", "attn_out", "moe_expert_input")


@pytest.mark.parametrize("name", OFFLOADABLE)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_offloading_moves_what_the_start_up_report_says(name: str, kind: parameters.Kind):
    """And frees as much, but for values, which free the keys that they are a view beside; half an alignment of rows
    per expert is padding."""
    options = ["--parallelism.expert_parallel_degree=64", f"--activation_offload.tensors={name}"]
    config = config_file.load(["train_configs/deepseek_v3_671b.toml", *options, "--activation_checkpoint.recompute="])
    job = Job.from_config(config, 256, HARDWARE["GB300"])
    assert job.offload == {name}
    items = activations.layer(job, kind)
    said = offload_check.offloaded_bytes(config, job.model, 2, moe=kind == "moe")[name]
    padding = 256 / 64 * 64 * 2 * job.model.dim if said and name == "moe_expert_input" else 0
    assert activations.moved(job, items) == pytest.approx(said + padding)
    before, after = (sum(i.size for i in activations.kept(j, items)) for j in (replace(job, offload=frozenset()), job))
    assert before - after == pytest.approx((said + padding) * (2 if name == "attn_v" else 1))


def test_what_is_recomputed_is_not_moved_and_what_it_keeps_is():
    job = megatron(ep=64, sharding="fsdp", dispatcher="dedup", recompute_mode="full", offload=frozenset(OFFLOADABLE))
    items = {item.name: item.size for item in activations.layer(job, "moe")}
    assert activations.moved(job, activations.layer(job, "moe")) == items["layer input"] + items["received rows"]
    job = replace(job, redispatch=True)
    assert activations.moved(job, activations.layer(job, "moe")) == items["layer input"]


def test_a_layer_more_of_what_is_offloaded_is_on_its_way_and_a_pipeline_keeps_its_stages_inputs():
    options = ["--activation_offload.tensors=layer_input"]
    config = config_file.load(["train_configs/deepseek_v3_671b_b200.toml", *options])
    moves = Job.from_config(config, 256, HARDWARE["B200"])
    before, after = (
        {e.name: e.size for e in entries_of_rank(each, 1)} for each in (replace(moves, offload=frozenset()), moves)
    )
    hidden_states = 2.0 * moves.tokens * DEEPSEEK.dim
    assert (before["offloaded, on its way"], after["offloaded, on its way"]) == (0, hidden_states)
    assert [(stage.embedding, stage.layers) for stage in moves.stages_of_rank(1)] == [(False, 2)] * 2
    assert before["layer input"] == 2 * after["layer input"] > 0


@pytest.mark.parametrize("part", ["mla_up_proj", "swiglu", "norms", "shared_expert"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_recompute_saves_what_the_start_up_report_says(part: str, kind: parameters.Kind):
    job = megatron(ep=64, sharding="fsdp", param_dtype="float32")
    sizes = [
        sum(item.size for item in activations.kept(each, activations.layer(each, kind)))
        for each in (job, replace(job, recompute=frozenset({part})))
    ]
    assert sizes[0] - sizes[1] == recompute_facts.saved_bytes(DEEPSEEK, job.tokens, 2, [part], moe=kind == "moe")


# ---------------------------------------------------------------------------------------------------------------------
# Measured

CASE = ["train_configs/debug_model.toml", "--training.dataset=synthetic", "--validation.no_enable"]
CASE += ["--training.mixed_precision_param=bfloat16"]
CASE += ["--metrics.no_enable_tensorboard", "--training.local_batch_size=2", "--training.seq_len=256"]
MOMENTS = "--optimizer.moments_dtype=bfloat16"
CASES = {
    "selective": ["--activation_checkpoint.mode=selective", "--loss.num_chunks=4"],
    "ep": ["--activation_checkpoint.mode=none", "--parallelism.expert_parallel_degree=2"],
    "gqa": ["--model.name=qwen3", "--activation_checkpoint.mode=none", "--loss.num_chunks=4", MOMENTS],
    "gqa_selective": ["--model.name=mixtral", "--activation_checkpoint.mode=selective"],
    "ep_offload": [
        *("--activation_checkpoint.mode=none", "--parallelism.expert_parallel_degree=2"),
        f"--activation_offload.tensors={','.join(OFFLOADABLE)}",
    ],
    "ep_muon": ["--activation_checkpoint.mode=none", "--parallelism.expert_parallel_degree=2", "--optimizer.name=Muon"],
    "ep_full": ["--activation_checkpoint.mode=full", "--parallelism.expert_parallel_degree=2"],
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, dict[str, int]]:
    out = tmp_path_factory.mktemp("memory")
    (out / "cases.json").write_text(json.dumps({name: (free_port(), [*CASE, *case]) for name, case in CASES.items()}))
    finished = forked(2, "tests/plan/measure_memory.py", str(out))
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    return {name: json.loads((out / f"{name}.json").read_text()) for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_real_steps_hold_what_is_planned(measured, name: str):
    """On a CPU: parameters, gradients and moments to the byte, activations within 2 %."""
    job = Job.from_config(config_file.load([*CASE, *CASES[name]]), 2, HARDWARE["H100"])
    real = measured[name]
    sizes = {entry.group: entry.size for entry in states(job, rank=0)}
    assert sizes == {"parameters": real["parameters"], "gradients": real["gradients"], "optimizer": real["moments"]}
    planned = sum(entry.size for entry in activations_held(job, 0, activations.CPU))
    last_layer = activations.layer(job, "moe", activations.CPU)
    planned += activations.moved(job, last_layer)  # has not left when forward ends
    assert planned == pytest.approx(real["activations"], rel=0.02)


def test_a_dry_run_counts_what_a_real_step_holds(measured, tmp_path):
    """FSDP 2 with EP 2: parameters, gradients and optimizer state within 1 %. A dry run counts whole storages: padding
    of uneven shards too, and Adam's step counts."""
    found = dry_runs({"ep": (2, 0, [*CASE, *CASES["ep"]])}, tmp_path)["ep"]["most"]
    real = measured["ep"]
    states = {"parameters": real["parameters"], "gradients": real["gradients"], "optimizer": real["moments"]}
    assert {kind: found[kind] for kind in states} == pytest.approx(states, rel=0.01)
