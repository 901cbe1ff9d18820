"""Activation offload: the same gradients to the bit, memory gone from the device, one copy of a tensor each way, and no
memory given back under a copy.

On a CPU copies are made when somebody waits for them, so a wait that is missing gives wrong numbers."""

from collections import Counter
from functools import cache

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch.distributed.pipelining import stage
from torch.distributed.pipelining._backward import stage_backward_input

from benchmarks.offload import kept_bytes, wrapped
from benchmarks.recompute import PARTS, Allocations
from tests.test_recompute import DEEPSEEK_V3, POLICIES, SMALL
from titan_moe import config_file, host_copies
from titan_moe.attention import documents
from titan_moe.config_check import model_flavor
from titan_moe.host_copies import PIECE, LateCopies, Pool
from titan_moe.model import build_model, init_weights
from titan_moe.offload import Offloader, _Sent, offloaded
from titan_moe.offload_blocks import attach
from titan_moe.offload_check import offloaded_bytes
from titan_moe.recompute import PartsCheckpointing
from titan_moe.startup import offload_report

B, L, D, N, QK, V = 2, 256, 64, 2, 96, 64  # so many tokens that attention takes its tiled path, with padded values
NAMES = ("layer_input", "attn_q", "attn_k", "attn_v", "attn_out", "moe_expert_input")
INPUT, QUERY, OUT = B * L * D * 4, B * L * N * QK * 4, B * L * N * V * 4  # bytes
ROWS = 4 * D * (B * L * 3 + 8 * 16)  # of the dispatcher local: all copies and a slab's padding for each expert


def small_model(names=(), policy=None, *extra: str):
    """A model of a dense, an MoE and an MTP layer that keeps the rows its experts take, and its offloader."""
    config = config_file.load([*SMALL, f"--training.seq_len={L}", "--training.mixed_precision_param=float32", *extra])
    model = build_model(config).to_empty(device="cpu").train()
    init_weights(model, seed=0)
    for module in model.modules():
        if hasattr(module, "inner_experts"):
            module.dispatcher.regather = None
    if policy is not None:
        policy.build(dump_folder="").apply(model)
    offloader = Offloader(names, torch.device("cpu"))
    if names:
        attach(offloader, model)
    model._skip_lm_head = True
    return model, offloader


def loss(model, seed: int = 0) -> torch.Tensor:
    tokens_BL = torch.randint(0, 250, (B, L), generator=torch.Generator().manual_seed(seed))
    positions_BL = torch.arange(L).expand(B, L)
    outputs = model(tokens_BL, positions_BL, documents(positions_BL))
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs  # a list of them with MTP layers
    return sum(out.float().square().mean() for out in outputs)


