"""The fused experts and the doubles of their kernels against the installed frontend of cuDNN: `pytest -m te`."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.te.signatures import REPO, Sources
from tests.te.test_signatures import DOUBLES
from titan_moe.moe import te
from titan_moe.moe.te_fused import OLDEST_FRONTEND

pytestmark = pytest.mark.te


@pytest.fixture(scope="module")
def package() -> metadata.Distribution:
    try:
        return metadata.distribution("nvidia-cudnn-frontend")
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cudnn-frontend is not installed")


@pytest.mark.parametrize("name", ["glu", "quant", "dglu", "wgrad"])
def test_doubles_take_what_the_kernels_take(package, name):
    """By the frontend's source."""
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


@pytest.mark.usefixtures("package")
def test_the_frontend_takes_our_calls_and_we_take_its_results():
    """Up to what it compiles: its checks of every operand, its results' layout, its sum of the routing weights'
    gradients, which two tiles of F contribute to."""
    argv = [sys.executable, "-m", "tests.te.drive_cudnn"]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *called, first, second = done.stdout.split()
    assert called == ["glu", "quant", "dglu:2", "wgrad", "wgrad", "quant"] * 2
    assert max(float(first), float(second)) < 4e-3
