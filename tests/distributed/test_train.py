"""Whole runs: they repeat, they can be killed and extended, they match the golden losses, and research edits work."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.cases import EP2, SCHEDULE_100
from tests.distributed.edits import research_edits
from tests.distributed.harness import REPO, SMALL_FP32, Outcome, torchrun
from titan_moe.metrics import read_metrics

GOLDEN = REPO / "tests" / "golden" / "small_fp32.txt"


def test_the_same_seed_repeats_bit_for_bit(outcome):
    """bf16 compute, one thread; test_readme.py repeats a run on all cores."""
    assert outcome(1, "repeat").losses == outcome(1, "repeat_again").losses


def test_golden_losses(outcome):
    """Small model on synthetic text, fp32: the file changes only with what a run computes. 1e-4 leaves room for another
    CPU's order of summation; a changed initial weight, sample or update moves the losses by far more."""
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    expected = {int(step): float(loss) for step, loss in lines}
    metrics = outcome(1, "golden").metrics
    assert {step: record["loss"] for step, record in metrics.items()} == pytest.approx(expected, rel=1e-4)
    assert len(expected) == 10


def test_compute_dtype_reaches_the_model(outcome):
    assert outcome(1, "repeat").losses != outcome(1, "one_rank").losses
    assert outcome(1, "repeat").losses == pytest.approx(outcome(1, "one_rank").losses, rel=2e-2)


def test_a_finished_run_can_be_extended(outcome):
    """3 steps, end, 3 more from the last checkpoint, which keeps the optimizer: as 6 steps without a break, bit for
    bit."""
    extended = outcome(1, "extended").metrics
    assert [record["loss"] for record in extended.values()] == outcome(1, "uninterrupted").losses
    assert [record["lr"] for record in extended.values()] == [
        r["lr"] for r in outcome(1, "uninterrupted").metrics.values()
    ]
    assert [record["attempt"] for record in extended.values()] == [1, 1, 1, 2, 2, 2]
    assert [record["tokens_seen"] for record in extended.values()] == [8 * 64 * step for step in range(1, 7)]


def test_moments_in_bf16_are_resumed_bit_for_bit(outcome):
    """3 steps, end, 2 more: torch's optimizers would go on with fp32 moments. The checkpoint has them in bf16."""
    extended, plain = outcome(1, "moments_extended"), outcome(1, "moments")
    assert extended.losses == plain.losses and plain.losses[2:] != outcome(1, "uninterrupted").losses[2:5]
    assert [record["attempt"] for record in extended.metrics.values()] == [1, 1, 1, 2, 2]
    saved = FileSystemReader(extended.folder / "checkpoint" / "step-5").read_metadata().state_dict_metadata
    moments = {key: entry for key, entry in saved.items() if key.endswith((".exp_avg", ".exp_avg_sq"))}
    assert len(moments) > 50 and {entry.properties.dtype for entry in moments.values()} == {torch.bfloat16}


def test_muon_is_resumed_bit_for_bit_and_learns(outcome):
    """3 steps, end, 2 more, from a checkpoint that has one momentum of each matrix under torchtitan's names."""
    extended, plain = outcome(1, "muon_extended"), outcome(1, "muon")
    assert extended.losses == plain.losses and plain.losses[-1] < plain.losses[0] - 0.1
    assert [record["attempt"] for record in extended.metrics.values()] == [1, 1, 1, 2, 2]
    saved = FileSystemReader(extended.folder / "checkpoint" / "step-5").read_metadata().state_dict_metadata
    kinds = Counter(key.rpartition(".")[2] for key in saved if key.startswith("optimizer.state."))
    # Of three layers: five matrices of attention, three of a feed-forward or six of an MoE; all norms, two routers.
    assert kinds["momentum_buffer"] == 3 * 5 + 3 + 2 * 6 and kinds["exp_avg"] == kinds["exp_avg_sq"] == 13 + 2 + 2
    assert "optimizer.state.layers.1.moe.routed_experts.inner_experts.w3_EFD.momentum_buffer" in saved


def test_data_workers_change_nothing(outcome):
    assert outcome(1, "workers").losses == outcome(1, "uninterrupted").losses[:3]


def test_the_run_folder_says_what_ran(outcome):
    folder = outcome(1, "one_rank").folder
    run = json.loads((folder / "run.json").read_text())
    assert run["versions"]["torchtitan"] == "0.3.0" and run["attempt"] == 1 and run["world"] == 1
    assert "seq_len = 64" in (folder / "config.toml").read_text()
    records = list(outcome(1, "one_rank").metrics.values())
    for key in ("step", "loss", "grad_norm", "lr", "tps", "tflops", "mfu", "time_s"):
        assert all(key in record for record in records), key
    assert all(record["mfu"] is None for record in records), "a CPU's peak is unknown, so there is no MFU to show"


