"""docs/parallelism.md is what the checks and the tests say, and what it says about combinations of more than two."""

from collections.abc import Iterable
from itertools import combinations

import titan_moe.runtime  # noqa: F401

from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.support_table import FEATURES, PAGE, can_meet, compared, refusals, renewed
from tests.distributed.cases import cases
from tests.distributed.harness import SMALL_FP32
from tests.distributed.test_meshes import COMPARED
from titan_moe import config_file
from titan_moe.config_check import check
from titan_moe.flavors import FLAVORS
from titan_moe.pipeline_layout import PipelineLayout, balanced_layers, stage_flops


def test_the_page_is_current():
    page = PAGE.read_text()
    assert renewed(page) == page, "python -m scripts.support_table"


def test_the_page_shows_the_layout_that_671b_gets():
    layers = balanced_layers(FLAVORS["671B"], 16, 4096)
    flops = tuple(stage_flops(FLAVORS["671B"], layers, 4096))
    assert f"\n    {PipelineLayout(schedule='1F1B', pp=16, layers=tuple(layers), flops=flops).report()}\n" in (
        PAGE.read_text()
    )


def test_what_is_compared_is_accepted(tmp_path):
    argvs = {ranks: cases(ranks, tmp_path) for ranks in (1, 2, 4)}
    for ranks, name, _ in COMPARED:
        config = config_file.load([*SMALL_FP32, *argvs[ranks][name].argv])
        assert check(config, ranks) == [], name
    assert not any(refusals(pair) for features in compared().values() for pair in combinations(features, 2))


REFUSED = {pair for pair in combinations(FEATURES, 2) if can_meet(pair) and refusals(pair)}


def refused_by_a_pair(features: Iterable[str]) -> bool:
    return not REFUSED.isdisjoint(combinations([name for name in FEATURES if name in features], 2))


def test_a_combination_of_three_is_refused_exactly_if_two_of_its_parts_are():
    assert REFUSED and not any(refusals([name]) for name in FEATURES)
    for features in filter(can_meet, combinations(FEATURES, 3)):
        assert bool(refusals(features)) is refused_by_a_pair(features), features


@settings(deadline=None)
@given(st.sets(st.sampled_from(list(FEATURES)), min_size=4).filter(can_meet))
def test_so_is_a_larger_one(features):
    assert bool(refusals(features)) is refused_by_a_pair(features)
