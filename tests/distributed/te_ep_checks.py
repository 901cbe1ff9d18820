"""The te_ep cases of dispatch_worker.py, over doubles of Transformer Engine, and the checks that only te_ep needs.

The doubles hold every call to the rules of NCCL EP, on all ranks, and leave NaN where it leaves anything.
"""

import os
import re
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from tests import te_doubles
from tests.sync_free import sync_free
from titan_moe.moe import te, te_ep_ops
from titan_moe.precision.quantize import round_trip
from titan_moe.precision.recipes import RECIPES

# What each call of the extension is, in the words of `dispatch_worker.recorded`.
KERNELS = {
    "prepare": ["plan"],
    "dispatch": ["rows", "weights"],
    "combine": ["rows"],
    "dispatch_bwd": ["rows", "weights"],
    "combine_bwd": ["rows"],
}


def cases(base) -> list:
    """Those of `base`, a case, with what NCCL EP takes: multiples of 4 experts, rows of 16 bytes."""
    found = []
    for buffer in ("exact", "worst_case"):
        case = replace(base, buffer=buffer)
        found += [
            case,
            replace(case, routing="one_expert", top_k=1),
            replace(case, routing="few_experts"),
            replace(case, top_k=1),
            replace(case, top_k=case.experts),
            replace(case, experts=4, top_k=2),  # one for each of four ranks
            replace(case, tokens=(0, 9, 0, 4)),
            replace(case, tokens=(0, 0, 0, 0)),
            replace(case, experts=12, top_k=5, tokens=(37, 1, 23, 11), width=16, alignment=16),
            replace(case, alignment=1),
            replace(case, check="is_transposed"),
            replace(case, check="rounds_once"),
            replace(case, check="recomputes_without_planning"),
            replace(case, check="needs_no_other_gradient"),
            replace(case, check="keeps_microbatches_apart"),
            replace(case, check="serves_one_kind_of_layer"),
            replace(case, check="asks_the_host_only_for_exact_sizes"),
            replace(case, check="takes_any_strides_and_weights"),
            replace(case, check="is_held_to_the_rules"),
            *([replace(case, ranks=2)] if case.ranks == 4 else []),
            replace(case, check="travels_as_mxfp8", tokens=(64, 0, 32, 96), width=512, alignment=128),
            *([replace(case, check="keeps_its_shapes")] if case.ranks == 2 and buffer == "worst_case" else []),
        ]
    many = replace(base, tokens=(150, 150, 150, 150), buffer=2.5)
    return [*found, many, replace(many, check="grows_after_an_overflow", buffer=1.0)]


@contextmanager
def recorded(calls: list[tuple[str, int]]):
    """Adds what the extension's double is asked to do to `calls`."""
    from transformer_engine_torch import ep

    class Recording(list):
        def append(self, name: str) -> None:
            calls.extend((kind, 0) for kind in KERNELS.get(name, []))

    ep.calls = Recording()
    try:
        yield
    finally:
        ep.calls = []


def keeps_microbatches_apart(rank) -> None:
    """Two microbatches of different routing, the second planned before the first has been through backward."""
    grad = rank.all_grad[rank.me].bfloat16()
    routings = [rank.ids, (rank.ids + 1) % rank.case.experts]

    def leaves():
        return [t.detach().clone().requires_grad_() for t in (rank.x, rank.w)]

    def forward(dispatcher, ids_TK, x_TD, w_TK):
        plan = dispatcher.plan(ids_TK)
        received = dispatcher.dispatch(x_TD, w_TK, plan)
        y_RD = received.x_RD * received.weight_R[:, None].bfloat16() * (rank.me + 1)
        return dispatcher.combine(y_RD, received.state), plan

    alone = []
    for ids_TK in routings:
        inputs = leaves()
        out, _ = forward(rank.dispatcher, ids_TK, *inputs)
        alone.append([out, *torch.autograd.grad(out, inputs, grad)])

    two, inputs = rank.make_dispatcher(in_flight=2), [leaves(), leaves()]
    outs = [forward(two, ids_TK, *each) for ids_TK, each in zip(routings, inputs)]
    for (out, _), each, expected in zip(outs, inputs, alone):
        assert all(map(torch.equal, [out, *torch.autograd.grad(out, each, grad)], expected))
    assert not torch.equal(alone[0][0], alone[1][0]), "the routings make no difference"

    # A third microbatch, with the routing of the second, gets the buffer of the first.
    counts = outs[0][1].padded_counts_e.tolist()
    out, _ = forward(two, routings[1], *inputs[0])
    assert outs[0][1].padded_counts_e.tolist() == counts != outs[1][1].padded_counts_e.tolist()
    _raises(AssertionError, "older than its EpBuffer", lambda: two.dispatch(*inputs[0], outs[0][1]))
    two.dispatch(*inputs[1], outs[1][1])
    torch.autograd.grad(out, inputs[0], grad)


