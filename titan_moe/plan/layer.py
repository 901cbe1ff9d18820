"""The kernels of one layer: what runs, how long each takes alone, and how many launches it costs the host.

A layer is listed once as forward and backward of one microbatch on one rank. Each kernel has a part (what the report
adds it to), a block (what schedule.py orders: "attention" up to the router's input, "experts" between dispatch and
combine, "shared" beside them) and a phase; weight gradients are apart because some schedules move them.

A kernel also costs the GPU a few microseconds to fill and drain (constant `kernel_gap_us`), graph or not.

The bytes of a kernel are counted where it runs, never again in the kernel that a profile fuses it into.

Shape letters: T tokens of this rank, D model width, F expert hidden width, E experts, e local experts, K top-k.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from titan_moe.flavors import Flavor
from titan_moe.plan import kernels
from titan_moe.plan.constants import Constants
from titan_moe.plan.hardware import Precision
from titan_moe.plan.job import Job
from titan_moe.plan.profiles import Software
from titan_moe.plan.traffic import IMBALANCE, unique_places

Kind = Literal["dense", "moe", "mtp"]
Block = Literal["attention", "router", "experts", "shared"]
Phase = Literal["forward", "backward", "wgrad"]

ALIGNMENT = {"bf16": 16, "fp8_current": 16, "fp8_block": 128, "mxfp8": 128, "nvfp4": 128}
"""Rows of an expert are padded to a multiple of this: half of it on average"""


MADE_OF = {
    "q": ("attention.wq",),
    "q down": ("attention.wq_a",),
    "q up": ("attention.wq_b",),
    "kv down": ("attention.wkv_a",),
    "kv up": ("attention.wkv_b",),
    "attention qkv": ("attention.wq", "attention.wkv"),
    "attention out": ("attention.wo",),
    "MLP gate and up": ("feed_forward.w1", "feed_forward.w3"),
    "MLP down": ("feed_forward.w2",),
    "experts gate and up": ("experts",),
    "experts down": ("experts",),
    "shared gate and up": ("shared_experts.w1", "shared_experts.w3"),
    "shared down": ("shared_experts.w2",),
    "MTP projection": ("eh_proj",),
}
"""The model's linear layers that a GEMM computes, by their names in precision/layers.py"""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kind of kernel of a layer; seconds and launches of all its instances in one microbatch."""

    name: str
    part: str
    block: Block
    phase: Phase
    seconds: float
    launches: float


@dataclass(frozen=True)
class Linear:
    """One linear layer: contraction k, output n, rows per group, groups, and what its input comes from."""

    name: str
    block: Block
    k: float
    n: float
    rows: float
    groups: int = 1
    source: Literal["norm", "swiglu", "other"] = "other"

    def precision(self, job: Job) -> Precision:
        """What it computes in, in a layer that is not left in BF16 as a whole."""
        return job.precision_of(MADE_OF[self.name])


def layer_kernels(job: Job, kind: Kind, software: Software, c: Constants) -> list[Kernel]:
    """All kernels of one layer, forward and backward."""
    build = _Builder(job, kind, software, c)
    return list(build.kernels())


def linears(job: Job, kind: Kind) -> tuple[Linear, ...]:
    """The layer's GEMMs as this rank runs them."""
    padding = ALIGNMENT[job.precision_of(["experts"])] / 2
    return _linears(job.model, kind, job.tokens, job.tp, job.ep, IMBALANCE[job.routing], padding)


@lru_cache(maxsize=1 << 16)
def _linears(
    f: Flavor, kind: Kind, tokens: int, tp: int, ep: int, imbalance: float, padding: float
) -> tuple[Linear, ...]:
    T = tokens * tp
    found = _attention_linears(f, T, tp)
    if kind == "dense":
        hidden = f.dense_hidden_dim / tp
        return (
            *found,
            Linear("MLP gate and up", "shared", f.dim, 2 * hidden, T, source="norm"),
            Linear("MLP down", "shared", hidden, f.dim, T, source="swiglu"),
        )
    e = f.num_experts // ep
    rows = tokens * f.top_k / e * imbalance + padding
    found += [
        Linear("experts gate and up", "experts", f.dim, 2 * f.moe_hidden_dim, rows, e),
        Linear("experts down", "experts", f.moe_hidden_dim, f.dim, rows, e, source="swiglu"),
    ]
    if f.num_shared_experts:
        hidden = f.num_shared_experts * f.moe_hidden_dim / tp
        found += [
            Linear("shared gate and up", "shared", f.dim, 2 * hidden, T, source="norm"),
            Linear("shared down", "shared", hidden, f.dim, T, source="swiglu"),
        ]
    if kind == "mtp":
        found.append(Linear("MTP projection", "attention", 2 * f.dim, f.dim / tp, T, source="norm"))
    return tuple(found)


