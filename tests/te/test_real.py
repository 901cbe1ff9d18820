"""The built Transformer Engine (TE) on a machine without a GPU: `pytest -m te`.

Nothing here computes with TE's kernels. Its Python runs, on meta tensors or with the one compiled function that would
need a GPU replaced, so that our calls go through TE's own checks.

Shape letters: T tokens, D model width, K top-k, e local experts, R rows received.
"""

import ast
import contextlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from unittest import mock

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.distributed.harness import torchrun
from tests.moe.test_experts import TOLERANCE, assert_close, oracle, problem
from tests.te.ep_worker import after
from tests.te.signatures import REPO, Sources, te_sources, uses
from tests.te.test_signatures import DOUBLES, EXTENSION, doubled, our_files
from titan_moe.moe import te
from titan_moe.moe.experts import by_gemm
from titan_moe.moe.te_experts import DeviceSplits, HostSplits

pytestmark = [pytest.mark.te, pytest.mark.usefixtures("tex")]


def test_a_run_finds_what_is_installed():
    """In a process of its own, where nothing has imported TE before `facts` does."""
    program = (
        "import titan_moe.runtime; from titan_moe.moe import te; print(repr(te.facts())); print(te.problem(te.facts()))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown, problem = done.stdout.splitlines()[-2:]
    found: te.Facts = eval(shown, {"Facts": te.Facts})
    assert (found.version, found.extension, found.nccl, found.nccl_ep) == (te.PINNED, "", te.NCCL_EP_BUILD, True)
    assert 130000 <= found.cublaslt < 140000
    if not torch.cuda.is_available():
        assert problem == "Transformer Engine needs a CUDA device, and torch sees none"


def imported(name: str):
    """What a dotted name is, by importing."""
    parts = name.split(".")
    found = import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        found = getattr(found, part) if hasattr(found, part) else import_module(".".join(parts[:at]))
    return found


def names_in_use() -> set[str]:
    """Every name of TE that our files use or that has a double."""
    found = [use for path in our_files() for use in uses(ast.parse(path.read_text()), path.name)]
    public = {name for name in doubled(Sources(DOUBLES)) if not name.rpartition(".")[2].startswith("_")}
    return {use.name for use in found} | public


def test_signatures_in_the_source_are_the_real_ones():
    """The ones that test_signatures.py holds our calls to are what Python sees: no decorator has changed them."""
    sources, compared = te_sources(), set()
    for name in sorted(names_in_use()):
        if name.split(".")[0] == EXTENSION or (read := sources.signature(name)) is None:
            continue
        real, module = inspect.signature(imported(name)), sys.modules[imported(name).__module__]
        assert list(read.parameters) == list(real.parameters), name
        for parameter in read.parameters.values():
            own = real.parameters[parameter.name]
            empty = parameter.default is Parameter.empty
            default = parameter.default if empty else eval(parameter.default, vars(module))
            assert (parameter.kind, default) == (own.kind, own.default), f"{name}({parameter.name})"
        compared.add(name)
    assert "transformer_engine._nccl_ep_library_installed" in compared


def declared(function) -> list[Parameter]:
    """The parameters of a compiled function, from the line that pybind11 documents it with. Those that it was not told
    the names of are called arg0, arg1, ... there, and cannot be passed by name. Defaults are only there or not."""
    text = function.__doc__.splitlines()[0]
    depth, pieces = 0, [""]
    for character in text[text.index("(") + 1 : text.rindex(") ->")]:
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    parameters, kind = [], Parameter.POSITIONAL_OR_KEYWORD
    for piece in filter(None, map(str.strip, pieces)):
        if piece == "*":
            kind = Parameter.KEYWORD_ONLY
            continue
        name = piece.partition(":")[0]
        unnamed = name == f"arg{len(parameters)}"
        default = ... if " = " in piece else Parameter.empty
        parameters.append(Parameter(name, Parameter.POSITIONAL_ONLY if unnamed else kind, default=default))
    return parameters


def test_doubles_of_compiled_functions_take_what_they_take(tex):
    doubles, compared = Sources(DOUBLES), set()
    for name in doubled(doubles):
        function = getattr(tex, name.rpartition(".")[2], None)
        if not name.startswith(f"{EXTENSION}.") or function is None:
            continue
        own, theirs, optional = list(doubles.signature(name).parameters.values()), declared(function), False
        assert len(own) == len(theirs), f"{name}: {theirs}"
        for mine, real in zip(own, theirs):
            if real.kind != Parameter.POSITIONAL_ONLY:
                assert (mine.name, mine.kind) == (real.name, real.kind), name
            optional |= real.default is not Parameter.empty
            # pybind11 allows a required parameter behind an optional one, Python does not.
            assert (mine.default is not Parameter.empty) == optional or mine.kind == Parameter.KEYWORD_ONLY, name
        compared.add(function.__name__)
    assert {"get_cublasLt_version", "splits_to_offsets_multi"} <= compared


@contextlib.contextmanager
def ep_on_meta() -> Iterator[None]:
    """TE's expert parallelism in capacity mode, without a communicator: its operators have fake kernels."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import ep

    with (
        mock.patch.object(ep, "_BOOTSTRAPPED", True),
        mock.patch.object(ep, "_EAGER", False),
        mock.patch.object(tex, "ep_handle_mem_size", return_value=4096),
        mock.patch.object(tex, "ep_get_zero_copy", return_value=False),
    ):
        yield


def test_ep_forward_and_backward_on_meta_tensors():
    from transformer_engine.pytorch.ep import EpBuffer, ep_combine, ep_dispatch

    T, D, K, e, R = 256, 512, 4, 8, 2048
    x_TD = torch.empty(T, D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weights_TK = torch.empty(T, K, device="meta", requires_grad=True)
    ids_TK = torch.empty(T, K, dtype=torch.int64, device="meta")
    with ep_on_meta():
        buffer = EpBuffer(K, T, D, e, R, alignment=128, device=torch.device("meta"))
        x_RD, weight_R, counts_e = ep_dispatch(buffer, x_TD, ids_TK, weights_TK)
        out_TD = ep_combine(buffer, (x_RD * weight_R[:, None]).to(x_RD.dtype), num_local_tokens=T)
        out_TD.float().sum().backward()
    assert (x_RD.shape, weight_R.shape, counts_e.shape) == ((R, D), (R,), (e,))
    assert (weight_R.dtype, counts_e.dtype, buffer.total_recv_tokens.dtype) == (torch.float32, torch.int64, torch.int64)
    assert (out_TD.shape, x_TD.grad.shape, weights_TK.grad.shape) == (x_TD.shape, x_TD.shape, weights_TK.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Grouped GEMM. What is compiled is replaced; TE's Python around it is real.

COUNTS = [16, 0, 32, 48]


def te_general_grouped_gemm(A, transa, B, transb, out, out_type, m_splits, *others):
    """The one compiled function behind host splits: out = op(B) op(A), row-major. Only what our calls ask of it."""
    bias, _, single_output, _, grad, _, _, accumulate, *_ = others
    assert not accumulate and [b.shape[0] for b in B] == m_splits and grad == (not transa)
    rows = out[0].split([*m_splits, out[0].shape[0] - sum(m_splits)]) if single_output else out
    for a, b, result in zip(A, B, rows):
        result.copy_((b.T if transb else b) @ (a.T if transa else a))
    return bias


def test_host_splits_through_tes_python(tex):
    """Forward, dgrad and wgrad against a loop over rows, an expert without rows among them."""
    from transformer_engine.pytorch.cpp_extensions import gemm

    name = "te_general_grouped_gemm"
    with (
        mock.patch.object(tex, name, side_effect=after(getattr(tex, name), te_general_grouped_gemm)) as compiled,
        mock.patch.object(gemm, "get_sm_count", return_value=132),
        mock.patch.object(gemm, "get_cublas_workspace", return_value=[torch.empty(1, dtype=torch.uint8)]),
        mock.patch.object(gemm, "_empty_tensor", side_effect=torch.Tensor),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = problem(COUNTS, dtype, tail=16)
            assert_close(
                computed(HostSplits(torch.tensor(COUNTS)), tensors), oracle(COUNTS, *tensors), TOLERANCE[dtype]
            )
    assert compiled.call_count == 2 * 3 * 2


def computed(gemm, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """y and the gradients of x, weight, w13 and w2."""
    leaves = x_RD, weight_R, w13_EF2D, w2_EDF = [tensor.clone().requires_grad_() for tensor in tensors[:4]]
    y_RD = by_gemm(gemm, x_RD, weight_R, w13_EF2D, w2_EDF)
    grads, rows = torch.autograd.grad(y_RD, leaves, tensors[4]), slice(0, sum(COUNTS))
    return [y_RD.detach()[rows], grads[0][rows], grads[1][rows], *grads[2:]]


def double(path: str) -> ModuleType:
    """A double, in a process that has the real TE: what it imports is real."""
    spec = importlib.util.spec_from_file_location(f"double_of_{Path(path).stem}", DOUBLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_double_of_device_splits_reads_tes_own_tensors(tex):
    """Packed by TE's own class, multiplied by the double: our packing says what TE's class takes it for."""
    from transformer_engine.pytorch.cpp_extensions import gemm

    doubled_gemm = double("transformer_engine/pytorch/cpp_extensions/gemm.py")
    doubled_tex = double("transformer_engine_torch/gemm.py")
    name = "general_grouped_gemm_for_grouped_tensor"
    with (
        mock.patch.object(gemm, name, getattr(doubled_gemm, name)),
        mock.patch.object(
            tex, "splits_to_offsets_multi", after(tex.splits_to_offsets_multi, doubled_tex.splits_to_offsets_multi)
        ),
    ):
        tensors = problem(COUNTS, torch.bfloat16, tail=16)
        D, F = tensors[3].shape[1:]
        splits = DeviceSplits(torch.tensor(COUNTS), (D, 2 * F, F))
        assert_close(computed(splits, tensors), oracle(COUNTS, *tensors), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_device_splits_pass_tes_python(tex, capability):
    """Fake CUDA tensors through TE's own checks, up to the compiled functions."""
    from transformer_engine.pytorch.cpp_extensions import gemm

    E, D, F, R = 4, 64, 48, 256
    doubled_tex = double("transformer_engine_torch/gemm.py")
    name = "te_general_grouped_gemm_for_grouped_tensor"
    with contextlib.ExitStack() as stack:
        for value in vars(gemm).values():
            if hasattr(value, "cache_clear"):
                stack.callback(value.cache_clear)  # of workspaces that are fake
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=capability))
        stack.enter_context(mock.patch.object(gemm, "get_sm_count", return_value=132))
        stack.enter_context(mock.patch.object(gemm, "get_cublas_workspace_size_bytes", return_value=1024))
        stack.enter_context(mock.patch.object(tex, "splits_to_offsets_multi", doubled_tex.splits_to_offsets_multi))
        compiled = stack.enter_context(mock.patch.object(tex, name))
        stack.enter_context(FakeTensorMode())
        counts_E = torch.empty(E, dtype=torch.int64, device="cuda")
        x_RD, w_EFD = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((R, D), (E, F, D)))
        splits = DeviceSplits(counts_E, (D, F))
        y_RF = splits.forward(x_RD, w_EFD)
        assert splits.dgrad(y_RF, w_EFD).shape == x_RD.shape and splits.wgrad(y_RF, x_RD).shape == w_EFD.shape
    transposed = [call.args[1:4:2] for call in compiled.call_args_list]
    assert transposed == [(True, False), (False, False), (False, True)]


# ---------------------------------------------------------------------------------------------------------------------
# Expert parallelism over gloo


def test_te_ep_between_ranks_over_tes_own_python(tmp_path):
    """See ep_worker.py: what passes over the double of ep.py passes over ep.py."""
    out = tmp_path / "errors.json"
    finished = torchrun(2, "tests/te/ep_worker.py", str(out))
    assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
    errors = json.loads(out.read_text())
    assert errors
    assert {name: found for name, found in errors.items() if found} == {}