def travels_as_mxfp8(rank) -> None:
    """As if rows, and gradients of what combine returns, had been rounded to MXFP8 before they were sent, bit for bit,
    in 33 of 64 bytes, which the doubles count. And experts that quantize what arrives get what travelled."""

    def forward(payload, x_TD, grad_TD):
        dispatcher = rank.make_dispatcher(payload=payload)
        leaves = [t.detach().clone().requires_grad_() for t in (x_TD, rank.w)]
        received = dispatcher.dispatch(*leaves, dispatcher.plan(rank.ids))
        y_RD = received.x_RD * received.weight_R[:, None].bfloat16() * (rank.me + 1)
        out = dispatcher.combine(y_RD, received.state)
        rows = received.x_RD[: int(received.counts_e.sum())]
        return [out.detach(), rows, *torch.autograd.grad(out, leaves, grad_TD)], te_doubles.rows_sent()[-2:]

    generator = torch.Generator().manual_seed(rank.me)
    wild = [torch.randn(t.shape, generator=generator) for t in (rank.x, rank.x)]  # of all magnitudes
    wild = [(t * torch.exp2(torch.randint(-9, 9, t.shape, generator=generator).float())).bfloat16() for t in wild]
    rounded = [round_trip(t, RECIPES["mxfp8"].forward_x, -1).values for t in wild]
    got, fewer = forward("mxfp8", *wild)
    expected, more = forward("bf16", *rounded)
    assert all(map(torch.equal, got, expected))
    assert rank.x.shape[0] == 0 or not torch.equal(wild[0], rounded[0]), "nothing was rounded"
    assert torch.equal(round_trip(got[1], RECIPES["mxfp8"].forward_x, -1).values, got[1])
    if te.facts is not te_doubles.LOOK:
        assert [name for name, _ in fewer] == [name for name, _ in more] == ["dispatch", "combine_bwd"]
    for (_, few), (_, many) in zip(fewer, more):
        assert 64 * few == 33 * many and (many > 0) == (rank.x.shape[0] > 0)
    for sizes in ({"dim": 480}, {"alignment": 16}, {"max_tokens": 40}):
        _raises(ValueError, "te_ep_payload", lambda: rank.make_dispatcher(payload="mxfp8", **sizes))  # noqa: B023


def serves_one_kind_of_layer(rank) -> None:
    """Another one is refused with both; the same one is not. And NCCL EP knows the compiler that was found."""
    rank.dispatcher.plan(rank.ids)
    assert os.environ["NCCL_EP_JIT_NVCC"] == te.facts().nvcc
    rank.make_dispatcher().plan(rank.ids)
    other = rank.make_dispatcher(top_k=1)
    _raises(ValueError, "top_k = 3.*a layer wants.*top_k = 1", lambda: other.plan(rank.ids[:, :1].contiguous()))
    te_ep_ops.finalize()
    other.plan(rank.ids[:, :1].contiguous())
    te_ep_ops.finalize()
    te_ep_ops.finalize()


def asks_the_host_only_for_exact_sizes(rank) -> None:
    """Fake tensors have no values: whatever needs one raises."""
    rank.dispatcher.plan(rank.ids)  # bootstraps

    def region():
        with sync_free():
            x_TD = torch.empty(rank.x.shape, dtype=torch.bfloat16, requires_grad=True)
            w_TK = torch.empty(rank.w.shape, requires_grad=True)
            plan = rank.dispatcher.plan(torch.empty(rank.w.shape, dtype=torch.int64))
            received = rank.dispatcher.dispatch(x_TD, w_TK, plan)
            y_RD = received.x_RD * received.weight_R[:, None].bfloat16()
            rank.dispatcher.combine(y_RD, received.state).sum().backward()
            assert x_TD.grad.shape == x_TD.shape and w_TK.grad.shape == w_TK.shape

    assert rank.dispatcher.sync_free == (rank.case.buffer != "exact")
    if rank.dispatcher.sync_free:
        region()
    else:
        _raises(DynamicOutputShapeException, "", region)