def gradients(model) -> list[torch.Tensor]:
    return [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    model, _ = small_model()
    loss(model).backward()
    return gradients(model)


CHOICES = {
    **{name: ((name,), None) for name in NAMES},
    "all": (NAMES, None),
    "all, other parts made again": (NAMES, PartsCheckpointing.Config(parts=["norms", "swiglu", "shared_expert"])),
    "the rest, all parts made again": (("layer_input", "attn_out"), PartsCheckpointing.Config(parts=list(PARTS))),
    "selective": (("layer_input", "attn_out"), POLICIES["selective"]),
    "full": (("layer_input",), POLICIES["full"]),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_no_bit_changes(choice, plain, monkeypatch):
    """In many pieces of host memory each."""
    monkeypatch.setattr(host_copies, "PIECE", 2**16)
    names, policy = CHOICES[choice]
    model, offloader = small_model(names, policy)
    for _ in range(2):  # the second in memory of the first
        model.zero_grad()
        loss(model).backward()
        assert equal(gradients(model), plain)
    told = offloader.statistics()
    told.pop("wait_s")
    attention = 3 * 2  # blocks, steps
    kept_out = OUT + B * L * N * QK * 4  # what the last projection takes, and what the kernel gave, padded
    expected = {
        "layer_input": 2 * 2 * INPUT,
        **dict.fromkeys(("attn_q", "attn_k", "attn_v"), attention * QUERY),
        "attn_out": 0 if choice == "selective" else attention * kept_out,  # a CPU's kernel is made again
        "moe_expert_input": 2 * 2 * ROWS,
    }
    assert told == {name: expected[name] for name in names}


@cache
def alive(names: tuple[str, ...], parts: tuple[str, ...]) -> int:
    """Bytes of storages that an MoE block's forward allocated on the device and that are there when it is over."""
    model, _ = small_model((), PartsCheckpointing.Config(parts=list(parts)) if parts else None)
    block = model.layers["1"]
    offloader = wrapped(block, names)
    before, positions_BL = torch.randn(B, L, D, requires_grad=True), torch.arange(L).expand(B, L)
    masks = documents(positions_BL)
    block(before * 2, masks, positions_BL).sum().backward()
    offloader.settle()
    host = offloader.pool.allocated
    with Allocations([*model.parameters(), *model.buffers()]) as allocated:
        x_BLD = before * 2  # nobody else keeps it
        y_BLD = block(x_BLD, masks, positions_BL)
        del x_BLD
        offloader.settle()
        found = allocated.alive() - y_BLD.nbytes - host
    assert offloader.pool.allocated == host
    return found


@pytest.mark.parametrize("parts", [(), ("norms", "swiglu", "shared_expert")], ids=["none", "parts"])
@pytest.mark.parametrize("name", NAMES)
def test_device_memory_drops_by_exactly_the_tensors(name, parts):
    expected = {
        "layer_input": INPUT,
        **dict.fromkeys(("attn_q", "attn_k", "attn_v"), QUERY),
        "attn_out": OUT + QUERY,
        "moe_expert_input": ROWS,
    }
    assert alive((), parts) - alive((name,), parts) == expected[name]


def test_bytes_moved_at_deepseeks_sizes_are_those_of_the_shapes():
    """On a fake GPU. A view of keys and values is kept whole; what is offloaded is v alone, and as much again becomes
    free."""
    kept = {}
    for tensors in ("", *NAMES[:-1]):
        config = config_file.load(
            [*DEEPSEEK_V3, "--training.local_batch_size=1", f"--activation_offload.tensors={tensors}"]
        )
        kept[tensors] = kept_bytes(config, 4096, moe=True)
        moved = offloaded_bytes(config, model_flavor(config), 2, moe=True)
        assert kept[""] - kept[tensors] == sum(moved.values()) * (2 if tensors == "attn_v" else 1)


def test_a_wait_left_out_shows(plain):
    model, offloader = small_model(NAMES)
    offloader.copies.wait = lambda copy: None
    loss(model).backward()
    assert not equal(gradients(model), plain)


def test_two_nodes_share_one_copy_and_what_nobody_keeps_stays():
    class Block(torch.nn.Module):
        attention = torch.nn.Module()

        def forward(self, x):
            y = offloaded("attn_q", x * 2)
            offloaded("attn_q", x * 3)  # nobody keeps this one
            return (y.sin() + y.view(8, 2).cos().view(4, 4)) * x

    Block.attention.inner_attention = Block.attention.wo = torch.nn.Identity()
    block, found = Block(), []
    for names in ((), ("attn_q",)):
        block.__dict__.pop("forward", None)
        offloader = wrapped(block, names)
        x = torch.arange(16.0).view(4, 4).requires_grad_()
        block(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found) and offloader.statistics()["attn_q"] == 64


def test_nothing_can_be_offloaded_too():
    """The experts of a rank to which no token was sent."""

    class Block(torch.nn.Module):
        attention = torch.nn.Module()

        def forward(self, x):
            y = offloaded("moe_expert_input", x[:0] * 2)
            return x.square().sum() + y.square().sum()

    Block.attention.inner_attention = Block.attention.wo = torch.nn.Identity()
    block = Block()
    offloader, x = wrapped(block, ("moe_expert_input",)), torch.ones(4, 4, requires_grad=True)
    for step in (1, 2):
        block(x).backward()
        assert torch.equal(x.grad, torch.full((4, 4), 2.0 * step))
    assert offloader.statistics()["moe_expert_input"] == offloader.pool.allocated == 0


def test_each_memory_comes_once_and_two_blocks_of_it_are_on_the_device_at_most(monkeypatch):
    """In forward that which leaves, in backward that which comes. What the last block sent has not left when backward
    begins, and of the others none comes only when it is asked for."""
    model, _ = small_model(NAMES, None, "--model.n_layers=5", "--model.num_mtp_layers=0")
    came, on_device = Counter(), []
    sent, send, come, take = [], Offloader.send, _Sent.come, _Sent.take
    asked = []

    def blocks() -> int:
        return len({one.block.index for one in sent if one.flat is not None})

    def sending(self, name, tensor, block):
        sent.append(send(self, name, tensor, block))
        on_device.append(blocks())
        return sent[-1]

    def coming(self):
        assert not asked, "brought back by the node that waits for it"
        come(self)
        came[self] += 1
        on_device.append(blocks())

    def taking(self):
        self.offloader.backward_reaches(self.block)
        asked.append(self)
        try:
            return take(self)
        finally:
            asked.pop()

    monkeypatch.setattr(Offloader, "send", sending)
    monkeypatch.setattr(_Sent, "come", coming)
    monkeypatch.setattr(_Sent, "take", taking)
    loss(model).backward()
    assert max(on_device) == 2
    assert came == {one: 1 for one in sent if one.block.index < 4}


def test_microbatches_in_flight_and_no_host_memory_after_the_first_step():
    """Three forwards before the first backward, as in a pipeline; twice."""
    found, allocated = [], []
    for names in ((), NAMES):
        model, offloader = small_model(names)
        for _ in range(2):
            model.zero_grad()
            losses = [loss(model, seed) for seed in range(3)]
            for each in losses:
                each.backward()
            del each, losses
            allocated.append(offloader.pool.allocated)
        found.append(gradients(model))
    assert equal(*found)
    assert allocated[2] == allocated[3] > 0
    offloader.settle()
    assert sum(size * len(free) for size, free in offloader.pool.free.items()) == allocated[3]


@pytest.mark.parametrize("parts", [(), ("norms", "swiglu", "shared_expert")], ids=["none", "parts"])
def test_split_backward_asks_twice(parts):
    """As zero-bubble schedules do, first for a stage's input, later for its weights."""
    found = []
    for names in ((), NAMES):
        policy = PartsCheckpointing.Config(parts=list(parts), splits_backward=True) if parts else None
        model, _ = small_model(names, policy)
        positions_BL = torch.arange(L).expand(B, L)
        x_BLD = torch.randn(B, L, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
        h_BLD, masks = x_BLD, documents(positions_BL)
        for layer in model.layers.values():
            h_BLD = layer(h_BLD, masks, positions_BL)
        weights = list(model.layers.parameters())
        _, groups = stage_backward_input([h_BLD], [torch.ones_like(h_BLD)], [x_BLD], iter(weights))
        stage.stage_backward_weight(iter(weights), groups)
        found.append([x_BLD.grad, *(p.grad for p in weights)])
    assert equal(*found)


def test_evaluation_moves_nothing():
    model, offloader = small_model(NAMES)
    expected, _ = small_model()
    with torch.no_grad():
        assert torch.equal(loss(model), loss(expected))
    assert offloader.statistics() == dict.fromkeys([*sorted(NAMES), "wait_s"], 0)


def test_what_is_written_to_after_it_was_kept_is_an_error():
    """Autograd's own check does not see what hooks keep."""

    class Block(torch.nn.Module):
        attention = torch.nn.Module()
        marks = True

        def forward(self, x):
            y = x.detach() * 2
            y = offloaded("attn_q", y) if self.marks else y
            z = x * y
            y += 1
            return z

    Block.attention.inner_attention = Block.attention.wo = torch.nn.Identity()
    block, x = Block(), torch.ones(4, 4, requires_grad=True)
    offloader = wrapped(block, ("attn_q",))
    block(x)
    with pytest.raises(AssertionError, match="while it was being offloaded"):
        offloader.settle()
    offloader.leaving, block.marks = [], False
    with pytest.raises(AssertionError, match="after it was saved"):
        block(x).sum().backward()


def test_copies_are_made_in_order_and_only_when_waited_for(monkeypatch):
    monkeypatch.setattr(host_copies, "PIECE", 16)
    copies, source = LateCopies(), torch.arange(40, dtype=torch.uint8)
    host = Pool(pinned=False).take(40)
    second, third = torch.zeros_like(source), torch.zeros_like(source)
    for piece in host:
        piece.zero_()
    one, two = copies.to_host(source, host), copies.from_host(host, second)
    copies.from_host(host, third)
    assert [piece.nbytes for piece in host] == [16, 16, 8] and not any(piece.any() for piece in host)
    copies.wait(two)
    assert torch.equal(second, source) and not third.any()
    copies.wait(one)  # is over
    assert not third.any()


def test_host_memory_is_handed_out_again_in_pieces():
    pool = Pool(pinned=False)
    (small,) = pool.take(3000)
    assert small.nbytes == 4096 and pool.take(3000)[0] is not small
    pool.give([small])
    assert pool.take(4096)[0] is small and pool.allocated == 2 * 4096
    pieces = pool.take(2 * PIECE + 1)
    assert [piece.nbytes for piece in pieces] == [PIECE, PIECE, 1]
    pool.give(pieces)
    assert {*map(id, pool.take(2 * PIECE))} == {*map(id, pieces[:2])} and pool.take(0) == []
    assert pool.allocated == 2 * 4096 + 2 * PIECE + 1


def test_the_report_says_how_much_each_is():
    options = ["--model.flavor=671B", "--training.seq_len=4096", "--training.local_batch_size=1"]
    config = config_file.load(
        [
            *("train_configs/debug_model.toml", *options, "--training.mixed_precision_param=bfloat16"),
            *("--parallelism.expert_parallel_degree=8", "--activation_offload.tensors=attn_q,moe_expert_input"),
        ]
    )
    assert offload_report(config) == [
        "Activation offload: to host memory, of each MoE layer and microbatch: attn_q 192.0 MiB, moe_expert_input "
        "448.0 MiB; together up to 640.0 MiB, of a dense layer 192.0 MiB"
    ]
    assert offload_report(config_file.load(["train_configs/debug_model.toml"])) == []
