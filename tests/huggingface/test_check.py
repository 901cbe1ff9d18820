"""What is refused, by name, before any memory is spent: broken folders, other models, what transformers cannot hold."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_moe import checkpoint_folder
from titan_moe.config import Config, Model
from titan_moe.config_check import check, model_flavor
from titan_moe.huggingface import model_config
from titan_moe.huggingface.check import problems
from titan_moe.huggingface.folder import tensors
from titan_moe.huggingface.names import weights
from titan_moe.huggingface.safetensors_file import Entry, File
from titan_moe.launch import main as launch

SIZES = {"vocab_size": 32, "dim": 8, "n_layers": 2, "n_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 4, "top_k": 2}
SIZES |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "dense_hidden_dim": 12, "moe_hidden_dim": 6}
SIZES |= {"num_experts": 4, "num_expert_groups": 1, "num_limited_groups": 1, "norm_eps": 1e-6}
SIZES |= {"latent_norm_eps": 1e-6}
Q = "model.layers.1.self_attn.q_b_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def configuration(**sizes: Any) -> Config:
    config = Config(model=Model(**SIZES | sizes))
    config.checkpoint.enable = True
    return config


def write(path: Path, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    entries = [Entry(name, dtype, shape) for name, (dtype, shape) in shapes.items()]
    with File(path, entries) as file:
        for entry in entries:
            file.write(entry.name, memoryview(bytes(entry.bytes)))


def folder(
    path: Path,
    config: Config,
    *,
    drop: tuple[str, ...] = (),
    change: dict[str, tuple[str, tuple[int, ...]] | None] | None = None,
    **content: Any,
) -> Path:
    """A model's folder in two files: without the tensors `drop`, with those in `change`, (type, shape), None: not in
    the index; and these fields of config.json."""
    path.mkdir()
    flavor = model_flavor(config)
    shapes = {name: ("BF16", w.shape) for w in weights(flavor, True) for name in w.names() if name not in drop}
    hidden = {name for name, value in (change or {}).items() if value is None}
    shapes |= {name: value or shapes[name] for name, value in (change or {}).items()}
    names, half = list(shapes), len(shapes) // 2
    parts = {FIRST: names[:half], SECOND: names[half:]}
    for file, part in parts.items():
        write(path / file, {name: shapes[name] for name in part})
    index = {name: file for file, part in parts.items() for name in part if name not in hidden}
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    (path / "config.json").write_text(json.dumps(model_config.content(flavor, "bfloat16", 0, 1) | content))
    return path


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_a_whole_folder_is_taken(tmp_path):
    assert problems(configuration(), folder(tmp_path / "hf", configuration())) == []
    stored, _ = tensors(tmp_path / "hf")
    assert stored[EXPERT].shape == (6, 8) and stored[EXPERT].dtype == "BF16"


def cut(path: Path) -> None:
    with (path / SECOND).open("r+b") as file:
        file.truncate((path / SECOND).stat().st_size - 1)


def cut_in_header(path: Path) -> None:
    with (path / SECOND).open("r+b") as file:
        file.truncate(100)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut, rf"{SECOND} is no whole safetensors file, .*: incomplete metadata, file not fully covered"),
    "truncated in its header": (cut_in_header, rf"{SECOND} is no whole safetensors file, with its 100 bytes"),
    "no file": (lambda path: (path / FIRST).unlink(), rf"{FIRST} cannot be read: No such file"),
    "no index": (lambda path: (path / INDEX).unlink(), r"index.json is missing, so nothing says whether 2 files"),
    "no config": (lambda path: (path / "config.json").unlink(), r"config.json is missing"),
    "index is no JSON": (lambda path: (path / INDEX).write_text("{"), r"index.json cannot be read"),
    "index outside": (
        lambda path: (path / INDEX).write_text('{"weight_map": {"a": "../b.safetensors"}}'),
        r"names a file outside its folder: '../b.safetensors'",
    ),
    "no safetensors": (
        lambda path: (path / FIRST).write_bytes(b"\x08" + b"\0" * 7 + b"not json"),
        rf"{FIRST} is no whole safetensors file, .*: invalid JSON",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(case, tmp_path):
    path = folder(tmp_path / "hf", configuration())
    damage, expected = BROKEN[case]
    damage(path)
    assert re.search(expected, only(problems(configuration(), path)))


def test_an_index_that_says_something_else_than_its_files_is_named(tmp_path):
    path = folder(tmp_path / "hf", configuration(), change={EXPERT: None})
    assert f"{INDEX}: no entry for {EXPERT}, which is in {SECOND}" in only(problems(configuration(), path))
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= {EXPERT: SECOND, "model.extra.weight": FIRST}
    (path / INDEX).write_text(json.dumps(index))
    assert f"model.extra.weight is to be in {FIRST}, which does not have it" in only(problems(configuration(), path))


def test_missing_unexpected_and_other_shapes_are_listed(tmp_path):
    changes: dict[str, Any] = {
        "model.layers.1.more.weight": ("F32", (2,)),
        Q: ("BF16", (5, 4)),
        EXPERT: ("F32", (6, 8)),
    }
    path = folder(tmp_path / "hf", configuration(), drop=("model.norm.weight",), change=changes)
    file = path / SECOND
    file.write_bytes(file.read_bytes().replace(b'"dtype":"F32","shape":[6,8]', b'"dtype":"I32","shape":[6,8]'))
    found = problems(configuration(), path)
    assert [text.partition(": ")[2] for text in found] == [
        "1 weights are missing: model.norm.weight",
        "1 tensors belong to no weight of this model: model.layers.1.more.weight",
        f"{Q} in {FIRST} has shape [5, 4], but this configuration needs [12 (n_heads x (qk_nope_head_dim + "
        "qk_rope_head_dim)), 4 (q_lora_rank)]",
        f"{EXPERT} in {SECOND} is of type I32; read are F64, F32, BF16, F16, F8_E4M3",
    ]


def test_every_field_that_disagrees_is_told_with_both_values(tmp_path):
    path = folder(tmp_path / "hf", configuration())
    config = configuration(top_k=3, norm_eps=1e-5, route_scale=1.0, rope_theta=5e5, q_lora_rank=0, num_mtp_layers=1)
    assert [text.partition("config.json: ")[2] for text in problems(config, path)] == [
        "num_experts_per_tok = 2, but model.top_k = 3 here; set model.top_k = 2",
        "rms_norm_eps = 1e-06, but model.norm_eps = 1e-05 here; set model.norm_eps = 1e-06",
        "q_lora_rank = 4, but model.q_lora_rank = 0 here; set model.q_lora_rank = 4",
        "routed_scaling_factor = 2.5, but model.route_scale = 1.0 here; set model.route_scale = 2.5",
        "rope_theta = 10000.0, but model.rope_theta = 500000.0 here; set model.rope_theta = 10000.0",
        "num_nextn_predict_layers = 0, but model.num_mtp_layers = 1 here; set model.num_mtp_layers = 0",
    ]
    assert 'set model.name = "deepseek_v3"' in only(problems(Config(model=Model(name="mixtral")), path))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("tie_word_embeddings", True, "the head of this trainer's models is a weight of its own"),
        ("attention_bias", True, "no biases"),
        ("hidden_act", "gelu", "SwiGLU"),
        ("topk_method", "group_limited_greedy", "only noaux_tc in models of type deepseek_v3"),
        ("model_type", "llama", "must be one of deepseek_v3, kimi_k2"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, 'of type "linear"'),
        ("rope_scaling", "linear", "is no dict; download it again"),
        ("num_nextn_predict_layers", "1", "is no int"),
        ("model_type", ["deepseek_v3"], "is no str"),
        ("quantization_config", "fp8", "is no dict"),
        ("quantization_config", {"quant_method": "awq"}, "quant_method = 'awq', .*only \"fp8\""),
    ],
)
def test_what_this_trainer_has_not_is_refused(field, value, expected, tmp_path):
    found = problems(configuration(), folder(tmp_path / "hf", configuration(), **{field: value}))
    assert re.search(expected, only(found)) and field in found[0]


def test_routing_that_no_number_of_config_json_tells_is_compared(tmp_path):
    """How groups are judged, epsilons of the latents; and a greedy router, whose number of groups means nothing."""
    groups = {"num_experts": 8, "num_expert_groups": 4, "num_limited_groups": 2}
    told = problems(configuration(scores_per_group=1, **groups), folder(tmp_path / "a", configuration(**groups)))
    assert 'topk_method = "noaux_tc": judges a group by its best 2, but model.scores_per_group = 1' in only(told)
    softmax = {"score_func": "softmax", "route_norm": False}
    v2 = configuration(**groups, **softmax, scores_per_group=1)
    v2.moe.load_balance_coeff = 0.0
    limited = folder(tmp_path / "b", v2, drop=(BIAS,))
    assert problems(v2, limited) == []
    v2.model.scores_per_group = 2
    assert "judges a group by its best 1, but model.scores_per_group = 2 here" in only(problems(v2, limited))
    greedy = folder(tmp_path / "c", v2, drop=(BIAS,), topk_method="greedy")
    assert "n_group = 1, but model.num_expert_groups = 4 here; set model.num_expert_groups = 1" in only(
        problems(v2, greedy)
    )
    told = problems(configuration(latent_norm_eps=1e-5), folder(tmp_path / "d", configuration()))
    assert "but model.latent_norm_eps = 1e-05 here; set model.latent_norm_eps = 1e-06" in only(told)


def test_a_tied_head_is_refused_also_where_only_the_files_show_it(tmp_path):
    found = problems(configuration(), folder(tmp_path / "hf", configuration(), drop=("lm_head.weight",)))
    assert "lm_head.weight is missing: the model's head is tied to its embedding" in only(found)


def test_fp8_needs_scales_of_its_blocks(tmp_path):
    no_scale = folder(tmp_path / "a", configuration(), change={Q: ("F8_E4M3", (12, 4))})
    assert f"{Q} is in FP8, and {Q}_scale_inv, its scales, is missing" in only(problems(configuration(), no_scale))
    scales: dict[str, Any] = {Q: ("F8_E4M3", (12, 4)), f"{Q}_scale_inv": ("F32", (2, 1))}
    wrong = folder(tmp_path / "b", configuration(), change=scales)
    assert "has shape [2, 1], but [12, 4] in blocks of [128, 128] need [1, 1]" in only(problems(configuration(), wrong))
    blocks = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    assert (
        problems(configuration(), folder(tmp_path / "c", configuration(), change=scales, quantization_config=blocks))
        == []
    )


def test_a_router_bias_needs_a_place_and_may_be_absent(tmp_path):
    config = configuration()
    config.moe.load_balance_coeff = 0.0
    found = problems(config, folder(tmp_path / "hf", configuration()))
    assert f"{BIAS}: moe.load_balance_coeff = 0 leaves no place" in only(found)
    assert problems(configuration(), folder(tmp_path / "none", configuration(), drop=(BIAS,))) == []


def test_what_a_folder_of_weights_does_not_have_is_refused(tmp_path):
    config = configuration()
    config.checkpoint.initial_load_model_only = False
    assert "a Hugging Face folder has only weights" in only(problems(config, folder(tmp_path / "hf", config)))


def test_a_folder_that_holds_nothing_to_start_from_is_refused(tmp_path):
    assert "holds neither a checkpoint (manifest.json, .metadata) nor" in (checkpoint_folder.misnamed(tmp_path) or "")
    (tmp_path / "pytorch_model.bin").touch()
    assert "take the model in safetensors" in (checkpoint_folder.misnamed(tmp_path) or "")
    assert checkpoint_folder.misnamed(folder(tmp_path / "hf", configuration())) is None


def test_launch_tells_all_of_it_before_a_process_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path / "hf", configuration())
    lines = [f"{key} = {value}" for key, value in (SIZES | {"top_k": 3, "norm_eps": 1e-5}).items()]
    start = f'[checkpoint]\nenable = true\ninitial_load_path = "{path}"\n[training]\ndataset = "synthetic"\n'
    (tmp_path / "run.toml").write_text("\n".join(["[model]", *lines, start]))
    assert launch(["run.toml"], {}) == 2
    said = capsys.readouterr().err
    assert "set model.top_k = 2" in said and "set model.norm_eps = 1e-06" in said


# The parts of published config.json files that this trainer compares.
DEEPSEEK = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "moe_layer_freq": 1}
DEEPSEEK |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK |= {"rms_norm_eps": 1e-06, "rope_theta": 10000}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
V3 = {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61}
V3 |= {"first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536}
V3 |= {"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
V3 |= {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "scoring_func": "sigmoid"}
V3 |= {"routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
V3 |= {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
LITE = {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27}
LITE |= {"first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None}
LITE |= {"intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
LITE |= {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax"}
LITE |= {"routed_scaling_factor": 1.0, "topk_method": "greedy"}
LITE |= {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
V2 = LITE | {"hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128}
V2 |= {"q_lora_rank": 1536, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160}
V2 |= {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy"}
V25 = V2 | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
MOONLIGHT = V3 | {"vocab_size": 163840, "hidden_size": 2048, "num_hidden_layers": 27, "first_k_dense_replace": 1}
MOONLIGHT |= {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "intermediate_size": 11264}
MOONLIGHT |= {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
MOONLIGHT |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0}
MOONLIGHT |= {"rms_norm_eps": 1e-05, "rope_theta": 50000.0, "rope_scaling": None, "max_position_embeddings": 8192}
KIMI = V3 | {"model_type": "kimi_k2", "vocab_size": 163840, "first_k_dense_replace": 1, "num_attention_heads": 64}
KIMI |= {"num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "rope_theta": 50000.0}
KIMI |= {"routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "max_position_embeddings": 131072}
KIMI |= {
    "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
}
KIMI_0905 = KIMI | {"rope_scaling": KIMI["rope_scaling"] | {"factor": 64.0}, "max_position_embeddings": 262144}
QWEN3 = {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48}
QWEN3 |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
QWEN3 |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-06}
QWEN3 |= {"rope_theta": 1000000.0, "rope_scaling": None, "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN3 |= {"use_sliding_window": False, "sliding_window": None, "hidden_act": "silu", "tie_word_embeddings": False}
MIXTRAL = {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32}
MIXTRAL |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8}
MIXTRAL |= {"num_experts_per_tok": 2, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None}
QWEN3_235B = QWEN3 | {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}
QWEN3_235B |= {"moe_intermediate_size": 1536}
MIXTRAL_8X22B = MIXTRAL | {"vocab_size": 32768, "hidden_size": 6144, "num_hidden_layers": 56}
MIXTRAL_8X22B |= {"num_attention_heads": 48, "intermediate_size": 16384}
LITE_MSCALE = "mscale_all_dim = 0.707, but model.mscale = 0.7 here; set model.mscale = 0.707"


@pytest.mark.parametrize(
    ("family", "flavor", "content", "expected"),
    [
        ("deepseek_v3", "671B", DEEPSEEK | V3, []),
        ("deepseek_v3", "16B", DEEPSEEK | LITE, [LITE_MSCALE]),
        ("deepseek_v3", "236B", DEEPSEEK | V2, [LITE_MSCALE.replace("= 0.7 here", "= 1.0 here")]),
        ("deepseek_v3", "236B", DEEPSEEK | V25, []),
        ("deepseek_v3", "Moonlight-16B-A3B", DEEPSEEK | MOONLIGHT, []),
        ("deepseek_v3", "Kimi-K2", DEEPSEEK | KIMI, []),
        ("deepseek_v3", "Kimi-K2", DEEPSEEK | KIMI_0905, ["set model.rope_factor = 64.0"]),
        ("qwen3", "30B-A3B", QWEN3, []),
        ("qwen3", "235B-A22B", QWEN3_235B, []),
        ("mixtral", "8x7B", MIXTRAL, []),
        ("mixtral", "8x22B", MIXTRAL_8X22B, []),
    ],
)
def test_published_models_are_the_flavors(family, flavor, content, expected):
    """For DeepSeek-V2.5 too, whose sizes are V2's."""
    found = model_config.disagreements(content, family, model_flavor(Config(model=Model(name=family, flavor=flavor))))
    assert len(found) == len(expected) and all(text in got for got, text in zip(found, expected))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "model.latent_norm_eps = 1e-05: DeepseekV3ForCausalLM has only 1e-06; set model.latent_norm_eps = 1e-06"),
        ({"name": "qwen3"}, "the router bias, which it moves, has no place in Qwen3MoeForCausalLM"),
        ({"name": "mixtral"}, "the router bias, which it moves, has no place in MixtralForCausalLM"),
        ({"score_func": "softmax", "latent_norm_eps": 1e-6}, "DeepseekV2ForCausalLM"),
        (
            {"scores_per_group": 1, "latent_norm_eps": 1e-6},
            "model.scores_per_group = 1: DeepseekV3ForCausalLM has only 2; set model.scores_per_group = 2",
        ),
    ],
)
def test_what_transformers_has_no_class_for_is_refused_before_the_run(settings, expected):
    config = Config(model=Model(**settings))
    config.checkpoint.enable = config.checkpoint.last_save_in_hf = True
    found = check(config, 1)
    assert (
        found and expected in found[0] and all(text.startswith("checkpoint.last_save_in_hf = true: ") for text in found)
    )
