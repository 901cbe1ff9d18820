"""At a fixed global batch, every mesh trains the same model: same losses, same gradient of every parameter, same
initial weights.

fp32 throughout. Loss and total gradient norm alone would not do: a wrong expert layout hides in them, so each
parameter's gradient is compared by itself.
"""

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.cases import PIPELINES, SLOW

COMPARED = [
    (1, "one_rank_whole_batch", "one_rank"),
    (2, "fsdp2", "one_rank"),
    (2, "fsdp2_no_bias", "one_rank_no_bias"),
    (2, "fsdp2_ep2", "one_rank"),
    (2, "fsdp2_ep2_no_bias", "one_rank_no_bias"),
    (2, "fsdp2_ep2_reduce_every", "one_rank"),
    (1, "one_rank_loop", "one_rank"),
    (2, "fsdp2_ep2_full", "one_rank"),
    (2, "fsdp2_ep2_selective", "one_rank"),
    (2, "fsdp2_ep2_alltoall", "one_rank"),
    (2, "fsdp2_ep2_alltoall_full", "one_rank"),
    (2, "fsdp2_ep2_alltoall_selective", "one_rank"),
    (2, "fsdp2_ep2_alltoall_redispatch", "one_rank"),
    (2, "fsdp2_ep2_losses", "one_rank_losses"),
    (2, "fsdp2_ep2_moments", "moments"),
    (2, "fsdp2_ep2_muon", "muon"),
    (2, "tp2_muon", "muon"),
    (4, "ep4_alltoall", "one_rank"),
    (4, "ep4_nodes_full", "one_rank"),
    (4, "ep4_chunks_full", "one_rank"),
    (2, "fsdp2_whole_batch", "one_rank"),
    (4, "fsdp4", "one_rank"),
    (4, "fsdp4_ep2", "one_rank"),
    (4, "fsdp4_ep2_no_bias", "one_rank_no_bias"),
    (4, "hsdp2x2_ep2", "one_rank"),
    (4, "ep2_two_experts", "one_rank_two_experts"),
    (4, "hsdp2x2", "one_rank"),
    (4, "hsdp2x2_reduce_every", "one_rank"),
    (2, "fsdp2_ep2_parts", "one_rank"),
    (2, "fsdp2_ep2_compiled", "one_rank"),
    (2, "tp2", "one_rank"),
    (2, "tp2_losses", "one_rank_losses"),
    (2, "tp2_ep2", "one_rank"),
    (2, "tp2_ep2_losses", "one_rank_losses"),
    (2, "tp2_mtp2", "one_rank_mtp2"),
    (2, "fsdp2_ep2_mtp_full", "one_rank_mtp"),
    (2, "fsdp2_ep2_qwen3", "one_rank_qwen3"),
    (2, "fsdp2_ep2_mixtral", "one_rank_mixtral"),
    (2, "cp2", "one_rank"),
    (2, "cp2_plain_order", "one_rank"),
    (2, "cp2_ep2_losses", "one_rank_losses"),
    *[(2, f"pp2_{schedule}", "one_rank") for schedule in PIPELINES],
    (2, "pp2_uneven", "one_rank"),
    (2, "pp2_losses", "one_rank_losses"),
    (2, "pp2_zbv_losses", "one_rank_losses"),
    (4, "fsdp2_tp2_ep2", "one_rank"),
    (4, "tp2_cp2_ep4", "one_rank"),
    (4, "tp2_cp2_ep4_qwen3", "one_rank_qwen3"),
    (4, "fsdp2_cp2", "one_rank"),
    (4, "fsdp2_pp2", "one_rank"),
    (4, "pp2_ep2", "one_rank"),
    (4, "hsdp2_tp2", "one_rank"),
    (4, "hsdp2_cp2", "one_rank"),
    (4, "hsdp2_pp2", "one_rank"),
    (4, "pp2_tp2", "one_rank"),
    (4, "pp2_cp2_ep2", "one_rank"),
]


def marked(rows: list[tuple]) -> list:
    """`rows` of ranks, name, ... with those of slow cases marked."""
    return [pytest.param(*row, marks=[pytest.mark.slow] if row[1] in SLOW[row[0]] else []) for row in rows]


