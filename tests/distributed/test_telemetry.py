"""What ranks tell of each other: phases that add up on every mesh, the rank that others wait for by its number, and the
bytes that rows take."""

import math
import statistics

import pytest

from tests.distributed.edits import SLOWER
from titan_moe.phase_names import NAMES
from titan_moe.plan.traffic import group_limited_unique

# (ranks, case, phases that it must have, phases that it must not have)
MESHES = [
    (
        2,
        "fsdp2_ep2",
        "dispatch.forward dispatch.backward combine.backward fsdp.backward data clip",
        "mtp.forward pipeline",
    ),
    (
        2,
        "fsdp2_ep2_mtp_full",
        "mtp.forward mtp.backward router.backward experts.backward norms.forward",
        "pipeline wgrad",
    ),
    (2, "fsdp2_ep2_alltoall_redispatch", "dispatch.backward experts.backward", "pipeline"),
    (2, "pp2_1F1B", "pipeline embedding.backward loss.backward experts.backward", "wgrad"),
    (2, "pp2_ZBVZeroBubble", "pipeline wgrad experts.backward", "mtp.forward"),
    (2, "tp2_ep2_losses", "router.backward shared_expert.backward dense.backward", "pipeline"),
]


@pytest.mark.parametrize(("ranks", "case", "there", "absent"), MESHES, ids=[case for _, case, *_ in MESHES])
def test_phases_add_up_to_the_step_on_every_mesh(outcome, ranks, case, there, absent):
    for step, record in outcome(ranks, case).metrics.items():
        phases = {name: record[f"phase/{name}"] for name in NAMES if f"phase/{name}" in record}
        assert sum(phases.values()) == pytest.approx(record["phase/step"])
        assert phases.keys() >= set(there.split()) and not phases.keys() & set(absent.split())
        for name, mean in phases.items():
            assert 0 <= mean <= record[f"phase_max/{name}"] <= ranks * mean * (1 + 1e-9)
            assert record[f"phase_rank/{name}"] in range(ranks)
        if step > 1:  # the first sets up what is made once
            assert phases["other"] < 0.2 * record["phase/step"], "tiny layers leave much between them, but not that"


def test_a_slow_rank_is_named(outcome):
    """Rank 1 sleeps in its experts, and rank 0 waits for it in what they do together: that rank 0's combine takes
    longest does not make it the slow one. Steps with a trace are slow otherwise."""
    records = [record for step, record in outcome(2, "slow_rank").metrics.items() if step not in (1, 3)]
    slept = SLOWER * 2 * 2  # layers, microbatches
    for record in records:
        assert record["phase_max/experts.forward"] >= slept and record["phase_rank/experts.forward"] == 1
        # the mean is of both: rank 0's is what is left
        assert 2 * record["phase/experts.forward"] - record["phase_max/experts.forward"] < slept
    assert statistics.median(record["slowest_rank"] for record in records) == 1
    assert statistics.median(record["slowest_rank_s"] for record in records) > slept / 4


def test_only_the_chosen_rank_leaves_a_trace(outcome):
    folder = outcome(2, "slow_rank").folder
    assert [str(path.relative_to(folder)) for path in folder.rglob("*trace*.gz")] == [
        "profile_traces/iteration_3/rank1_trace.json.gz"
    ]


def test_bytes_are_those_of_the_rows(outcome):
    """Sent by dedup: a row of D fp32 numbers for each (token, other rank), the routing weight of each copy, and in
    backward the same again the other way. Both ranks together send what leaves a rank: the unique ranks of a token less
    its own, which over many tokens is half of its experts' ranks."""
    tokens, layers, dim, weights = 2 * 64 * 2, 2, 64, 4  # of a rank and step: sequences, L, microbatches
    for record in outcome(2, "fsdp2_ep2").metrics.values():
        rows = tokens * layers * record["comm/unique_ranks"] / 2  # to the other rank, in the mean of both
        combine = 2 * rows * dim * 4
        assert record["comm/combine_bytes"] == pytest.approx(combine, rel=0.1)
        extra = record["comm/dispatch_bytes"] - record["comm/combine_bytes"]
        copies = tokens * layers * 3 / 2  # K = 3 of which half go to the other rank, if routing is even
        assert 0.5 < extra / (2 * copies * weights) < 1.5
        assert 0 <= record["comm/hidden"] <= 1 and record["comm/exposed_s"] > 0
        for name in ("dispatch", "combine"):
            assert math.isfinite(record[f"comm/{name}_gb_s"]) and record[f"comm/{name}_gb_s"] > 0


def test_recompute_sends_nothing_again_but_where_it_is_asked_to(outcome):
    """Without redispatch the bytes are those of no recompute. Accumulation, MTP and the dispatcher are in the cases."""
    plain = outcome(2, "fsdp2_ep2").metrics[1]
    for case in ("fsdp2_ep2_full", "fsdp2_ep2_selective", "fsdp2_ep2_parts"):
        again = outcome(2, case).metrics[1]
        assert [again[key] for key in KEYS] == [plain[key] for key in KEYS], case
    kept, sent = (outcome(2, f"fsdp2_ep2_alltoall_{name}").metrics[1] for name in ("full", "redispatch"))
    assert sent["comm/dispatch_bytes"] == pytest.approx(1.5 * kept["comm/dispatch_bytes"])
    assert sent["comm/combine_bytes"] == kept["comm/combine_bytes"]


KEYS = ("comm/dispatch_bytes", "comm/combine_bytes", "comm/unique_ranks", "comm/padded_over_valid")


def test_unique_ranks_and_padding_do_not_depend_on_who_sends(outcome):
    """The plans of three dispatchers, and of te_ep's doubles, see the same routing."""
    dedup, alltoall = (outcome(2, case).metrics[1] for case in ("fsdp2_ep2", "fsdp2_ep2_alltoall"))
    for key in KEYS[2:]:
        assert dedup[key] == alltoall[key]
    assert 1 < dedup["comm/unique_ranks"] < 2 and dedup["comm/padded_over_valid"] > 1
    assert dedup["comm/unique_ranks_predicted"] == group_limited_unique(8, 3, 4, 2, 2)
    assert alltoall["comm/combine_bytes"] > dedup["comm/combine_bytes"], "a row for each copy"
    te_ep = outcome(2, "te_ep").metrics[1]
    assert "comm/unique_ranks" in te_ep and "comm/dispatch_bytes" not in te_ep, "its kernels do not tell"


def test_one_rank_has_nothing_to_send(outcome):
    record = outcome(1, "one_rank").metrics[1]
    assert {key for key in record if key.startswith("comm/")} == {"comm/padded_over_valid"}
    assert record["slowest_rank"] == 0 and record["slowest_rank_s"] == 0
