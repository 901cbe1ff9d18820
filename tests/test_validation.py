"""Several validation sets in a run, and others after a resume."""

import math

import titan_moe.runtime  # noqa: F401

import pytest

from tests.distributed.harness import REPO
from tests.faults.checkpoint_run import Job
from tests.huggingface import mesh_run
from titan_moe.metrics import read_metrics


def test_each_set_has_its_loss_and_a_resumed_run_may_have_others(tmp_path):
    """The same documents under another name have the same loss, bit for bit."""
    for name, text in {"words": "the quick brown fox ", "digits": "31415926535 "}.items():
        (tmp_path / f"{name}.txt").write_text(text * 400)
    words, digits = (f'{{ name = "{name}", dataset = "{tmp_path / name}.txt" }}' for name in ("words", "digits"))
    argv = [str(REPO / "train_configs" / "debug_model.toml"), f"--job.dump_folder={tmp_path / 'run'}", "--model.dim=64"]
    argv += ["--model.n_layers=2", "--training.dataset=synthetic", "--training.seq_len=32"]
    argv += ["--training.local_batch_size=2", "--training.global_batch_size=2", "--metrics.log_freq=1"]
    argv += ["--checkpoint.enable", "--checkpoint.interval=2", "--validation.freq=2", "--validation.steps=2"]
    argv += [f"--validation.dataset={tmp_path / 'words.txt'}", "--lr_scheduler.total_steps=4"]
    first = [*argv, "--training.steps=2", f"--validation.sets=[{words}, {digits}]"]
    job = Job(
        tmp_path / "store", mesh_run.training, first, [*argv, "--training.steps=4", f"--validation.sets=[{digits}]"]
    )
    assert job.hear() == ["done"]
    job.end()
    metrics = read_metrics(tmp_path / "run")
    told = {step: {key for key in record if "validation_" in key} for step, record in metrics.items()}
    assert told[1] == told[3] == set()
    assert told[2] == {"validation_loss"} | {
        f"validation_{what}/{name}" for what in ("loss", "perplexity") for name in ("words", "digits")
    }
    assert told[4] == {"validation_loss", "validation_loss/digits", "validation_perplexity/digits"}
    assert metrics[2]["validation_loss/words"] == metrics[2]["validation_loss"]
    assert metrics[2]["validation_loss/digits"] != pytest.approx(metrics[2]["validation_loss"], rel=1e-3)
    assert metrics[4]["validation_perplexity/digits"] == math.exp(metrics[4]["validation_loss/digits"])
    assert metrics[3]["attempt"] == 2 and metrics[4]["validation_loss"] < metrics[2]["validation_loss"]