def test_there_are_three_edits_of_ten_lines_at_most():
    edits = research_edits()
    assert sorted(edits) == ["loss_term", "new_quantity", "schedule"]
    for name, diff in edits.items():
        changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        assert 1 <= len(changed) <= 10, name


def test_research_edit_adds_a_loss_term(outcome):
    """Told as a quantity of its own, and part of what is minimised: from the second step on the loss is another."""
    plain, edited = outcome(1, "uninterrupted").losses, outcome(1, "loss_term").losses
    assert edited[0] == plain[0] and edited[1:] != plain[1:3]
    assert all(record["hidden_loss"] > 0 for record in outcome(1, "loss_term").metrics.values())


def test_research_edit_changes_the_schedule(outcome):
    rates = [record["lr"] for record in outcome(1, "schedule").metrics.values()]
    assert rates == pytest.approx([3e-3 * min((step + 1) / 10, ((step + 1) / 10) ** -0.5) for step in range(3)])


def test_research_edit_logs_a_new_quantity(outcome):
    norms = [record["embedding_norm"] for record in outcome(1, "new_quantity").metrics.values()]
    assert len(norms) == 3 and all(norm > 1 for norm in norms)
    assert outcome(1, "new_quantity").losses == outcome(1, "uninterrupted").losses[:3]


@pytest.mark.slow
def test_a_sequence_of_32k_on_two_context_ranks(tmp_path):
    """One step; attention in blocks, because a mask of the whole sequence would take gigabytes."""
    long = ["--training.seq_len=32768", "--model.max_seq_len=32768", "--parallelism.context_parallel_degree=2"]
    long += ["--training.local_batch_size=1", "--training.global_batch_size=1", "--training.steps=1"]
    long += ["--lr_scheduler.warmup_steps=1", "--validation.enable=false", f"--job.dump_folder={tmp_path / 'run'}"]
    finished = torchrun(2, "train.py", *SMALL_FP32, *long)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    record = read_metrics(tmp_path / "run")[1]
    assert record["tokens_seen"] == 32768 and 5 < record["loss"] < 7


@pytest.mark.parametrize(("world_size", "name"), [(2, "tp2_stops"), (4, "pp2_cp2_stops")])
def test_all_ranks_stop_after_the_same_step(outcome, world_size, name):
    """Rank 0 sees before step 2 that it should stop. So do, in time, ranks of other stages and with the same data as
    it, which none of the sums over data-parallel ranks joins to it; step 3 is the last for all, and is logged."""
    stopped = outcome(world_size, name)
    assert stopped.last_steps == [3] * world_size and list(stopped.metrics) == [1, 2, 3]
    assert not (stopped.folder / "stop").exists()


def test_an_error_on_any_rank_reaches_the_console(tmp_path):
    """Rank 1's message, though the console shows only rank 0's output."""
    script = tmp_path / "failing.py"
    script.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(REPO)!r})\nimport train\n"
        "def build(config):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('this text changed after it was listed')\n"
        "    time.sleep(60)\n"
        "train.build = build\n"
        "train.main(sys.argv[1:])\n"
    )
    finished = torchrun(2, str(script), *SMALL_FP32)
    assert finished.returncode != 0
    assert "this text changed after it was listed" in finished.stdout + finished.stderr


def kill_all_with(argument: str) -> None:
    """SIGKILL to every process with `argument` in its command line: torchrun puts its workers in sessions of their
    own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if argument.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):  # ended in between
            continue


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(outcome, tmp_path):
    """Two ranks with EP = 2 in bf16, saving asynchronously every 3 steps through run_train.sh: killed with SIGKILL
    after a checkpoint was complete, started again with the same command, it goes on with bit-identical losses."""
    folder = tmp_path / "run with space"
    command = ["./run_train.sh", *SMALL_FP32, EP2, SCHEDULE_100, "--training.mixed_precision_param=bfloat16"]
    command += ["--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.async_mode=async"]
    command += [f"--job.dump_folder={folder}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "NGPU": "2", "OMP_NUM_THREADS": "1"}
    log = (tmp_path / "log").open("w")
    first = subprocess.Popen([*command, "--training.steps=100"], cwd=REPO, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("checkpoint/step-*/.metadata")) or max(read_metrics(folder)) < 5:
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.05)
    finally:
        kill_all_with(str(folder))
        first.wait()
    second = subprocess.run(
        [*command, "--training.steps=10"], cwd=REPO, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert second.returncode == 0, second.stdout[-4000:] + second.stderr[-4000:]
    resumed = Outcome(folder).metrics
    assert {record["attempt"] for record in resumed.values()} == {1, 2}
    first_of_second = min(step for step, record in resumed.items() if record["attempt"] == 2)
    assert (first_of_second - 1) % 3 == 0 and first_of_second > 1, "it did not go on from a checkpoint"
    assert [resumed[step]["loss"] for step in range(1, 11)] == outcome(2, "uninterrupted").losses
