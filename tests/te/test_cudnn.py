"""The doubles of the kernels in cuDNN's frontend are declared as the installed kernels are: `pytest -m te`.

Its Python is read, not imported, which would take a GPU.
"""

from importlib import metadata
from pathlib import Path

import pytest

from tests.te.signatures import Sources
from tests.te.test_signatures import DOUBLES
from titan_moe.moe import te
from titan_moe.moe.te_fused import OLDEST_FRONTEND

pytestmark = pytest.mark.te


@pytest.mark.parametrize("name", ["glu", "quant", "dglu", "wgrad"])
def test_doubles_take_what_the_kernels_take(name):
    try:
        package = metadata.distribution("nvidia-cudnn-frontend")
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    assert te.release(package.version) >= te.release(OLDEST_FRONTEND)
    wrapper, theirs = f"grouped_gemm_{name}_wrapper_sm100", Sources(Path(str(package.locate_file(""))))
    signature = theirs.signature(f"cudnn.gemm.cutedsl.grouped.{name}.api.{wrapper}")
    double = Sources(DOUBLES).signature(f"cudnn.{wrapper}")
    assert [(p.name, p.kind) for p in double.parameters.values()] == [
        (p.name, p.kind) for p in signature.parameters.values()
    ]
    for parameter in signature.parameters.values():
        own = double.parameters[parameter.name].default
        if parameter.name != "input_order":  # a member of an enum, which is a string too
            assert own == parameter.default, parameter.name
    exported = (Path(str(package.locate_file("cudnn"))) / "__init__.py").read_text()
    assert f'"{wrapper}": (' in exported
