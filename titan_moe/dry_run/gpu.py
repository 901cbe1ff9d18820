"""What a GPU would run, on fake tensors of the CPU. Import this module before titan_moe.runtime and torchtitan.

The tensors are the CPU's, because torch 2.14 built for CUDA cannot run backward on fake CUDA tensors of a machine
without a GPU ("hasPrimaryContext expects a valid device index"), and because the report should be the same on every
machine. The choices are those for a GPU (`runtime.DEVICE_TYPE` is "cuda"): slabs of 128 rows, FlexAttention, one
grouped GEMM for all experts. Where torch would then choose by the tensor's device, `install` chooses for it. What
counts is what an operation keeps for backward and how large it is:

- RMS norm: one kernel that keeps its input and one number per row; a CPU's is made of steps.
- FlexAttention, which needs a compiler: torch's attention operator of the same signature. Both keep q, k, v, the output
  and one fp32 number per query and head.
- Block masks are made by plain operations, not by a compiled one.
- Grouped GEMM by its operator, which on a CPU would be a loop over true counts.
"""

import torch

torch._utils._get_available_device_type = lambda: "cuda"  # asked once, at import

import warnings  # noqa: E402
from typing import NamedTuple  # noqa: E402

import titan_moe.runtime  # noqa: E402

from torch import Tensor  # noqa: E402
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torchtitan.distributed import parallel_dims  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402

from titan_moe.moe import experts  # noqa: E402

assert titan_moe.runtime.DEVICE_TYPE == "cuda", "import titan_moe.dry_run.gpu before titan_moe.runtime"

DEVICE = torch.device("cpu")

_aten = torch.library.Library("aten", "IMPL")  # kernels are registered as long as it lives


def install() -> None:
    """From now on this process computes as if for a GPU; it cannot train any more."""
    parallel_dims.device_type = DEVICE.type
    experts._PiecewiseGemm = experts._GroupedGemm  # type: ignore[assignment]
    attention.FlexAttention._compiled_flex_attn = staticmethod(flex_attention)
    attention._compiled_create_block_mask = create_block_mask
    context_parallel._compiled_create_block_mask = create_block_mask  # type: ignore[assignment]
    # With a kernel of its own for the device, autograd takes the operator as one; fake tensors never call the kernel.
    _aten.impl("_fused_rms_norm", _never_called, "CPU")
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")


class _Aux(NamedTuple):
    lse: Tensor


def flex_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_) -> tuple[Tensor, _Aux]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return out, _Aux(lse.squeeze(-1))


def _never_called(*_):
    raise AssertionError("a dry run met a tensor that is not fake")
