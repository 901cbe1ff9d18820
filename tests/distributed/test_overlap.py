"""moe.overlap between real ranks: nothing but the order of things changes, and what should be hidden is.

Forked jobs, one for each layout of the ranks; what these do is in overlap_ranks.py.
"""

import pytest

from tests.distributed import overlap_ranks
from tests.faults.checkpoint_run import Job

Job.context.set_forkserver_preload(["tests.faults.checkpoint_run", "tests.distributed.overlap_ranks"])

EP2, EP4 = (f"--parallelism.expert_parallel_degree={ranks}" for ranks in (2, 4))
SELECTIVE, FULL = (f"--activation_checkpoint.mode={mode}" for mode in ("selective", "full"))
PARTS = '--activation_checkpoint.recompute=["norms", "mla_up_proj", "swiglu", "shared_expert"]'
BOTH, HALVES = ["shared_expert", "half_batch"], ["half_batch"]
FOUR_MICROBATCHES = ["--training.local_batch_size=8", "--parallelism.pipeline_parallel_microbatch_size=2"]
PP = "--parallelism.pipeline_parallel_degree=2"
ZBV = [PP, *FOUR_MICROBATCHES, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--model.n_layers=6"]
QWEN = [
    *("train_configs/debug_model.toml", "--model.name=qwen3", "--model.flavor=30B-A3B", "--model.dim=64"),
    *("--model.n_layers=2", "--model.n_heads=2", "--model.num_kv_heads=1", "--model.qk_rope_head_dim=32"),
    *("--model.v_head_dim=32", "--model.moe_hidden_dim=48", "--model.num_experts=8", "--model.top_k=3"),
    *("--model.vocab_size=512", *overlap_ranks.BATCH),
]

TWO = {
    "dedup": (BOTH, [EP2]),
    "alltoall": (BOTH, [EP2, "--moe.dispatcher=alltoall"]),
    "three sequences": (HALVES, [EP2, "--training.local_batch_size=3"]),
    "accumulated": (BOTH, [EP2, "--training.global_batch_size=16"]),
    "selective": (BOTH, [EP2, SELECTIVE]),
    "full": (BOTH, [EP2, FULL]),
    "redispatch": (BOTH, [EP2, FULL, "--moe.redispatch=true"]),
    "parts": (BOTH, [EP2, PARTS]),
    "MTP": (BOTH, [EP2, "--model.num_mtp_layers=1", SELECTIVE]),
    "fixed buffer": (BOTH, [EP2, "--moe.recv_buffer=worst_case"]),
    "drops": (["shared_expert"], [EP2, "--moe.capacity_factor=1.0"]),
    "TP": (BOTH, [EP2, "--parallelism.tensor_parallel_degree=2"]),
    "CP": (BOTH, [EP2, "--parallelism.context_parallel_degree=2"]),
    "Qwen3": (HALVES, [*QWEN, EP2]),
}
FOUR = {
    "ep4": (BOTH, [EP4]),
    "two hops": (BOTH, [EP4, "--moe.ranks_per_node=2"]),
    "two hops redispatch": (BOTH, [EP4, "--moe.ranks_per_node=2", FULL, "--moe.redispatch=true"]),
    "two hops in chunks": (BOTH, [EP4, "--moe.ranks_per_node=2", "--moe.hop_chunks=3", SELECTIVE]),
    "ep2 fsdp2": (BOTH, [EP2, SELECTIVE]),
    "1F1B": (BOTH, [EP2, PP, *FOUR_MICROBATCHES, FULL]),
    "ZBV": (BOTH, [EP2, *ZBV, SELECTIVE]),
    "ZBV redispatch": (BOTH, [EP2, *ZBV, FULL, "--moe.redispatch=true"]),
}
QUICK = ("dedup", "redispatch")  # of two ranks; the others in the long run
BACKWARD = ("dispatch backward", "combine backward")


def compare(tmp_path, world_size: int, modes: list[str], argv: list[str]) -> None:
    """Loss, auxiliary losses and each parameter's gradient within 1e-6, the same loads, and as many gathers and
    reductions of parameters."""
    argv = argv if argv[0] == QWEN[0] else [*overlap_ranks.SMALL, *argv]
    job = Job(tmp_path / "store", overlap_ranks.compare, modes, argv, world_size=world_size)
    for mode in modes:
        for answer in job.hear():
            assert isinstance(answer, dict), answer
            assert answer["loss"] <= 1e-6 and answer["aux"] <= 1e-6 and answer["gradient"][1] <= 1e-6, (mode, answer)
            assert answer["loads"] and answer["gathers"][0] == answer["gathers"][1] != {}, (mode, answer)
            parts = 2 if mode == "half_batch" else 1
            assert answer["calls"] == {key: calls * parts for key, calls in answer["plain calls"].items()}
            assert set(answer["calls"]) == {"dispatch", "combine", *BACKWARD}
    job.end()


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TWO])
def test_same_gradients_on_two_ranks(tmp_path, name):
    compare(tmp_path, 2, *TWO[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_same_gradients_on_four_ranks(tmp_path, name):
    """Two hops, and pipeline schedules that split backward."""
    compare(tmp_path, 4, *FOUR[name])


def measured(tmp_path, world_size: int, mode: str, delay: float) -> list[dict]:
    """What rank 0 tells of five steps. A busy machine can only hide less, so tests look at the best of them."""
    argv = [*overlap_ranks.SMALL, *overlap_ranks.LAYER, f"--parallelism.expert_parallel_degree={world_size}"]
    argv += [f"--moe.overlap={mode}", f"--debug.comm_delay_ns_per_byte={delay}"]
    job = Job(tmp_path / f"store-{mode}", overlap_ranks.measure, argv, 5, world_size=world_size)
    answer = job.hear()[0]
    job.end()
    assert isinstance(answer, list), answer
    return answer


def hidden(step: dict) -> float:
    """Of dispatch and combine together, forward and backward."""
    in_flight, exposed = (sum(total[key] for total in step["totals"].values()) for key in ("in_flight", "exposed"))
    return 1 - exposed / in_flight


LONG, SHORT = 500.0, 10.0
"""Nanoseconds per byte with which a transfer takes longer than the shared expert, and less long than attention or the
experts of half a batch, on a busy machine too"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_hidden_on_a_slow_link(tmp_path, world_size):
    """Without overlap nothing; half a batch hides 60 % of dispatch and combine; while the shared expert computes, in
    either direction, a transfer is always under way. And it is other work that runs meanwhile: the experts of one half
    under transfers of the other."""
    alone = measured(tmp_path, world_size, "none", LONG)
    assert max(map(hidden, alone)) < 0.1, [step["totals"] for step in alone]

    shared = measured(tmp_path, world_size, "shared_expert", LONG)
    for part, transfer in (("shared expert", "dispatch"), ("shared expert backward", "dispatch backward")):
        shares = [overlap_ranks.covered(step["intervals"], (part,), (transfer,)) for step in shared]
        assert max(shares) > 0.99, (part, shares)
        assert max(overlap_ranks.covered(step["intervals"], (part,), (transfer,)) for step in alone) == 0

    halves = measured(tmp_path, world_size, "half_batch", SHORT)
    assert max(map(hidden, halves)) >= 0.6, [step["totals"] for step in halves]
    for part, transfers in (("experts", ("dispatch", "combine")), ("experts backward", BACKWARD)):
        assert max(overlap_ranks.covered(step["intervals"], (part,), transfers) for step in halves) > 0
        assert max(overlap_ranks.covered(step["intervals"], (part,), transfers) for step in alone) == 0
