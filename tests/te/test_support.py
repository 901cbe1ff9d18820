"""The table of what Transformer Engine (TE) runs where (titan_moe/precision/support.py) is TE's own conditions.

Those are functions in TE's source, which are compiled from it by themselves and run for GPUs and libraries that are not
there. TE is not imported.
"""

import ast
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from tests.te.signatures import te_sources
from titan_moe.precision import support

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
QUANTIZATION = "transformer_engine.pytorch.quantization"
SUPPORT = {
    "fp8_current": f"{QUANTIZATION}._compute_fp8_support",
    "fp8_block": f"{QUANTIZATION}._compute_fp8_block_scaling_support",
    "mxfp8": f"{QUANTIZATION}._compute_mxfp8_support",
    "nvfp4": f"{QUANTIZATION}._compute_nvfp4_support",
}
GROUPED = "transformer_engine.pytorch.module.grouped_linear.is_module_grouped_tensor_path_supported"
KINDS = {
    "float8_current_scaling": "fp8_current",
    "float8_block_scaling": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


@cache
def compiled(name: str) -> CodeType:
    node = te_sources().find(name)
    assert isinstance(node, ast.FunctionDef)
    node.returns, node.decorator_list = None, []
    for argument in node.args.args:
        argument.annotation = None
    return compile(ast.Module([node], []), name, "exec")


def own(name: str, capability: tuple[int, int], cublaslt: int) -> Any:
    """TE's function, on a machine with these, and CUDA 13.0."""
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), bfloat16="bfloat16", float16="float16")
    found: dict[str, Any] = {
        "get_device_compute_capability": lambda: capability,
        "tex": SimpleNamespace(get_cublasLt_version=lambda: cublaslt),
        "torch": torch,
    }
    exec(compiled(name), found)
    return found[name.rpartition(".")[2]]


@pytest.mark.parametrize("recipe", SUPPORT)
def test_single_matrices(recipe):
    for capability in CAPABILITIES:
        has, _ = own(SUPPORT[recipe], capability, 130000)()
        for path in ("linears", "host splits"):
            assert has == (support.find(recipe, path, capability) is not None), capability


@pytest.mark.parametrize("recipe", support.ALL_RECIPES)
def test_device_splits(recipe):
    """TE's own recipes are its defaults, which nothing has changed."""
    asked = {kind: lambda named=named: named == recipe for kind, named in KINDS.items()}
    features = {"backward_override": None, "disable_rht": False, "row_scaled_activation": False}
    theirs = None if recipe == "bf16" else SimpleNamespace(custom=lambda: False, **asked, **features)
    for capability in CAPABILITIES:
        row = support.find(recipe, "device splits", capability)
        for cublaslt in (130200, 130300, 130400, 130500, 130600, 130801):
            has = own(GROUPED, capability, cublaslt)(theirs, "bfloat16")
            assert has == (row is not None and cublaslt >= row.cublaslt), (capability, cublaslt)