def grows_after_an_overflow(rank) -> None:
    """Two of each token's three copies go to rank 0, whose buffer is too small for them. It alone knows, on its
    device; after all have grown, the same routing gives the right result."""
    E = rank.case.experts
    for ids in rank.all_ids:
        ids[:, 0], ids[:, 1], ids[:, 2] = 0, 1, 2 + torch.arange(ids.shape[0]) % (E - 2)
    plan = rank.dispatcher.plan(rank.ids)
    assert plan.overflow.shape == () and plan.overflow.item() == (rank.me == 0)
    received = rank.dispatcher.dispatch(rank.x, rank.w, plan)
    rows = rank.dispatcher.fixed_rows()
    assert received.x_RD.shape[0] == rows
    assert received.counts_e.sum() == rows if rank.me == 0 else received.counts_e.sum() < rows
    rank.dispatcher.combine(received.x_RD, received.state).sum().backward()  # no kernel stops at it
    rank.x.grad = rank.w.grad = None

    growths = 0
    while plan.overflow is not None and _anywhere(plan.overflow, rank.group):
        rank.dispatcher.grow()
        plan, growths = rank.dispatcher.plan(rank.ids), growths + 1
    assert growths > 0 and rank.dispatcher.fixed_rows() > rows
    out, plan = rank.forward()
    out.backward(rank.all_grad[rank.me].bfloat16())
    outs, x_grads, w_grads, _ = rank.loop()
    assert not plan.overflow
    assert torch.equal(out.double(), outs[rank.me])
    assert torch.equal(rank.x.grad.double(), x_grads[rank.me]) and torch.equal(rank.w.grad.double(), w_grads[rank.me])


def takes_any_strides_and_weights(rank) -> None:
    """NCCL EP wants contiguous tensors and fp32 weights; whoever calls the dispatcher need not."""

    def run(x_TD, w_TK, ids_TK):
        received = rank.dispatcher.dispatch(x_TD, w_TK, rank.dispatcher.plan(ids_TK))
        y_RD = received.x_RD * received.weight_R[:, None].bfloat16()
        return rank.dispatcher.combine(y_RD.T.contiguous().T, received.state)

    inputs = [rank.x.detach(), rank.w.detach(), rank.ids]
    strided = [t.T.contiguous().T for t in inputs]
    assert torch.equal(run(*inputs), run(strided[0], strided[1].bfloat16(), strided[2]))


def is_held_to_the_rules(rank) -> None:
    """What the doubles are there for: calls that a GPU would trap on, or answer wrongly, stop with what they broke."""
    from transformer_engine.pytorch import ep

    def made(**changes):
        s = rank.dispatcher.ring.signature
        sizes = {"top_k": s.top_k, "alignment": s.alignment, "recv_capacity_per_rank": s.rows} | changes
        return ep.EpBuffer(max_tokens_per_rank=s.max_tokens, hidden_dim=s.dim, num_local_experts=rank.e, **sizes)

    _raises(AssertionError, "requires ep_bootstrap", made)
    plan = rank.dispatcher.plan(rank.ids)
    x, w, ids = rank.x.detach(), rank.w.detach(), rank.ids
    received = rank.dispatcher.dispatch(x, w, plan)
    rows, weights, buffer = received.x_RD, received.weight_R, te_ep_ops.planned(plan.ticket)
    wrong = {
        "float32 where": [x.float(), w, ids, rows, weights],
        "bfloat16 where": [x, w.bfloat16(), ids, rows, weights],
        "contiguous": [x.T.contiguous().T, w, ids, rows, weights],
        "is expected": [x, w, ids, rows.new_empty(rows.shape[0] + 4, rows.shape[1]), weights],
        "another routing": [x, w, ids.roll(1, 1), rows, weights],
    }
    for words, (x_TD, w_TK, ids_TK, x_RD, w_R) in wrong.items():
        _raises(AssertionError, words, lambda: ep._ep_dispatch_raw(buffer, ids_TK, x_TD, w_TK, x_RD, w_R))  # noqa: B023
    _raises(AssertionError, "no expert's", lambda: ep.ep_prepare(buffer, ids - rank.case.experts))
    _raises(AssertionError, "twice", lambda: ep.ep_prepare(buffer, ids * 0))
    _raises(AssertionError, "cached alignment", lambda: ep.ep_prepare(made(alignment=64), ids))
    _raises(AssertionError, "combine before prepare", lambda: ep._ep_combine_raw(made(), rows, x))
    _raises(AssertionError, "goes before ep_finalize", dist.destroy_process_group)
    other = made()
    ep.ep_prepare(other, ids)
    one_of_two = buffer if rank.me == 0 else other
    _raises(AssertionError, "ranks call different things", lambda: ep.ep_prepare(one_of_two, ids))


def _anywhere(flag: torch.Tensor, group) -> bool:
    flag = flag.int()
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def _raises(kind: type[Exception], pattern: str, call) -> None:

    try:
        call()
    except kind as error:
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")
