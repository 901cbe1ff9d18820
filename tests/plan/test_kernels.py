"""Kernel times with all constants at their priors against the public tables they are meant to follow."""

from dataclasses import replace

import pytest

from titan_moe.plan import constants, kernels
from titan_moe.plan.hardware import HARDWARE

C = constants.priors()
OLD_LIBRARY = 0.78  # the B200 BF16 table is 25-30 % slower than published runs


def tflops(hardware, precision, phase, m, n, k, groups=1, c=C):
    seconds = kernels.gemm_seconds(HARDWARE[hardware], precision, phase, m, n, k, c, groups)
    return 2e-12 * groups * m * n * k / seconds


@pytest.mark.parametrize(
    ("groups", "rows", "wide", "narrow"),
    [
        (32, 1024, (1028, 980, 650), (865, 968, 617)),
        (64, 512, (826, 910, 493), (962, 662, 483)),
        (128, 256, (611, 748, 331), (683, 524, 317)),
        (256, 128, (468, 509, 174), (401, 340, 180)),
    ],
)
def test_grouped_gemm_follows_the_b200_table(groups, rows, wide, narrow):
    for (n, k), measured in (((4096, 7168), wide), ((7168, 2048), narrow)):
        for phase, value in zip(kernels.PHASES, measured):
            found = OLD_LIBRARY * tflops("B200", "bf16", phase, rows, n, k, groups)
            assert found == pytest.approx(value, rel=0.5 if phase == "wgrad" else 0.35)


def test_four_times_fewer_rows_cost_about_40_percent():
    many, few = (tflops("B200", "bf16", "forward", rows, 4096, 7168, 2**15 // rows) for rows in (1024, 256))
    assert few / many == pytest.approx(0.6, abs=0.12)
    many, few = (tflops("B200", "bf16", "wgrad", rows, 4096, 7168, 2**15 // rows) for rows in (1024, 256))
    assert few / many == pytest.approx(0.5, abs=0.12)


def test_deepgemm_on_h800():
    assert tflops("H800", "fp8_block", "forward", 8192, 4096, 7168, 4) == pytest.approx(1297, rel=0.08)
    assert tflops("H800", "fp8_block", "forward", 8192, 7168, 2048, 4) == pytest.approx(1099, rel=0.1)


@pytest.mark.parametrize(("phase", "share"), [("forward", 0.656), ("dgrad", 0.651), ("wgrad", 0.521)])
def test_mxfp8_grouped_gemm_on_b200(phase, share):
    assert tflops("B200", "mxfp8", phase, 16384, 2048, 7168, 8) / 4500 == pytest.approx(share, rel=0.13)


def test_mxfp8_quantization_on_b200():
    """633 us beside the forward GEMM of 131,072 x 7168."""
    seconds = kernels.quantize_seconds(HARDWARE["B200"], "mxfp8", 131072 * 7168, 0.0, C)
    assert seconds == pytest.approx(633e-6, rel=0.2)


def test_few_rows_are_bound_by_reading_the_weights():
    hw = HARDWARE["H100"]
    seconds = kernels.gemm_seconds(hw, "bf16", "forward", 16, 8192, 8192, C)
    assert seconds == pytest.approx((2 * 16 * 8192 + 8192**2) * 2 / kernels.hbm_bytes_per_s(hw, C))


@pytest.mark.parametrize(
    ("hardware", "fp8", "forward", "backward"),
    [
        ("H200", False, 599, 404),
        ("H100", True, 599, 404),  # no FP8 attention there: BF16
        ("GB200", False, 1406, 1057),
        ("GB200", True, 2095, 1692),
        ("GB300", True, 2788, 1982),
        ("B200", False, 1406 * 0.9, 1057 * 0.9),
    ],
)
def test_attention_rates(hardware, fp8, forward, backward):
    for rate, back in ((forward, False), (backward, True)):
        seconds = kernels.attention_seconds(HARDWARE[hardware], 1e12, 4096, backward=back, fp8=fp8)
        assert 1 / seconds == pytest.approx(rate)


def test_longer_sequences_use_attention_better():
    short, long = (
        kernels.attention_seconds(HARDWARE["H100"], 1e12, s, backward=False, fp8=False) for s in (2048, 16384)
    )
    assert 1.0 < short / long < 1.3


def test_memory_bound_shares_of_b200():
    hw = HARDWARE["B200"]
    assert kernels.hbm_bytes_per_s(hw, C) / 8e12 == pytest.approx(0.666)
    assert kernels.hbm_bytes_per_s(hw, C, permute=True) / 8e12 == pytest.approx(0.50, abs=0.005)


@pytest.mark.parametrize(
    ("hardware", "kind", "ranks", "nodes", "combine", "gb_s"),
    [
        ("GB200", "hybridep", 32, 1, False, 484),
        ("GB200", "hybridep", 32, 1, True, 465),
        ("GB200", "deepep", 32, 1, False, 400),
        ("GB200", "deepep", 32, 1, True, 190),
        ("B200", "hybridep", 8, 1, False, 536),
        ("B200", "alltoall", 8, 1, False, 537),
        ("H100", "hybridep", 16, 2, False, 54),
        ("H100", "hybridep", 64, 8, True, 47),
        ("H800", "deepep", 64, 8, False, 51),
        ("H800", "deepep", 32, 4, True, 57),
    ],
)
def test_transport_bandwidths(hardware, kind, ranks, nodes, combine, gb_s):
    near, far = (1e9, 0.0) if nodes == 1 else (0.0, 1e9)
    seconds = kernels.ep_seconds(HARDWARE[hardware], kind, ranks, nodes, near, far, combine, C)
    assert 1 / (seconds - kernels.FIXED_US * 1e-6) == pytest.approx(gb_s, rel=0.02)


def test_constants_act_where_they_say():
    half = replace(C, comm=C.comm / 2)
    moved = [kernels.ep_seconds(HARDWARE["GB200"], "hybridep", 8, 1, 1e9, 0, False, c) for c in (C, half)]
    assert (moved[1] - 24e-6) / (moved[0] - 24e-6) == pytest.approx(2)
    assert tflops("B200", "bf16", "wgrad", 4096, 4096, 4096, c=replace(C, wgrad=0.4)) == pytest.approx(
        0.5 * tflops("B200", "bf16", "wgrad", 4096, 4096, 4096), rel=1e-6
    )
