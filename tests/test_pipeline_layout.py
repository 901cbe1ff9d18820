"""Pipeline layouts: complete, as torchtitan deals them out, and as balanced as contiguous stages can be."""

from dataclasses import replace
from itertools import product

import titan_moe.runtime  # noqa: F401

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pp_rank_to_stage_indices_mapping,
)
from torchtitan.models.deepseek_v3 import DeepSeekV3Model

from titan_moe import config_file
from titan_moe.config_check import model_flavor
from titan_moe.flavors import FLAVORS, Flavor
from titan_moe.model import build_model
from titan_moe.pipeline_layout import (
    PipelineLayout,
    balanced_layers,
    default_stages,
    pipeline_layout,
    stage_flops,
)
from titan_moe.plan import flops

SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@st.composite
def flavors_and_stages(draw, most_layers=12, most_stages=12) -> tuple[Flavor, int]:
    """A model, and a number of stages that its layers fill."""
    n = draw(st.integers(1, most_layers))
    flavor = replace(
        FLAVORS["debugmodel"],
        n_layers=n,
        n_dense_layers=draw(st.integers(0, n - 1)),
        dense_hidden_dim=draw(st.sampled_from([64, 768, 4096])),
        vocab_size=draw(st.sampled_from([16, 288, 5000, 20000])),
        num_mtp_layers=draw(st.integers(0, 1)),
    )
    return flavor, draw(st.integers(1, min(n + 1, most_stages)))


def layout(*words: str) -> PipelineLayout:
    config = config_file.load(["train_configs/debug_model.toml", *(f"--{word}" for word in words)])
    return pipeline_layout(config, model_flavor(config))


def counts(modules: list[list[str]]) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in modules]


# ---------------------------------------------------------------------------------------------------------------------
# Stages and ranks


def test_listed_layers_become_torchtitans_module_names():
    found = layout(
        "parallelism.pipeline_parallel_degree=2",
        "parallelism.pipeline_parallel_schedule=Interleaved1F1B",
        "parallelism.pipeline_parallel_layers_per_stage=1,1,2,0",
    )
    assert found.modules() == [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2", "layers.3"],
        ["norm", "lm_head"],
    ]
    assert [found.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    assert found.report() == (
        "Pipeline: 4 stages on 2 ranks (Interleaved1F1B): E+1 | 1 | 2 | 0+H; slowest stage x "
        f"{found.slowest_stage():.2f} of the mean, slowest rank x {found.slowest_rank():.2f}"
    )


def test_a_v_gives_the_first_rank_the_last_stage_too():
    found = layout("parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_schedule=DualPipeV")
    assert found.num_stages == 4 and [found.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]


def head_flops(flavor: Flavor) -> float:
    return flops.per_token(flavor, 4096, num_mtp_layers=0)["logits"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_ranks_hold_the_stages_that_torchtitan_gives_them(schedule, pp):
    stages = default_stages(schedule, pp)
    found = PipelineLayout(schedule=schedule, pp=pp, layers=(1,) * stages, flops=(1,) * stages)
    held = [found.stages_of(rank) for rank in range(pp)]
    assert held == [_get_pp_rank_to_stage_indices_mapping(rank, pp, schedule, stages) for rank in range(pp)]
    assert sorted(stage for rank in held for stage in rank) == list(range(stages))


@settings(deadline=None)
@given(flavors_and_stages(), st.booleans())
def test_every_layer_is_in_one_stage_in_order(flavor_and_stages, recompute):
    flavor, stages = flavor_and_stages
    layers = tuple(balanced_layers(flavor, stages, 128, recompute=recompute))
    found = PipelineLayout(
        schedule="1F1B", pp=stages, layers=layers, flops=layers, num_mtp_layers=flavor.num_mtp_layers
    )
    modules = found.modules()
    assert len(modules) == stages and all(modules)
    assert [name for stage in modules for name in stage] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(flavor.n_layers)),
        *("norm", "lm_head"),
        *(f"mtp_layers.{i}" for i in range(flavor.num_mtp_layers)),
    ]
    assert {"norm", "lm_head"} <= set(modules[-1]) and all(layers[:-1])


# ---------------------------------------------------------------------------------------------------------------------
# Balance


