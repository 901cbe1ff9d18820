"""One GPU in under five minutes: grouped GEMMs, the layer, recipes, whole steps with CUDA graphs and offload.

For what is installed: what this machine lacks is said in a line each, and left out. Without a GPU all is left out.

- Experts by every backend at the widths of three models, forward and backward of one rank's routed experts in bf16, of
  all of one layer, but for 671B, where 32 ranks share them: a loop over experts, torch._grouped_mm, Transformer Engine
  (TE). The ceiling is the machine's best square product.
- The same by TE in low precision, quantization and GEMMs together, beside bf16 by TE.
- Our region against torchtitan's RoutedExperts and transformers' experts, as in the layer suite.
- SwiGLU with its quantization to MXFP8, as steps of torch and as one Triton kernel.
- Training steps: torchtitan's (stock.py), ours, and ours with a CUDA graph, with offload and with recipes.
- Every dispatcher between the GPUs of this machine, where there are several (gpu_dispatch.py).

No GPU has run this yet; tests run it on a CPU, with small sizes.

Shape letters: T tokens of the rank, D model width, K top-k, N = T*K copies, E experts of the rank, F expert hidden
width, R rows of the padded slabs.
"""

import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group  # isort: skip - before torchtitan

import torch
from torch import Tensor

from benchmarks import fused_quantize, harness, layer, roofline
from benchmarks.harness import Options, Record, Times, interleaved, versus
from benchmarks.stock import StockRun
from tests.gpu.backends import LOW_PRECISION, NAMES, experts_backend
from titan_moe.flavors import FLAVORS
from titan_moe.moe import layout, te
from titan_moe.precision.recipes import RECIPES

SUITE = "gpu"
ALIGNMENT = 128
RANKS = {"debugmodel": 1, "16B": 1, "671B": 32}  # that share the experts
STEPS = {  # the run: more words; each against "ours"
    "ours": [],
    "CUDA graph": ["--cuda_graph.scope=full"],
    "offload": ["--activation_offload.tensors=layer_input"],
    **{name: [f"--precision.recipe={name}"] for name in RECIPES if name != "bf16"},
}
SIZE_OF_STEP = [
    *("--model.dim=1024", "--model.n_layers=6", "--model.moe_hidden_dim=512", "--model.dense_hidden_dim=3072"),
    *("--model.num_experts=32", "--model.top_k=4", "--model.n_heads=16", "--model.q_lora_rank=512"),
    *("--model.kv_lora_rank=256", "--training.seq_len=4096"),
]
SMALL_STEP = [
    *("--model.dim=64", "--model.n_layers=2", "--model.moe_hidden_dim=64", "--model.dense_hidden_dim=96"),
    *("--model.q_lora_rank=32", "--model.kv_lora_rank=32", "--model.n_heads=2", "--training.seq_len=64"),
]


def measure(options: Options) -> Iterator[Record]:
    if roofline.DEVICE != "cuda":
        print("no GPU: torch sees no CUDA device on this machine, so nothing of this suite was run\n", flush=True)
        return
    print(f"{torch.cuda.get_device_name(0)}; {te.facts()}\n", flush=True)
    yield from measure_on("cuda", options)
    if torch.cuda.device_count() > 1:
        yield from between_gpus(torch.cuda.device_count())


def measure_on(device: str, options: Options) -> Iterator[Record]:
    tokens = options.pick(64, 4096, 4096)
    repetitions, budget_s = options.pick((2, 1.0), (10, 3.0), (30, 30.0))
    time_it = Timer(device, repetitions, budget_s)
    sizes = options.pick(["debugmodel"], list(RANKS), list(RANKS))
    for names, base in ((NAMES, "loop"), (("TE, device splits", *LOW_PRECISION), "TE, device splits")):
        for flavor in sizes:
            yield from experts(flavor, names, base, tokens, time_it)
    for name in options.pick(["smallest"], ["wide", "16b"], ["debug-2048", "wide", "16b"]):
        for found in layer.compare(name, "natural", repetitions, budget_s, device):
            yield replace(found, suite=SUITE, case=f"layer, {found.case}")
    yield from fused(*options.pick((64, 64), (32768, 2048), (32768, 2048)), time_it)
    yield from steps(options.pick(SMALL_STEP, SIZE_OF_STEP, SIZE_OF_STEP), time_it)


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def absent(what: str, why: object) -> None:
    print(f"not here: {what}: {why}", flush=True)


