"""How long one kernel takes alone on the GPU: GEMMs, attention, memory-bound kernels, quantization, and transfers.

A GEMM of m rows, contraction k, output n runs at

    peak x e x k/(k + K_HALF) x n/(n + N_HALF) x m/(m + rows_half),

or at HBM speed if its bytes take longer. e is the saturated share of peak (constants gemm_fp8, gemm_bf16). Short
contractions do not amortize filling and draining the pipeline, narrow outputs not the loading of tiles; the tables show
both to the same degree. Few rows leave SMs without tiles: the faster the machine, the more it needs, so rows_half grows
with the peak (in units of the tables' 2 PFLOPS). Weight gradients contract over the rows, so that few rows per expert
hurt them twice; `wgrad` is their further loss.

Memory-bound kernels are bytes over a share of the HBM bandwidth. Kernels that permute or transpose reach less.

Tables hold measured rates, dated and sourced; what is fitted is in constants.toml.
"""

from typing import Literal

from titan_moe.plan.constants import Constants
from titan_moe.plan.hardware import Hardware, Precision

UNIT_TFLOPS = 2000.0  # peak at which rows_half holds
K_HALF, N_HALF = 556.0, 500.0
"""H800 DeepGEMM FP8: N 4096 K 7168 over N 7168 K 2048, 1,297 / 1,099 TFLOPS; B200 BF16 grouped GEMM the same shapes:
1,028 / 865 forward, 980 / 968 dgrad (contracting over N); B200 MXFP8 N 2048 K 7168: forward and dgrad alike"""
GEMM_SHARE = {"nvfp4": 0.55}
"""Further share of peak: NVFP4 instead of MXFP8 gains 35 % on a dense 405B model and 2-4 % on an MoE"""
WGRAD_SHARE = {"fp8_block": 0.66}
"""Further share of wgrad: in DeepSeek's H800 trace it runs at 0.35 of peak (4.78 TFLOP in 8.19 ms), forward and dgrad
at 0.6: FP8 with 1x128 tiles on both sides promotes its partial sums more often"""

HBM_SHARE = {
    "ampere": 0.80,
    "hopper": 0.75,
    "blackwell": 0.666,
    "blackwell_ultra": 0.666,
    "cdna3": 0.70,
    "cdna4": 0.666,
}
"""Share of peak bandwidth of elementwise kernels: B200 measured 0.666; the slower memories are easier to fill"""
PERMUTE_SHARE = 0.75
"""Permuting or transposing over elementwise kernels: B200 0.50 / 0.666"""

ATTENTION_TFLOPS = {
    # BF16 forward and backward, FP8 forward and backward; MLA, 128 heads of 192/128, causal, 4,096 tokens.
    "H200": (599, 404, 0, 0),
    "GB200": (1406, 1057, 2095, 1692),
    "GB300": (1590, 1143, 2788, 1982),
}
_LIKE = {
    "ampere": "H200",
    "hopper": "H200",
    "blackwell": "GB200",
    "blackwell_ultra": "GB300",
    "cdna3": "H200",
    "cdna4": "GB200",
}
_TABLE_PEAK = {"H200": 989.0, "GB200": 2500.0, "GB300": 2500.0}
SEQUENCE_HALF = 400.0  # tokens: causal kernels gain with length, as blocks on the diagonal are half wasted

Phase = Literal["forward", "dgrad", "wgrad"]
PHASES: tuple[Phase, ...] = ("forward", "dgrad", "wgrad")


def gemm_seconds(
    hw: Hardware, precision: Precision, phase: Phase, m: float, n: float, k: float, c: Constants, groups: int = 1
) -> float:
    """One phase of a linear layer of `groups` equal experts with m rows each, contraction k and output n in forward."""
    peak = hw.peak_tflops(precision)
    scale = (peak if precision == "bf16" else hw.fp8_tflops) / UNIT_TFLOPS
    saturated = (c.gemm_bf16 if precision == "bf16" else c.gemm_fp8) * GEMM_SHARE.get(precision, 1.0)
    rate = saturated * peak * hw.sustained * 1e12
    contraction = {"forward": k, "dgrad": n, "wgrad": m}[phase]
    width_out = {"forward": n, "dgrad": k, "wgrad": min(n, k)}[phase]
    share = contraction / (contraction + K_HALF) * width_out / (width_out + N_HALF)
    rows = max(n, k) if phase == "wgrad" else m
    share *= rows / (rows + c.rows_half * scale)
    if phase == "wgrad":
        share *= c.wgrad * WGRAD_SHARE.get(precision, 1.0)
    arithmetic = 2.0 * groups * m * n * k / (rate * share)
    width = 2.0 if precision == "bf16" else 0.5625 if precision == "nvfp4" else 1.03
    if phase == "wgrad":  # adds to FP32 gradients: reads and writes them
        moved = groups * (m * (n + k) * width + n * k * 8.0)
    else:
        moved = groups * (m * (contraction * width + (n + k - contraction) * 2.0) + n * k * width)
    return max(arithmetic, moved / (hbm_bytes_per_s(hw, c)))


