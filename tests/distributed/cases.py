"""Every training that the tests of whole runs look at, by the number of ranks: one torchrun job each (see
conftest.py)."""

from pathlib import Path

from tests.distributed.edits import edited_copies
from tests.distributed.harness import Case

BIAS_OFF = "--moe.load_balance_coeff=0"
EP2 = "--parallelism.expert_parallel_degree=2"
HSDP2 = "--parallelism.data_parallel_replicate_degree=2"
# With two experts on four ranks FSDP has no whole expert left to hand out, so it cuts them along F, as at 1,024 GPUs.
TWO_EXPERTS = [
    *("--model.num_experts=2", "--model.top_k=1", "--model.num_expert_groups=1", "--model.num_limited_groups=1"),
]
SEED_ONLY = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
# The schedule must not follow training.steps where runs of different lengths are compared.
SCHEDULE_100 = "--lr_scheduler.total_steps=100"


def cases(world_size: int, out: Path) -> dict[str, Case]:
    """Name -> case, in the order they run; `out` is the job's folder, which some cases share a run folder in."""
    if world_size == 1:
        finished = ["--checkpoint.enable", SCHEDULE_100, f"--job.dump_folder={out / 'extended'}"]
        argvs = {
            "one_rank": [],
            "one_rank_no_bias": [BIAS_OFF],
            "one_rank_two_experts": TWO_EXPERTS,
            "one_rank_whole_batch": ["--training.local_batch_size=8"],
            "one_rank_seed": SEED_ONLY,
            "golden": ["--training.steps=10"],
            "repeat": ["--training.mixed_precision_param=bfloat16"],
            "repeat_again": ["--training.mixed_precision_param=bfloat16"],
            "uninterrupted": ["--training.steps=6", SCHEDULE_100],
            "extended": ["--training.steps=3", *finished],
            "extended_again": ["--training.steps=6", *finished],
            "workers": ["--training.steps=3", "--training.dataloader.num_workers=2"],
        }
        edits = {name: Case(["--training.steps=3"], path) for name, path in edited_copies(out / "edits").items()}
        return {name: Case(argv) for name, argv in argvs.items()} | edits
    if world_size == 2:
        argvs = {
            "fsdp2": [],
            "fsdp2_no_bias": [BIAS_OFF, "--loss.num_chunks=1"],
            "fsdp2_ep2": [EP2],
            "fsdp2_ep2_no_bias": [EP2, BIAS_OFF],
            "fsdp2_ep2_full": [EP2, "--activation_checkpoint.mode=full"],
            "fsdp2_whole_batch": ["--training.local_batch_size=4"],
            "uninterrupted": [EP2, "--training.steps=10", SCHEDULE_100, "--training.mixed_precision_param=bfloat16"],
        }
        return {name: Case(argv) for name, argv in argvs.items()}
    assert world_size == 4
    argvs = {
        "fsdp4": [],
        "fsdp4_ep2": [EP2],
        "fsdp4_ep2_no_bias": [EP2, BIAS_OFF],
        "hsdp2x2_ep2": [EP2, HSDP2],
        "ep2_two_experts": [EP2, *TWO_EXPERTS],
        "ep2_seed": [EP2, *SEED_ONLY],
    }
    return {name: Case(argv) for name, argv in argvs.items()}
