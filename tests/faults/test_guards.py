"""Real runs of two ranks in which numbers go wrong: what is skipped, who is named, what goes on, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.cases import EP2, FULL, HSDP2, PP2, REDUCE_EVERY, SCHEDULE_100, pipeline
from tests.distributed.harness import SMALL_FP32, forked, free_port
from titan_moe.metrics import read_metrics

BASE = [*SMALL_FP32, "--validation.enable=false", "--lr_scheduler.warmup_steps=50", SCHEDULE_100]
QUIET, SAVE_4 = "--metrics.log_freq=100", ["--checkpoint.enable", "--checkpoint.interval=4"]
CHECK = ["--debug.deterministic", "--guards.corruption_check_every=2", "--training.steps=3"]


def cases(out) -> dict[str, tuple[list | None, list[str]]]:
    load = [f"--checkpoint.initial_load_path={out / 'nan' / 'checkpoint' / 'step-4'}"]
    load += ["--checkpoint.enable", "--checkpoint.initial_load_model_only=false"]
    eight = [EP2, QUIET, "--training.steps=8"]
    zbv = [*pipeline("ZBVZeroBubble"), FULL]
    return {
        "clean": (None, eight),
        # The verdict on step 3 is read in step 4, that on step 4 at once, because it saves.
        "nan": (["loss_times", 1, [3, 4], None], [*eight, *SAVE_4]),
        "nan_resumed": (None, [*eight, *load]),
        "nan_gradient": (["nan_in_backward", 1, [2], "layers.0"], [EP2, REDUCE_EVERY, "--training.steps=3"]),
        "nan_hsdp": (["nan_in_backward", 0, [2], "layers.0"], [HSDP2, "--training.steps=3"]),
        "nan_foreach": (
            ["loss_times", 0, [1], None],
            [EP2, "--optimizer.implementation=foreach", "--training.steps=3", QUIET],
        ),
        "nan_pipeline": (["loss_times", 1, [2], None], [PP2, "--training.steps=3", QUIET]),
        "nan_zero_bubble": (["loss_times", 0, [2], None], [*zbv, "--training.steps=3", QUIET]),
        "nan_factor": (
            ["nan_in_forward", 1, [2], "tok_embeddings"],
            [EP2, "--moe.recv_buffer=1.9", "--training.steps=3"],
        ),
        "nan_on_and_on": (["loss_times", 1, [3, 4, 5, 6, 7, 8], None], [*eight, "--guards.max_skipped_steps=2"]),
        "spike": (["small_window", 0, [3, 8], 1e6], [*eight, "--training.steps=9", "--guards.spike_sigma=20"]),
        "checked": (None, [EP2, *CHECK]),
        "checked_pipeline": (None, [*zbv, *CHECK]),
        # Step 1 passes once, the check before step 2 twice.
        "bit_in_gradient": (["flipped_bit", 1, "gradient of layers.0.attention.wo.weight", 3], [EP2, *CHECK]),
        "bit_in_experts": (
            ["flipped_bit", 0, "gradient of layers.2.moe.routed_experts.inner_experts.w2_EDF", 2],
            [EP2, *CHECK],
        ),
        "bit_in_activation": (["flipped_bit", 0, "layers.1", 3], [EP2, *CHECK]),
        "bit_in_pipeline": (["flipped_bit", 1, "layers.2", 3], [PP2, *CHECK]),
    }


SLOW = {
    *("nan_foreach", "nan_hsdp", "nan_zero_bubble", "nan_factor"),
    *("bit_in_experts", "bit_in_pipeline", "checked_pipeline"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Callable[[str], list[dict]]:
    """`seen(name)`: what each rank saw of a case; all from one job of two ranks, and one for the slow cases."""
    jobs: dict[bool, Path] = {}

    def get(name: str) -> list[dict]:
        slow = name in SLOW
        if slow not in jobs:
            out = jobs[slow] = tmp_path_factory.mktemp("guards")
            table = {
                name: (free_port(), fault, [*BASE, f"--job.dump_folder={out / name}", *argv])
                for name, (fault, argv) in cases(out).items()
                if (name in SLOW) == slow
            }
            (out / "cases.json").write_text(json.dumps(table))
            finished = forked(2, "tests/faults/guards_worker.py", str(out))
            assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
        folder = jobs[slow] / name
        ranks = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
        return [{**rank, "metrics": read_metrics(folder)} for rank in ranks]

    return get


def marked(names) -> list:
    """For parametrize: the slow ones with their mark."""
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


def taken(rank: dict) -> list[int]:
    """The steps that changed something on a rank."""
    return [int(step) for step, changed in rank["changed"].items() if changed]


SKIPPED = {
    "nan": [3, 4],
    "nan_gradient": [2],
    "nan_hsdp": [2],
    "nan_foreach": [1],
    "nan_pipeline": [2],
    "nan_zero_bubble": [2],
    "nan_factor": [2],
    "spike": [8],
}


@pytest.mark.parametrize("name", marked(SKIPPED))
def test_a_bad_step_changes_nothing_on_any_rank_and_is_counted(seen, name):
    """No parameter, moment, step count or router bias, whoever's numbers were bad; and no load count is left over."""
    steps = [int(step) for step in seen(name)[0]["changed"]]
    for rank in seen(name):
        assert taken(rank) == [step for step in steps if step not in SKIPPED[name]]
        assert rank["left"] == 0 and rank["error"] is None
        assert rank["counts"] == [len(steps) - len(SKIPPED[name]), len(SKIPPED[name]), 0]
    assert seen(name)[0]["metrics"][steps[-1]]["skipped_steps"] == len(SKIPPED[name])


