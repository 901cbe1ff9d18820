"""A long run needs no more memory than a short one."""

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.harness import REPO
from titan_moe.metrics import read_metrics

TINY = [
    "train_configs/debug_model.toml",
    *("--model.dim=32", "--model.n_layers=2", "--model.moe_hidden_dim=16", "--model.dense_hidden_dim=32"),
    *("--model.q_lora_rank=16", "--model.kv_lora_rank=16", "--model.n_heads=2", "--model.num_mtp_layers=1"),
    *("--training.seq_len=32", "--training.mixed_precision_param=float32", "--training.local_batch_size=2"),
    *(
        "--training.global_batch_size=4",
        "--metrics.log_freq=20",
        "--metrics.enable_tensorboard",
        "--validation.freq=200",
    ),
    *("--validation.steps=1", "--checkpoint.enable", "--checkpoint.interval=500", "--checkpoint.keep_latest_k=2"),
    *("--debug.deterministic", "--guards.corruption_check_every=50", "--loss.num_chunks=1"),
]


@pytest.mark.slow
def test_memory_is_flat_over_2000_steps(tmp_path):
    """With microbatches, MTP, validation, metrics, TensorBoard, checkpoints, skipped steps and corruption checks. No
    tensor more is alive, and from step 1,000 on what the process holds grows by no more than its allocator's noise."""
    arguments = [*TINY, "--training.steps=2000", f"--job.dump_folder={tmp_path / 'run'}"]
    command = [sys.executable, "tests/faults/long_run.py", str(tmp_path / "seen.json"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "long"}  # torchrun's: with the watchdog
    finished = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert read_metrics(tmp_path / "run")[2000]["skipped_steps"] >= 20  # such small batches have spikes of their own
    steps, resident, tensors = zip(*json.loads((tmp_path / "seen.json").read_text()))
    assert steps == tuple(range(250, 2001, 250))
    # A step that was skipped and saved, as every other of these, leaves two less.
    assert tensors[2:] == tensors[:-2], f"live tensors by step: {dict(zip(steps, tensors))}"
    assert max(resident[3:]) - resident[3] < 4, f"resident MiB by step: {dict(zip(steps, resident))}"
