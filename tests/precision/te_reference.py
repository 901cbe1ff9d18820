"""Transformer Engine's own pure-Python references, run from its sources without its compiled extension.

Its `custom_recipes/reference_*.py` are what its own tests hold the kernels to. They are plain torch, but their package
imports the extension. So the modules that they import from it are replaced by the little that they use.
"""

import sys
from functools import cache
from types import ModuleType
from unittest import mock

from tests.te.signatures import te_sources

PACKAGE = "transformer_engine.pytorch.custom_recipes"


class Quantizer:
    """Base class of the references: which of the two layouts are wanted."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class QuantizedTensorStorage:
    pass


@cache
def quantizers(name: str) -> ModuleType:
    """The module reference_`name`.py."""
    tensors = {"Quantizer": Quantizer, "QuantizedTensorStorage": QuantizedTensorStorage}
    utils = _module(f"{PACKAGE}.reference_utils")
    _run(utils, [])
    gemm = _module(f"{PACKAGE}.gemm", MMParams=object, GEMMType=mock.Mock())
    module = _module(f"{PACKAGE}.reference_{name}")
    package = _module(PACKAGE, gemm=gemm, reference_utils=utils)
    _run(module, [_module("transformer_engine.pytorch.quantized_tensor", **tensors), package])
    return module


@cache
def recipes() -> ModuleType:
    module = _module("transformer_engine.common.recipe")
    _run(module, [])
    return module


def _module(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


def _run(module: ModuleType, imports: list[ModuleType]) -> None:
    """Executes a module's source with `imports` in the place of the modules of their names."""
    *path, name = module.__name__.split(".")
    folder = te_sources().root.joinpath(*path)
    file = folder / f"{name}.py" if (folder / f"{name}.py").is_file() else folder / name / "__init__.py"
    parents = [ModuleType(".".join(path[:n])) for n in range(1, len(path) + 1)]
    placed = {module.__name__: module for module in (*parents, module, *imports)}
    before = {name: sys.modules.get(name) for name in placed}
    sys.modules.update(placed)
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
