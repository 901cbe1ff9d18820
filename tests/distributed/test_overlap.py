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
QWEN = [
    *("--model.name=qwen3", "--model.flavor=30B-A3B", "--model.num_experts=8", "--model.top_k=3"),
    *("--model.num_kv_heads=1", "--model.vocab_size=512", "--model.qk_rope_head_dim=32"),
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
    "Qwen3": (HALVES, [EP2, *QWEN]),
}
FOUR = {
    "ep4": (BOTH, [EP4]),
    "two hops": (BOTH, [EP4, "--moe.ranks_per_node=2"]),
    "two hops redispatch": (BOTH, [EP4, "--moe.ranks_per_node=2", FULL, "--moe.redispatch=true"]),
    "ep2 fsdp2": (BOTH, [EP2, SELECTIVE]),
    "1F1B": (BOTH, [EP2, PP, *FOUR_MICROBATCHES, FULL]),
    "ZBV": (
        BOTH,
        [EP2, PP, *FOUR_MICROBATCHES, SELECTIVE, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"],
    ),
    "ZBV redispatch": (
        BOTH,
        [
            *(EP2, PP, *FOUR_MICROBATCHES, FULL, "--moe.redispatch=true"),
            "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        ],
    ),
}
QUICK = ("dedup", "redispatch")  # of two ranks; the others in the long run


def compare(tmp_path, world_size: int, cases: dict) -> None:
    """Loss, auxiliary losses and each parameter's gradient within 1e-6, the same loads, and as many gathers and
    reductions of parameters."""
    wrong, seen = [], 0
    for name, (modes, argv) in cases.items():
        job = Job(tmp_path / "store", overlap_ranks.compare, modes, argv, world_size=world_size)
        for mode in modes:
            for answer in job.hear():
                assert isinstance(answer, dict), f"{name} {mode}: {answer}"
                seen += 1
                halves = mode == "half_batch"
                expected = {key: calls * (1 + halves) for key, calls in answer["plain calls"].items()}
                if not (
                    answer["loss"] <= 1e-6
                    and answer["aux"] <= 1e-6
                    and answer["gradient"][1] <= 1e-6
                    and answer["loads"]
                    and answer["gathers"][0] == answer["gathers"][1]
                    and answer["calls"] == expected
                ):
                    wrong.append((name, mode, answer))
        job.end()
    assert seen == world_size * sum(len(modes) for modes, _ in cases.values())
    assert not wrong, "\n".join(map(str, wrong))


def test_same_gradients_on_two_ranks(tmp_path):
    compare(tmp_path, 2, {name: TWO[name] for name in QUICK})


@pytest.mark.slow
def test_same_gradients_on_two_ranks_in_every_mode(tmp_path):
    compare(tmp_path, 2, {name: case for name, case in TWO.items() if name not in QUICK})


@pytest.mark.slow
def test_same_gradients_on_four_ranks(tmp_path):
    """Two hops, and pipeline schedules that split backward."""
    compare(tmp_path, 4, FOUR)
