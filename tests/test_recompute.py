"""Activation checkpointing: the same gradients to the bit, less memory, nothing done twice that must not be."""

from collections import Counter
from functools import cache
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import stage
from torch.distributed.pipelining._backward import stage_backward_input
from torch.multiprocessing.reductions import StorageWeakRef
from torchtitan.models.deepseek_v3.model import Attention

from benchmarks.recompute import PARTS, Allocations, kept_bytes
from titan_moe import config_file
from titan_moe.attention import documents
from titan_moe.config_check import model_flavor
from titan_moe.model import build_model, init_weights
from titan_moe.moe import experts
from titan_moe.rebuild import rebuilding, rebuilt
from titan_moe.recompute import FullCheckpointing, PartsCheckpointing, SelectiveCheckpointing, mtp_blocks
from titan_moe.recompute_facts import saved_bytes
from titan_moe.startup import recompute_report

B, L = 2, 64
SMALL = [
    *("train_configs/debug_model.toml", "--model.dim=64", "--model.n_layers=2", "--model.moe_hidden_dim=48"),
    *("--model.dense_hidden_dim=96", "--model.q_lora_rank=32", "--model.kv_lora_rank=32", "--model.n_heads=2"),
    *("--model.num_mtp_layers=1", f"--training.seq_len={L}"),
]
DEEPSEEK_V3 = [
    *("train_configs/debug_model.toml", "--model.flavor=671B", "--model.n_layers=2", "--model.n_dense_layers=1"),
    "--training.seq_len=4096",
]
POLICIES = {
    **{part: PartsCheckpointing.Config(parts=[part]) for part in PARTS},
    "all four": PartsCheckpointing.Config(parts=list(PARTS)),
    "selective": SelectiveCheckpointing.Config(),
    "full": FullCheckpointing.Config(),
}


