"""Linear layers in low precision, as nodes of torchtitan's config tree.

The parameter stays what it was, with its sharding: fp32 for the optimizer, bf16 when FSDP has gathered it. Under tensor
parallelism a rank quantizes the part of a matrix that it multiplies. Blocks of 16 or 32 numbers are the same as those
of the whole matrix; what is one per tensor (fp8_current, the second level of nvfp4), and blocks of 128 that a cut goes
through, are not.

dgrad and wgrad are nodes of their own in backward, as in moe/experts.py.
"""

from dataclasses import dataclass

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor
from torchtitan.config.override import derive
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.linear import Linear

from titan_moe.moe.experts import GroupedGemm, linear
from titan_moe.precision.gemm import DenseGemm, QuantizedGemm
from titan_moe.precision.layers import Chosen
from titan_moe.precision.recipes import RECIPES, Recipe
from titan_moe.precision.te_linear import TEGemm
from titan_moe.torch_helpers import local


class QuantizedLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: str
        keeps_input: bool = False
        backend: str = "emulated"
        """Or "te", for Transformer Engine's quantizers and GEMM"""

    def __init__(self, config: Config):
        super().__init__(config)
        assert not config.bias
        self.gemm = gemm_of(RECIPES[config.recipe], config.backend, keeps_input=config.keeps_input)

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        out_TO = linear(self.gemm, input.flatten(0, -2), local(self.weight).to(input.dtype))
        return out_TO.unflatten(0, input.shape[:-1])


def gemm_of(recipe: Recipe, backend: str, *, keeps_input: bool = False) -> GroupedGemm:
    """Of one weight, by the backend that quantizes linear layers."""
    if backend == "te":
        return TEGemm(recipe, keeps_input=keeps_input)
    return QuantizedGemm(DenseGemm(), recipe, keeps_input=keeps_input)


def quantize_linears(layer: TransformerBlock.Config, chosen: Chosen, backend: str) -> None:
    """Put quantized nodes in the config of a layer, in place of those that are chosen."""
    for fqn, config, parent, attribute in list(layer.traverse(Linear.Config)):
        if (name := name_of(fqn)) in chosen.linears:
            assert isinstance(config, Linear.Config) and parent is not None and isinstance(attribute, str)
            settings = {
                "recipe": chosen.recipe.name,
                "keeps_input": name in chosen.kept_inputs,
                "backend": backend,
            }
            setattr(parent, attribute, derive(config, QuantizedLinear.Config, **settings))


def name_of(fqn: str) -> str:
    """What layers.py calls the linear layer at `fqn` in a block."""
    return fqn.removeprefix("moe.").replace("qkv_linear.", "")
