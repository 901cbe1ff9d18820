"""Combinations that activation offload refuses, each with what is in the way and the way out; and those it allows."""

import pytest

from titan_moe import config_file

ALL = "layer_input,attn_q,attn_k,attn_v,attn_out,moe_expert_input"
EP2, CP2 = "--parallelism.expert_parallel_degree=2", "--parallelism.context_parallel_degree=2"
MODE = "--activation_checkpoint.mode"


def problems(tensors: str, *options: str) -> list[str]:
    config = config_file.load(["train_configs/debug_model.toml", f"--activation_offload.tensors={tensors}", *options])
    return [problem for problem in config_file.check(config, 2) if "activation_offload" in problem]


@pytest.mark.parametrize(
    ("tensors", "options", "expected"),
    [
        (
            "attn_q,attn_out",
            [f"{MODE}=selective"],
            'attn_q cannot be moved away and made again, and activation_checkpoint.mode = "selective" makes again all '
            "but layer_input, attn_out and moe_expert_input; leave the others out",
        ),
        ("layer_input,attn_out,attn_v", [f"{MODE}=full"], "attn_out and attn_v cannot be moved away and made again"),
        (
            "attn_q,attn_out",
            [f"{MODE}=none", "--activation_checkpoint.recompute=norms,mla_up_proj"],
            'attn_q cannot be moved away and made again, as "mla_up_proj" in activation_checkpoint.recompute does',
        ),
        ("moe_expert_input", [], "not kept with parallelism.expert_parallel_degree = 1"),
        ("moe_expert_input", [EP2, f"{MODE}=full", "--moe.redispatch"], "not kept with moe.redispatch = true"),
        ("attn_q,attn_k,attn_v", [CP2], "not this rank's attn_k and attn_v, with"),
        ("attn_q", ["--compile.enable"], 'set compile.enable = false, or compile.components = ["loss"]'),
    ],
)
def test_refusals(tensors, options, expected):
    (problem,) = problems(tensors, *options)
    listed = ", ".join(f'"{name}"' for name in tensors.split(","))
    assert problem.startswith(f"activation_offload.tensors = [{listed}]: ") and expected in problem


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (ALL, [EP2, f"{MODE}=none", "--activation_checkpoint.recompute=norms,swiglu,shared_expert"]),
        ("layer_input,attn_out,moe_expert_input", [EP2, f"{MODE}=selective"]),
        ("layer_input,moe_expert_input", [EP2, f"{MODE}=full"]),
        ("layer_input,attn_q,attn_out", [CP2]),
        ("layer_input", ["--compile.enable", "--compile.components=loss"]),
        ("", [f"{MODE}=full", "--compile.enable"]),
    ],
)
def test_what_goes_together(tensors, options):
    assert problems(tensors, *options) == []


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(ValueError, match="moe_expert_input"):
        problems("moe_expert_inputs")
