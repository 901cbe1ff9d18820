"""What the planner makes of [precision]: which GEMMs are in low precision, and in which layers."""

from dataclasses import replace

import pytest

from titan_moe import config_file, flavors
from titan_moe.plan import constants, profiles
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.layer import MADE_OF, layer_kernels, linears
from titan_moe.plan.memory import predict_memory
from titan_moe.plan.step import KINDS, predict, tokens_per_s
from titan_moe.precision import layers

CONFIG = "tests/plan/deepseek_v3_671b.toml"
MXFP8 = "--precision.recipe=mxfp8"


def job_of(*words: str, gpus: int = 256) -> Job:
    return Job.from_config(config_file.load([CONFIG, *words]), gpus, HARDWARE["GB300"])


def low(job: Job) -> set[str]:
    """GEMMs that compute in low precision, of all kinds of layers."""
    return {linear.name for kind in KINDS for linear in linears(job, kind) if linear.precision(job) != "bf16"}


EXPERTS = {"experts gate and up", "experts down"}
ATTENTION = {"q down", "q up", "kv down", "kv up", "attention out"}
DENSE = {"MLP gate and up", "MLP down"}
SHARED = {"shared gate and up", "shared down"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], set()),
        (["--precision.recipe=bf16"], set()),
        ([MXFP8], EXPERTS | ATTENTION | DENSE | SHARED),
        ([MXFP8, "--precision.linears=[]"], EXPERTS),
        ([MXFP8, "--precision.experts=false"], ATTENTION | DENSE | SHARED),
        ([MXFP8, "--precision.linears=attention.wq_a,w2"], EXPERTS | {"q down", "MLP down", "shared down"}),
        ([MXFP8, "--precision.linears=w1", "--precision.experts=false"], set()),  # fused with w3, which stays in BF16
        ([MXFP8, "--precision.linears=eh_proj"], EXPERTS | {"MTP projection"}),
    ],
)
def test_the_recipe_holds_for_what_is_named(words, expected):
    assert low(job_of("--model.num_mtp_layers=1", *words)) == expected


MODELS = {"671B": flavors.FLAVORS["671B"], "16B": flavors.FLAVORS["16B"]}
MODELS |= {name: flavors.PUBLISHED[name] for name in ("Qwen3-235B-A22B", "Mixtral-8x7B")}


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_has_its_gemm(name):
    """The names of precision/layers.py, each in one GEMM of the planner, whose weights are theirs."""
    model = replace(MODELS[name], num_mtp_layers=1)
    job = replace(job_of(), model=model, ep=8)
    named = layers.linears(model)
    of_kind = [linears(job, kind) for kind in KINDS if kind != "dense" or model.n_dense_layers]
    gemms = {gemm.name: gemm for found in of_kind for gemm in found}
    computed = [name for gemm in gemms for name in MADE_OF[gemm] if name != "experts"]
    assert sorted([*computed, "lm_head"]) == sorted(named)
    for name, gemm in gemms.items():
        if name not in EXPERTS:
            twice = ["attention.wkv"] if name == "attention qkv" else []  # keys and values have one name
            weights = [named[linear].inputs * named[linear].outputs for linear in [*MADE_OF[name], *twice]]
            assert gemm.k * gemm.n == sum(weights), name


def test_what_stays_in_bf16_costs_what_it_costs_there():
    """Kernel by kernel, whatever the others are in."""
    c, software = constants.fitted(), profiles.of_release("titan")[0]
    bf16, mxfp8, mixed = job_of(), job_of(MXFP8), job_of(MXFP8, "--precision.linears=[]")

    def seconds(job: Job) -> dict[str, float]:
        return {kernel.name: kernel.seconds for kernel in layer_kernels(job, "moe", software, c)}

    for name, second in seconds(mixed).items():
        same = seconds(mxfp8) if name.removeprefix("quantize ").startswith("experts") else seconds(bf16)
        assert second == same[name], name
    assert tokens_per_s(bf16) < tokens_per_s(mixed) < tokens_per_s(mxfp8)


def test_layers_that_are_left_alone_cost_as_in_bf16():
    """Each layer takes the step as much further from MXFP8 to BF16."""
    rates = {n: 1 / tokens_per_s(job_of(MXFP8, f"--precision.keep_high_precision_layers=last {n}")) for n in (29, 58)}
    low, high = 1 / tokens_per_s(job_of(MXFP8)), 1 / tokens_per_s(job_of())
    dense = f"--precision.keep_high_precision_layers=first {job_of().model.n_dense_layers}"
    rates["dense"] = 1 / tokens_per_s(job_of(MXFP8, dense))
    assert rates[29] - low == pytest.approx(rates[58] - rates[29], rel=1e-6)
    assert rates[58] - low + rates["dense"] - low == pytest.approx(high - low, rel=1e-6)


def test_layers_are_counted_through_the_stages():
    pipeline = ["--parallelism.pipeline_parallel_degree=4", "--parallelism.expert_parallel_degree=8"]
    pipeline += ["--parallelism.pipeline_parallel_layers_per_stage=[14,16,16,15]", "--training.local_batch_size=8"]
    kept = "--precision.keep_high_precision_layers=first 2, 4, 13-14, last 1"
    job = job_of(*pipeline, MXFP8, kept, "--training.global_batch_size=-1", gpus=64)
    assert [list(job.kept_in(index).values()) for index in range(4)] == [[2, 2, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert sum(stage.dense for stage in job.stages) == 3
    mtp = job_of(MXFP8, "--model.num_mtp_layers=2", "--precision.keep_high_precision_layers=60, 62")
    assert list(mtp.kept_in(0).values()) == [0, 1, 1]


def test_copies_of_weights_are_those_of_what_is_quantized():
    """Row- and column-wise in MXFP8, of two gathered layers: 2 x 1.03 bytes a weight."""

    def copies(*words: str) -> float:
        sizes = {entry.name: entry.size for entry in predict_memory(job_of(*words)).entries}
        return sizes.get("low-precision copies", 0.0)

    f = job_of().model
    experts, dense = 3 * f.dim * f.moe_hidden_dim * f.num_experts / job_of().ep, 3 * f.dim * f.dense_hidden_dim
    assert copies() == 0
    assert copies(MXFP8, "--precision.linears=[]") == pytest.approx(2 * 2 * (33 / 32) * experts)
    assert copies(MXFP8, "--precision.linears=feed_forward") == pytest.approx(2 * 2 * (33 / 32) * dense)


def test_mfu_is_of_the_recipes_peak_even_of_a_mixed_model():
    for words, peak in (([], 2500), ([MXFP8], 5000), ([MXFP8, "--precision.linears=[]"], 5000)):
        plan = predict(job_of(*words))
        assert plan.mfu == pytest.approx(plan.tflops_causal / peak)


def test_te_fused_is_one_kernel_each_way():
    job = job_of(MXFP8, "--moe.experts=te_fused")
    assert job.fused_grouped_mlp and tokens_per_s(job) > tokens_per_s(replace(job, fused_grouped_mlp=False))
    assert not job_of(MXFP8).fused_grouped_mlp
