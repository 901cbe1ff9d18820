"""The training loss: cross-entropy summed over tokens, divided by the global number of valid ones."""

import titan_moe.runtime  # noqa: F401

from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.models.deepseek_v3 import DeepSeekV3Model

from titan_moe.config import Config


def build_loss(config: Config, model: DeepSeekV3Model) -> BaseLoss:
    """Cross-entropy summed over tokens and divided by the global number of valid ones, in chunks of the sequence if
    asked."""
    if config.loss.num_chunks == 1:
        return CrossEntropyLoss.Config().build(compile_config=compile_config(config))
    loss = ChunkedLossWrapper.Config(num_chunks=config.loss.num_chunks).build(compile_config=compile_config(config))
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True  # the loss applies the head itself, chunk by chunk
    return loss


def compile_config(config: Config) -> CompileConfig:
    return CompileConfig(
        enable=config.compile.enable, components=list(config.compile.components), backend=config.compile.backend
    )
