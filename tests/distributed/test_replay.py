"""Trainings whose receive buffers have a fixed size: the numbers of exact sizes, bit for bit, also where a buffer
overflowed and the step ran again; and a clear end where it cannot grow any more."""

import pytest

from tests.distributed.harness import REPO, SMALL_FP32, torchrun
from tests.distributed.test_meshes import marked

PAIRS = [
    (2, "overflow", "fsdp2_ep2_mtp_full"),
    (2, "fsdp2_ep2_losses_factor", "fsdp2_ep2_losses"),
    (2, "tp2_ep2_losses_worst_case", "tp2_ep2_losses"),
    (4, "pp2_cp2_ep2_factor", "pp2_cp2_ep2"),
]


@pytest.mark.parametrize(("ranks", "name", "exact"), marked(PAIRS))
def test_the_curve_is_that_of_exact_sizes(outcome, ranks, name, exact):
    """Losses, those of balancing too, gradient norms, and load statistics, which a step that ran twice must count
    once."""
    expected = outcome(ranks, exact).metrics
    numbers = [key for key in expected[5] if not key.startswith("phase")]
    told = {key for key in numbers if "loss" in key or key == "grad_norm" or key.startswith("moe_")}
    assert told >= {"loss", "grad_norm", "validation_loss", "moe_max/mean.layers.1", "moe_max/mean.layers.2"}
    for step, record in outcome(ranks, name).metrics.items():
        for key in told:  # the validation loss only at the last step
            assert record.get(key) == expected[step].get(key), (step, key)


def test_an_overflow_on_one_rank_in_one_layer_is_replayed_once_by_all(outcome):
    """Of step 2, and of a validation; every layer's buffer has then grown twice, on both ranks."""
    for rank in outcome(2, "overflow").passes:
        assert rank["training"] == {"1": 1, "2": 2, "3": 1, "4": 1, "5": 1} and rank["validation"] == 2
        assert rank["factors"] == pytest.approx([1.4 * 1.5 * 1.5] * 3)
    told = [record["overflow_replays"] for record in outcome(2, "overflow").metrics.values()]
    assert told == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(("ranks", "name"), marked([(2, "fsdp2_ep2_losses_factor"), (4, "pp2_cp2_ep2_factor")]))
def test_routing_itself_overflows_buffers_of_the_mean(outcome, ranks, name):
    first, *others = outcome(ranks, name).passes
    assert sum(first["training"].values()) > 5 and len(others) == ranks - 1
    assert all(rank["training"] == first["training"] for rank in others)
    assert max(factor for rank in [first, *others] for factor in rank["factors"]) > 1


def test_worst_case_never_runs_again(outcome):
    for rank in outcome(2, "tp2_ep2_losses_worst_case").passes:
        assert set(rank["training"].values()) == {1} and rank["validation"] == 1


def test_a_buffer_that_overflows_at_its_bound_ends_the_run(tmp_path):
    """Two ranks cannot bring four times the mean, so rank 1 claims to have seen more however large the buffer is."""
    script = tmp_path / "overflowing.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(REPO)!r})\nimport train, torch\n"
        "from titan_moe.moe.contract import Dispatcher\n"
        "plan = Dispatcher.plan\n"
        "def claiming(self, *args):\n"
        "    found = plan(self, *args)\n"
        "    found.overflow = torch.tensor(os.environ['RANK'] == '1')\n"
        "    return found\n"
        "Dispatcher.plan, Dispatcher.can_overflow = claiming, property(lambda self: True)\n"
        "train.main(sys.argv[1:])\n"
    )
    arguments = ["--parallelism.expert_parallel_degree=2", "--moe.recv_buffer=1.2", f"--job.dump_folder={tmp_path}"]
    finished = torchrun(2, str(script), *SMALL_FP32, *arguments)
    output = finished.stdout + finished.stderr
    assert finished.returncode != 0 and "exitcode  : 2" in output
    for words in ("moe.recv_buffer = 1.2", "4.8 times the mean overflowed too, after 4 growths", '"worst_case"'):
        assert words in output, output[-3000:]
    assert "in next_factor" not in output, "a user's mistake has no traceback"
    assert output.count("It grows from") == 4, "the log tells of each growth"
