"""CUDA graphs of the whole step on GPUs: the debug model trains as it does without, to bf16's last digits."""

import pytest

from tests.gpu.test_training import train

pytestmark = pytest.mark.gpu

GRAPHS = "--cuda_graph.scope=full"
# Losses of equal steps differ where kernels add in another order each time they run (atomics of embedding and scatter).
CLOSE = 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["--training.global_batch_size=32", "--moe.sequence_loss_coeff=1e-3", "--moe.capacity_factor=1.0"],
        ["--activation_checkpoint.mode=selective", "--model.num_mtp_layers=1"],
        ["--compile.enable"],
    ],
)
def test_replays_equal_eager_steps(tmp_path, settings):
    """One warm-up, one capture, three replays."""
    eager = train(tmp_path / "eager", *settings)
    assert train(tmp_path / "graphs", *settings, GRAPHS) == pytest.approx(eager, rel=CLOSE)


@pytest.mark.parametrize("recv_buffer", ["worst_case", "1.0"])
def test_between_ranks(tmp_path, gpus, recv_buffer):
    """Fixed receive buffers, and ones of the mean, which overflow: the step is recorded anew."""
    if gpus < 2:
        pytest.skip("one GPU: nothing to dispatch to")
    settings = [
        "--parallelism.expert_parallel_degree=2",
        "--moe.dispatcher=alltoall",
        f"--moe.recv_buffer={recv_buffer}",
    ]
    eager = train(tmp_path / "eager", *settings, ranks=2)
    assert train(tmp_path / "graphs", *settings, GRAPHS, ranks=2) == pytest.approx(eager, rel=CLOSE)
