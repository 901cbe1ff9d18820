"""What the [moe] section refuses, with the arithmetic and the way out, before any process group exists."""

from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest

from titan_moe import config_check, config_file
from titan_moe.startup import moe_report

EP2 = "--parallelism.expert_parallel_degree=2"


def problems(*arguments: str, world: int = 4) -> str:
    config = config_file.load(["train_configs/debug_model.toml", *arguments])
    return "\n".join(config_check.check(config, world))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--moe.dispatcher=local", EP2], ['moe.dispatcher = "local"', "expert_parallel_degree = 2", '"dedup"']),
        (["--moe.dispatcher=alltoall"], ['moe.dispatcher = "alltoall"', "expert_parallel_degree = 1", '"local"']),
        (["--moe.ranks_per_node=3", EP2], ["moe.ranks_per_node = 3", "must divide", "= 2", "choose one of 1, 2"]),
        (["--moe.ranks_per_node=2"], ["moe.ranks_per_node = 2", "only the dispatcher dedup"]),
        (["--moe.hop_chunks=2", EP2], ["moe.hop_chunks = 2", "two hops", "leave moe.hop_chunks at 1"]),
        (["--moe.hop_chunks=0", EP2], ["moe.hop_chunks = 0: must be at least 1"]),
        (["--moe.ranks_per_node=1", "--moe.hop_chunks=2", EP2], []),
        (["--moe.ranks_per_node=0", EP2], ["moe.ranks_per_node = 0: must be at least 1"]),
        (["--moe.capacity_factor=0"], ["moe.capacity_factor = 0.0: must be greater than 0"]),
        (["--moe.capacity_factor=-1.5"], ["moe.capacity_factor = -1.5"]),
        (["--moe.recv_buffer=0.5"], ["moe.recv_buffer = 0.5: must be", '"worst_case"', "at least 1"]),
        (["--moe.recv_buffer=inf"], ["moe.recv_buffer = inf: must be finite"]),
        (["--moe.recv_buffer=nan"], ["moe.recv_buffer = nan: must be finite"]),
        (["--moe.recv_buffer=1.5", EP2], []),
        (["--moe.recv_buffer=1.5"], []),
        (
            ["--moe.recv_buffer=worst_case", "--moe.ranks_per_node=1", EP2],
            ['moe.recv_buffer = "worst_case"', "moe.ranks_per_node = 1 sends them by node", 'or choose "exact"'],
        ),
        (["--moe.sequence_loss_coeff=-1"], ["moe.sequence_loss_coeff = -1.0: must be at least 0"]),
        (["--moe.force_balance=round_robin"], []),
        (["--moe.experts=te"], []),
        (["--moe.experts=te_fused"], ["its kernels compute in mxfp8", 'set precision.recipe = "mxfp8"']),
        (["--moe.experts=te_fused", "--precision.recipe=mxfp8"], []),
        (["--moe.dispatcher=dedup", "--moe.ranks_per_node=2", "--parallelism.expert_parallel_degree=4"], []),
    ],
)
def test_values_that_do_not_fit(arguments, said):
    found = problems(*arguments)
    assert all(part in found for part in said), found
    assert said or not found


@pytest.mark.parametrize("argument", ["--moe.dispatcher=alltoal", "--moe.experts=lop", "--moe.drop_policy=random"])
def test_unknown_names_are_refused_with_the_known_ones(argument):
    with pytest.raises(config_file.ConfigError) as error:
        config_file.load(["train_configs/debug_model.toml", argument])
    assert argument.split("=")[0].removeprefix("--") in str(error.value)
    assert any(known in str(error.value) for known in ("alltoall", "grouped_mm", "position"))


def test_the_report_says_how_much_room_there_is():
    """Debug model: 8 x 128 tokens, K = 3 of 8 experts, 2 on each of 4 ranks, slabs of multiples of 16 rows."""
    for recv_buffer, rows in [("1.25", "3,840 rows"), ("worst_case", "8,192 rows")]:
        ep4 = "--parallelism.expert_parallel_degree=4"
        config = config_file.load(["train_configs/debug_model.toml", f"--moe.recv_buffer={recv_buffer}", ep4])
        assert rows in moe_report(config, SimpleNamespace(ep=4, cp=1, tp=1))[1]


@pytest.mark.parametrize("how", ["round_robin", "balanced_random"])
def test_the_report_says_how_far_forced_routing_spreads(how):
    """Debug model: K = 3 of 8 experts, on 4 ranks of 2. In turn, 3 experts lie on 2 ranks, always. At random from 2 of
    4 groups, which here are the ranks, always on 2 as well."""
    config = config_file.load(["train_configs/debug_model.toml", f"--moe.force_balance={how}"])
    lines = moe_report(config, SimpleNamespace(ep=4, cp=1, tp=1))
    assert f"forced ({how})" in lines[1] and "2.000 different ranks of 4" in lines[1], lines