@pytest.mark.parametrize(
    ("name", "whose", "step", "samples"),
    [
        ("nan", "the loss of rank 1", 3, "16 to 23"),
        ("nan_gradient", "the gradients of rank 1", 2, "8 to 15"),
        pytest.param("nan_hsdp", "the gradients of rank 0", 2, "8 to 15", marks=pytest.mark.slow),
        ("nan_pipeline", "the loss of rank 1", 2, "8 to 15"),
        pytest.param("nan_zero_bubble", "the loss of rank 0", 2, "8 to 15", marks=pytest.mark.slow),
    ],
)
def test_rank_and_data_are_named(seen, name, whose, step, samples):
    first, *_ = seen(name)[0]["log"]
    assert first.startswith(f"Step {step} skipped: ") and f"not finite in {whose}. " in first, first
    assert f"samples {samples} of the global order; 1 in a row, 1 in all" in first


def test_the_verdict_is_read_one_step_late_but_before_a_save(seen):
    """Logged are the first and the last step; step 4 is saved."""
    assert seen("clean")[0]["read"] == {"1": 1, **{str(step): step + 1 for step in range(2, 8)}, "8": 8}
    assert seen("nan")[1]["read"] == {"1": 1, "2": 3, "3": 4, "4": 4, "5": 6, "6": 7, "7": 8, "8": 8}


def test_the_schedule_counts_updates(seen):
    """Each update has the rate that the schedule has for an update of its number."""
    rates = [seen("clean")[0]["rates"][str(step)] for step in range(1, 9)]
    assert rates == pytest.approx([3e-3 * step / 50 for step in range(1, 9)])
    for rank in seen("nan"):
        assert [rank["rates"][str(step)] for step in (1, 2, 5, 6, 7, 8)] == rates[:6]


def test_a_run_resumed_right_after_a_skipped_step_goes_on_bit_for_bit(seen):
    for resumed, whole in zip(seen("nan_resumed"), seen("nan")):
        for key in ("losses", "rates"):
            assert resumed[key] == {step: value for step, value in whole[key].items() if int(step) > 4}
            assert len(resumed[key]) == 4
        assert resumed["history"] == whole["history"] and resumed["counts"] == whole["counts"] == [6, 2, 0]
    assert seen("nan_resumed")[0]["metrics"][8]["skipped_steps"] == 2


def test_metrics_of_a_skipped_step(seen):
    record = seen("nan")[0]["metrics"][4]
    assert record["loss"] is None and record["grad_norm"] is None and record["skipped_steps"] == 2
    assert record["tokens_seen"] == 4 * 8 * 64 and seen("nan")[0]["metrics"][8]["tokens_seen"] == 8 * 8 * 64


def test_too_many_in_a_row_end_the_run_on_all_ranks(seen):
    for rank in seen("nan_on_and_on"):
        assert taken(rank) == [1, 2] and max(map(int, rank["losses"])) == 6
        for words in ("Step 5 skipped", "3 steps in a row", "guards.max_skipped_steps = 2", "the loss of rank 1"):
            assert words in rank["error"]


def test_a_spike_is_skipped_once_there_is_history(seen):
    """Not at step 3, which has two steps before it, though it is as high."""
    (line,) = seen("spike")[0]["log"]
    assert line.startswith("Step 8 skipped: loss ") and "mean + 20 sigma" in line


@pytest.mark.slow
def test_no_buffer_grows_for_tokens_that_are_no_numbers(seen):
    """They all go to the same experts, whose rank had no room for them."""
    for rank in seen("nan_factor"):
        assert rank["factors"] == [1.9, 1.9]
    assert not any("grows" in line for line in seen("nan_factor")[0]["log"])


def test_the_corruption_check_leaves_training_alone(seen):
    assert seen("checked")[0]["log"] == ["Corruption check at step 2: all ranks computed the same twice"]
    for checked, clean in zip(seen("checked"), seen("clean")):
        for key in ("losses", "rates"):
            assert checked[key] == {step: clean[key][step] for step in ("1", "2", "3")}


@pytest.mark.slow
def test_a_pipeline_of_split_backwards_computes_the_same_twice(seen):
    assert seen("checked_pipeline")[0]["log"] == ["Corruption check at step 2: all ranks computed the same twice"]
    assert len(seen("checked_pipeline")[1]["losses"]) == 3


@pytest.mark.parametrize(
    ("name", "rank", "place"),
    [
        ("bit_in_gradient", 1, "the gradients of layers.0's parameters"),
        pytest.param("bit_in_experts", 0, "the gradients of layers.2's parameters", marks=pytest.mark.slow),
        ("bit_in_activation", 0, "the output of layers.1"),
        pytest.param("bit_in_pipeline", 1, "the output of layers.2", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_ends_the_run_and_its_rank_is_named(seen, name, rank, place):
    for found in seen(name):
        assert f"Step 2: computed twice, {place} differed on rank {rank}" in found["error"]
        assert list(found["losses"]) == ["1"], "the step itself was not taken"