def _attention_linears(f: Flavor, T: float, tp: int) -> list[Linear]:
    qk, heads = f.qk_nope_head_dim + f.qk_rope_head_dim, f.n_heads / tp
    out = Linear("attention out", "attention", heads * f.v_head_dim, f.dim, T)
    if f.attention == "gqa":
        width = heads * qk + f.num_kv_heads / tp * (qk + f.v_head_dim)
        return [Linear("attention qkv", "attention", f.dim, width, T, source="norm"), out]
    q = [Linear("q", "attention", f.dim, heads * qk, T, source="norm")]
    if f.q_lora_rank:
        q = [
            Linear("q down", "attention", f.dim, f.q_lora_rank, T, source="norm"),
            Linear("q up", "attention", f.q_lora_rank, heads * qk, T, source="norm"),
        ]
    return [
        *q,
        Linear("kv down", "attention", f.dim, f.kv_lora_rank + f.qk_rope_head_dim, T, source="norm"),
        Linear("kv up", "attention", f.kv_lora_rank, heads * (f.qk_nope_head_dim + f.v_head_dim), T, source="norm"),
        out,
    ]


STREAMS = 4
"""Streams that experts' single GEMMs are spread over"""


class _Builder:
    def __init__(self, job: Job, kind: Kind, software: Software, c: Constants) -> None:
        self.job, self.kind, self.software, self.c = job, kind, software, c
        self.moe = kind != "dense"

    def kernels(self) -> Iterator[Kernel]:
        for linear in linears(self.job, self.kind):
            yield from self._linear(linear)
        yield from self._core_attention()
        yield from self._elementwise()
        if self.moe:
            yield from self._routing()

    def _kernel(
        self, name: str, part: str, block: Block, phase: Phase, seconds: float, launches: float, streams: int = 1
    ) -> Kernel:
        seconds += launches / streams * self.c.kernel_gap_us * 1e-6
        return Kernel(name=name, part=part, block=block, phase=phase, seconds=seconds, launches=launches)

    # GEMMs, and the quantization of their inputs and output gradients
    def _linear(self, at: Linear) -> Iterator[Kernel]:
        hw, c, precision = self.job.hardware, self.c, at.precision(self.job)
        grouped = at.block == "experts"
        part = "grouped_gemm" if grouped else "dense_gemm"
        one_launch = self._one_launch(at)
        launches = 1 if one_launch else at.groups
        again = self._recomputed(at)

        def gemm(phase: kernels.Phase) -> float:
            return kernels.gemm_seconds(hw, precision, phase, at.rows, at.n, at.k, c, at.groups)

        streams = 1 if one_launch else STREAMS
        twice = gemm("dgrad") + again * gemm("forward")
        yield self._kernel(at.name, part, at.block, "forward", gemm("forward"), launches, streams)
        yield self._kernel(f"{at.name} dgrad", part, at.block, "backward", twice, launches * (1 + again), streams)
        yield self._kernel(f"{at.name} wgrad", part, at.block, "wgrad", gemm("wgrad"), launches, streams)
        if precision != "bf16":
            yield from self._quantize(at, again)

    def _one_launch(self, at: Linear) -> bool:
        """Whether one launch serves all groups."""
        return at.groups == 1 or self.software.grouped_launch or self.job.fused_grouped_mlp

    def _quantize(self, at: Linear, again: float) -> Iterator[Kernel]:
        precision, software = at.precision(self.job), self.software
        fused_mlp = at.block == "experts" and self.job.fused_grouped_mlp
        x, dy = at.rows * at.groups * at.k, at.rows * at.groups * at.n
        x_free, dy_free = fused_mlp and at.source == "swiglu", fused_mlp and at.source == "norm"
        # A producer that writes the quantized form saves its BF16 write and our read.
        in_norm = software.quantize_in_norm and at.source == "norm" and at.block != "experts"
        casts = 2 if precision in ("fp8_current", "nvfp4") else 1
        one_launch = self._one_launch(at)
        swizzles = 0 if software.fused_swizzle or precision not in ("mxfp8", "nvfp4") else at.groups

        def seconds(elements: float, saved: float) -> float:
            return kernels.quantize_seconds(self.job.hardware, precision, elements, saved, self.c)

        def cast(name: str, phase: Phase, time: float, times: float) -> Kernel:
            count = times * (casts * (1 if one_launch else at.groups) + swizzles)
            streams = 1 if one_launch else STREAMS
            return self._kernel(f"quantize {at.name} {name}", "quantize", at.block, phase, time, count, streams)

        x_seconds, x_casts = (0.0, 0) if x_free else (seconds(x, 4.0 * x * in_norm), int(not in_norm))
        dy_seconds, dy_casts = (0.0, 0) if dy_free else (seconds(dy, 0.0), 1)
        yield cast("input", "forward", x_seconds, x_casts)
        yield cast("gradient", "backward", dy_seconds + again * x_seconds, dy_casts + again * x_casts)

    def _recomputed(self, at: Linear) -> float:
        """Share of this GEMM's forward that backward repeats."""
        job = self.job
        if job.recompute_mode == "full":
            return 1.0
        if job.recompute_mode == "selective":
            return 0.5  # torchtitan keeps every second product
        redone = job.recompute | self.software.recompute
        named = {"q up": "mla_up_proj", "kv up": "mla_up_proj", "MLP gate and up": "mlp", "MLP down": "mlp"}
        named |= {"shared gate and up": "shared_expert", "shared down": "shared_expert"}
        named |= {"experts gate and up": "moe", "experts down": "moe"}
        return float(named.get(at.name) in redone)

    def _core_attention(self) -> Iterator[Kernel]:
        job, f = self.job, self.job.model
        width = f.n_heads * (f.qk_nope_head_dim + f.qk_rope_head_dim + f.v_head_dim) / job.tp
        flops = job.tokens * job.tp * job.seq_len * width  # causal: 2 FLOPs x half of the positions
        again = job.recompute_mode == "full" or "core_attention" in job.recompute

        def seconds(backward: bool) -> float:
            work = 2.5 * flops if backward else flops
            return kernels.attention_seconds(job.hardware, work, job.seq_len, backward=backward, fp8=job.fp8_attention)

        yield self._kernel("core attention", "attention", "attention", "forward", seconds(False), 3)
        yield self._kernel(
            "core attention backward", "attention", "attention", "backward", seconds(True) + again * seconds(False), 5
        )

    # Memory-bound kernels. Bytes per token of this rank in BF16, forward and backward.
    def _elementwise(self) -> Iterator[Kernel]:
        job, f, T = self.job, self.job.model, self.job.tokens
        redone = job.recompute | (self.software.recompute if f.attention == "mla" else frozenset())
        D, full = float(f.dim * T), T * job.tp
        qk, heads, kv_heads = f.qk_nope_head_dim + f.qk_rope_head_dim, f.n_heads / job.tp, f.num_kv_heads / job.tp
        # Two norms, each read and written; backward reads x and dy and writes dx.
        gqa = f.attention == "gqa"
        low_rank = 1.0 + (f.q_lora_rank + f.kv_lora_rank) * job.tp / (2 * f.dim)
        norms = (2, 4) if gqa else (4, 8)
        yield from self._both("norms", "attention", 8 * D * low_rank, 12 * D * low_rank, norms, "norms" in redone, True)
        # Two residual additions; backward adds the gradients of a norm's readers: residual, two low-rank projections.
        yield from self._both("residuals", "attention", 12 * D, 18 * D, (2, 3))
        if gqa:  # norm of q and k, then rotary, each read and written
            moved = 2.0 * 2 * 2 * (heads + kv_heads) * qk * full
            yield from self._both("rotary and qk norm", "attention", moved, 1.5 * moved, (4, 6))
        else:  # rotary in place on q; k joined from two parts and v split off: read and written
            moved = 2.0 * heads * (2 * f.qk_rope_head_dim + f.qk_nope_head_dim + qk + 2 * f.v_head_dim) * full
            up = "mla_up_proj" in redone
            yield from self._both("rotary and head layout", "attention", moved, moved, (8, 10), up)
        if not self.moe:
            rows = full * f.dense_hidden_dim / job.tp
            yield from self._both("SwiGLU", "shared", 6 * rows, 10 * rows, (1, 1), "mlp" in redone)
            return
        # The shared expert's output joins; backward adds the gradients of experts, router and shared expert.
        yield from self._both("expert sums", "shared", (6 if f.num_shared_experts else 0) * D, 12 * D, (1, 2))
        if f.num_shared_experts:
            rows = full * f.num_shared_experts * f.moe_hidden_dim / job.tp
            shared = "shared_expert" in redone
            yield from self._both("shared SwiGLU", "shared", 6 * rows, 10 * rows, (1, 1), shared)
        if not job.fused_grouped_mlp:  # fused: inside the GEMMs
            rows = T * f.top_k * IMBALANCE[job.routing] * f.moe_hidden_dim
            late = 0 if job.early_weighting else 4 * T * f.top_k * f.dim
            again = "swiglu" in redone
            yield from self._both("experts SwiGLU", "experts", 6 * rows + late, 10 * rows + 2 * late, (1, 1), again)

    def _both(
        self,
        name: str,
        block: Block,
        forward: float,
        backward: float,
        launches: tuple[int, int],
        again: bool = False,
        reduces: bool = False,
    ) -> Iterator[Kernel]:
        """A memory-bound kernel of so many bytes each way; `again`: backward repeats forward."""
        again = again or self.job.recompute_mode != "none"
        # Reductions over rows fill HBM no better than permutes do.
        rate = kernels.hbm_bytes_per_s(self.job.hardware, self.c, permute=reduces)
        yield self._kernel(name, "elementwise", block, "forward", forward / rate, launches[0])
        twice = (backward + again * forward) / rate
        yield self._kernel(
            f"{name} backward", "elementwise", block, "backward", twice, launches[1] + again * launches[0]
        )

    # Router, and the copies around the experts
    def _routing(self) -> Iterator[Kernel]:
        job, f, T, software = self.job, self.job.model, self.job.tokens, self.software
        rate = kernels.hbm_bytes_per_s(job.hardware, self.c)
        passes = 4 if software.fused_router else 20
        logits = T * (2.0 * f.dim + 4.0 * f.num_experts * passes)
        launches = (5, 6) if software.fused_router else (20, 24)
        yield self._kernel("router", "router", "router", "forward", logits / rate, launches[0])
        yield self._kernel("router backward", "router", "router", "backward", 1.5 * logits / rate, launches[1])
        sorting = {"alltoall": 14, "dedup": 20, "local": 8}.get(job.dispatcher, 8)
        yield self._kernel("dispatch plan", "router", "router", "forward", 0.0, sorting)
        moved = permute_bytes(job, software)
        rate = kernels.hbm_bytes_per_s(job.hardware, self.c, permute=True)
        count = 2 if software.fused_permute else 8
        if job.dispatcher == "alltoall":
            count *= 2
        for phase in ("forward", "backward"):
            yield self._kernel(f"permute {phase}", "permute", "experts", phase, moved / rate, count)


def permute_bytes(job: Job, software: Software) -> float:
    """Bytes of permute and unpermute in one direction (forward or backward) of one microbatch.

    `alltoall` copies tokens into K rows before the exchange and sorts what it received by expert; unpermuting is the
    reverse. Transports that deduplicate expand what they received, U rows a token, to K rows; HybridEP writes rows in
    place as it receives them and reads them so as it sends.
    """
    f, row = job.model, 2.0 * job.model.dim * job.tokens
    K = f.top_k * IMBALANCE[job.routing]
    if job.dispatcher in ("alltoall", "local"):
        sort = 2 * K if job.ep > 1 and f.num_experts > job.ep else 0
        one_way = (1 + K) + sort
    else:
        one_way = unique_places(f, job.routing, job.ep) + K
    unfused = 1.0 if software.fused_permute else 2.5
    first = 0.516 if software.fp8_dispatch else 1.0
    return row * one_way * unfused * (1 + first)
