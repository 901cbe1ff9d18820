"""Where a recipe runs by Transformer Engine (TE): the table, its page, and what configurations are told by it.

That the table is TE's own conditions: tests/te/test_support.py.
"""

import pytest

from scripts import precision_table
from titan_moe import config_file
from titan_moe.config_check import check
from titan_moe.plan.hardware import HARDWARE
from titan_moe.precision import support


def test_the_page_is_up_to_date():
    page = precision_table.PAGE.read_text()
    assert precision_table.renewed(page) == page, "run python -m scripts.precision_table"


def test_a_path_has_one_row_at_most_for_a_gpu():
    for capability in ((major, minor) for major in range(7, 13) for minor in range(10)):
        for row in support.TABLE:
            held = [other for other in support.TABLE if (other.recipe, other.path) == (row.recipe, row.path)]
            found = [r for r in held if r.oldest <= capability and (r.before is None or capability < r.before)]
            assert len(found) <= 1 and support.find(row.recipe, row.path, capability) == (found or [None])[0]


def test_device_splits_are_never_all_there_is():
    """Without a cuBLASLt that is new enough there are host splits."""
    for row in support.TABLE:
        if row.path in ("device splits", "te_fused"):
            assert support.find(row.recipe, "host splits", row.oldest)


def test_the_planners_hardware_has_a_capability_where_te_runs():
    for hardware in HARDWARE.values():
        assert (hardware.architecture in support.CAPABILITY) == (not hardware.name.startswith("MI"))
        peak = {"fp8": hardware.fp8_tflops, "nvfp4": hardware.fp4_tflops}
        if capability := support.CAPABILITY.get(hardware.architecture):
            assert bool(peak["fp8"]) == bool(support.find("fp8_current", "linears", capability))
            assert bool(peak["nvfp4"]) == bool(support.find("nvfp4", "linears", capability))


MXFP8 = ["--precision.recipe=mxfp8", "--training.mixed_precision_param=bfloat16"]
TE, H100 = "--precision.backend=te", "--plan.hardware=H100"


def said(*arguments: str) -> str:
    return "\n".join(check(config_file.load(["train_configs/debug_model.toml", *arguments]), 1))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            [*MXFP8, TE, H100],
            ['precision.backend = "te"', "10.0 to 11.x", "has 9.0", "runs bf16, fp8_current, fp8_block"],
        ),
        ([*MXFP8, "--moe.experts=te", H100], ['moe.experts = "te"', 'plan.hardware = "H100"']),
        ([*MXFP8, "--moe.experts=te_fused", H100], ['moe.experts = "te_fused"', "10.0 to 10.6"]),
        ([*MXFP8, TE, "--plan.hardware=MI300X"], ["needs a GPU of NVIDIA"]),
        ([*MXFP8, TE, "--plan.hardware=GB200"], []),
        ([*MXFP8, H100], []),
        (["--precision.recipe=fp8_block", TE, H100], []),
        (["--moe.experts=te_fused"], ["its kernels compute in mxfp8", 'set precision.recipe = "mxfp8"']),
        ([*MXFP8, "--moe.experts=te_fused", "--precision.experts=false"], ["its kernels compute in mxfp8"]),
        ([*MXFP8, "--moe.experts=te", "--precision.backend=emulated"], ['moe.experts = "auto", or the backend "auto"']),
        ([*MXFP8, "--moe.experts=loop", TE], ["computes without Transformer Engine"]),
        ([TE], ['precision.backend = "te": has nothing to quantize']),
        (["--moe.te_ep_payload=mxfp8"], ['is of moe.dispatcher = "te_ep", not of "auto"']),
    ],
)
def test_configurations_that_do_not_fit(arguments, parts):
    found = said(*arguments)
    assert all(part in found for part in parts), found
    assert parts or not found
