"""Activations that wait for backward in host memory, in whole trainings: with FSDP, expert parallelism and gradient
accumulation, with what recompute keeps, and in pipelines, also those that split backward.

Of each training there is one that keeps everything on the device, and no bit of it may differ."""

import pytest
import torch

from tests.distributed.test_meshes import marked

# Of a layer's input: 2 sequences of 64 tokens, width 64, fp32. Attention's output has twice as many.
BYTES = 2 * 64 * 64 * 4

MOVED = {
    # Two microbatches through three layers, two of them with the rows that a rank's experts received: 128 x 3 at an
    # even load, and up to 16 of padding for each of 4 experts.
    "fsdp2_ep2_offload": (2 * 3 * 3 * BYTES, 2 * 2 * 4 * 64 * (128 * 3 + 4 * 16)),
    # What arrives between ranks: at most a row per token and source, and a row of zeros.
    "fsdp2_ep2_full_offload": (2 * 3 * BYTES, 2 * 2 * 4 * 64 * (2 * 128 + 1)),
    "fsdp2_ep2_alltoall_selective_offload": (2 * 3 * 3 * BYTES, 2 * 2 * 4 * 64 * (128 * 3 + 1)),
    # The mean of two ranks. The inputs of the stages behind the first are the pipeline's own.
    "pp2_1F1B_offload": (4 * (3 * 3 - 1) * BYTES / 2, 0),
    "pp2_ZBVZeroBubble_offload": (4 * (3 * 3 - 2) * BYTES / 2, 0),
    "pp2_DualPipeV_offload": (4 * (3 - 2) * BYTES / 2, 0),
}
"""Bytes of a step, by case: those known, and how many more the rows may be"""


@pytest.mark.parametrize(("ranks", "name"), marked([(2, name) for name in MOVED]))
def test_no_bit_of_a_training_changes(outcome, ranks, name):
    found, expected = outcome(ranks, name), outcome(ranks, name.removesuffix("_offload"))
    gradients, wanted = found.step1["gradients"], expected.step1["gradients"]
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[key], wanted[key]) for key in wanted)
    for quantity in ("loss", "grad_norm"):
        assert [r[quantity] for r in found.metrics.values()] == [r[quantity] for r in expected.metrics.values()]
    assert found.metrics[5]["validation_loss"] == expected.metrics[5]["validation_loss"]


@pytest.mark.parametrize(("ranks", "name"), marked([(2, name) for name in MOVED]))
def test_bytes_and_waits_of_each_step_are_told(outcome, ranks, name):
    known, rows = MOVED[name]
    # In the first step a pipeline also runs its stages once on nothing, to learn shapes.
    for record in [record for step, record in outcome(ranks, name).metrics.items() if step > 1]:
        assert known + 0.5 * rows <= record["offload/bytes"] <= known + rows
        assert record["offload/wait_s"] > 0
    assert "offload/bytes" not in outcome(ranks, name.removesuffix("_offload")).metrics[1]
