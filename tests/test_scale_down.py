"""The rule by which a configuration becomes its twin; tests/distributed/test_twins.py trains them."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.config_check import NEEDS_GPU, check, model_flavor
from titan_moe.config_keys import get
from titan_moe.flavors import FAMILIES
from titan_moe.machine_check import GIB, Machine, needed_bytes
from titan_moe.scale_down import scale_down

FILES = sorted(str(path) for path in (Path(__file__).parents[1] / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("path", FILES, ids=lambda path: Path(path).stem)
def test_every_twin_is_sound_and_small_on_any_number_of_processes(path, processes):
    twin = config_file.load([path, "--model.scale_down"], processes)
    assert check(twin, processes) == []
    assert needed_bytes(twin, processes, Machine(name="", memory=0, gpu=False)) < 0.8 * GIB


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names])
def test_what_makes_a_model_what_it_is_stays(family, name):
    config = Config()
    config.model.name, config.model.flavor, config.model.num_mtp_layers = family, name, int(family == "deepseek_v3")
    whole, twin = model_flavor(config), model_flavor(scale_down(config, 1)[0])
    routing = ("top_k", "score_func", "num_expert_groups", "num_limited_groups", "scores_per_group", "route_norm")
    same = (*routing, "route_scale", "num_shared_experts", "num_mtp_layers", "attention", "qk_norm", "mscale")
    same += ("rope_theta", "rope_factor", "rope_beta_fast", "norm_eps", "latent_norm_eps")
    assert all(getattr(twin, field) == getattr(whole, field) for field in same)
    for field in ("q_lora_rank", "n_dense_layers", "num_kv_heads", "kv_lora_rank"):
        assert bool(getattr(twin, field)) == bool(getattr(whole, field)), field
    assert twin.n_layers > twin.n_dense_layers and twin.num_experts <= whole.num_experts
    reachable = twin.num_experts * twin.num_limited_groups // twin.num_expert_groups
    assert reachable >= 2 * twin.top_k or twin.num_experts == whole.num_experts, "the router has a choice"


def test_degrees_are_handed_out_in_order():
    config = Config()
    p = config.parallelism
    p.pipeline_parallel_degree, p.context_parallel_degree, p.tensor_parallel_degree = 8, 4, 8
    p.data_parallel_replicate_degree, p.expert_parallel_degree = 2, 16
    config.model.flavor = "671B"

    def degrees(processes: int) -> tuple[int, ...]:
        twin = scale_down(config, processes)[0].parallelism
        names = ("pipeline_parallel", "context_parallel", "tensor_parallel", "data_parallel_replicate")
        return *(getattr(twin, f"{name}_degree") for name in names), twin.expert_parallel_degree

    assert degrees(1) == (1, 1, 1, 1, 1)
    assert degrees(2) == (2, 1, 1, 1, 1)
    assert degrees(4) == (2, 2, 1, 1, 2)
    assert degrees(6) == (2, 1, 1, 1, 1), "3 are left, which no power of two divides"
    assert degrees(32) == (2, 2, 2, 2, 8)


def test_the_command_line_counts_more_and_what_was_changed_says_why():
    words = ["--model.scale_down", "--training.steps=7", "--model.n_layers=5", "--training.dataset=synthetic"]
    loaded = config_file.read([FILES[-1], *words])
    assert (loaded.config.training.steps, loaded.config.model.n_layers) == (7, 5)
    assert loaded.config.training.dataset == "synthetic" and loaded.config.model.dim == 64
    assert loaded.origins["model.dim"] == "model.scale_down (command line)"
    assert loaded.origins["training.steps"] == "command line"


def test_backends_of_gpus_give_way():
    config = Config()
    config.moe = replace(config.moe, dispatcher="te_ep", experts="te", router="te", ranks_per_node=8)
    config.parallelism.expert_parallel_degree = 64
    config.model.flavor, config.checkpoint.async_mode = "671B", "async_with_pinned_mem"
    twin, _ = scale_down(config, 4)
    assert (twin.moe.dispatcher, twin.moe.experts, twin.moe.router) == ("auto", "auto", "torch")
    assert twin.checkpoint.async_mode == "async"
    config.moe.dispatcher = "dedup"
    assert [scale_down(config, n)[0].moe.dispatcher for n in (1, 4)] == ["auto", "dedup"]
    assert [scale_down(config, n)[0].moe.ranks_per_node for n in (1, 2, 4)] == [None, None, 2]
    config.moe = replace(config.moe, hop_chunks=4)
    assert [scale_down(config, n)[0].moe.hop_chunks for n in (1, 2, 4)] == [1, 1, 4]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, values) in NEEDS_GPU.items() for value in values])
def test_nothing_that_is_refused_without_a_gpu_stays(key, value):
    config = Config()
    config.model.flavor, config.parallelism.expert_parallel_degree = "671B", 64
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    assert get(scale_down(config, 4)[0], key) != value


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("--model.flavor=671B", "is no size of model.name"),
        ("--model.num_expert_groups=0", "must be at least 1"),
        ("--parallelism.expert_parallel_degree=0", "must be at least 1"),
    ],
)
def test_what_cannot_be_is_named_not_scaled(word, named):
    loaded = config_file.read([FILES[-1], "--model.scale_down", word])
    assert loaded.problems == [] and named in check(loaded.config, 1)[0]


def test_one_rank_offloads_no_expert_input():
    """Which it does not keep; several do."""
    config = config_file.load(["train_configs/deepseek_v3_671b.toml"])
    config.activation_offload.tensors = ["attn_out", "moe_expert_input"]
    for processes, expected in ((1, ["attn_out"]), (2, ["attn_out", "moe_expert_input"])):
        twin, _ = scale_down(config, processes)
        assert check(twin, processes) == [] and twin.activation_offload.tensors == expected
