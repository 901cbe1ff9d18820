"""FSDP's collectives beside expert-parallel ones, between real gloo ranks: in other groups, with the bits of FSDP2's
stock ones, and under way at the same time, in forward and in backward."""

import pytest

from tests.distributed.traced import compare_with_stock, traced_steps
from tests.faults.checkpoint_run import Job
from titan_moe import timeline

EP2, EP4 = (f"--parallelism.expert_parallel_degree={ep}" for ep in (2, 4))
TWO_MICROBATCHES = "--training.global_batch_size=16"
EVERY = "--parallelism.fsdp_reduce_every_microbatch=true"
HSDP = "--parallelism.data_parallel_replicate_degree=2"
PP = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=2"]
LAYOUTS = [
    (2, [EP2], False),
    (2, [EP2, TWO_MICROBATCHES, EVERY], False),
    (4, [EP2, HSDP], False),
    (4, [EP2, HSDP, "--training.global_batch_size=32", EVERY], True),
    (4, [EP4], True),
    (4, [EP4, "--parallelism.context_parallel_degree=2"], True),
    (4, [EP2, *PP], True),
    (2, [TWO_MICROBATCHES], True),
    (2, [EP2, "--training.mixed_precision_param=bfloat16"], True),
    (2, [EP2, "--activation_checkpoint.mode=full"], True),
]
"""Ranks, settings, whether slow"""


@pytest.mark.parametrize(
    ("ranks", "argv"), [pytest.param(*case, marks=[pytest.mark.slow] * slow) for *case, slow in LAYOUTS]
)
def test_gradients_are_those_of_stock_fsdp_and_dispatch_has_its_own_group(tmp_path, ranks, argv):
    """Bit for bit, also where FSDP2 reads a reduction at once, replicas or gradients that are there already, and where
    it reduces outside of backward, a pipeline."""
    job = Job(tmp_path / "store", compare_with_stock, argv, world_size=ranks)
    assert job.hear() == [[]] * ranks
    job.end()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp_is_under_way_beside_expert_parallel_traffic(tmp_path, report, ranks):
    """In forward and in backward, on links slow enough to see it: a gather takes as long as a layer. With FSDP2's stock
    collectives the host would stand still in each of them, and none would lie beside a dispatch."""
    argv = [EP2, "--moe.force_balance=balanced_random", "--model.n_layers=4", "--model.moe_hidden_dim=256"]
    job = Job(tmp_path / "store", traced_steps, argv, 6.0, 1, world_size=ranks)
    for rank, found in enumerate(job.hear()):
        for backward in (False, True):
            here = [span for span in found if span.backward == backward]
            fsdp, ep = ([s.interval for s in here if s.lane == lane] for lane in ("FSDP", "expert parallel"))
            assert len(ep) == 2 * 3, "dispatch and combine of three layers"
            of_fsdp, of_ep = timeline.share_beside(fsdp, ep), timeline.share_beside(ep, fsdp)
            report(
                f"{ranks} ranks, rank {rank}, {'backward' if backward else 'forward'}: both kinds under way in "
                f"{of_fsdp:.0%} of FSDP's seconds, {of_ep:.0%} of expert parallelism's"
            )
            assert of_ep > 0.2
        assert {s.name for s in found if s.backward and s.lane == "FSDP"} == {"gather", "reduce"}
    job.end()
