"""The Triton kernel that quantizes to MXFP8: its numbers, and that it compiles for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

REPO = Path(__file__).parents[2]


def test_the_kernel_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "tests/precision/triton_interpreted.py"]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_kernel_compiles_for_hopper(tmp_path, monkeypatch):
    """Behind SwiGLU, which is all of it but the codes that are stored."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from titan_moe.precision import triton_quantize

    constants = {"SWIGLU": True, "WEIGHTED": True, "ALONG_ROWS": True, "STORED": False}
    constants |= {"BLOCK": triton_quantize.BLOCK, "TILE_COLUMNS": triton_quantize.TILE_COLUMNS}
    pointers = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16", "scale_ptr": "*bf16"}
    signature = pointers | {"columns": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(triton_quantize._mxfp8, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