def small_model(policy, dtype: str = "float32"):
    model = build_model(config_file.load([*SMALL, f"--training.mixed_precision_param={dtype}"])).to_empty(device="cpu")
    init_weights(model, seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    if policy is not None:
        policy.build(dump_folder="").apply(model)
    return model.train()


def batch():
    tokens_BL = torch.randint(0, 250, (B, L), generator=torch.Generator().manual_seed(0))
    positions_BL = torch.arange(L).expand(B, L)
    return tokens_BL, positions_BL, documents(positions_BL)


def gradients(model) -> list[torch.Tensor]:
    tokens_BL, positions_BL, masks = batch()
    model._skip_lm_head = True
    sum(out.float().square().mean() for out in model(tokens_BL, positions_BL, masks)).backward()
    return [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def plain():
    return {dtype: gradients(small_model(None, dtype)) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_bit_changes_and_router_plan_and_combine_run_once(policy, dtype, plain):
    """MTP layers included. Under "selective" and "full" the router's projection is repeated, its choice is not."""
    model = small_model(POLICIES[policy], dtype)
    calls: Counter[str] = Counter()
    for moe in (module for module in model.modules() if hasattr(module, "tokens_per_expert_E")):
        dispatcher = moe.routed_experts.dispatcher
        combine = dispatcher.start_combine
        dispatcher.start_combine = lambda *args, combine=combine: calls.update(combine=1) or combine(*args)
        if policy not in ("selective", "full"):
            moe.router.register_forward_hook(lambda *_: calls.update(router=1))
    found = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, plain[dtype], strict=True))
    assert calls["combine"] == 2 and calls["router"] in (0, 2), calls
    loads = [module.tokens_per_expert_E.sum() for module in model.modules() if hasattr(module, "tokens_per_expert_E")]
    assert loads == [B * L * 3] * 2


@pytest.mark.parametrize("policy", ["all four", "selective", "full"])
def test_every_block_is_checkpointed_mtp_included(policy):
    """Forward keeps less than without, in the layers and in the MTP layer."""
    kept = []
    for config in (None, POLICIES[policy]):
        model = small_model(config)
        _, positions_BL, masks = batch()
        h_BLD = torch.randn(B, L, 64)
        (_, mtp), layer = next(mtp_blocks(model)), model.layers["1"]
        for block, inputs in ((layer, (h_BLD,)), (mtp, (h_BLD, h_BLD, positions_BL >= 0))):
            with Allocations(model.parameters()) as allocated:
                y_BLD = block(*inputs, masks, positions_BL)
            kept.append(allocated.alive())
            del y_BLD
    assert kept[2] < kept[0] and kept[3] < kept[1], kept


@cache
def block_bytes(recompute: str, moe: bool) -> int:
    """What a block of DeepSeek-V3's sizes keeps on a GPU."""
    chosen = ["--activation_checkpoint.mode=none", f"--activation_checkpoint.recompute={recompute}"]
    return kept_bytes(config_file.load([*DEEPSEEK_V3, *chosen]), 4096, moe=moe)


@pytest.mark.parametrize("parts", [("norms",), ("mla_up_proj",), ("swiglu",), PARTS], ids=lambda parts: "+".join(parts))
def test_bytes_saved_are_those_of_the_shapes(parts):
    """As the start-up report counts them."""
    flavor = model_flavor(config_file.load(DEEPSEEK_V3))
    for moe in (False, True):
        saved = block_bytes("", moe) - block_bytes(",".join(parts), moe)
        assert saved == saved_bytes(flavor, 4096, 2, parts, moe=moe)


def test_a_dropped_result_is_made_once_for_all_its_consumers_and_freed():
    calls, made, found = [], [], []

    def double(x):
        calls.append(torch.is_grad_enabled())
        y = x * 2
        made[:] = [StorageWeakRef(y.untyped_storage())]
        return y

    for kinds in ((), ("a", "b")):
        calls.clear()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with rebuilding(kinds):
            y = rebuilt(("a",), double, x)
            z = rebuilt(("b",), torch.exp, y.view(8, 4))  # a recipe's input is a recipe
            loss = (y.sin() * y.cos()).sum() + z.square().sum()
        del y, z
        assert made[0].expired() == bool(kinds) and calls == [True]
        loss.backward()
        assert made[0].expired() and calls == [True] * (2 if kinds else 1)
        found.append(x.grad)
    assert torch.equal(*found)


def test_what_was_written_to_is_kept():
    """The recipe would give what was there before."""
    x = torch.randn(4, requires_grad=True)
    with rebuilding({"a"}):
        y = rebuilt(("a",), torch.exp, x.detach())
        y += 1
        loss = (x * y).sum()
    loss.backward()
    assert torch.equal(x.grad, y)
    with rebuilding({"a"}):
        source = torch.randn(4)
        loss = (x * rebuilt(("a",), torch.exp, source)).sum()
    source.zero_()
    with pytest.raises(AssertionError, match="written to"):
        loss.backward()


def test_outside_and_without_gradients_nothing_is_noted():
    x = torch.randn(3, requires_grad=True)
    assert rebuilt(("a",), torch.exp, x).grad_fn is not None
    with rebuilding({"a"}), torch.no_grad():
        assert torch.equal(rebuilt(("a",), torch.exp, x), x.exp())


@pytest.mark.parametrize("policy", ["none", "all four", "selective", "full"])
def test_split_backward_runs_each_dgrad_and_wgrad_once(policy, plain, monkeypatch):
    """As zero-bubble schedules call it: first for a stage's input, later for its weights. Recompute repeats forward
    GEMMs, once in each pass."""
    calls: Counter[str] = Counter()
    for name in ("forward", "dgrad", "wgrad"):
        original = getattr(experts._PiecewiseGemm, name)
        monkeypatch.setattr(
            experts._PiecewiseGemm, name, lambda *args, f=original, n=name: calls.update({n: 1}) or f(*args)
        )
    found = []
    for splits in (False, True):
        config = None
        if policy != "none":
            kind = type(POLICIES[policy])
            config = kind(**({"parts": list(PARTS)} if policy == "all four" else {}), splits_backward=splits)
        model = small_model(config)
        _, positions_BL, masks = batch()
        x_BLD = torch.randn(B, L, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        h_BLD = x_BLD
        calls.clear()
        for layer in model.layers.values():
            h_BLD = layer(h_BLD, masks, positions_BL)
        weights = list(model.layers.parameters())
        if splits:
            _, groups = stage_backward_input([h_BLD], [torch.ones_like(h_BLD)], [x_BLD], iter(weights))
            stage.stage_backward_weight(iter(weights), groups)
        else:
            h_BLD.backward(torch.ones_like(h_BLD))
        # A forward GEMM on a CPU goes through dgrad; the layer has two GEMMs, gate and up being one.
        forwards = 2 * (1 if policy in ("none", "all four") else 3 if splits else 2)
        assert calls == {"forward": forwards, "dgrad": forwards + 2, "wgrad": 2}
        found.append([x_BLD.grad, *(p.grad for p in weights)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_latent_attention_is_torchtitans():
    """To the bit, forward and backward."""
    model = small_model(None)
    _, positions_BL, masks = batch()
    attention = model.layers["1"].attention
    x_BLD, found = torch.randn(B, L, 64), []
    for forward in (type(attention).forward, Attention.forward):
        attention.zero_grad()
        x = x_BLD.clone().requires_grad_()
        y_BLD = forward(attention, x, masks, positions_BL)
        y_BLD.square().sum().backward()
        found.append([y_BLD, x.grad, *(p.grad for p in attention.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--activation_checkpoint.mode=full"], 'names what mode "none" recomputes, but mode = "full"'),
        (["--activation_checkpoint.mode=none", "--compile.enable"], "torch.compile decides that by itself"),
    ],
)
def test_refusals(options, expected):
    config = config_file.load([SMALL[0], "--activation_checkpoint.recompute=norms,swiglu", *options])
    problems = [problem for problem in config_file.check(config, 1) if expected in problem]
    assert len(problems) == 1 and 'recompute = ["norms", "swiglu"]' in problems[0]


def test_the_report_says_what_each_part_saves():
    config = config_file.load(
        [
            *("train_configs/debug_model.toml", "--model.flavor=671B", "--training.seq_len=4096"),
            *("--training.local_batch_size=1", "--activation_checkpoint.mode=none"),
            *("--activation_checkpoint.recompute=mla_up_proj,norms", "--training.mixed_precision_param=bfloat16"),
        ]
    )
    assert recompute_report(config) == (
        "Activation checkpointing: made again in backward, of each MoE layer and microbatch: mla_up_proj 640.0 MiB, "
        "norms 240.0 MiB; together 880.0 MiB, of a dense layer 768.0 MiB"
    )


def test_a_model_without_mtp_layers_has_no_such_blocks():
    assert list(mtp_blocks(nn.Linear(1, 1))) == []
    assert list(mtp_blocks(SimpleNamespace(mtp_layers=None))) == []
