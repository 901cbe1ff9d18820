"""A mixture of experts that begins as a dense model: its logits and its first loss are the dense model's, on one rank
and on two, and from there it trains."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.distributed.harness import REPO
from tests.faults.checkpoint_run import Job
from tests.huggingface import mesh_run, peers
from titan_moe.attention import documents, mask
from titan_moe.config import Config, Model
from titan_moe.config_check import check
from titan_moe.config_file import load as load_config
from titan_moe.data import build_dataloaders
from titan_moe.huggingface.check import problems
from titan_moe.huggingface.load import load
from titan_moe.launch import main as launch
from titan_moe.metrics import read_metrics
from titan_moe.sources.record import list_all
from titan_moe.tokenizer import build_tokenizer

SIZES = {key: value for key, value in peers.GQA.items() if key != "num_experts_per_tok"}
SIZES |= {"intermediate_size": 48, "rope_parameters": peers.THETA, "rms_norm_eps": 1e-6}
YARN = peers.YARN | {"rope_theta": peers.THETA["rope_theta"]}
OURS = peers.OURS_GQA | {"moe_hidden_dim": 48, "num_experts": 6, "norm_eps": 1e-6}
DENSE: dict[str, tuple[Any, Any, str]] = {
    "qwen3": (Qwen3Config(**SIZES), Qwen3ForCausalLM, "qwen3"),
    "qwen3 tied": (Qwen3Config(**SIZES, tie_word_embeddings=True), Qwen3ForCausalLM, "qwen3"),
    "mistral": (MistralConfig(**SIZES, sliding_window=None), MistralForCausalLM, "mixtral"),
    "llama": (LlamaConfig(**SIZES), LlamaForCausalLM, "mixtral"),
}


def dense(kind: str) -> nn.Module:
    """transformers' model in fp32, far enough from its initialization that every weight matters."""
    config, model_class, _ = DENSE[kind]
    return peers.drawn(model_class._from_config(config, **peers.EAGER), seed=0)


def configuration(kind: str, folder: Path | str, **sizes: Any) -> Config:
    config = Config(model=Model(name=DENSE[kind][2], **OURS | sizes))  # type: ignore[arg-type]
    config.training.seq_len, config.training.mixed_precision_param = peers.LENGTH, "float32"
    config.moe.experts = "loop"
    config.checkpoint.enable = config.checkpoint.upcycle = True
    config.checkpoint.initial_load_path = str(folder)
    return config


def dense_logits(model: nn.Module, tokens_BL: Tensor, positions_BL: Tensor) -> Tensor:
    """Inside packed documents, as here."""
    index_L = torch.arange(tokens_BL.shape[1])
    allowed_B1LL = mask(index_L - positions_BL, index_L, index_L)
    mask_B1LL = torch.zeros(allowed_B1LL.shape).masked_fill(~allowed_B1LL, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(tokens_BL, position_ids=positions_BL, attention_mask=mask_B1LL).logits


@pytest.mark.parametrize("kind", DENSE)
def test_logits_are_the_dense_models(kind, tmp_path, group):
    """With a router bias that would move, and with FP32 weights that are spread over two files."""
    theirs = dense(kind)
    theirs.save_pretrained(tmp_path / "dense", max_shard_size="100KB")
    config = configuration(kind, tmp_path / "dense")
    assert check(config, 1) == []
    model = peers.ours(config)
    routers = {name: value.clone() for name, value in model.named_parameters() if "router" in name}
    load(tmp_path / "dense", config, [model], group)
    tokens_BL, positions_BL = peers.ids()
    with torch.no_grad():
        got = model.eval()(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL))
    expected = dense_logits(theirs, tokens_BL, positions_BL)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    after = dict(model.named_parameters())
    assert routers and all(torch.equal(after[name], value) and value.std() > 0 for name, value in routers.items())


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_first_loss_is_the_dense_models_and_then_it_falls(ranks, tmp_path):
    """Through train.py, on packed documents, with the experts on so many ranks."""
    theirs = dense("qwen3")
    theirs.save_pretrained(tmp_path / "dense")
    sizes = [f"--model.{key}={value}" for key, value in (OURS | {"name": "qwen3"}).items()]
    argv = [str(REPO / "train_configs" / "debug_model.toml"), *sizes, "--training.steps=6", "--metrics.log_freq=1"]
    argv += ["--training.dataset=synthetic", "--training.seq_len=64", "--training.mixed_precision_param=float32"]
    argv += ["--training.local_batch_size=2", "--training.global_batch_size=4", "--validation.enable=false"]
    argv += ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path / 'dense'}", "--checkpoint.upcycle"]
    argv += ["--optimizer.lr=3e-3", "--lr_scheduler.warmup_steps=0", "--checkpoint.interval=100"]
    config = load_config(argv)
    tokenizer = build_tokenizer("", peers.ROWS)
    loader, _ = build_dataloaders(config, list_all(config), tokenizer, dp_rank=0, dp_degree=1)
    batches = iter(loader)
    losses, labels = 0.0, 0
    for inputs, labels_BL in (next(batches), next(batches)):
        logits = dense_logits(theirs, inputs["input"], inputs["positions"])
        losses += nn.functional.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), reduction="sum").item()
        labels += int((labels_BL != -100).sum())
    argv += [f"--job.dump_folder={tmp_path / 'run'}", f"--parallelism.expert_parallel_degree={ranks}"]
    job = Job(tmp_path / "store", mesh_run.training, argv, world_size=ranks)
    assert job.hear() == ["done"] * ranks
    job.end()
    metrics = read_metrics(tmp_path / "run")
    assert metrics[1]["loss"] == pytest.approx(losses / labels, rel=1e-5)
    assert metrics[6]["loss"] < metrics[1]["loss"] - 0.1


