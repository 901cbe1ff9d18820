"""Whether a run can write its last weights for Hugging Face's libraries. See config_check.py. No torch."""

from titan_moe.config import Config
from titan_moe.flavors import Flavor
from titan_moe.huggingface import model_config


def has_bias(config: Config) -> bool:
    """Whether the model's routers have a correction bias."""
    return config.moe.load_balance_coeff != 0


def check(config: Config, flavor: Flavor) -> list[str]:
    c = config.checkpoint
    if not c.last_save_in_hf:
        return []
    if not c.enable:
        return ["checkpoint.last_save_in_hf = true: saves nothing without checkpoint.enable = true; set it"]
    if c.load_only:
        return ["checkpoint.last_save_in_hf = true: load_only = true forbids to save; choose one"]
    found = model_config.export_problems(flavor, has_bias(config))
    return [f"checkpoint.last_save_in_hf = true: {problem}" for problem in found]
