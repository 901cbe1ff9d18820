"""Who quantizes the linear layers of a run: Transformer Engine or the emulation. Of the experts: moe/choices.py."""

import titan_moe.runtime  # noqa: F401

import torch

from titan_moe.config import Config
from titan_moe.flavors import Flavor
from titan_moe.moe.choices import choose_quantizer
from titan_moe.precision.layers import Chosen, linears


def backend_of_linears(config: Config, flavor: Flavor, low: Chosen) -> tuple[str, str]:
    """("te" or "emulated", why), the same for all of them. Raises ValueError where Transformer Engine was asked for and
    cannot."""
    tp, widths = config.parallelism.tensor_parallel_degree, set()
    for linear in (linear for name, linear in linears(flavor).items() if name in low.linears):
        widths |= {linear.inputs // (tp if linear.cut == "inputs" else 1)}
        widths |= {linear.outputs // (tp if linear.cut == "outputs" else 1)}
    dtype = getattr(torch, config.training.mixed_precision_param)
    return choose_quantizer(config.precision.backend, low.recipe.name, dtype, sorted(widths))