def test_another_hidden_width_is_named(tmp_path):
    dense("qwen3").save_pretrained(tmp_path / "dense")
    (found,) = problems(configuration("qwen3", tmp_path / "dense", moe_hidden_dim=24), tmp_path / "dense")
    assert "intermediate_size = 48, but model.moe_hidden_dim = 24 here; set model.moe_hidden_dim = 48" in found


@pytest.mark.parametrize(
    ("upcycle", "kind", "content", "expected"),
    [
        (False, "qwen3", {}, 'as this dense model, set model.name = "qwen3" and checkpoint.upcycle = true'),
        (True, "qwen3", {"model_type": "qwen3_moe"}, "'qwen3_moe' has experts already: leave checkpoint.upcycle out"),
        (True, "qwen3", {"model_type": "llama"}, 'set model.name = "mixtral"'),
        (True, "qwen3", {"model_type": "gemma"}, "must be one of qwen3, mistral, llama"),
        (True, "mistral", {"sliding_window": 4096}, "sliding_window = 4096: this trainer's attention has no window"),
        (True, "qwen3", {"rope_parameters": YARN}, 'type "yarn": this trainer has none in models of type qwen3;'),
        (True, "llama", {"mlp_bias": True}, "mlp_bias = True: this trainer's projections have no biases"),
    ],
)
def test_a_folder_that_is_not_the_dense_model_is_refused(upcycle, kind, content, expected, tmp_path):
    dense(kind).save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | content))
    config = configuration(kind, tmp_path / "dense")
    config.checkpoint = replace(config.checkpoint, upcycle=upcycle)
    (found,) = problems(config, tmp_path / "dense")
    assert expected in found


def test_a_missing_matrix_is_named_once(tmp_path):
    theirs = dense("llama")
    state = {name: value for name, value in theirs.state_dict().items() if "1.mlp.up_proj" not in name}
    theirs.save_pretrained(tmp_path / "dense", state_dict=state)
    (found,) = problems(configuration("llama", tmp_path / "dense"), tmp_path / "dense")
    assert re.search(r"1 weights are missing: model.layers.1.mlp.up_proj.weight$", found)


def test_a_checkpoint_of_this_trainer_is_no_dense_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text("{}")
    (tmp_path / "run.toml").write_text(
        'model.name = "qwen3"\ntraining.dataset = "synthetic"\nvalidation.enable = false\n[checkpoint]\nenable = true\n'
        'upcycle = true\ninitial_load_path = "step-1"\n'
    )
    assert launch(["run.toml"], {}) == 2
    assert "initial_load_path = 'step-1' is a checkpoint of this trainer" in capsys.readouterr().err
    argv = [str(tmp_path / "run.toml"), f"--job.dump_folder={tmp_path / 'run'}"]
    job = Job(tmp_path / "store", mesh_run.training, argv)  # without the launcher
    (told,) = job.hear()
    job.end()
    assert re.match("ValueError: checkpoint.upcycle = true: .*step-1' is a checkpoint of this trainer", told)
