"""Low precision by Transformer Engine (TE): what moe.experts and precision.backend say together, and what the hardware
lacks that the file is for. See config_check.py. No torch.

What the device of a run lacks is told by every process (moe/choices.py), from the same table (precision/support.py).
"""

from titan_moe.config import Config
from titan_moe.plan import hardware
from titan_moe.precision import support


def check(config: Config) -> list[str]:
    """What does not fit together."""
    p, experts = config.precision, config.moe.experts
    quantized = p.recipe in support.LOW_PRECISION and p.experts
    found = []
    if experts == "te_fused" and not (quantized and p.recipe == "mxfp8"):
        found.append(
            'moe.experts = "te_fused": its kernels compute in mxfp8; set precision.recipe = "mxfp8", with '
            'precision.experts = true, or choose moe.experts = "te"'
        )
    if not quantized and not (p.recipe in support.LOW_PRECISION and p.linears):
        if p.backend != "auto":
            found.append(
                f'precision.backend = "{p.backend}": has nothing to quantize; leave it out, or choose a '
                f"precision.recipe of {', '.join(support.LOW_PRECISION)}"
            )
        return found
    if quantized and experts in ("te", "te_fused") and p.backend == "emulated":
        found.append(
            f'moe.experts = "{experts}": quantizes by Transformer Engine, but precision.backend = "emulated"; choose '
            'moe.experts = "auto", or the backend "auto"'
        )
    if quantized and experts in ("loop", "grouped_mm") and p.backend == "te":
        found.append(
            f'moe.experts = "{experts}": computes without Transformer Engine, but precision.backend = "te"; choose '
            'moe.experts = "auto", or the backend "auto"'
        )
    return found + _planned(config, quantized)


def _planned(config: Config, quantized: bool) -> list[str]:
    """What TE was asked for and cannot do on the hardware of [plan]."""
    p, experts = config.precision, config.moe.experts
    if not config.plan.hardware or p.recipe is None or p.recipe not in support.LOW_PRECISION:
        return []
    try:
        planned = hardware.resolve(config.plan.hardware)
    except ValueError:  # told elsewhere
        return []
    asked: list[tuple[str, support.Path]] = []
    if quantized and experts in ("te", "te_fused"):
        asked.append((f'moe.experts = "{experts}"', "te_fused" if experts == "te_fused" else "host splits"))
    if p.backend == "te":
        asked.append(('precision.backend = "te"', "linears"))
    capability = support.CAPABILITY.get(planned.architecture)
    return [
        f'{key}: {why}; plan.hardware = "{config.plan.hardware}"; choose another recipe, or leave that to "auto"'
        for key, path in asked
        if (why := support.te_problem(p.recipe, path, capability))
    ]
