"""Kernels and bytes of SwiGLU with its quantization to MXFP8, as steps of torch and as one Triton kernel.

What is counted is what the emulated backend does between the two GEMMs of its experts: gate and up, [R, 2F] in bf16, to
h, [R, F], as MXFP8 stands for it in bf16; and what it does to any operand, x [R, F] to the same, and to the tensor that
is stored, with blocks along the rows. For each operation that torch runs (views apart) the bytes are those of all
tensors that go in and come out; each is a kernel on a GPU. The Triton kernel's are what it loads and stores. On a CPU
the kernel runs in Triton's interpreter, whose time says nothing.

Run as a script it prints its counts, with the interpreter on, which has to be so before triton is imported.

Shape letters: R rows of the padded slabs, F expert hidden width.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import ROOT
from titan_moe.moe import experts
from titan_moe.precision import quantize, triton_quantize
from titan_moe.precision.triton_quantize import BLOCK, FORMAT


class Count(TorchDispatchMode):
    """Operations that touch memory, and the bytes that go in and come out of them."""

    kernels = moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        read = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in read}
        views = not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in memory for t in made)
        if made and not views and "empty" not in func.name():
            read = read[1:] if func.name().startswith("aten::copy_") else read  # its first argument is only written
            self.kernels += 1
            self.moved += sum(tensor.nbytes for tensor in [*read, *made])
        return out


class OnePiece:
    """What `swiglu` asks a GEMM: all rows at once, as on a GPU."""

    def blocks(self, width: int) -> list[slice]:
        return [slice(None)]


def cases(R: int, F: int, device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any], int]]:
    """Name -> (by torch, by the kernel, bytes that the kernel moves)."""
    generator = torch.Generator(device).manual_seed(0)
    gate_up_R2F = torch.randn(R, 2 * F, generator=generator, device=device).bfloat16()
    x_RF, weight_R = gate_up_R2F[:, :F].contiguous(), torch.rand(R, generator=generator, device=device)
    number = R * F

    def swiglu_by_steps() -> Tensor:
        h_RF = experts.swiglu(gate_up_R2F, weight_R, OnePiece())
        return quantize.round_trip(h_RF, FORMAT, -1).values

    return {
        "SwiGLU, then MXFP8 along F": (
            swiglu_by_steps,
            lambda: triton_quantize.swiglu_round_trip(gate_up_R2F, weight_R),
            2 * 2 * number + 4 * R * -(-F // triton_quantize.TILE_COLUMNS) + 2 * number,
        ),
        "MXFP8 along F": (
            lambda: quantize.round_trip(x_RF, FORMAT, -1).values,
            lambda: triton_quantize.round_trip(x_RF, -1),
            2 * number + 2 * number,
        ),
        "MXFP8 along R, stored": (
            lambda: quantize.quantize(x_RF, FORMAT, -2),
            lambda: triton_quantize.quantize(x_RF, -2),
            2 * number + number + number // BLOCK,
        ),
    }


def counts(by_torch: Callable[[], Any], by_kernel: Callable[[], Any], moved: int) -> dict[str, tuple[int, int]]:
    """(kernels, bytes) by torch and with Triton, whose results agree."""
    with Count() as count:
        expected = by_torch()
    found, launches = watched(by_kernel)
    assert moved_by(launches) == moved, "the formula and the tensors differ"
    a, b = (out if isinstance(out, Tensor) else out.dequantize(torch.bfloat16) for out in (found, expected))
    assert (a != b).double().mean() < 1e-3, "the kernel computes something else"
    return {"torch": (count.kernels, count.moved), "Triton": (len(launches), moved)}


def watched(run: Callable[[], Any]) -> tuple[Any, list[tuple]]:
    """What `run` returns, and what the kernel was launched with."""
    launches: list[tuple] = []
    launch = triton_quantize._launch

    def noting(*args, **kwargs) -> None:
        launches.append(args)
        launch(*args, **kwargs)

    triton_quantize._launch = noting
    try:
        return run(), launches
    finally:
        triton_quantize._launch = launch


def moved_by(launches: list[tuple]) -> int:
    """Bytes of the tensors that launches take and make; a row's weight is loaded by every tile of it."""
    total = 0
    for x, weight_R, out, scale in launches:
        tiles = -(-out.shape[-1] // triton_quantize.TILE_COLUMNS)
        total += x.nbytes + out.nbytes + (0 if weight_R is None else tiles * weight_R.nbytes)
        total += 0 if scale is None else scale.nbytes
    return total


def counts_apart(R: int, F: int) -> dict[str, dict[str, tuple[int, int]]]:
    """By case what `counts` finds, on a CPU, in a process in which triton interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fused_quantize", str(R), str(F)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps({name: counts(*case) for name, case in cases(*map(int, sys.argv[1:]), "cpu").items()}))
