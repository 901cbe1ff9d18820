"""What a [precision] section may say (the exact messages: tests/golden/broken_configurations.txt), and that checks
calculate with what a rank has of a matrix."""

from pathlib import Path

import pytest

from titan_moe import config_check, config_file, precision_check
from titan_moe.config import Config
from titan_moe.precision.layers import kept_layers, linears, named
from titan_moe.precision.recipes import RECIPES


def load(tmp_path, text: str, *words: str) -> config_file.Loaded:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return config_file.read([str(path), *words])


def problems(config: Config) -> list[str]:
    return precision_check.check(config, config_check.model_flavor(config))


def debug(**precision) -> Config:
    config = Config()
    for key, value in precision.items():
        setattr(config.precision, key, value)
    return config


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "mixtral"])
def test_every_recipe_tiles_the_debug_models_and_the_published_ones(recipe, family):
    config = debug(recipe=recipe)
    config.model.name = family
    assert not problems(config)
    config.model.flavor = {"deepseek_v3": "671B", "qwen3": "235B-A22B", "mixtral": "8x7B"}[family]
    for tp in (1, 2, 4):
        config.parallelism.tensor_parallel_degree = tp
        assert not problems(config)


def test_names_stand_for_groups_parts_and_single_layers():
    there = linears(config_check.model_flavor(debug()))
    assert named(["wo"], there) == ({"attention.wo"}, {})
    assert named(["w2"], there)[0] == {"feed_forward.w2", "shared_experts.w2"}
    assert named(["attention"], there)[0] == {f"attention.{name}" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")}
    found, mistakes = named(["atention", "wqa", "gate", "lm_head"], there)
    assert found == {"lm_head"}
    assert mistakes.keys() == {"atention", "wqa", "gate"}
    assert "'attention'" in mistakes["atention"] and "'wq_a'" in mistakes["wqa"]


def test_a_group_that_a_model_lacks_is_no_mistake():
    config = debug(recipe="mxfp8")
    config.model.name = "qwen3"
    assert "feed_forward" in config.precision.linears and not problems(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        ("first 1, last 2", {0, 8, 9}),
        ("0, 5-7", {0, 5, 6, 7}),
        ("first 0,11", {11}),
        ("last 10", set(range(10))),
    ],
)
def test_layers_that_are_kept(text, expected):
    """Ten layers, and two behind them for multi-token prediction, which "last" does not count."""
    assert kept_layers(text, 10, 2) == expected


@pytest.mark.parametrize(
    "text", ["first 11", "12", "5-12", "7-5", "middle 2", "1;2", "-1", "first", "\u0663", "first \u0663"]
)
def test_layers_that_are_not_there(text):
    with pytest.raises(ValueError, match=f'"{text}": '):
        kept_layers(text, 10, 2)


@pytest.mark.parametrize(
    ("precision", "nothing"),
    [
        ({"keep_high_precision_layers": "first 4"}, True),
        ({"keep_high_precision_layers": "first 4", "linears": ["lm_head"]}, False),
        ({"keep_high_precision_layers": "first 3"}, False),
        ({"keep_high_precision_layers": "last 3", "linears": []}, True),  # layer 0 is dense
        ({"keep_high_precision_layers": "last 3", "linears": ["shared_experts"]}, True),
        ({"keep_high_precision_layers": "last 3", "linears": ["feed_forward"]}, False),
        ({"keep_high_precision_layers": "0", "linears": ["feed_forward"], "experts": False}, True),
    ],
)
def test_a_recipe_has_to_hold_for_something(precision, nothing):
    """The debug model has four layers, of which the first is dense. With a multi-token prediction layer none of these
    keeps all."""
    config = debug(recipe="mxfp8", **precision)
    assert bool([line for line in problems(config) if "holds for nothing" in line]) == nothing
    config.model.num_mtp_layers = 1
    assert bool(problems(config)) == (precision.get("linears") == ["feed_forward"] and nothing)


def test_tensor_parallel_ranks_have_a_part_of_a_side():
    """Experts too, unless expert parallelism leaves them whole."""
    config = debug(recipe="mxfp8")
    config.model.moe_hidden_dim, config.model.dense_hidden_dim = 96, 192
    assert not problems(config)
    config.parallelism.tensor_parallel_degree = 2
    found = problems(config)
    assert [line for line in found if "model.moe_hidden_dim = 96 / tensor_parallel_degree 2 = 48 = 1 x 32 + 16" in line]
    assert [line for line in found if "shared_experts.w2 has 96 / tensor_parallel_degree 2 = 48" in line]
    config.parallelism.expert_parallel_degree = 2
    assert not [line for line in problems(config) if "model.moe_hidden_dim" in line]


def test_a_nearer_recipe_takes_the_place_of_a_type(tmp_path):
    text = '[training]\nmixed_precision_param = "float32"\n'
    loaded = load(tmp_path, text, "--precision.recipe=bf16")
    assert loaded.config.training.mixed_precision_param == "bfloat16" and not problems(loaded.config)
    assert load(tmp_path, "", "--precision.recipe=fp32").config.training.mixed_precision_param == "float32"
    low = load(tmp_path, text, "--precision.recipe=mxfp8").config
    assert low.training.mixed_precision_param == "float32" and not problems(low)


def test_a_recipe_and_a_type_that_contradict_each_other(tmp_path):
    both = '[precision]\nrecipe = "fp32"\n[training]\nmixed_precision_param = "bfloat16"\n'
    for loaded in (
        load(tmp_path, both),
        load(tmp_path, '[precision]\nrecipe = "fp32"\n', "--training.mixed_precision_param=bfloat16"),
    ):
        (found,) = problems(loaded.config)
        assert found.startswith('precision.recipe = "fp32": computes in float32, but training.mixed_precision_param')


def test_a_twin_keeps_a_layer_that_it_has(tmp_path):
    """Of 61 layers, or of 94, those that a file keeps in high precision are not the twin's two or three."""
    for name in ("deepseek_v3_671b", "qwen3_235b_a22b"):
        text = f'base = "{Path("train_configs").resolve() / name}.toml"\n[precision]\nrecipe = "mxfp8"\n'
        loaded = load(tmp_path, text + 'keep_high_precision_layers = "first 3, 60"\n', "--model.scale_down")
        assert loaded.config.precision.keep_high_precision_layers == "last 1"
        assert not loaded.problems and not problems(loaded.config)


@pytest.mark.parametrize("recipe", RECIPES)
def test_twins_can_be_tiled(recipe, tmp_path):
    for name in ("deepseek_v3_671b", "qwen3_235b_a22b"):
        for world in (1, 4):
            words = [f"train_configs/{name}.toml", "--model.scale_down", f"--precision.recipe={recipe}"]
            loaded = config_file.read([*words, "--parallelism.tensor_parallel_degree=2"], world)
            assert not problems(loaded.config), (name, world)
