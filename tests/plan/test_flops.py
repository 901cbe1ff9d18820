"""FLOPs per token reproduce the TFLOPS that published runs state, and the totals known for each model."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.flavors import FLAVORS, PUBLISHED
from titan_moe.plan.flops import per_token

RUNS = Path(__file__).parents[2] / "titan_moe" / "plan" / "published_runs.csv"
DEEPSEEK = PUBLISHED["DeepSeek-V3 671B"]


def published_runs() -> list[dict[str, str]]:
    with RUNS.open() as file:
        return [row for row in csv.DictReader(file) if row["tokens_per_s_per_gpu"] != "-"]


@pytest.mark.parametrize("row", published_runs(), ids=lambda row: f"{row['model']}-{row['source']}"[:60])
def test_published_tflops_over_tokens_is_our_count(row: dict[str, str]) -> None:
    """Within 0.5 % of every run; Qwen3-30B on B200 was published with rounded figures that are 0.9 % apart."""
    mtp = 0 if row["flops_include_mtp"] == "no" else int(row["mtp_layers"])
    published = float(row["tflops_per_gpu"]) * 1e12 / float(row["tokens_per_s_per_gpu"])
    ours = sum(per_token(PUBLISHED[row["model"]], int(row["seq_len"]), num_mtp_layers=mtp).values())
    tolerance = 0.009 if (row["model"], row["hardware"]) == ("Qwen3-30B-A3B", "B200") else 0.005
    assert ours == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(
    ("model", "mtp", "causal", "gflops"),
    [
        ("DeepSeek-V3 671B", 0, True, 249.8),
        ("DeepSeek-V3 671B", 1, True, 260.0),
        ("DeepSeek-V3 671B", 0, False, 280.5),  # torchtitan's 281.2 adds the router, 6 x 7168 x 256 x 58 = 0.64
        ("Qwen3-235B-A22B", 0, True, 148.0),
        ("Qwen3-30B-A3B", 0, True, 23.0),
        ("Mixtral-8x7B", 0, True, 79.7),
        ("Mixtral-8x22B", 0, True, 242.2),
    ],
)
def test_totals(model: str, mtp: int, causal: bool, gflops: float) -> None:
    terms = per_token(PUBLISHED[model], 4096, num_mtp_layers=mtp, causal=causal)
    assert sum(terms.values()) / 1e9 == pytest.approx(gflops, abs=0.06)


def test_conventions_differ_in_core_attention_alone() -> None:
    causal, full = (per_token(DEEPSEEK, 4096, num_mtp_layers=1, causal=causal) for causal in (True, False))
    assert full.pop("core attention") == 2 * causal.pop("core attention")
    assert full == causal


def test_mtp_adds_a_moe_layer_a_projection_and_a_head() -> None:
    without, one, two = (per_token(DEEPSEEK, 4096, num_mtp_layers=n) for n in (0, 1, 2))
    assert {name: two[name] - one[name] for name in one} == pytest.approx(
        {name: one[name] - without[name] for name in one}
    )
    assert one["routed experts"] / without["routed experts"] == pytest.approx(59 / 58)
    assert one["logits"] == 2 * without["logits"]
    assert one["dense MLP"] == without["dense MLP"]


def test_a_full_query_projection_costs_what_its_matrix_does() -> None:
    f = FLAVORS["16B"]
    assert f.q_lora_rank == 0
    assert per_token(f, 1, num_mtp_layers=0)["attention q"] == 6 * f.n_layers * f.dim * f.n_heads * (128 + 64)


def test_torchtitan_counts_the_same_in_its_convention() -> None:
    """All attention, no MTP; torchtitan also counts the router and every norm."""
    from titan_moe.model import build_model  # isort: skip - it tells torchtitan about CPUs
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model

    from titan_moe.config import Config, Model

    config = Config(model=Model(flavor="16B", n_layers=3))
    model = build_model(config)
    _, theirs = DeepSeekV3Model.Config.get_nparams_and_flops(model.config, model, 4096)
    flavor = replace(FLAVORS["16B"], n_layers=3)
    ours = sum(per_token(flavor, 4096, num_mtp_layers=0, causal=False).values())
    router = 6 * 2 * flavor.dim * flavor.num_experts
    assert theirs == pytest.approx(ours + router, rel=1e-4)
