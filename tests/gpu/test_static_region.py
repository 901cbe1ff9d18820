"""The sync-free region on one GPU: plan, dispatch, experts and combine with sizes that do not follow the routing.

Against float64 on the CPU; under CUDA's own check for host syncs; and captured once in a CUDA graph that then serves
twenty routings.

Shape letters: T tokens, D model width, K top-k, E experts, F expert hidden width.
"""

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import Tensor

from tests.gpu.backends import SYNC_FREE, experts_backend
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.moe.experts import EXPERTS

pytestmark = pytest.mark.gpu

T, D, K, E, F = 512, 128, 3, 8, 96
ROUTINGS = 20


@pytest.fixture(params=SYNC_FREE)
def experts(request):
    backend = experts_backend(request.param, torch.bfloat16, D, F)
    if isinstance(backend, str):
        pytest.skip(backend)
    return backend


def draw(seed: int) -> list[Tensor]:
    """ids_TK, and float64 x_TD, weights_TK, w13_EF2D, w2_EDF and the gradient of the output; some experts are more
    popular than others, and with the first seed one has no token."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().double()  # the same numbers in bf16 and float64

    scores_TE = torch.sigmoid(randn(T, E) + randn(E))
    if seed == 0:
        scores_TE[:, 3] = -1
    weights_TK, ids_TK = scores_TE.topk(K, dim=-1)
    return [ids_TK, randn(T, D), weights_TK, randn(E, F, 2, D) * 0.1, randn(E, D, F) * 0.1, randn(T, D)]


def region(dispatcher, experts, ids_TK, x_TD, weights_TK, w13_EF2D, w2_EDF, grad_TD) -> list[Tensor]:
    """The output, and the gradients of x, the routing weights, w13 and w2."""
    plan = dispatcher.plan(ids_TK, weights_TK)
    received = dispatcher.dispatch(x_TD, weights_TK, plan)
    y_RD = experts(received.x_RD, received.counts_e, received.weight_R, w13_EF2D, w2_EDF)
    out_TD = dispatcher.combine(y_RD, received.state)
    return [out_TD, *torch.autograd.grad(out_TD, [x_TD, weights_TK, w13_EF2D, w2_EDF], grad_TD)]


def on_gpu(drawn: list[Tensor]) -> list[Tensor]:
    """In the dtypes of a training: ids int64, routing weights fp32, all else bf16; leaves where gradients are asked."""
    dtypes = [torch.int64, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    moved = [tensor.to("cuda", dtype) for tensor, dtype in zip(drawn, dtypes)]
    return [moved[0], *(tensor.requires_grad_() for tensor in moved[1:5]), moved[5]]


def assert_near(got: list[Tensor], expected: list[Tensor]) -> None:
    for name, value, reference in zip(("out", "x", "weights", "w13", "w2"), got, expected, strict=True):
        error = (value.cpu().double() - reference.detach()).norm() / reference.norm()
        assert error < 1e-2, f"{name}: {error:.1e}"  # bf16 has 8 bits


def local():
    return make_dispatcher("local", num_experts=E, top_k=K, alignment=128)


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_float64_on_the_cpu(experts, seed):
    drawn = draw(seed)
    reference = [drawn[0], *(tensor.requires_grad_() for tensor in drawn[1:5]), drawn[5]]
    assert_near(region(local(), experts, *on_gpu(drawn)), region(local(), EXPERTS["loop"], *reference))


def test_the_host_waits_for_nothing(experts):
    tensors = on_gpu(draw(1))
    region(local(), experts, *tensors)  # what is compiled or allocated once may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        region(local(), experts, *tensors)
        with pytest.raises(RuntimeError, match="synchroniz"):  # the check itself works: this one reads the counts
            region(local(), EXPERTS["loop"], *tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_graph_serves_every_routing(experts):
    """Forward and backward, captured with the first routing, replayed with others; eager computes the same."""
    static = on_gpu(draw(0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            region(local(), experts, *static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = region(local(), experts, *static)
    for seed in range(1, ROUTINGS + 1):
        fresh = on_gpu(draw(seed))
        with torch.no_grad():
            for buffer, tensor in zip(static, fresh):
                buffer.copy_(tensor)
        graph.replay()
        for name, replayed, eager in zip(
            ("out", "x", "weights", "w13", "w2"), captured, region(local(), experts, *fresh), strict=True
        ):
            error = (replayed - eager).float().norm() / eager.float().norm()
            assert error < 1e-3, f"routing {seed}, {name}: {error:.1e}"
