"""Drives `te_fused` through the installed Python of cuDNN's frontend where there is no GPU. A program of its own, for
test_cudnn.py: what it replaces stays replaced.

The frontend checks its operands, allocates results and reduces over slots in Python. Only what it compiles needs a GPU,
and is computed by the doubles, which also quantize. Prints the kernels called and, for each case, the largest error.
"""

import contextlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor

from tests import te_doubles
from tests.moe.test_experts import problem, run
from tests.moe.test_te_fused import FUSED, reference

CASES = [([256, 0, 512], 256), ([512], 0)]
D, F = 128, 384  # two tiles of F, which the routing weights' gradient adds up


def main() -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    import cudnn
    from cudnn.gemm.cutedsl.grouped.dglu import _blockscaled_api as dglu
    from cudnn.gemm.cutedsl.grouped.glu import _blockscaled_api as glu
    from cudnn.gemm.cutedsl.grouped.quant import api as quant
    from cudnn.gemm.cutedsl.grouped.wgrad import _blockscaled_api as wgrad

    te_doubles.PACKAGES = tuple(name for name in te_doubles.PACKAGES if name != "cudnn")  # which is real here
    te_doubles.install()
    called: list[str] = []
    kernels = doubled_kernels(called)
    glu.GroupedGemmGluBlockScaledAPI.compile = compiled(kernels["glu"])
    quant.GroupedGemmQuantSm100.compile = compiled(kernels["quant"])
    dglu.GroupedGemmDgluBlockScaledAPI.compile = compiled(kernels["dglu"])
    wgrad.GroupedGemmWgradBlockScaledAPI.compile = compiled(kernels["wgrad"])
    without_streams([module for name, module in sys.modules.items() if name.split(".")[0] == cudnn.__name__])
    errors = []
    for counts, tail in CASES:
        tensors = problem(counts, torch.bfloat16, tail=tail, D=D, F=F)
        pairs = zip(run(FUSED, counts, tensors), reference(counts, *tensors), strict=True)
        errors.append(max(((value.double() - own).norm() / own.norm()).item() for value, own in pairs))
    print(*called, *errors)


def doubled_kernels(called: list[str]) -> dict[str, Any]:
    """What a kernel does with the operands that the frontend hands to it, by the wrappers' doubles."""
    spec = importlib.util.spec_from_file_location("cudnn_double", te_doubles.DOUBLES / "cudnn" / "__init__.py")
    assert spec is not None and spec.loader is not None
    double = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(double)

    def glu(api, a_tensor, b_tensor, c_tensor, d_tensor, d_col_tensor, sfd_row_tensor, sfd_col_tensor, **rest):
        names = ("sfa_tensor", "sfb_tensor", "padded_offsets", "alpha_tensor", "norm_const_tensor", "prob_tensor")
        out = double.grouped_gemm_glu_wrapper_sm100(
            a_tensor, b_tensor=b_tensor, c_dtype=c_tensor.dtype, **options(api, d_tensor, rest, names)
        )
        own = {"c_tensor": c_tensor, "d_tensor": d_tensor, "d_col_tensor": d_col_tensor}
        put(out, own | {"sfd_row_tensor": sfd_row_tensor, "sfd_col_tensor": sfd_col_tensor})
        called.append("glu")

    def dglu(api, a_tensor, b_tensor, d_row_tensor, d_col_tensor, sfd_row_tensor, sfd_col_tensor, dprob_tensor, **rest):
        names = ("sfa_tensor", "sfb_tensor", "padded_offsets", "alpha_tensor", "beta_tensor", "norm_const_tensor")
        prob = {"prob_tensor": rest["prob_tensor"], "dprob_tensor": torch.zeros_like(rest["prob_tensor"])}
        out = double.grouped_gemm_dglu_wrapper_sm100(
            a_tensor, rest["c_tensor"], b_tensor=b_tensor, **prob, **options(api, d_row_tensor, rest, names)
        )
        own = {"d_row_tensor": d_row_tensor, "d_col_tensor": d_col_tensor}
        put(out, own | {"sfd_row_tensor": sfd_row_tensor, "sfd_col_tensor": sfd_col_tensor})
        slots = dprob_tensor.shape[1]
        dprob_tensor += out["dprob_tensor"] / slots
        called.append(f"dglu:{slots}")

    def quant(api, a_tensor, b_tensor, d_tensor, **rest):
        names = ("sfa_tensor", "sfb_tensor", "padded_offsets", "alpha_tensor")
        given = {name: rest[name] for name in names}
        double.grouped_gemm_quant_wrapper_sm100(
            a_tensor, b_tensor=b_tensor, d_tensor=d_tensor, d_dtype=d_tensor.dtype, sf_vec_size=api.sf_vec_size, **given
        )
        called.append("quant")

    def wgrad(api, a, b, sfa, sfb, out, offsets, *_):
        double.grouped_gemm_wgrad_wrapper_sm100(
            a, b, sfa, sfb, offsets, wgrad_tensor=out, wgrad_dtype=out.dtype, sf_vec_size=api.sf_vec_size
        )
        called.append("wgrad")

    return {"glu": glu, "dglu": dglu, "quant": quant, "wgrad": wgrad}


def options(api, d: Tensor, rest: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    own = {"d_dtype": d.dtype, "discrete_col_sfd": api.discrete_col_sfd, "sf_vec_size": api.sf_vec_size}
    return own | {name: rest[name] for name in names}


def put(results: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
    for name, output in outputs.items():
        assert output.shape == results[name].shape and output.dtype == results[name].dtype, name
        output.copy_(results[name])


def compiled(kernel):
    def compile(api) -> None:
        api._workspace_arg, api._workspace_bytes = None, 1
        api._compiled_kernel = lambda *args, **kwargs: kernel(api, *args, **kwargs)

    return compile


def without_streams(modules: list[ModuleType]) -> None:
    def workspace(framework: str, nbytes: int, device, stream) -> Tensor:
        memory = torch.empty(nbytes + 128, dtype=torch.uint8)
        return memory[-memory.data_ptr() % 128 :][:nbytes]

    @contextlib.contextmanager
    def stream_context(stream, device):
        yield

    instead = {"default_stream": lambda _: 0, "allocate_wrapper_workspace": workspace, "stream_context": stream_context}
    for module in modules:
        for name, value in instead.items():
            if hasattr(module, name):
                setattr(module, name, value)
        if hasattr(module, "APIBase"):
            module.APIBase._get_default_stream = lambda _, stream: 0


if __name__ == "__main__":
    main()