@pytest.mark.parametrize(("ranks", "name", "reference"), marked(COMPARED))
def test_losses_equal_one_ranks(outcome, ranks, name, reference):
    metrics, expected = outcome(ranks, name).metrics, outcome(1, reference).metrics
    assert list(metrics) == list(expected) == [1, 2, 3, 4, 5]
    for quantity in ("loss", "grad_norm", *(["mtp_loss"] if "mtp" in name else [])):
        got = [record[quantity] for record in metrics.values()]
        assert got == pytest.approx([record[quantity] for record in expected.values()], rel=1e-5), quantity
    assert metrics[5]["validation_loss"] == pytest.approx(expected[5]["validation_loss"], rel=1e-5)
    assert metrics[5]["tokens_seen"] == expected[5]["tokens_seen"] == 5 * 8 * 64


@pytest.mark.parametrize(("ranks", "name", "reference"), marked(COMPARED))
def test_every_parameters_gradient_equals_one_ranks(outcome, ranks, name, reference, report):
    step1, expected = outcome(ranks, name).step1, outcome(1, reference).step1
    flipped = (step1["routing"] != expected["routing"]).any(dim=-1)
    assert step1["gradients"].keys() == expected["gradients"].keys()
    errors = {}
    for parameter, gradient in expected["gradients"].items():
        assert gradient.norm() > 0, f"{parameter}: the reference has no gradient to compare with"
        errors[parameter] = ((step1["gradients"][parameter] - gradient).norm() / gradient.norm()).item()
    parameter, error = max(errors.items(), key=lambda item: item[1])
    flips = f"{int(flipped.sum())} of {flipped.numel()} top-k choices flipped"
    report(f"{name} against {reference}: {flips}; largest gradient difference {error:.1e} of the norm ({parameter})")
    assert error <= 1e-5, f"{name}: gradient of {parameter} differs by {error:.2e} of its norm"


def test_losses_of_ranks_with_few_labels(outcome):
    """Rank 1 keeps three labels of 64 in each sequence: loss, maximum, validation loss and tokens are those computed
    directly, in float64 from each microbatch's hidden states."""
    few = outcome(2, "few_labels")
    ranks = [[{"step": step, "loss": loss, "labels": labels} for step, loss, labels in rank] for rank in few.direct]

    def totals(step: int) -> list[tuple[float, int]]:
        return [
            (sum(m["loss"] for m in rank if m["step"] == step), sum(m["labels"] for m in rank if m["step"] == step))
            for rank in ranks
        ]

    for step, record in few.metrics.items():
        losses, labels = zip(*totals(step))
        assert labels[1] == 4 * 3 and labels[0] > 15 * labels[1]
        assert record["loss"] == pytest.approx(sum(losses) / sum(labels), rel=1e-5)
        assert record["max_loss"] == pytest.approx(max(loss / n for loss, n in zip(losses, labels)), rel=1e-5)
        assert record["tokens_seen"] == step * 8 * 64
    losses, labels = zip(*totals(0))
    assert few.metrics[5]["validation_loss"] == pytest.approx(sum(losses) / sum(labels), rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "name"),
    marked([*((2, f"pp2_{schedule}") for schedule in PIPELINES), (2, "pp2_uneven"), (2, "pp2_zbv_losses")]),
)
def test_no_schedule_runs_an_expert_gemm_twice(outcome, ranks, name):
    """Schedules that split backward ask for inputs' gradients first and for weights' later: each expert GEMM runs once,
    two of each kind per MoE layer and microbatch."""
    microbatches = 4 if name == "pp2_uneven" else 8
    layers = 2
    once = 2 * layers * microbatches
    assert outcome(ranks, name).step1["expert_gemms"] == {"_Dgrad": once, "_Wgrad": once}


