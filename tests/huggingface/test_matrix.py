"""Every shape of every family computes what transformers' model of it does: logits and gradients of every parameter,
with each experts backend of a CPU, in fp32 and as near as bf16 comes. Multi-token prediction, which transformers does
not run, is compared with what its modules make of the same weights."""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.huggingface import peers
from titan_moe.attention import documents
from titan_moe.config import Config
from titan_moe.config_check import check, model_flavor
from titan_moe.huggingface import model_config
from titan_moe.huggingface.load import load
from titan_moe.loss import build_loss
from titan_moe.moe.layer import moe_layers
from titan_moe.moe.names import to_stock_names

EXPERTS, SEQUENCES = ["loop", "grouped_mm"], 6


@dataclass(frozen=True)
class Peer:
    """transformers' model of a shape, with weights that bf16 holds, and what it computes in fp32."""

    model: nn.Module
    logits_BLV: Tensor
    choices: list[Tensor]
    """Of each MoE layer, the experts of each token [T, K] in ascending order"""

    gradients: dict[str, Tensor]
    """Under our names"""


@cache
def peer_of(shape: str) -> Peer:
    model = peers.peer(shape)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    choices = watch(gates(model), 2)
    logits_BLV = their_logits(model)
    loss_of(logits_BLV).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len([*model.parameters()])
    flavor = model_flavor(peers.configuration(shape))
    return Peer(model, logits_BLV.detach(), choices[:], peers.by_our_names(gradients, flavor))


def gates(model: Any) -> list[nn.Module]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def watch(routers: Iterable[nn.Module], output: int) -> list[Tensor]:
    """What they choose from now on: their output of that number, with a token's experts in ascending order."""
    seen: list[Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda *call: seen.append(call[-1][output].flatten(0, -2).sort(-1).values))
    return seen


def their_logits(model: nn.Module) -> Tensor:
    tokens_BL, positions_BL = peers.ids(SEQUENCES)
    return model(tokens_BL, position_ids=positions_BL).logits.float()


def our_logits(model: nn.Module) -> Tensor:
    tokens_BL, positions_BL = peers.ids(SEQUENCES)
    return model(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL)).float()


def loss_of(logits_BLV: Tensor) -> Tensor:
    """Of labels that are in no relation to the tokens: every logit has a gradient."""
    labels_BL = torch.randint(0, peers.ROWS, logits_BLV.shape[:2], generator=torch.Generator().manual_seed(3))
    return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten())


def in_bf16(model: nn.Module) -> nn.Module:
    """As FSDP computes in it: the parameters, neither router biases nor rotary tables."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def imported(shape: str, folder: Path, group: Any, **moe: Any) -> tuple[Config, nn.Module]:
    """Our model with the weights in the folder."""
    config = peers.configuration(shape, folder)
    config.moe.experts = moe["experts"]
    config.training.mixed_precision_param = moe.get("dtype", "float32")
    assert check(config, 1) == []
    model = peers.ours(config)
    load(folder, config, [model], group)
    return config, model


@pytest.fixture
def saved(request, tmp_path) -> tuple[str, Peer, Path]:
    peer = peer_of(request.param)
    peer.model.save_pretrained(tmp_path / "hf")
    return request.param, peer, tmp_path / "hf"


@pytest.mark.parametrize("saved", peers.SHAPES, indirect=True)
def test_logits_and_gradients_equal_transformers(saved, group):
    """In fp32: logits within 1e-5 of their largest, and every parameter's gradient within 1e-4 of its norm."""
    shape, peer, folder = saved
    for experts in EXPERTS:
        _, model = imported(shape, folder, group, experts=experts)
        routers = [layer.router for layer in moe_layers(model).values()]
        assert len(routers) == len(peer.choices)
        choices = watch(routers, 1)
        logits_BLV = our_logits(model.train())
        assert (logits_BLV - peer.logits_BLV).abs().max() < 1e-5 * peer.logits_BLV.abs().max(), experts
        assert all(torch.equal(*pair) for pair in zip(choices, peer.choices, strict=True))
        loss_of(logits_BLV).backward()
        gradients = to_stock_names({name: p.grad for name, p in model.named_parameters()})
        assert gradients.keys() == peer.gradients.keys()
        errors = {name: difference(gradients[name], expected) for name, expected in peer.gradients.items()}
        assert max(errors.values()) < 1e-4, (experts, errors)


