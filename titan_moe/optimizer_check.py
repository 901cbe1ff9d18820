"""What moments in bf16 need (adamw.py says why), and what Muon leaves to AdamW. See config_check.py. No torch."""

from typing import Literal

from titan_moe.config import Config

LOST = 2.0**-8
"""Relative change that may be lost when a bf16 number is rounded to nearest: half of the 2^-7 between two of them just
above a power of two"""
NOT_MUON = r"tok_embeddings\.|lm_head\.|\.router\."
"""What AdamW keeps beside Muon: matrices whose rows stand for one token or one expert each"""


def moments_dtype(config: Config) -> Literal["float32", "bfloat16"]:
    """Type of the optimizer's moments, chosen or not."""
    return config.optimizer.moments_dtype or config.training.dtype


def check(config: Config) -> list[str]:
    """Why the optimizer of `config` cannot keep its moments in that type."""
    o, stored = config.optimizer, config.training.dtype
    if stored == "bfloat16" and o.moments_dtype == "float32":
        return [
            'optimizer.moments_dtype = "float32": parameters of training.dtype = "bfloat16" have moments in their own '
            "type; leave it out, or store the parameters in float32"
        ]
    if stored == moments_dtype(config):
        return []
    if o.name == "Muon":
        return [
            f'optimizer.moments_dtype = "bfloat16": optimizer.name = "Muon" keeps its one momentum in training.dtype = '
            f'"{stored}", 4 bytes beside 4 of parameters, which is what AdamW has with two in bfloat16; leave it out'
        ]
    return [
        f"optimizer.{name} = {decay}: must be at most 1 - 2**-8 = {1 - LOST} with optimizer.moments_dtype = "
        f'"bfloat16": a step takes 1 - {name} = {1 - decay:.3g} off a moment, and bf16 may lose up to 2**-8 = '
        f'{LOST:.3g} of it to rounding; lower it, or keep the moments in "float32"'
        for name, decay in (("beta1", o.beta1), ("beta2", o.beta2))
        if LOST > 1 - decay > 0
    ]