def test_a_pipeline_learns_shapes_with_an_even_load(outcome):
    """torch runs the stages on tensors without content, whose rows are all alike: unless routing is forced then, all of
    them would go to the same few experts, and at scale no rank could hold them."""
    loads = outcome(2, "pp2_Interleaved1F1B").step1["load_without_content"]
    assert loads and max(loads) <= 1.25


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_on_any_mesh(outcome, ranks):
    """3 steps on one rank, then one on each of three meshes in turn, each from what the last one saved: one curve,
    of which the moments are part from the second loss on."""
    expected = outcome(1, "uninterrupted").metrics
    meshes = {2: ["then_tp2", "then_pp2", "then_cp2_ep2"], 4: ["then_pp2_ep2", "then_tp2_ep2", "then_hsdp2"]}
    for step, name in enumerate(meshes[ranks], start=4):
        record = outcome(ranks, name).metrics[step]
        assert record["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5), name
        assert record["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-5), name
        assert record["tokens_seen"] == expected[step]["tokens_seen"], name


def test_the_bias_matters(outcome):
    """Otherwise the cases with the router bias on would repeat those without."""
    assert outcome(1, "one_rank").losses != outcome(1, "one_rank_no_bias").losses


def test_initial_weights_do_not_depend_on_the_mesh(outcome, tmp_path):
    """The step-0 checkpoint of 4 ranks with EP = 2 equals that of 1 rank bit for bit, and no two experts are equal."""
    weights = {}
    for ranks, name in ((1, "one_rank_seed"), (4, "ep2_seed")):
        dcp_to_torch_save(outcome(ranks, name).folder / "checkpoint" / "step-0", tmp_path / name)
        weights[name] = torch.load(tmp_path / name, weights_only=False)
    one, four = weights["one_rank_seed"], weights["ep2_seed"]
    parameters = outcome(1, "one_rank").step1["gradients"].keys()
    for parameter in [*parameters, "layers.1.moe.expert_bias_E"]:
        assert torch.equal(one[parameter], four[parameter]), parameter
    w1_EFD = four["layers.1.moe.routed_experts.inner_experts.w1_EFD"]
    assert len({expert.sum().item() for expert in w1_EFD}) == w1_EFD.shape[0] == 8


def test_accumulation_reduces_gradients_once_per_step(outcome):
    """2 microbatches on 2 ranks reduce as often as 1 of twice the size: only the last backward communicates gradients,
    the chunked loss's output head included."""

    def reductions(name: str) -> int:
        counts = outcome(2, name).step1["collectives"]
        return sum(n for collective, n in counts.items() if "reduce_scatter" in collective)

    assert reductions("fsdp2") == reductions("fsdp2_whole_batch") > 0
    assert reductions("fsdp2_ep2_reduce_every") == 2 * reductions("fsdp2_ep2") > 0, "asked for, each of 2 reduces"


def test_expert_parallel_ranks_exchange_tokens(outcome):
    """Otherwise the EP cases would compare FSDP with itself."""
    counts = outcome(2, "fsdp2_ep2").step1["collectives"]
    assert sum(n for collective, n in counts.items() if "alltoall" in collective) > 0
    assert not [collective for collective in outcome(2, "fsdp2").step1["collectives"] if "alltoall" in collective]


def test_experts_are_cut_along_f_where_ranks_outnumber_them(outcome):
    """Otherwise the case of 1,024 GPUs would not have been met."""
    assert outcome(4, "ep2_two_experts").step1["expert_shards"] == [[1, 24, 2, 64]] * 4


def test_recompute_sends_no_token_again(outcome):
    """Plan and rows are exchanged as often with recompute as without; `moe.redispatch` repeats the rows, which are sent
    with their weights, and only in dispatch: two collectives more per MoE layer and microbatch."""

    def exchanges(name: str) -> int:
        return sum(n for collective, n in outcome(2, name).step1["collectives"].items() if "alltoall" in collective)

    plain = exchanges("fsdp2_ep2_alltoall")
    assert exchanges("fsdp2_ep2_full") == exchanges("fsdp2_ep2_selective") == exchanges("fsdp2_ep2")
    assert exchanges("fsdp2_ep2_alltoall_full") == plain
    layers, microbatches = 2, 2
    assert exchanges("fsdp2_ep2_mtp_full") * layers == exchanges("fsdp2_ep2") * (layers + 1)
    assert exchanges("fsdp2_ep2_alltoall_redispatch") == plain + 2 * layers * microbatches


def test_load_and_losses_are_of_all_ranks(outcome):
    """The same load, and the same auxiliary losses, whatever the mesh, accumulation and recompute."""
    one, two = outcome(1, "one_rank_losses").metrics, outcome(2, "fsdp2_ep2_losses").metrics
    for step, record in one.items():
        keys = {key for key in record if key.startswith("moe_")}
        assert keys >= {"moe_max/mean", "moe_load.layers.1", "moe_max/mean.layers.1", "moe_aux_loss"}
        assert {key: two[step][key] for key in keys} == {key: pytest.approx(record[key], rel=1e-5) for key in keys}
    assert outcome(1, "one_rank_losses").losses != outcome(1, "one_rank").losses


RECOUNTED = {
    1: ["one_rank", "one_rank_whole_batch", "one_rank_mtp", "one_rank_drops"],
    2: ["fsdp2_ep2", "fsdp2_ep2_full", "fsdp2_ep2_mtp_full", "fsdp2_ep2_losses_factor", "tp2", "tp2_ep2_losses", "cp2"],
    4: ["hsdp2x2_ep2", "tp2_cp2_ep4", "pp2_cp2_ep2", "pp2_cp2_ep2_factor"],
}
RECOUNTED[2] += [f"pp2_{schedule}" for schedule in PIPELINES]


@pytest.mark.parametrize(
    ("ranks", "name"), marked([(ranks, name) for ranks, names in RECOUNTED.items() for name in names])
)
def test_loads_equal_a_recount_of_the_routers_ids(outcome, ranks, name):
    """Of step 1, all ranks and microbatches, as the routers chose: whatever the mesh, accumulation, recompute, replays,
    schedules that run stages on nothing, dropped copies, and multi-token prediction's layers."""
    found = outcome(ranks, name)
    record = found.metrics[1]
    layers = sorted(key.removeprefix("moe_load.") for key in record if key.startswith("moe_load."))
    assert len(layers) == len(found.step1["routing"]) == (3 if "mtp" in name else 2)
    violations = []
    for layer, ids_SLK in zip(layers, found.step1["routing"]):
        load = ids_SLK.flatten().bincount(minlength=8).tolist()
        mean = sum(load) / len(load)
        violations.append((max(load) - mean) / mean)
        assert record[f"moe_load.{layer}"] == load and sum(load) == ids_SLK.numel()
        assert record[f"moe_maxvio.{layer}"] == pytest.approx(violations[-1], rel=1e-12)
        assert record[f"moe_dead.{layer}"] == load.count(0)
    assert record["moe_maxvio"] == pytest.approx(max(violations), rel=1e-12)


@pytest.mark.parametrize("name", ["fsdp2_ep2_full", "tp2", "cp2", "pp2_1F1B", "pp2_ZBVZeroBubble"])
def test_every_rank_and_microbatch_enters_a_layer_s_numbers(outcome, name):
    """At step 1, where weights are the same: those of one rank."""
    one, other = outcome(1, "one_rank").metrics[1], outcome(2, name).metrics[1]
    keys = {key for key in one if key.startswith("moe_")}
    assert keys >= {"moe_entropy.layers.1", "moe_confidence.layers.2", "moe_bias_min", "moe_maxvio_floor"}
    assert {key: other[key] for key in keys} == {key: pytest.approx(one[key], rel=1e-5) for key in keys}


def test_drops_are_reported(outcome):
    records = outcome(1, "one_rank_drops").metrics.values()
    assert all(0 < record["moe_dropped.layers.1"] < 0.5 for record in records)


@pytest.mark.parametrize(("ranks", "name"), [(1, "one_rank"), (2, "fsdp2_ep2"), (4, "ep4_nodes_full")])
def test_every_expert_that_received_a_token_learns(outcome, ranks, name):
    """And no other: a gradient for each weight of exactly the experts that a token was routed to at step 1."""
    step1 = outcome(ranks, name).step1
    for layer, ids in enumerate(step1["routing"], start=1):
        chosen = torch.zeros(8, dtype=torch.bool).index_fill_(0, ids.flatten(), True)
        for weight in ("w1_EFD", "w2_EDF", "w3_EFD"):
            gradient = step1["gradients"][f"layers.{layer}.moe.routed_experts.inner_experts.{weight}"]
            assert torch.equal(gradient.flatten(1).norm(dim=1) > 0, chosen), (layer, weight)
