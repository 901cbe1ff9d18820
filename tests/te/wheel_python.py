"""Transformer Engine's (TE's) own Python, out of the pinned wheel, on a machine that has neither its libraries nor its
extension: what of it needs neither can be imported after `install`.

The packages' __init__.py, which load libraries, are not run. What is compiled is a mock, for the caller to replace; of
TE's debugging tools only the names are there.
"""

import ast
import sys
from enum import IntEnum
from types import ModuleType
from unittest import mock

from tests.te.signatures import te_sources

EXTENSION = "transformer_engine_torch"


class _Compiled(ModuleType):
    """Has whatever is asked for."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, mock.MagicMock(name=name))
        return vars(self)[name]


def install() -> ModuleType:
    """Make it importable in this process, for good. Returns what stands for the extension."""
    sources = te_sources()
    tex = sys.modules[EXTENSION] = _Compiled(EXTENSION)
    # TE asserts that its enum in Python has the members of the compiled one.
    members = [node for node in sources.find("transformer_engine.pytorch.constants.DType").body if _is_member(node)]
    tex.DType = IntEnum("DType", [(node.targets[0].id, at) for at, node in enumerate(members)])
    for name in ("", ".common", ".pytorch", ".pytorch.cpp_extensions"):
        package = sys.modules[f"transformer_engine{name}"] = ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(sources.root / "transformer_engine" / name[1:].replace(".", "/")).rstrip("/")]
    sys.modules["transformer_engine.common"].decode_cudnn_version = lambda version: (9, 0, 0)
    for name, classes in {
        "debug": (),
        "debug.pytorch": (),
        "debug.pytorch.debug_quantization": ("DebugQuantizer", "DebugQuantizedTensor"),
    }.items():
        module = sys.modules[f"transformer_engine.{name}"] = ModuleType(f"transformer_engine.{name}")
        for each in classes:
            setattr(module, each, type(each, (), {}))
    import transformer_engine.pytorch.tensor  # noqa: F401 - first: its modules import each other

    return tex


def _is_member(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and "tex.DType." in ast.unparse(node.value)
