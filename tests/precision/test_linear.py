"""Quantized linear layers: which nodes of a model they replace, what they compute, keep and share."""

from dataclasses import replace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor
from torchtitan.models.common.linear import Linear

from titan_moe import config_file
from titan_moe.attention import documents
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.model import build_model, init_weights, model_config
from titan_moe.precision.gemm import DenseGemm, QuantizedGemm
from titan_moe.precision.layers import Chosen, chosen, linears
from titan_moe.precision.linear import QuantizedLinear, name_of
from titan_moe.precision.once import once
from titan_moe.precision.quantize import round_trip
from titan_moe.precision.recipes import RECIPES
from titan_moe.precision.report import kept_bytes, precision_report

BF16 = "--training.mixed_precision_param=bfloat16"
MXFP8 = [BF16, "--precision.recipe=mxfp8"]


def config_of(*words: str) -> Config:
    return config_file.load(["train_configs/debug_model.toml", *words])


def low_precision_of(config: Config) -> Chosen:
    low = chosen(config, model_flavor(config))
    assert low is not None
    return low


def quantized(config: Config) -> dict[str, set[str]]:
    """By layer, what is quantized in it; "experts" for the routed ones."""
    tree = model_config(config)
    layers = {f"layers.{i}": layer for i, layer in enumerate(tree.layers)}
    layers |= {f"mtp_layers.{i}": layer for i, layer in enumerate(tree.mtp_layers)}
    found: dict[str, set[str]] = {path: set() for path in layers}
    for path, layer in layers.items():
        for fqn, node, *_ in layer.traverse(Linear.Config):
            if isinstance(node, QuantizedLinear.Config):
                assert node.recipe == config.precision.recipe
                found[path].add(name_of(fqn))
        if layer.moe is not None and layer.moe.routed_experts.inner_experts.recipe is not None:
            found[path].add("experts")
    return found


ATTENTION = {f"attention.{name}" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")}
DENSE, SHARED = ({f"{group}.w{i}" for i in (1, 2, 3)} for group in ("feed_forward", "shared_experts"))
MOE = ATTENTION | SHARED | {"experts"}


def test_the_default_is_every_gemm_of_a_block_but_the_gate():
    assert quantized(config_of(*MXFP8)) == {"layers.0": ATTENTION | DENSE} | {f"layers.{i}": MOE for i in (1, 2, 3)}
    assert not any(quantized(config_of(BF16)).values()) and not any(
        quantized(config_of("--precision.recipe=fp32")).values()
    )


def test_names_and_layers_are_chosen_one_by_one():
    words = ["--precision.linears=wo,shared_experts.w2", "--precision.keep_high_precision_layers=first 1, 2"]
    some = {"attention.wo", "shared_experts.w2"}
    found = quantized(config_of(*MXFP8, *words, "--precision.experts=false"))
    assert found == {"layers.0": set(), "layers.1": some, "layers.2": set(), "layers.3": some}


def test_prediction_layers_have_the_numbers_behind_the_last():
    words = ["--model.num_mtp_layers=2", "--precision.linears=attention,eh_proj"]
    found = quantized(config_of(*MXFP8, *words, "--precision.keep_high_precision_layers=last 1, 5"))
    assert found["mtp_layers.0"] == ATTENTION | {"eh_proj", "experts"}
    assert found["mtp_layers.1"] == found["layers.3"] == set() and found["layers.2"] == ATTENTION | {"experts"}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "mixtral"])
def test_sizes_that_checks_calculate_with_are_the_models(family):
    config = config_of(f"--model.name={family}", *(["--model.num_mtp_layers=1"] if family == "deepseek_v3" else []))
    flavor, tree = model_flavor(config), model_config(config)
    found = {"lm_head": (tree.lm_head.in_features, tree.lm_head.out_features)}
    for layer in (*tree.layers, *tree.mtp_layers):
        for fqn, node, *_ in layer.traverse(Linear.Config):
            found[name_of(fqn)] = (node.in_features, node.out_features)
    del found["router.gate"]
    assert found == {name: (linear.inputs, linear.outputs) for name, linear in linears(flavor).items()}


