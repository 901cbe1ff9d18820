"""Exports that fail: found before the run where they can be, named, and with nothing left of them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_moe.config import Checkpoint, Config, Model
from titan_moe.config_check import model_flavor
from titan_moe.config_file import to_toml
from titan_moe.convert import DTYPES
from titan_moe.convert import main as convert
from titan_moe.huggingface import export, names
from titan_moe.huggingface.folder import ITEM_BYTES
from titan_moe.model import build_model, init_weights
from titan_moe.plan import parameters

QWEN3 = {"name": "qwen3", "vocab_size": 288, "dim": 32, "n_layers": 1, "n_heads": 2, "num_kv_heads": 1}
QWEN3 |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "moe_hidden_dim": 16, "num_experts": 4, "top_k": 2}


def configuration() -> Config:
    config = Config(model=Model(**QWEN3))
    config.checkpoint.enable, config.checkpoint.last_save_in_hf = True, True
    return config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run with a router bias that has not moved, with its config.toml."""
    config = configuration()
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, seed=0)
    folder = tmp_path / "run" / "checkpoint" / "step-1"
    save(model.state_dict(), folder)
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    return folder


def save(state: dict[str, torch.Tensor], folder: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=folder)


def converted(checkpoint: Path, *more: str) -> int:
    return convert([str(checkpoint), str(checkpoint.parents[2] / "out"), "--to", "hf", "--verify", "none", *more])


def test_the_types_to_choose_from_are_one_list():
    assert list(get_args(get_type_hints(Checkpoint)["export_dtype"])) == DTYPES
    assert set(export.DTYPES.values()) <= set(ITEM_BYTES)


def test_an_exported_folder_is_all_there_is(checkpoint, tmp_path):
    assert converted(checkpoint, "--dtype", "float16") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == ["Qwen3MoeForCausalLM"] and content["torch_dtype"] == "float16"


def test_the_tokenizer_is_the_runs(checkpoint, tmp_path):
    assert converted(checkpoint) == 0
    (tmp_path / "out").rename(tmp_path / "assets")  # the built-in one, as files
    (tmp_path / "assets" / "generation_config.json").write_text("{}")
    config = configuration()
    config.model.hf_assets_path = str(tmp_path / "assets")
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    assert converted(checkpoint) == 0
    copied = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "assets" / n).read_bytes() for n in copied)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["bos_token_id"], content["eos_token_id"]) == (256, 257)


def test_a_write_that_fails_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("titan_moe.huggingface.safetensors_file.File.write", full)
    assert converted(checkpoint) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_too_little_room_is_told_before_anything_is_written(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert converted(checkpoint) == 2
    assert re.search(r"it takes [\d,]+ bytes, and 1,000 bytes are free", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_bias_that_has_moved_is_not_dropped_silently(checkpoint, tmp_path, capsys):
    state = export.Checkpoint(checkpoint)
    values = {name: state.read(name) for name in state.entries}
    values["layers.0.moe.expert_bias_E"][2] = 1e-3
    moved = checkpoint.with_name("step-2")
    save(values, moved)
    assert converted(moved) == 2
    assert "layers.0.moe.expert_bias_E is not zero" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path, capsys):
    config = configuration()
    config.model.n_layers, config.model.dim = 2, 64
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    assert converted(checkpoint) == 2
    said = capsys.readouterr().err
    assert "weights are missing, such as layers.1.attention" in said
    assert "norm.weight has shape [32], and the configuration says [64]" in said


def test_what_convert_cannot_start_from_is_named(checkpoint, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert converted(checkpoint) == 2 and "is there already" in capsys.readouterr().err
    (tmp_path / "out").rmdir()
    assert converted(checkpoint, "--verify", "full") == 2 and "has no manifest.json" in capsys.readouterr().err
    assert converted(tmp_path / "run") == 2 and "is no checkpoint, but holds some" in capsys.readouterr().err
    (tmp_path / "run" / "config.toml").unlink()
    assert converted(checkpoint) == 2 and "no config.toml above it" in capsys.readouterr().err


def test_an_export_is_rehearsed_on_the_meta_device(monkeypatch):
    """A name that the table does not have is found with the model's shapes alone; so is one of another size."""
    config = configuration()
    model = build_model(config)
    export.rehearse(config, model)

    def lacking(flavor, bias):
        return [weight for weight in names.weights(flavor, bias) if "k_norm" not in weight.ours]

    monkeypatch.setattr(export, "weights", lacking)
    with pytest.raises(ValueError, match=r"have no name there, such as layers.0.attention.k_norm.weight"):
        export.rehearse(config, model)

    def wider(flavor, bias):
        return names.weights(replace(flavor, num_kv_heads=2), bias)

    monkeypatch.setattr(export, "weights", wider)
    with pytest.raises(ValueError, match=r"qkv_linear.wk.weight has shape \[8, 32\], and the configuration says"):
        export.rehearse(config, model)
    config.checkpoint.last_save_in_hf = False
    export.rehearse(config, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flavor", "mtp"),
    [
        *[("deepseek_v3", "671B", 1), ("deepseek_v3", "Kimi-K2", 0), ("deepseek_v3", "Moonlight-16B-A3B", 0)],
        *[("deepseek_v3", "236B", 0), ("deepseek_v3", "16B", 0)],
        *[("qwen3", "235B-A22B", None), ("mixtral", "8x22B", None)],
    ],
)
def test_big_models_have_a_place_for_every_weight(name, flavor, mtp):
    config = Config(model=Model(name=name, flavor=flavor, num_mtp_layers=mtp))
    config.moe.load_balance_coeff = 1e-3 if flavor in ("671B", "Kimi-K2", "Moonlight-16B-A3B") else 0.0
    model, sizes = build_model(config), model_flavor(config)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    shards = export.plan(config, shapes, torch.bfloat16)
    copies = sum(len(weight.copies) for shard in shards for weight, _ in shard.weights) * sizes.vocab_size * sizes.dim
    biases = (sizes.n_layers - sizes.n_dense_layers + sizes.num_mtp_layers) * sizes.num_experts
    biases *= config.moe.load_balance_coeff > 0
    assert sum(shard.bytes for shard in shards) == 2 * (parameters.total(sizes) + copies) + 4 * biases
    stack = 2 * sizes.num_experts * sizes.moe_hidden_dim * sizes.dim
    assert max(shard.bytes for shard in shards) < export.FILE_BYTES + stack