def attention_seconds(hw: Hardware, flops: float, seq_len: float, *, backward: bool, fp8: bool) -> float:
    """Core attention of `flops` causal FLOPs (backward: 2.5 times the forward's)."""
    like = _LIKE[hw.architecture]
    rates = ATTENTION_TFLOPS[like]
    rate = rates[(2 if fp8 and rates[2] else 0) + backward] * hw.bf16_tflops / _TABLE_PEAK[like]
    rate *= (1 + SEQUENCE_HALF / 4096) / (1 + SEQUENCE_HALF / seq_len)
    return flops / (rate * 1e12)


def hbm_bytes_per_s(hw: Hardware, c: Constants, *, permute: bool = False) -> float:
    """What memory-bound kernels reach."""
    return hw.hbm_tb_s * 1e12 * HBM_SHARE[hw.architecture] * c.hbm * (PERMUTE_SHARE if permute else 1.0)


QUANTIZE = {
    # Bytes of quantization kernels per element of a GEMM's input and output gradient, and whether they transpose.
    "bf16": (0.0, False),
    "mxfp8": (2 + 2 * 1.03, False),  # read BF16 once, write both scalings
    "fp8_current": (2 + 2 + 1 + 1, True),  # a pass for the maximum; Hopper's GEMM wants wgrad operands transposed
    "fp8_block": (2 + 1 + 2 + 1, True),  # 1x128 tiles for one direction, 128x1 transposed for the other
    "nvfp4": (2 + 2 + 2 + 2 * 0.5625, False),  # a pass for the second-level scale, one for wgrad's Hadamard transform
}


def quantize_seconds(hw: Hardware, precision: Precision, elements: float, saved_bytes: float, c: Constants) -> float:
    """Quantizing so many elements, of which producers already did part: `saved_bytes`."""
    each, transposes = QUANTIZE[precision]
    return max(each * elements - saved_bytes, 0.0) / hbm_bytes_per_s(hw, c, permute=transposes)


# ---------------------------------------------------------------------------------------------------------------------
# Transfers

NVLINK_SHARE = {
    # Unique (alltoall: all leaving) bytes per second over the link's: dispatch, combine, by expert-parallel ranks.
    # HybridEP, API: B200 EP8, GB200 EP16 and EP32 (the share falls with the number of peers), continued to EP64.
    "hybridep": {8: (0.60, 0.61), 16: (0.58, 0.58), 32: (0.54, 0.52), 64: (0.50, 0.46)},
    "te_ep": {8: (0.60, 0.61), 16: (0.58, 0.58), 32: (0.54, 0.52), 64: (0.50, 0.46)},
    # DeepEP B200 EP8 (24 SMs); GB200 EP32 (400 and 190 GB/s).
    "deepep": {8: (0.55, 0.47), 16: (0.50, 0.34), 32: (0.44, 0.21), 64: (0.40, 0.18)},
    # NCCL, one 8 x B200 node.
    "alltoall": {8: (0.597, 0.597)},
    "dedup": {8: (0.597, 0.597)},
}
NETWORK_SHARE = {
    # Unique nodes' bytes (the own one counts) over the NIC's, so it can exceed 1. HybridEP H100 EP16, EP32, EP64 (API);
    # DeepEP H800 EP16, EP32, EP64.
    "hybridep": {2: (1.08, 1.06), 4: (0.94, 1.06), 8: (0.82, 0.94)},
    "te_ep": {2: (1.08, 1.06), 4: (0.94, 1.06), 8: (0.82, 0.94)},
    "deepep": {2: (0.86, 0.86), 4: (1.16, 1.14), 8: (1.02, 1.00)},
    # Copies that leave the node only: NCCL over the NIC.
    "alltoall": {2: (0.80, 0.80)},
    "dedup": {2: (0.80, 0.80)},
}
COLLECTIVE_SHARE = 0.674
"""All-gather and reduce-scatter over NVLink's bandwidth, one 8 x B200 node"""
NETWORK_COLLECTIVE_SHARE = 0.80
"""The same over the NIC's"""
FIXED_US = 24.0
"""Fixed cost of a collective: 22-26 us, one 8 x B200 node"""


def _nearest(table: dict[int, tuple[float, float]], size: int, combine: bool) -> float:
    return table[min(table, key=lambda known: abs(known.bit_length() - int(size).bit_length()))][combine]


def ep_seconds(
    hw: Hardware,
    kind: str,
    ranks: int,
    nodes: int,
    over_nvlink: float,
    over_network: float,
    combine: bool,
    c: Constants,
) -> float:
    """One dispatch or combine that moves so many bytes at each level; the two levels are pipelined."""
    nvlink = over_nvlink / (_nearest(NVLINK_SHARE[kind], ranks // nodes, combine) * hw.nvlink_gb_s * 1e9)
    network = over_network / (_nearest(NETWORK_SHARE[kind], nodes, combine) * hw.nic_gb_s * 1e9)
    return max(nvlink, network) / c.comm + FIXED_US * 1e-6


def collective_seconds(hw: Hardware, moved: float, *, across: bool) -> float:
    """An all-gather or reduce-scatter in which a rank moves so many bytes."""
    if moved == 0:
        return 0.0
    rate = hw.nic_gb_s * NETWORK_COLLECTIVE_SHARE if across else hw.nvlink_gb_s * COLLECTIVE_SHARE
    return moved / (rate * 1e9) + FIXED_US * 1e-6
