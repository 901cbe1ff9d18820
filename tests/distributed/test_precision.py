"""Whole trainings in emulated low precision: every recipe learns, nothing but the formats changes what is computed, and
a mesh changes it as little as they allow.

How little, per recipe: scales of 32 or 128 numbers along a row are any mesh's. The wgrad's blocks are of a slab's rows,
which come in another order with expert parallelism, and a scale of a whole tensor is that of a rank's part of it. With
tensor parallelism gradients are quantized before ranks add up their parts. nvfp4 rounds gradients by chance, by other
draws on another mesh, so that its losses there are those of another seed.
"""

import pytest

from tests.distributed.test_meshes import marked

ONE, RECIPES = "one_rank_", ("fp8_current", "fp8_block", "mxfp8", "nvfp4")
MESHES = [
    (2, "fsdp2_ep2_mxfp8", "mxfp8", 1e-5),
    (2, "fsdp2_ep2_mxfp8_compiled", "mxfp8", 1e-5),
    (2, "pp2_mxfp8", "mxfp8", 1e-5),
    (2, "tp2_mxfp8", "mxfp8", 2e-4),
    (2, "fsdp2_ep2_nvfp4", "nvfp4", 3e-3),
    (2, "fsdp2_ep2_fp8_current", "fp8_current", 1e-3),
    (2, "fsdp2_ep2_fp8_block", "fp8_block", 1e-5),
    (2, "tp2_nvfp4", "nvfp4", 1e-2),
    (2, "pp2_nvfp4", "nvfp4", 3e-3),
]


@pytest.mark.parametrize(("ranks", "name", "reference", "tolerance"), marked(MESHES))
def test_losses_are_one_ranks_up_to_rounding(outcome, ranks, name, reference, tolerance, report):
    """Two ranks, with gradient accumulation on the way, against one rank with twice as much of it."""
    got, expected = outcome(ranks, name).losses, outcome(1, ONE + reference).losses
    largest = max(abs(a / b - 1) for a, b in zip(got, expected, strict=True))
    report(f"{name} against {ONE}{reference}: losses differ by {largest:.1e} at most")
    assert got == pytest.approx(expected, rel=tolerance)
    assert got[0] == pytest.approx(expected[0], rel=1e-4), "forward does not depend on chance or order"


RECOMPUTED = [
    (1, "one_rank_nvfp4_selective", "one_rank_nvfp4"),
    (1, "one_rank_mxfp8_loop_full", "one_rank_mxfp8"),
    (1, "one_rank_mxfp8_parts_mtp", "one_rank_mxfp8_mtp"),
    (2, "fsdp2_ep2_mxfp8_full", "fsdp2_ep2_mxfp8"),
]


@pytest.mark.parametrize(("ranks", "recomputing", "plain"), marked(RECOMPUTED))
def test_recompute_changes_nothing(outcome, ranks, recomputing, plain):
    """Bit for bit: whole blocks, selected operations, named parts, under expert parallelism and with rounding by
    chance."""
    got, expected = outcome(ranks, recomputing).losses, outcome(ranks, plain).losses
    exact = "loop" not in recomputing  # whose sums over rows are in another order
    assert got == (expected if exact else pytest.approx(expected, rel=1e-6))


@pytest.mark.slow
def test_a_resumed_run_rounds_by_the_same_chance(outcome):
    """Two steps, a checkpoint, and two more in another process."""
    resumed = outcome(1, "resumed_nvfp4").metrics
    assert [record["attempt"] for record in resumed.values()] == [1, 1, 2, 2]
    assert [record["loss"] for record in resumed.values()] == outcome(1, "one_rank_nvfp4").losses


@pytest.mark.parametrize(("ranks", "name"), marked([(1, ONE + recipe) for recipe in RECIPES]))
def test_formats_reach_the_model(outcome, ranks, name):
    got, plain = outcome(ranks, name).losses, outcome(1, "one_rank_tiled").losses
    assert got != plain and got[0] != plain[0]
    assert got == pytest.approx(plain, rel=1e-2)


@pytest.mark.slow
def test_prediction_layers_and_the_head_are_quantized_when_named(outcome):
    assert outcome(1, "one_rank_mxfp8_mtp").losses[0] != outcome(1, "one_rank_mxfp8").losses[0]


@pytest.mark.parametrize(("ranks", "name"), marked([(1, f"debug_{recipe}") for recipe in RECIPES]))
def test_every_recipe_trains_the_debug_model(outcome, ranks, name):
    got, bf16 = outcome(ranks, name).losses, outcome(1, "debug_bf16").losses
    assert got == pytest.approx(bf16, rel=2e-2) and got != bf16
    assert got[-1] < got[0] - 0.3
