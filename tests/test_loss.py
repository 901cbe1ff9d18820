"""The loss against plain autograd in float64, MTP's against a reference written here, and what it costs in memory."""

from collections.abc import Callable
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common import Linear
from torchtitan.models.deepseek_v3.mtp import MTPLoss

from titan_moe.attention import documents
from titan_moe.config import Config
from titan_moe.families import Model
from titan_moe.loss import IGNORE_INDEX, Loss, build_loss
from titan_moe.model import build_model, init_weights

B, L, D, V = 2, 12, 8, 17


def loss_and_head(num_chunks: int, dtype: torch.dtype = torch.float32, **compile) -> tuple[Loss, nn.Linear]:
    config = Config()
    config.loss.num_chunks = num_chunks
    for name, value in compile.items():
        setattr(config.compile, name, value)
    head = Linear.Config(in_features=D, out_features=V).build().to(dtype)
    return build_loss(config, SimpleNamespace(lm_head=head)), head


def microbatch(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states, and labels of which the first 8 and some others count for nothing."""
    torch.manual_seed(seed)
    labels_BL = torch.randint(V, (B, L))
    labels_BL[0, :8] = labels_BL[1, 5] = IGNORE_INDEX
    return torch.randn(B, L, D, dtype=dtype).requires_grad_(), labels_BL


def oracle(h_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of h and W, in float64."""
    h, weight = (t.detach().double().requires_grad_() for t in (h_BLD, weight_VD))
    loss = F.cross_entropy((h @ weight.T).flatten(0, 1), labels_BL.flatten(), reduction="sum") / valid
    return loss.detach(), *torch.autograd.grad(loss, [h, weight])


def difference(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("num_chunks", [1, 3, 5, 8, 100])
def test_loss_and_gradients_equal_plain_autograd(num_chunks):
    """Also where chunks do not divide the tokens, are more than the tokens, or hold no valid label; and the loss may be
    scaled by what comes after it."""
    loss_fn, head = loss_and_head(num_chunks)
    h_BLD, labels_BL = microbatch()
    loss, parts = loss_fn(h_BLD, labels_BL, torch.tensor(50))
    (3 * loss).backward()
    expected, dh_BLD, dweight_VD = oracle(h_BLD, head.weight, labels_BL, 50)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert parts.keys() == {"loss"} and parts["loss"].item() == loss.item() and not parts["loss"].requires_grad
    assert difference(h_BLD.grad, 3 * dh_BLD) < 1e-6
    assert difference(head.weight.grad, 3 * dweight_VD) < 1e-6


def test_bf16_is_as_exact_as_without_chunks():
    """The head's gradient is summed over the chunks in fp32."""
    errors = {}
    for num_chunks in (1, 24):
        torch.manual_seed(1)
        loss_fn, head = loss_and_head(num_chunks, torch.bfloat16)
        h_BLD, labels_BL = microbatch(dtype=torch.bfloat16)
        loss, _ = loss_fn(h_BLD, labels_BL, torch.tensor(50))
        loss.backward()
        assert loss.dtype == torch.float32
        assert h_BLD.grad.dtype == head.weight.grad.dtype == torch.bfloat16
        expected, dh_BLD, dweight_VD = oracle(h_BLD, head.weight, labels_BL, 50)
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
        assert difference(h_BLD.grad, dh_BLD) < 5e-3
        errors[num_chunks] = difference(head.weight.grad, dweight_VD)
    assert errors[24] < 1.2 * errors[1] < 6e-3


@pytest.mark.parametrize("valid", [50, 0])
def test_no_valid_label_at_all_is_a_loss_of_zero(valid):
    loss_fn, head = loss_and_head(3)
    h_BLD, labels_BL = microbatch()
    loss, _ = loss_fn(h_BLD, torch.full_like(labels_BL, IGNORE_INDEX), torch.tensor(valid))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(h_BLD.grad, torch.zeros_like(h_BLD))
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


def test_microbatches_add_up():
    """Divided by the step's labels, two microbatches with different numbers of them give the mean over all."""
    loss_fn, head = loss_and_head(4)
    batches = [microbatch(seed) for seed in (0, 1)]
    batches[1][1][:, 2:] = IGNORE_INDEX
    valid = sum(int((labels_BL != IGNORE_INDEX).sum()) for _, labels_BL in batches)
    losses = [loss_fn(h_BLD, labels_BL, torch.tensor(valid))[0] for h_BLD, labels_BL in batches]
    for loss in losses:
        loss.backward()
    h_BLD, labels_BL = (torch.cat(parts) for parts in zip(*batches))
    expected, dh_BLD, dweight_VD = oracle(h_BLD, head.weight, labels_BL, valid)
    assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-6)
    assert difference(head.weight.grad, dweight_VD) < 1e-6
    assert difference(torch.cat([h_BLD.grad for h_BLD, _ in batches]), dh_BLD) < 1e-6


def test_a_forward_without_backward_leaves_nothing_behind():
    """torch's pipelines run one on uninitialized memory to learn shapes."""
    loss_fn, head = loss_and_head(3)
    h_BLD, labels_BL = microbatch()
    loss, _ = loss_fn(h_BLD, labels_BL)
    with torch.no_grad():
        summed, parts = loss_fn(h_BLD, labels_BL)
    expected, *_ = oracle(h_BLD, head.weight, labels_BL, 1)
    assert not summed.requires_grad and torch.equal(summed, loss) and torch.equal(parts["loss"], loss)
    assert summed.item() == pytest.approx(expected.item(), rel=1e-6)
    assert h_BLD.grad is None and head.weight.grad is None


def test_compiled_it_is_the_same():
    h_BLD, labels_BL = microbatch()
    got = []
    for compile in ({}, {"enable": True, "components": ["loss"], "backend": "aot_eager"}):
        torch.manual_seed(0)
        loss_fn, head = loss_and_head(3, **compile)
        loss, _ = loss_fn(h_BLD, labels_BL, torch.tensor(50))
        got.append([loss, *torch.autograd.grad(loss, [h_BLD, head.weight])])
    for plain, compiled in zip(*got):
        torch.testing.assert_close(compiled, plain)


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor has that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else [out]
        self.numel = max([self.numel, *(t.numel() for t in outputs if t is not None)])
        return out


def test_the_logits_of_a_whole_microbatch_never_exist():
    """Nor anything of their size; and what waits for backward are the gradients of h and W, whatever the chunks."""
    T, vocabulary = 4096, 512
    for num_chunks in (1, 8, 64):
        config = Config()
        config.loss.num_chunks = num_chunks
        head = Linear.Config(in_features=D, out_features=vocabulary).build()
        loss_fn = build_loss(config, SimpleNamespace(lm_head=head))
        h_BLD, labels_BL = torch.randn(2, T // 2, D, requires_grad=True), torch.randint(vocabulary, (2, T // 2))
        with LargestTensor() as largest:
            loss, _ = loss_fn(h_BLD, labels_BL, torch.tensor(T))
            assert [tuple(t.shape) for t in loss.grad_fn.saved_tensors] == [(vocabulary, D), (T, D)]
            loss.backward()
        assert largest.numel == max(T // num_chunks * vocabulary, T * D)


# ---------------------------------------------------------------------------------------------------------------------
# Split backward under FSDP2, as a pipeline's last stage has it


class LastStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(D, D, bias=False), nn.RMSNorm(D)
        self.lm_head = Linear.Config(in_features=D, out_features=V).build()

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.norm(self.layer(x_BLD))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients_of_a_split_backward(make_loss: Callable[[LastStage], Callable], fsdp: bool) -> dict[str, Tensor | None]:
    """Of two microbatches: forward of both, input gradients of both, then weight gradients of both, with the calls that
    torch's pipeline schedules make."""
    torch.manual_seed(0)
    stage = LastStage()
    modules = [stage]
    if fsdp:
        mesh = init_device_mesh("cpu", (1,))
        for group in ([stage.norm, stage.lm_head], stage.layer, stage):
            fully_shard(group, mesh=mesh, reshard_after_forward=False)
        modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.unshard()
        stage.set_is_last_backward(False)
        stage.set_reshard_after_backward(False)
        stage.set_requires_gradient_sync(False)
    loss_fn = make_loss(stage)
    batches = [microbatch(seed) for seed in (0, 1)]
    losses = [loss_fn(stage(x_BLD), labels_BL, torch.tensor(40))[0] for x_BLD, labels_BL in batches]
    groups = [stage_backward_input([loss], None, [x], stage.parameters())[1] for (x, _), loss in zip(batches, losses)]
    for group in groups:
        stage_backward_weight(stage.parameters(), group)
    if fsdp:  # what a stage does at the end of the schedule
        stage.set_is_last_backward(True)
        stage.set_reshard_after_backward(True)
        stage.set_requires_gradient_sync(True)
        state = stage._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def ours(stage: LastStage) -> Callable:
    config = Config()
    config.loss.num_chunks = 3
    return build_loss(config, stage)


def torchtitans(stage: LastStage) -> Callable:
    loss_fn = ChunkedLossWrapper.Config(num_chunks=3).build()
    loss_fn.set_lm_head(stage.lm_head)
    return loss_fn


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_split_backward_gives_every_gradient_once(process_group, fsdp):
    got = gradients_of_a_split_backward(ours, fsdp)
    torch.manual_seed(0)
    stage = LastStage().double()
    for seed in (0, 1):
        x_BLD, labels_BL = microbatch(seed)
        logits_BLV = stage.lm_head(stage(x_BLD.double()))
        (F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum") / 40).backward()
    for name, parameter in stage.named_parameters():
        assert got[name] is not None, name
        assert difference(got[name], parameter.grad) < 1e-6, name


def test_torchtitans_chunked_loss_loses_the_norms_gradient_in_a_split_backward(process_group):
    """The reason for a loss of our own. Should this fail with a newer torchtitan, its loss may do."""
    assert gradients_of_a_split_backward(torchtitans, fsdp=True)["norm.weight"] is None
    assert gradients_of_a_split_backward(torchtitans, fsdp=False)["norm.weight"] is not None


# ---------------------------------------------------------------------------------------------------------------------
# Multi-token prediction, in a whole model


DOCUMENTS = [[7, 1, 4], [2, 2, 8]]  # their lengths, in two sequences


def mtp_model(depths: int, num_chunks: int = 5) -> tuple[Model, Loss]:
    config = Config()
    config.model.dim, config.model.n_layers, config.training.seq_len = 32, 2, L
    config.model.num_mtp_layers, config.loss.num_chunks, config.loss.mtp_coeff = depths, num_chunks, 0.7
    model = build_model(config).to_empty(device="cpu")
    init_weights(model, seed=0)
    return model.train(), build_loss(config, model)


def mtp_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, positions: a document's last token has no label, as some others."""
    torch.manual_seed(0)
    tokens_BL = torch.randint(288, (B, L))
    positions_BL = torch.tensor([[i for length in row for i in range(length)] for row in DOCUMENTS])
    labels_BL = torch.full_like(tokens_BL, IGNORE_INDEX)
    starts = positions_BL == 0
    labels_BL[:, :-1] = torch.where(starts[:, 1:], IGNORE_INDEX, tokens_BL[:, 1:])
    labels_BL[0, 2] = labels_BL[1, 7] = IGNORE_INDEX
    return tokens_BL, labels_BL, positions_BL


def reference(model: Model, tokens_BL: Tensor, labels_BL: Tensor, positions_BL: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(main cross-entropy, that of each depth), summed, from all logits; what lies ahead by Python's lists."""
    masks = documents(positions_BL)
    ends = [[end for n, length in enumerate(row) for end in [sum(row[: n + 1])] * length] for row in DOCUMENTS]

    def ahead(values_BL: Tensor, k: int, fill: int) -> tuple[Tensor, Tensor]:
        inside = torch.tensor([[i + k < ends[b][i] for i in range(L)] for b in range(B)])
        rows = [[int(values_BL[b, i + k]) if inside[b, i] else fill for i in range(L)] for b in range(B)]
        return torch.tensor(rows), inside

    def cross_entropy(h_BLD: Tensor, labels_BL: Tensor) -> Tensor:
        logprobs_BLV = (h_BLD @ model.lm_head.weight.T).log_softmax(-1)
        picked = [logprobs_BLV[b, i, labels_BL[b, i]] for b in range(B) for i in range(L) if labels_BL[b, i] >= 0]
        return -torch.stack(picked).sum()

    h_BLD = model.tok_embeddings.weight[tokens_BL]
    for block in model.layers.values():
        h_BLD = block(h_BLD, masks, positions_BL)
    main, depths = cross_entropy(model.norm(h_BLD), labels_BL), []
    for k, block in enumerate(model.mtp_layers, start=1):
        known_BL, inside = ahead(tokens_BL, k, fill=0)
        embedded_BLD = model.tok_embeddings.weight[known_BL]
        joined = torch.cat([block.enorm(embedded_BLD), block.hnorm(h_BLD * inside.unsqueeze(-1))], dim=-1)
        h_BLD = block.eh_proj(joined)
        h_BLD = h_BLD + block.attention(block.attention_norm(h_BLD), masks, positions_BL)
        h_BLD = block.mtp_norm(h_BLD + block.moe(block.ffn_norm(h_BLD)))
        depths.append(cross_entropy(h_BLD, ahead(labels_BL, k, fill=IGNORE_INDEX)[0]))
    return main, depths


@pytest.mark.parametrize("depths", [1, 2])
def test_mtp_loss_and_gradients_equal_a_plain_reference(depths):
    model, loss_fn = mtp_model(depths)
    tokens_BL, labels_BL, positions_BL = mtp_batch()
    valid = torch.tensor(31)  # of the whole step
    output = model(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL))
    loss, parts = loss_fn(output, labels_BL, valid, positions=positions_BL)
    got = torch.autograd.grad(loss, list(model.parameters()))

    main, further = reference(model, tokens_BL, labels_BL, positions_BL)
    expected = (main + 0.7 / depths * sum(further)) / 31
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert parts["loss"].item() == pytest.approx(main.item() / 31, rel=1e-6)
    assert parts["mtp_loss"].item() == pytest.approx(sum(further).item() / depths / 31, rel=1e-6)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), got, gradients):
        assert b.norm() > 0, name
        assert difference(a, b) < 1e-5, name


def test_mtp_loss_equals_torchtitans():
    model, loss_fn = mtp_model(2)
    tokens_BL, labels_BL, positions_BL = mtp_batch()
    hidden = model(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL))
    hidden = [h_BLD.detach().requires_grad_() for h_BLD in hidden]
    stock = MTPLoss.Config(mtp_scale=0.7).build()
    loss, _ = loss_fn(hidden, labels_BL, torch.tensor(31), positions=positions_BL)
    logits = [model.lm_head(h_BLD) for h_BLD in hidden]
    expected, _ = stock(logits, labels_BL, torch.tensor(31), positions=positions_BL)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wrt = [*hidden, model.lm_head.weight]
    for a, b in zip(torch.autograd.grad(loss, wrt), torch.autograd.grad(expected, wrt)):
        assert difference(a, b) < 1e-6


def test_validation_is_the_main_loss_alone():
    """Neither are MTP layers run in evaluation, nor does the loss count them without gradients."""
    model, loss_fn = mtp_model(1)
    tokens_BL, labels_BL, positions_BL = mtp_batch()
    masks = documents(positions_BL)
    with torch.no_grad():
        main, _ = reference(model, tokens_BL, labels_BL, positions_BL)
        in_training, _ = loss_fn(model(tokens_BL, positions_BL, masks), labels_BL, positions=positions_BL)
        model.eval()
        h_BLD = model(tokens_BL, positions_BL, masks)
        loss, parts = loss_fn(h_BLD, labels_BL, positions=positions_BL)
    assert isinstance(h_BLD, Tensor) and parts.keys() == {"loss"}
    assert loss.item() == in_training.item() == pytest.approx(main.item(), rel=1e-6)


def test_mtp_with_no_label_ahead():
    """Documents of one token: nothing to predict at any depth, no NaN."""
    model, loss_fn = mtp_model(2)
    tokens_BL, labels_BL, _ = mtp_batch()
    positions_BL = torch.zeros_like(tokens_BL)
    output = model(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL))
    loss, parts = loss_fn(output, labels_BL, torch.tensor(31), positions=positions_BL)
    loss.backward()
    assert parts["mtp_loss"].item() == 0 and loss.item() == parts["loss"].item() > 0
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