@pytest.mark.parametrize("name", RECIPES)
def test_ragged_sides_are_filled_up_with_zeros(name):
    """Rows that are no multiple of a block, and the 160 outputs of wkv_a under fp8_block: as with zeros written out."""
    recipe = RECIPES[name]
    recipe = replace(recipe, dgrad_g=recipe.forward_x, wgrad_g=recipe.wgrad_x)  # without chance
    up = 128 if name == "fp8_block" else 32
    generator = torch.Generator().manual_seed(1)
    plain = [torch.randn(*shape, generator=generator) for shape in ((72, 96), (160, 96), (72, 160))]
    whole = []
    for tensor in plain:
        rows, columns = tensor.shape
        whole.append(torch.zeros(-(-rows // up) * up, -(-columns // up) * up))
        whole[-1][:rows, :columns] = tensor
    gemm = QuantizedGemm(DenseGemm(), recipe)
    results = [
        (gemm.forward(x_RI, w_OI), gemm.dgrad(grad_RO, w_OI), gemm.wgrad(grad_RO, x_RI))
        for x_RI, w_OI, grad_RO in (plain, whole)
    ]
    for got, expected in zip(*results):
        rows, columns = got.shape
        torch.testing.assert_close(got, expected[:rows, :columns], rtol=1e-5, atol=1e-4)


def block_saves(config: Config) -> int:
    """Bytes that the first MoE block keeps for backward, each memory once, parameters not counted."""
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, 1)
    layer = model.to(torch.bfloat16).layers["1"]
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    h_BLD = torch.randn(8, 128, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    positions_BL = torch.arange(128).expand(8, 128)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(h_BLD, documents(positions_BL), positions_BL)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in parameters)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_a_block_keeps_less_by_what_the_report_says(recipe):
    """The dense GEMMs alone: the experts' buffers change size with the alignment of slabs."""
    quantized_words = [BF16, f"--precision.recipe={recipe}", "--precision.experts=false"]
    config = config_of(*quantized_words)
    quantized_bytes, plain_bytes = kept_bytes(config, model_flavor(config), low_precision_of(config))
    saved = block_saves(config_of(BF16)) - block_saves(config)
    # A scale per tensor, of the four that are kept, is not in the report.
    assert plain_bytes - quantized_bytes - 64 <= saved <= plain_bytes - quantized_bytes
    assert saved >= 0.4 * plain_bytes > 0


def test_the_report_names_what_is_quantized_and_no_bytes_where_none_are_saved():
    words = [BF16, "--precision.recipe=mxfp8", "--precision.keep_high_precision_layers=0"]
    first, by, kept = precision_report(config_of(*words))
    all_groups = "routed experts, attention, feed_forward, shared_experts"
    assert first == f"Precision: GEMMs in mxfp8 of {all_groups}; layers 0 stay in bfloat16"
    assert "emulated" in by and "less than in bfloat16" in kept
    # On one expert-parallel rank rows are gathered again, and attention keeps what wo takes.
    lines = precision_report(config_of(*words, "--precision.linears=attention.wo"))
    assert len(lines) == 2 and "of routed experts, attention.wo;" in lines[0]


def test_what_is_kept_for_two_linears_is_kept_once():
    x = torch.randn(64, 64)
    made = []

    def make() -> int:
        made.append(1)
        return len(made)

    assert once(x, "a", make) == once(x.view(64, 64), "a", make) == 1
    assert once(x, "b", make) == 2 and once(x[:32], "a", make) == 3
    x.add_(1)  # written to: another tensor
    assert once(x, "a", make) == 4
    del x
    assert once(torch.randn(64, 64), "a", make) == 5


def test_a_layer_without_grad_or_with_frozen_weight():
    layer = QuantizedLinear.Config(in_features=64, out_features=32, recipe="mxfp8").build()
    x = torch.randn(2, 5, 64, requires_grad=True)
    with torch.no_grad():
        y = layer(x)
    w = layer.weight.detach()
    expected = round_trip(x.detach().flatten(0, 1), RECIPES["mxfp8"].forward_x, -1).values
    expected = expected @ round_trip(w, RECIPES["mxfp8"].forward_w, -1).values.T
    torch.testing.assert_close(y, expected.view(2, 5, 32))
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad.isfinite().all() and layer.weight.grad is None