def difference(got: Tensor, expected: Tensor) -> float:
    assert expected.norm() > 0
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "saved", peers.marked("deepseek_v3 as Kimi-K2", "deepseek_v2 groups", "mixtral 12"), indirect=True
)
def test_bf16_is_as_near_as_transformers_own(saved, group):
    """To the logits of fp32. A token goes to another expert where two scores come closer to each other than bf16 can
    tell, and with it changes what the tokens behind it see: such choices are counted, and logits compared before the
    first of a sequence."""
    shape, peer, folder = saved
    lower = in_bf16(copy.deepcopy(peer.model))
    for gate in gates(lower):
        gate._forward_hooks.clear()

    def errors(logits_BLV: Tensor, choices: list[Tensor]) -> tuple[Tensor, float]:
        """Of each token that is compared, relative to the norm of its logits; and the part of choices that fell
        otherwise."""
        other = torch.stack([(a != b).any(-1) for a, b in zip(choices, peer.choices, strict=True)])
        before_BL = other.any(0).view(logits_BLV.shape[:2]).int().cumsum(1) == 0
        away_BL = (logits_BLV - peer.logits_BLV).norm(dim=-1) / peer.logits_BLV.norm(dim=-1)
        return away_BL[before_BL], other.float().mean().item()

    with torch.no_grad():
        choices = watch(gates(lower), 2)
        theirs, their_flips = errors(their_logits(lower), choices)
        assert 1e-3 < theirs.median() < 3e-2 and their_flips < 0.06 and len(theirs) > 50
        for experts in EXPERTS:
            _, model = imported(shape, folder, group, experts=experts, dtype="bfloat16")
            choices = watch([layer.router for layer in moe_layers(in_bf16(model).eval()).values()], 1)
            ours, flips = errors(our_logits(model), choices)
            assert ours.median() < 1.1 * theirs.median() and ours.max() < 1.5 * theirs.max(), experts
            assert flips < 0.06 and len(ours) > 50, experts


def test_multi_token_prediction_is_made_of_the_published_weights(tmp_path, group):
    """Layer 61 of DeepSeek-V3, here layer 3: transformers' decoder layer between its norms and projection, written down
    from the paper (arXiv 2412.19437, 2.2), gives the loss and the gradients that the imported model has."""
    shape, layers = "deepseek_v3", 3
    theirs, flavor = peers.with_a_layer_more(), model_flavor(peers.configuration(shape))
    norms = {
        name: (1 + 0.1 * torch.randn(flavor.dim)).requires_grad_() for name in ("enorm", "hnorm", "shared_head.norm")
    }
    eh_proj = (0.1 * torch.randn(flavor.dim, 2 * flavor.dim)).requires_grad_()
    config = peers.configuration(shape, tmp_path / "hf")
    config.model.num_mtp_layers = 1
    theirs.save_pretrained(tmp_path / "hf")
    added = {f"model.layers.{layers}.{name}.weight": value.detach() for name, value in norms.items()}
    added[f"model.layers.{layers}.eh_proj.weight"] = eh_proj.detach()
    save_file(peers.files(tmp_path / "hf") | added, tmp_path / "hf" / "model.safetensors")
    content = model_config.content(model_flavor(config), "float32", None, None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    model = peers.ours(config).train()
    load(tmp_path / "hf", config, [model], group)

    tokens_BL, positions_BL = peers.ids()
    labels_BL = torch.cat([tokens_BL[:, 1:], torch.full((len(tokens_BL), 1), -100)], 1)
    loss_fn, valid = build_loss(config, model), torch.tensor(labels_BL.numel())
    hidden = model(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL))
    loss, parts = loss_fn(hidden, labels_BL, valid, positions=positions_BL)
    loss.backward()

    rotary = theirs.model.rotary_emb(torch.zeros(1), positions_BL)
    future = torch.full((peers.LENGTH, peers.LENGTH), -torch.inf).triu(1)[None, None]

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + flavor.norm_eps) * weight

    def cross_entropy(h_BLD: Tensor, labels_BL: Tensor) -> Tensor:
        logits = theirs.lm_head(h_BLD).flatten(0, 1)
        return F.cross_entropy(logits, labels_BL.flatten(), reduction="sum", ignore_index=-100) / valid

    *main, further = theirs.model.layers
    h_BLD = theirs.model.embed_tokens(tokens_BL)
    for layer in main:
        h_BLD = layer(h_BLD, attention_mask=future, position_embeddings=rotary)
    expected = cross_entropy(theirs.model.norm(h_BLD), labels_BL)
    assert parts["loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    # The last token of a sequence has no next one: what its hidden state is does not matter, its label is none.
    after_BL = torch.cat([tokens_BL[:, 1:], torch.zeros(len(tokens_BL), 1, dtype=torch.int64)], 1)
    known_BLD = h_BLD * torch.arange(peers.LENGTH).lt(peers.LENGTH - 1)[None, :, None]
    embedded_BLD = rms_norm(theirs.model.embed_tokens(after_BL), norms["enorm"])
    joined = torch.cat([embedded_BLD, rms_norm(known_BLD, norms["hnorm"])], -1) @ eh_proj.T
    h_BLD = further(joined, attention_mask=future, position_embeddings=rotary)
    ahead_BL = torch.cat([labels_BL[:, 1:], torch.full((len(tokens_BL), 1), -100)], 1)
    mtp = cross_entropy(rms_norm(h_BLD, norms["shared_head.norm"]), ahead_BL)
    assert parts["mtp_loss"].item() == pytest.approx(mtp.item(), rel=1e-5)
    (expected + config.loss.mtp_coeff * mtp).backward()

    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    gradients |= {f"model.layers.{layers}.{name}.weight": value.grad for name, value in norms.items()}
    gradients[f"model.layers.{layers}.eh_proj.weight"] = eh_proj.grad
    wanted = peers.by_our_names(gradients, model_flavor(config))
    got = to_stock_names({name: p.grad for name, p in model.named_parameters()})
    assert got.keys() == wanted.keys() and sum(name.startswith("mtp_layers") for name in got) > 15
    errors = {name: difference(got[name], value) for name, value in wanted.items()}
    assert max(errors.values()) < 1e-4, errors
