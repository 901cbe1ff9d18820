"""Low-precision recipes against bf16: time, what is kept for backward, rounding, and what one fused kernel saves.

Forward and backward of routed experts on one rank. On a CPU every recipe is emulated, which computes more, not less:
the ratio says what an experiment in low precision costs here, and nothing about a GPU (the gpu suite does). Error is
that of the gradient of gate and up against fp32 on the same weights and routing, over its norm: bf16's own beside each
recipe's.

Kernels and bytes are those of SwiGLU with its quantization to MXFP8 (fused_quantize.py). learning.py trains the debug
model in every recipe.

Shape letters: T tokens, D model width, F expert hidden width, E experts, K top-k.
"""

from collections.abc import Callable, Iterator

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor

from benchmarks import fused_quantize
from benchmarks.harness import Options, Record, interleaved, versus
from benchmarks.kept import kept_bytes
from benchmarks.peers import Shape, draw, stock_config
from titan_moe.moe.layer import fuse
from titan_moe.moe.region import FusedRoutedExperts
from titan_moe.precision.recipes import RECIPES

SUITE = "precision"
SHAPES = {"smallest": Shape(64, 64, 64, 4, 2), "quick": Shape(512, 256, 256, 8, 3), "full": Shape(1024, 512, 512, 8, 4)}


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def region(s: Shape, recipe: str | None, weights: dict[str, Tensor] | None = None) -> FusedRoutedExperts:
    """On a CPU by the emulated backend, by whatever is best on a GPU."""
    made = fuse(stock_config(s), recipe=recipe).routed_experts.build()
    if weights is None:
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    else:
        made.load_state_dict(weights)
    return made


def gradient(layer: FusedRoutedExperts, inputs: tuple[Tensor, ...], grad: Tensor) -> Tensor:
    layer.zero_grad(set_to_none=True)
    layer(*inputs).backward(grad)
    found = layer.inner_experts.w13_EF2D.grad
    assert found is not None
    layer.zero_grad(set_to_none=True)
    return found.double()


def measure(options: Options) -> Iterator[Record]:
    s = SHAPES[options.size]
    repetitions, budget_s = options.pick((2, 1.0), (9, 5.0), (31, 120.0))
    exact = region(s, None)
    layers = {"bf16": region(s, None, exact.state_dict()).bfloat16()}
    layers |= {name: region(s, name, exact.state_dict()).bfloat16() for name in RECIPES if name != "bf16"}

    def prepare(layer: FusedRoutedExperts) -> Callable[[], object]:
        layer.zero_grad(set_to_none=True)
        inputs = draw(s)
        grad = torch.randn_like(inputs[0])
        return lambda: layer(*inputs).backward(grad)

    times = interleaved(
        {name: (lambda layer=layer: prepare(layer)) for name, layer in layers.items()}, repetitions, budget_s=budget_s
    )
    inputs = draw(s)
    grad = torch.randn_like(inputs[0])
    wide = (inputs[0].detach().float().requires_grad_(), *inputs[1:])
    reference = gradient(exact, wide, grad.float())
    kept = {name: kept_bytes(layer, lambda layer=layer: layer(*inputs)) for name, layer in layers.items()}
    errors = {n: ((gradient(layer, inputs, grad) - reference).norm() / reference.norm()) for n, layer in layers.items()}
    for name in layers:
        case = f"{name}: {s}"
        yield record(case, "forward + backward", unit="ms", **times.against(name, "bf16"))
        mib = versus(kept[name] / 2**20, kept["bf16"] / 2**20)
        yield record(case, "kept for backward", value=kept[name] / 2**20, unit="MiB", **mib, against="bf16")
        error = versus(100 * errors[name].item(), 100 * errors["bf16"].item())
        yield record(case, "error of the gradient", value=100 * errors[name].item(), unit="%", **error, against="bf16")
    if options.size != "smallest":
        yield from fused(*options.pick(None, (256, 256), (1024, 1024)))


def fused(R: int, F: int) -> Iterator[Record]:
    for name, found in fused_quantize.counts_apart(R, F).items():
        for i, (metric, unit) in enumerate((("kernels", ""), ("bytes", "per number"))):
            scale = 1 if i == 0 else R * F
            values = versus(found["Triton"][i] / scale, found["torch"][i] / scale)
            yield record(name, metric, value=found["Triton"][i] / scale, unit=unit, **values, against="torch")