class Timer:
    """Interleaved times of calls that need no new inputs, the device's work included."""

    def __init__(self, device: str, repetitions: int, budget_s: float) -> None:
        self.device, self.repetitions, self.budget_s = device, repetitions, budget_s

    def __call__(self, calls: dict[str, Callable[[], object]]) -> Times:
        return interleaved(
            {name: (lambda call=call: call) for name, call in calls.items()},
            self.repetitions,
            budget_s=self.budget_s,
            wait=lambda: roofline.synchronize(self.device),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def draw(flavor: str, tokens: int, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """x_RD, weight_R, w13_EF2D and w2_EDF as leaves; slab sizes counts_E, as random routing makes them; the gradient of
    the output."""
    model, E = FLAVORS[flavor], FLAVORS[flavor].num_experts // RANKS[flavor]
    D, F, N = model.dim, model.moe_hidden_dim, tokens * model.top_k
    generator = torch.Generator(device).manual_seed(0)
    ids_N = torch.randint(E, (N,), generator=generator, device=device)
    counts_E = layout.round_up(layout.expert_counts(ids_N, E), ALIGNMENT)
    R = int(counts_E.sum())

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    weight_R = torch.rand(R, generator=generator, device=device)
    leaves = [randn(R, D), weight_R, randn(E, F, 2, D) * D**-0.5, randn(E, D, F) * F**-0.5]
    return [leaf.requires_grad_() for leaf in leaves], counts_E, randn(R, D)


def experts(flavor: str, names, base: str, tokens: int, time_it: Timer) -> Iterator[Record]:
    """Speeds of those of `names` that are here, against `base` or, without it, the first that is. FLOPs are those of
    the N copies, not of the rows that pad slabs."""
    model, E = FLAVORS[flavor], FLAVORS[flavor].num_experts // RANKS[flavor]
    D, F, N = model.dim, model.moe_hidden_dim, tokens * model.top_k
    leaves, counts_E, grad_RD = draw(flavor, tokens, time_it.device)
    x_RD, weight_R, w13_EF2D, w2_EDF = leaves
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        backend = experts_backend(name, torch.bfloat16, D, F, E)
        if isinstance(backend, str):
            absent(f"experts of {flavor}, {name}", backend)
            continue

        def step(backend=backend) -> None:
            torch.autograd.grad(backend(x_RD, counts_E, weight_R, w13_EF2D, w2_EDF), leaves, grad_RD)

        calls[name] = step
    if not calls:
        return
    times, base = time_it(calls), base if base in calls else next(iter(calls))
    flops = 6 * N * 3 * D * F
    for name in calls:
        found = times.against(name, base)
        reached = flops / times.median(name)
        case = f"experts of {flavor}: {E} x {D} x {F}, {N:,} copies, {name}"
        roof = reached / roofline.matmul_peak(torch.bfloat16, time_it.device)
        yield record(case, metric="forward + backward", unit="ms", **found, roof=roof)
        yield record(case, metric="achieved", value=reached / 1e12, unit="TFLOPS")


def fused(R: int, F: int, time_it: Timer) -> Iterator[Record]:
    if time_it.device == "cpu":  # it only interprets the kernel; the precision suite counts there
        return
    for name, (by_torch, by_kernel, moved) in fused_quantize.cases(R, F, time_it.device).items():
        case = f"{name}, [{R:,}, {F:,}]"
        found = fused_quantize.counts(by_torch, by_kernel, moved)
        kernels = versus(found["Triton"][0], found["torch"][0]) | {"against": "torch"}
        yield record(case, metric="kernels", value=found["Triton"][0], **kernels)
        times = time_it({"torch": by_torch, "Triton": by_kernel})
        roof = moved / roofline.bandwidth("cuda") / times.median("Triton")
        yield record(case, metric="time", unit="ms", **times.against("Triton", "torch"), roof=roof)


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps


def steps(size: list[str], time_it: Timer) -> Iterator[Record]:
    """One after the other, not in turn: each with a peak of memory of its own, and a recorded graph owns the device's
    memory. So "ours" runs first and last, and what it differs by is how steady the device was."""
    base = [
        *("train_configs/debug_model.toml", *QUIET, "--training.mixed_precision_param=bfloat16", *size),
        *("--training.local_batch_size=1", "--training.dataset=synthetic"),
    ]
    variants = {"torchtitan": None, **STEPS, "ours, again": []}
    times, peaks = Times(), {}
    with one_process_group() as folder:
        for name, more in variants.items():
            try:
                config = load([*base, *(more or [])], folder / name.replace(", ", "-").replace(" ", "-"))
                run = StockRun(config) if more is None else SteppedRun(config)
            except ValueError as refusal:
                absent(f"step, {name}", refusal)
                continue
            if time_it.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times.seconds |= time_it({name: run.step}).seconds
            if time_it.device == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
            if isinstance(run, SteppedRun):
                run.close()
            del run
            gc.collect()  # or its memory would be in the next one's peak
    shortest = min(map(len, times.seconds.values()))
    times.seconds = {name: found[:shortest] for name, found in times.seconds.items()}
    for name in times.seconds:
        against = "torchtitan" if name == "ours" and "torchtitan" in times.seconds else "ours"
        yield record(f"step, {name}", metric="time", unit="ms", **times.against(name, against))
        if name in peaks:
            peak = versus(peaks[name], peaks[against]) | {"against": against}
            yield record(f"step, {name}", metric="peak of device memory", value=peaks[name], unit="MiB", **peak)


def between_gpus(gpus: int) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "records.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
        subprocess.run([*launch, "benchmarks/gpu_dispatch.py", "--json", str(answer)], cwd=harness.ROOT, check=True)
        for found, _ in harness.read(answer):
            yield found