@settings(deadline=None)
@given(flavors_and_stages(most_layers=8, most_stages=5), st.booleans())
def test_nothing_is_faster_or_as_fast_and_easier_on_memory(flavor_and_stages, recompute):
    """Against all contiguous layouts."""
    flavor, stages = flavor_and_stages

    def cost(layers: tuple[int, ...]) -> tuple[int, int]:
        time = max(stage_flops(flavor, list(layers), 128, recompute=recompute))
        return time, max((stages - s) * count for s, count in enumerate(layers))

    every = [
        layers
        for layers in product(range(flavor.n_layers + 1), repeat=stages)
        if sum(layers) == flavor.n_layers and all(layers[:-1])
    ]
    assert cost(tuple(balanced_layers(flavor, stages, 128, recompute=recompute))) == min(map(cost, every))


@settings(deadline=None)
@given(flavors_and_stages())
def test_never_slower_than_torchtitans_even_split(flavor_and_stages):
    flavor, stages = flavor_and_stages
    try:
        even = _generate_llm_fqn_per_model_part(stages, flavor.n_layers)
    except ValueError:  # torchtitan wants the embedding to weigh a layer and finds no room
        assume(False)
    slowest = max(stage_flops(flavor, counts(even), 128))
    assert max(stage_flops(flavor, balanced_layers(flavor, stages, 128), 128)) <= slowest


@pytest.mark.parametrize("name", ["16B", "236B", "671B"])
@pytest.mark.parametrize(("schedule", "pp"), [("1F1B", 8), ("Interleaved1F1B", 4), ("DualPipeV", 4), ("DualPipeV", 8)])
def test_nor_do_ranks_with_several_stages_lose_by_it(name, schedule, pp):
    """Stages are balanced, ranks are what limits a full pipeline."""
    flavor, stages = FLAVORS[name], default_stages(schedule, pp)

    def slowest_rank(layers: list[int]) -> float:
        flops = tuple(stage_flops(flavor, layers, 4096))
        return PipelineLayout(schedule=schedule, pp=pp, layers=tuple(layers), flops=flops).slowest_rank()

    even = counts(_generate_llm_fqn_per_model_part(stages, flavor.n_layers))
    assert slowest_rank(balanced_layers(flavor, stages, 4096)) <= slowest_rank(even) + 1e-9


def test_671b_on_16_ranks():
    """61 layers: the head stands for 1.4 of them, so 62.4 / 16 = 3.9; the first stage, which keeps the most
    microbatches, is the one with fewer."""
    flavor = FLAVORS["671B"]
    assert head_flops(flavor) / flops.of_layer(flavor, 4096, dense=False) == pytest.approx(1.39, abs=0.01)
    layers = balanced_layers(flavor, 16, 4096)
    assert layers == [3, *[4] * 14, 2]
    found = PipelineLayout(schedule="1F1B", pp=16, layers=tuple(layers), flops=tuple(stage_flops(flavor, layers, 4096)))
    stages = f"E+3 | {' | '.join(['4'] * 14)} | 2+H"
    assert found.report() == (f"Pipeline: 16 stages on 16 ranks (1F1B): {stages}; slowest stage x 1.03 of the mean")


def test_multi_token_prediction_weighs_where_the_head_is():
    """A layer, a projection of two hidden states and the head once more: with the head itself as much as 3.9 layers,
    so one more is as many as the last stage takes when 60 others fill 15 stages."""
    flavor = FLAVORS["671B"]
    layers = balanced_layers(replace(flavor, num_mtp_layers=1), 16, 4096)
    assert layers == [*[4] * 15, 1]
    found = PipelineLayout(schedule="1F1B", pp=16, layers=tuple(layers), flops=(1,) * 16, num_mtp_layers=1)
    assert found.modules()[-1] == ["layers.60", "norm", "lm_head", "mtp_layers.0"] and "| 1+1 MTP+H;" in found.report()


def test_a_layer_recomputed_weighs_a_forward_more():
    flavor = FLAVORS["671B"]
    once, again = (stage_flops(flavor, [61, 0], 4096, recompute=recompute) for recompute in (False, True))
    assert again[0] * 3 == once[0] * 4 and again[1] == once[1] == head_flops(flavor)


def test_flops_are_torchtitans():
    """But for what torchtitan counts besides: norms and router. Its attention is not causal, so a short sequence."""
    config = config_file.load(["train_configs/debug_model.toml", "--training.seq_len=8"])
    flavor, model = model_flavor(config), build_model(config)
    _, expected = DeepSeekV3Model.Config.get_nparams_and_flops(model.config, model, 8)
    assert sum(stage_flops(flavor, [flavor.n_layers], 8)) == pytest.approx(expected, rel=0.01)
