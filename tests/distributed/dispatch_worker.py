"""One job that checks dispatchers between real ranks, one case after the other.

    python tests/distributed/ranks.py N tests/distributed/dispatch_worker.py OUT.json

OUT.json maps each case of `cases(N)` to the errors that any rank met: a list, empty if all went well. Every rank can
make every rank's tokens, so each checks its part against a loop over all tokens of all ranks in float64.

Shape letters: T tokens of a rank, D model width, K top-k, E experts, e experts of a rank, R rows of the slabs.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import te_doubles
from tests.distributed import te_ep_checks
from titan_moe.moe import dedup, exchange, experts, static, te_ep_ops
from titan_moe.moe.dispatch import PAYLOAD_OPS, PLAN_OPS, make_dispatcher
from titan_moe.phase_hooks import exchange_nodes

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    dispatcher: str
    ranks: int  # expert-parallel ranks; a job of more has several such groups
    check: str = "equals_a_loop"
    per_node: int | None = None
    chunks: int = 1
    factor: float | None = None
    policy: str = "probs"
    routing: str = "random"
    experts: int = 8
    top_k: int = 3
    tokens: tuple[int, ...] = (13, 7, 10, 5)  # of each expert-parallel rank
    width: int = 3
    alignment: int = 4
    buffer: str | float = "exact"

    @property
    def name(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(type(self), k, None)]
        return " ".join(changed).replace("dispatcher=", "").replace("ranks=", "ep")


def cases(world_size: int) -> list[Case]:
    """The cases of one job."""
    both = [Case("alltoall", world_size), Case("dedup", world_size)]
    one = [Case("local", 1), Case("alltoall", 1), Case("dedup", 1)] if world_size == 2 else []
    nodes = [Case("dedup", 4, per_node=2)] if world_size == 4 else [Case("dedup", 2, per_node=1)]
    halves = [Case("alltoall", 2), Case("dedup", 2)] if world_size == 4 else []
    several = [*both, *nodes]
    drops = [{}, {"factor": 1.0}, {"factor": 0.6, "policy": "position"}]
    found = [replace(case, **drop) for case in [*one, *several, *halves] for drop in drops]
    for case in several:
        E = case.experts
        found += [
            replace(case, routing="one_expert", top_k=1),
            replace(case, routing="few_experts"),
            replace(case, top_k=1),
            replace(case, top_k=E),
            replace(case, top_k=E, factor=0.5),
            replace(case, experts=world_size, top_k=2),
            replace(case, tokens=(0, 9, 0, 4)),
            replace(case, tokens=(0, 0, 0, 0)),
            replace(case, tokens=(0, 0, 0, 0), factor=1.0),
            replace(case, experts=12, top_k=5, tokens=(37, 1, 23, 11), width=17, alignment=16),
            replace(case, alignment=1),
            replace(case, check="is_transposed"),
            replace(case, check="rounds_once", width=8),
            replace(case, check="sends_what_it_says", tokens=(40, 33, 28, 0), experts=16, top_k=6),
            replace(case, check="sends_what_it_says", factor=0.8, experts=16, top_k=6),
            replace(case, check="recomputes_without_planning"),
            replace(case, check="needs_no_other_gradient"),
            replace(case, check="repeats_bitwise", tokens=(64, 50, 64, 3)),
        ]
    return found + chunked(nodes[0]) + fixed(both) + te_ep_checks.cases(Case("te_ep", world_size, width=8))


def chunked(nodes: Case) -> list[Case]:
    """Two hops in chunks of the tokens, also more chunks than a rank has tokens."""
    found = []
    for case in (replace(nodes, chunks=2), replace(nodes, chunks=4)):
        found += [
            *(case, replace(case, factor=1.0), replace(case, factor=0.6, policy="position")),
            replace(case, routing="one_expert", top_k=1),
            replace(case, tokens=(3, 1, 0, 2)),
            replace(case, tokens=(0, 9, 0, 4)),
            replace(case, tokens=(0, 0, 0, 0)),
            replace(case, experts=12, top_k=5, tokens=(37, 1, 23, 11), width=17, alignment=16),
            replace(case, check="is_transposed"),
            replace(case, check="rounds_once", width=8),
            replace(case, check="recomputes_without_planning"),
            replace(case, check="needs_no_other_gradient"),
            replace(case, check="equals_one_chunk", tokens=(64, 50, 64, 3)),
            replace(case, check="equals_one_chunk", tokens=(64, 50, 64, 3), factor=1.0),
            replace(case, check="keeps_hops_apart"),
        ]
    return found


def fixed(both: list[Case]) -> list[Case]:
    """With buffers that do not follow the routing; 1.5 times the mean holds what the random routings here bring."""
    found = []
    for case in (replace(case, buffer=buffer) for case in both for buffer in ("worst_case", 1.5)):
        drops = [{}, {"factor": 1.0}, {"factor": 0.6, "policy": "position"}]
        found += [replace(case, **drop) for drop in drops]
        found += [
            replace(case, top_k=1, tokens=(40, 33, 28, 0)),
            replace(case, top_k=case.experts),
            replace(case, tokens=(0, 49, 0, 34)),
            replace(case, experts=12, top_k=5, tokens=(37, 1, 23, 11), width=17, alignment=16),
            replace(case, alignment=1),
            replace(case, check="is_transposed"),
            replace(case, check="rounds_once", width=8),
            replace(case, check="sends_what_it_says", tokens=(40, 33, 28, 0), experts=16, top_k=6),
            replace(case, check="recomputes_without_planning"),
            replace(case, check="needs_no_other_gradient"),
            replace(case, check="equals_exact", tokens=(64, 50, 64, 3)),
            replace(case, check="equals_exact", tokens=(64, 50, 64, 3), factor=1.0),
            *([replace(case, check="keeps_its_shapes")] if case.ranks == 2 else []),
        ]
        if case.buffer == "worst_case":
            found += [replace(case, routing="few_experts"), replace(case, routing="one_expert", top_k=1)]
        else:
            found += [
                replace(case, check="overflows", buffer=1.0, routing="one_expert", top_k=1),
                replace(case, check="overflows", buffer=1.0, routing="few_experts"),
                replace(case, check="overflows", buffer=1.0, tokens=(64, 50, 64, 3)),
                replace(case, check="overflows", buffer=1.0, tokens=(64, 64, 64, 64), alignment=16),  # by padding too
                replace(case, check="overflows", buffer=1.0, tokens=(64, 50, 64, 3), factor=1.5, experts=16),
            ]
    rows_alone = Case("dedup", 2, "overflows", buffer=1.0, routing="both_ranks", tokens=(64, 64))
    return [*found, rows_alone] if both[0].ranks == 2 else found


def one_or_two_on_each(tokens: int) -> Tensor:
    """Ids of 3 of 8 experts on two ranks: as many copies for each expert, but every token goes to both ranks."""
    once, turn = torch.arange(tokens) % 2 * 4, torch.arange(tokens) // 2
    return torch.stack([once + turn % 4, 4 - once + turn % 4, 4 - once + (turn + 1) % 4], dim=1)


class Rank:
    """One rank of one case: everybody's inputs, its own as leaves, and the oracle.

    te_ep moves bfloat16 alone. Where float64 is asked for, which is to be exact, it gets bfloat16 and small whole
    numbers instead, with powers of two for weights: sums of their products are exact too.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup, dtype=torch.float64) -> None:
        self.case, self.group, self.me = case, group, group.rank()
        E, K, D = case.experts, case.top_k, case.width
        self.e = E // case.ranks
        generator = torch.Generator().manual_seed(7)
        self.whole_numbers = case.dispatcher == "te_ep" and dtype == torch.float64
        dtype = torch.bfloat16 if self.whole_numbers else dtype

        def randn(*shape):
            return self.randn(*shape, generator=generator)

        self.all_ids, self.all_x, self.all_w, self.all_grad = [], [], [], []
        for T in case.tokens[: case.ranks]:
            among = {"few_experts": max(K, E // 4), "one_expert": 1}.get(case.routing, E)
            ids_TK = torch.rand(T, among, generator=generator).topk(K, dim=-1).indices
            self.all_ids.append(one_or_two_on_each(T) if case.routing == "both_ranks" else ids_TK)
            self.all_x.append(randn(T, D).to(dtype))
            w = torch.rand(T, K, generator=generator, dtype=torch.float64).add(0.1)
            self.all_w.append(w.log2().round().exp2() if self.whole_numbers else w)
            self.all_grad.append(randn(T, D))
        self.map_EDD = randn(E, D, D)
        self.ids = self.all_ids[self.me]
        weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.x = self.all_x[self.me].clone().requires_grad_()
        self.w = self.all_w[self.me].clone().to(weight_dtype).requires_grad_()
        self.map_eDD = self.map_EDD[self.me * self.e :][: self.e].clone().requires_grad_()
        self.dispatcher = self.make_dispatcher()

    def randn(self, *shape, generator) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.round().clamp(-1, 1) if self.whole_numbers else drawn

    def make_dispatcher(self, **changes):
        case = self.case
        arguments = {
            "num_experts": case.experts,
            "top_k": case.top_k,
            "alignment": case.alignment,
            "capacity_factor": case.factor,
            "drop_policy": case.policy,
            "ep_group": None if case.dispatcher == "local" else self.group,
            "recv_buffer": case.buffer,
            "max_tokens": max(1, *case.tokens),
            **({"dim": case.width} if case.dispatcher == "te_ep" else {}),
            **({} if case.per_node is None else {"ranks_per_node": case.per_node, "hop_chunks": case.chunks}),
        }
        return make_dispatcher(case.dispatcher, **(arguments | changes))

    def kept(self, rank: int) -> list[tuple[int, int]]:
        """The (token, k) pairs of a rank that are not dropped, by loops."""
        ids, w, case = self.all_ids[rank], self.all_w[rank], self.case
        pairs = [(t, k) for t in range(ids.shape[0]) for k in range(case.top_k)]
        if case.factor is None:
            return pairs
        capacity = math.ceil(round(case.factor * ids.numel() / case.experts, 9))
        kept = []
        for expert in range(case.experts):
            mine = [(t, k) for t, k in pairs if ids[t, k] == expert]
            if case.policy == "probs":
                mine.sort(key=lambda pair: -w[pair].item())  # stable: the earlier token among equals
            kept += mine[:capacity]
        return sorted(kept)

    def true_counts(self) -> list[int]:
        counts = [0] * self.e
        for rank in range(self.case.ranks):
            for t, k in self.kept(rank):
                expert = int(self.all_ids[rank][t, k]) - self.me * self.e
                if 0 <= expert < self.e:
                    counts[expert] += 1
        return counts

    def check_slabs(self, received) -> Tensor:
        """Sizes and padding as promised; returns which rows are real, [R]."""
        alignment, counts = self.case.alignment, self.true_counts()
        padded = [-(-n // alignment) * alignment for n in counts]
        assert received.counts_e.tolist() == padded and received.counts_e.dtype == torch.int64
        assert received.x_RD.shape[0] >= sum(padded)
        if self.case.buffer != "exact":
            assert received.x_RD.shape[0] == self.dispatcher.fixed_rows()
        elif self.case.dispatcher != "local":
            assert received.x_RD.shape[0] == sum(padded) <= self.dispatcher.max_rows(max(self.case.tokens))
        real = torch.zeros(received.x_RD.shape[0], dtype=torch.bool)
        start = 0
        for n, rows in zip(counts, padded):
            real[start : start + n] = True
            assert not received.x_RD[start + n : start + rows].any()
            assert not received.weight_R[start + n : start + rows].any()
            start += rows
        return real

    def experts(self, received, real_R: Tensor) -> Tensor:
        """y = w A_e x for every slab; whatever is no copy of a token is NaN, in y and in both gradients."""
        x_RD, weight_R = received.x_RD, received.weight_R
        if x_RD.requires_grad:
            x_RD.register_hook(lambda grad: torch.where(real_R[:, None], grad, NAN))
            weight_R.register_hook(lambda grad: torch.where(real_R, grad, NAN))
        expert_R = torch.repeat_interleave(received.counts_e)
        expert_R = torch.cat([expert_R, expert_R.new_zeros(real_R.shape[0] - expert_R.shape[0])])
        map_RDD = self.map_eDD[expert_R].to(x_RD.dtype)
        y_RD = torch.einsum("rd,rdf->rf", torch.where(real_R[:, None], x_RD, 0), map_RDD)
        weight_R = torch.where(real_R, weight_R, 0).to(y_RD.dtype)
        return torch.where(real_R[:, None], y_RD * weight_R[:, None], NAN)

    def forward(self, x=None, w=None):
        x, w = self.x if x is None else x, self.w if w is None else w
        plan = self.dispatcher.plan(self.ids, w)
        received = self.dispatcher.dispatch(x, w, plan)
        y_RD = self.experts(received, self.check_slabs(received))
        return self.dispatcher.combine(y_RD, received.state), plan

    def loop(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        """Outputs of all ranks and the gradients of x, w and the experts, token by token."""
        xs = [x.double().clone().requires_grad_() for x in self.all_x]
        ws = [w.clone().requires_grad_() for w in self.all_w]
        maps = self.map_EDD.clone().requires_grad_()
        outs = [torch.zeros_like(x) for x in xs]
        for rank, (x, w, ids) in enumerate(zip(xs, ws, self.all_ids)):
            for t, k in self.kept(rank):
                row = w[t, k] * (x[t] @ maps[ids[t, k]])
                outs[rank] = outs[rank] + torch.zeros_like(x).index_add(0, torch.tensor([t]), row[None])
        loss = sum((out * grad).sum() for out, grad in zip(outs, self.all_grad))
        loss = loss + 0 * (sum(x.sum() + w.sum() for x, w in zip(xs, ws)) + maps.sum())
        loss.backward()
        return outs, [x.grad for x in xs], [w.grad for w in ws], maps.grad


def equals_a_loop(case: Case, group) -> None:
    rank = Rank(case, group)
    out, plan = rank.forward()
    out.backward(rank.all_grad[rank.me].to(out.dtype))
    outs, x_grads, w_grads, map_grad = rank.loop()
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out.detach().double(), outs[rank.me].detach(), **close)
    torch.testing.assert_close(rank.x.grad.double(), x_grads[rank.me], **close)
    torch.testing.assert_close(rank.w.grad.double(), w_grads[rank.me], **close)
    torch.testing.assert_close(rank.map_eDD.grad, map_grad[rank.me * rank.e :][: rank.e], **close)
    assert (plan.overflow is not None) == rank.dispatcher.can_overflow
    assert plan.overflow is None or not plan.overflow
    kept = rank.kept(rank.me)
    assert plan.counts_E.tolist() == [int((rank.ids == expert).sum()) for expert in range(case.experts)]
    assert plan.dropped.item() == rank.ids.numel() - len(kept) and plan.dropped.dtype == torch.int64
    if case.factor is None:
        assert plan.kept_TK is None
    else:
        assert [tuple(pair) for pair in plan.kept_TK.nonzero().tolist()] == kept


def is_transposed(case: Case, group) -> None:
    """<dispatch(x), y> = <x, combine(y)>, over all ranks together."""
    rank = Rank(case, group)
    plan = rank.dispatcher.plan(rank.ids)
    received = rank.dispatcher.dispatch(rank.x.detach(), rank.w.detach(), plan)
    real_R = rank.check_slabs(received)
    y_RD = rank.randn(*received.x_RD.shape, generator=torch.Generator().manual_seed(rank.me)).to(rank.x.dtype)
    combined = rank.dispatcher.combine(torch.where(real_R[:, None], y_RD, NAN), received.state)
    sides = torch.stack([(received.x_RD * y_RD)[real_R].double().sum(), (rank.x.detach() * combined).double().sum()])
    dist.all_reduce(sides, group=group)
    torch.testing.assert_close(sides[0], sides[1], rtol=0, atol=1e-11)


def rounds_once(case: Case, group) -> None:
    """bf16 rows: combine's error is that of one rounding per hop and of one more at the end, not one per copy."""
    rank = Rank(case, group, dtype=torch.bfloat16)
    plan = rank.dispatcher.plan(rank.ids)
    received = rank.dispatcher.dispatch(rank.x, rank.w, plan)
    assert received.x_RD.dtype == torch.bfloat16 and received.weight_R.dtype == torch.float32
    y_RD = (received.x_RD.double() * received.weight_R[:, None].double()).bfloat16()
    out = rank.dispatcher.combine(y_RD, received.state)
    w, x = rank.w.detach(), rank.x.detach()
    copies = (x.double()[:, None] * w.double()[:, :, None]).bfloat16().double()
    exact, scale = copies.sum(1), copies.abs().sum(1)
    if case.dispatcher == "alltoall":
        assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * scale).all()  # half a unit of bf16
    roundings = {"alltoall": 1, "dedup": 2 if case.per_node is None else 3, "te_ep": 2}[case.dispatcher]
    assert ((out.double() - exact).abs() <= roundings * 2**-8 * scale * 1.01).all()


@contextmanager
def recorded():
    """Every all_to_all_single: ("rows" or "values", how many sent); and "gather" for an all-gather."""
    calls, exchange, gather = [], dist.all_to_all_single, dist.all_gather_single

    def recording(output, input, *args, **kwargs):
        float_rows = input.is_floating_point()
        calls.append(("rows" if float_rows and input.dim() == 2 else "weights" if float_rows else "plan", len(input)))
        return exchange(output, input, *args, **kwargs)

    def recording_gather(output, input, *args, **kwargs):
        calls.append(("plan", len(input)))
        return gather(output, input, *args, **kwargs)

    dist.all_to_all_single, dist.all_gather_single = recording, recording_gather
    try:
        with te_ep_checks.recorded(calls):
            yield calls
    finally:
        dist.all_to_all_single, dist.all_gather_single = exchange, gather


def sends_what_it_says(case: Case, group) -> None:
    """Rows on the wire: copies, (token, rank) or (token, node) pairs; nothing planned outside `plan`."""
    rank = Rank(case, group)
    sent = {}
    hops = 1 if case.per_node is None else 2
    with recorded() as calls:
        plan = rank.dispatcher.plan(rank.ids, rank.w)
        assert [kind for kind, _ in calls] == ["plan"] * {"alltoall": 1, "dedup": hops * case.chunks + 1}[
            case.dispatcher
        ]
        planned = calls[-1][1]
        calls.clear()
        received = rank.dispatcher.dispatch(rank.x, rank.w, plan)
        assert [kind for kind, _ in calls] == ["weights", "rows"] * hops
        sent["dispatch"] = [n for kind, n in calls if kind == "rows"]
        weights = [n for kind, n in calls if kind == "weights"]
        calls.clear()
        y_RD = rank.experts(received, rank.check_slabs(received))
        out = rank.dispatcher.combine(y_RD, received.state)
        assert [kind for kind, _ in calls] == ["rows"] * hops
        sent["combine"] = [n for _, n in calls][::-1]
        calls.clear()
        out.backward(rank.all_grad[rank.me])
        assert sorted(kind for kind, _ in calls) == ["rows"] * 2 * hops + ["weights"] * hops
        rows = [n for kind, n in calls if kind == "rows"]
        sent["combine backward"], sent["dispatch backward"] = rows[:hops], rows[hops:][::-1]
    e, me, ranks = rank.e, rank.me, case.ranks
    pairs = [{(t, int(rank.all_ids[source][t, k]) // e) for t, k in rank.kept(source)} for source in range(ranks)]
    if case.dispatcher == "alltoall":
        there = [len(rank.kept(me))]
        back = [sum(int(rank.all_ids[s][p]) // e == me for s in range(ranks) for p in rank.kept(s))]
    elif case.per_node is None:
        there = [len(pairs[me])]
        back = [sum(to == me for source in pairs for _, to in source)]
    else:
        n = case.per_node
        mates = [s for s in range(ranks) if s % n == me % n]
        in_node = [s for s in range(ranks) if s // n == me // n]
        crossing = [{(t, to // n) for t, to in source} for source in pairs]
        there = [len(crossing[me]), sum(to in in_node for s in mates for _, to in pairs[s])]
        back = [
            sum(node == me // n for s in mates for _, node in crossing[s]),
            sum(to == me for source in pairs for _, to in source),
        ]
    if case.buffer != "exact":
        sizes = static.fixed_sizes(rank.dispatcher)
        slots = sizes.copies if case.dispatcher == "alltoall" else sizes.rows
        assert max(there + back) <= ranks * slots and len(rank.kept(me)) <= ranks * sizes.copies
        there = back = [ranks * slots]
        assert weights == [ranks * sizes.copies]
        assert planned == (ranks if case.dispatcher == "alltoall" else ranks * sizes.copies)
    else:
        assert weights[0] == len(rank.kept(me))
    assert sent == {"dispatch": there, "combine": back, "combine backward": there, "dispatch backward": back}, (
        sent,
        there,
        back,
    )


def recomputes_without_planning(case: Case, group) -> None:
    """Checkpointed with the ops in the save set, backward sends no more than without; with only the plans, it sends
    the rows again but plans nothing."""

    def run(saved):
        rank = Rank(case, group)

        def contexts():
            def policy(ctx, op, *args, **kwargs):
                return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

            return create_selective_checkpoint_contexts(policy)

        def region(x, w):
            # Works on copies of the leaves, as a router upstream would make them
            return rank.forward(x * 1, w * 1)[0]

        with recorded() as calls:
            if saved is None:
                out = region(rank.x, rank.w)
            else:
                out = checkpoint(region, rank.x, rank.w, use_reentrant=False, context_fn=contexts)
            forward = sorted(calls)
            calls.clear()
            out.backward(rank.all_grad[rank.me].to(out.dtype))
            backward = sorted(calls)
        return [rank.x.grad, rank.w.grad, rank.map_eDD.grad], forward, backward

    plain, forward, backward = run(None)
    kept, kept_forward, kept_backward = run({*PLAN_OPS, *PAYLOAD_OPS})
    again, again_forward, again_backward = run(set(PLAN_OPS))
    assert forward == kept_forward == again_forward
    assert kept_backward == backward
    # The last combine's result is needed by nobody in backward, so recompute stops before it.
    repeated = [call for call in forward if call[0] != "plan"]
    assert {kind for kind, _ in again_backward} == {"rows", "weights"}
    assert len(backward) < len(again_backward) <= len(backward) + len(repeated)
    for one, two, three in zip(plain, kept, again):
        assert torch.equal(one, two) and torch.equal(one, three)


def needs_no_other_gradient(case: Case, group) -> None:
    """Only the rows matter to the loss, only the weights do, or only one of them asks for a gradient."""
    rank = Rank(case, group)
    plan = rank.dispatcher.plan(rank.ids)
    received = rank.dispatcher.dispatch(rank.x, rank.w, plan)
    real_R = rank.check_slabs(received)
    out = rank.dispatcher.combine(received.x_RD, received.state)
    (grad,) = torch.autograd.grad(out.sum(), [rank.x], retain_graph=True)
    torch.testing.assert_close(grad, torch.full_like(grad, case.top_k))
    (grad,) = torch.autograd.grad(received.weight_R[real_R].sum(), [rank.w])
    torch.testing.assert_close(grad, torch.ones_like(grad))
    for x, w in ((rank.x, rank.w.detach()), (rank.x.detach(), rank.w)):
        received = rank.dispatcher.dispatch(x, w, plan)
        y_RD = received.x_RD * received.weight_R[:, None].to(x.dtype)
        rank.dispatcher.combine(y_RD, received.state).sum().backward()
    torch.testing.assert_close(rank.x.grad, rank.w.detach().sum(1, keepdim=True).expand_as(rank.x).to(rank.x.dtype))
    torch.testing.assert_close(rank.w.grad, rank.x.detach().sum(1, keepdim=True).expand_as(rank.w).to(rank.w.dtype))


def equals_exact(case: Case, group) -> None:
    """The same bits: slabs are of the same sizes and sums in the same order."""

    def run(case):
        rank = Rank(case, group, dtype=torch.float32)
        out, _ = rank.forward()
        out.backward(rank.all_grad[rank.me].float())
        return [out, rank.x.grad, rank.w.grad, rank.map_eDD.grad]

    assert all(torch.equal(one, two) for one, two in zip(run(case), run(replace(case, buffer="exact"))))


def equals_one_chunk(case: Case, group) -> None:
    """The same bits where a token's copies are added up; the experts' rows are in another order, and their gradients
    sums in that order. Each rank sends the same rows."""

    def run(case):
        rank = Rank(case, group, dtype=torch.float32)
        with recorded() as calls:
            out, plan = rank.forward()
            out.backward(rank.all_grad[rank.me].float())
        sent = {what: sum(rows for kind, rows in calls if kind == what) for what in ("rows", "weights")}
        return plan, sent, [out, rank.x.grad, rank.w.grad], rank.map_eDD.grad

    plan, sent, same, summed = run(case)
    one_plan, one_sent, one_same, one_summed = run(replace(case, chunks=1))
    assert len(plan.hops) == 2 * case.chunks and len(one_plan.hops) == 2 and sent == one_sent
    assert all(torch.equal(one, two) for one, two in zip(same, one_same))
    torch.testing.assert_close(summed, one_summed, rtol=1e-12, atol=1e-12)


def keeps_hops_apart(case: Case, group) -> None:
    """First hops go over one process group and last hops over another, in forward and backward; all first hops start
    before anybody waits, and a chunk starts its last hop before the next has arrived."""
    rank, events = Rank(case, group), []

    class Noting(exchange.InFlight):
        def __init__(self, *args, link="", **kwargs) -> None:
            super().__init__(*args, link=link, **kwargs)
            self.link = link
            events.append(("start", link))

        def wait(self):
            events.append(("wait", self.link))
            return super().wait()

    first, last = group.group_name, dedup.last_hop_group(group).group_name
    assert first != last and dedup.last_hop_group(group) is rank.dispatcher.hop_groups[1]
    plan = rank.dispatcher.plan(rank.ids, rank.w)

    def pipelined(one: str, other: str) -> list[tuple[str, str]]:
        return (
            [("start", one)] * case.chunks
            + [("wait", one), ("start", other)] * case.chunks
            + [("wait", other)] * case.chunks
        )

    with mock.patch.object(exchange, "InFlight", Noting):
        received = rank.dispatcher.dispatch(rank.x, rank.w, plan)
        assert events == pipelined(first, last)
        events.clear()
        out = rank.dispatcher.combine(rank.experts(received, rank.check_slabs(received)), received.state)
        assert events == pipelined(last, first)
        events.clear()
        out.backward(rank.all_grad[rank.me])
        assert events == pipelined(first, last) + pipelined(last, first)
    for result in (received.x_RD, out):  # where backward waits, for whoever times it
        nodes = [node for node in exchange_nodes(result) if "start_" in node.name()]
        assert len(nodes) == len(set(nodes)) == 2 * case.chunks


def overflows(case: Case, group) -> None:
    """The flag is what a count by loops says, on each rank; numbers stay finite; no rank's `grow` is in vain."""
    rank = Rank(case, group)
    dispatcher, growths = rank.dispatcher, 0
    while dispatcher.can_overflow:
        plan = dispatcher.plan(rank.ids, rank.w)
        expected = too_much(rank)
        assert plan.overflow.item() == expected and plan.overflow.dtype == torch.bool
        received = dispatcher.dispatch(rank.x, rank.w, plan)
        assert received.x_RD.shape[0] == dispatcher.fixed_rows() >= received.counts_e.sum()
        real_R = torch.arange(received.x_RD.shape[0]) < received.counts_e.sum()
        y_RD = torch.where(real_R[:, None], received.x_RD * received.weight_R[:, None], NAN)
        out = dispatcher.combine(y_RD, plan)
        received.x_RD.register_hook(lambda grad, real_R=real_R: torch.where(real_R[:, None], grad, NAN))
        received.weight_R.register_hook(lambda grad, real_R=real_R: torch.where(real_R, grad, NAN))
        gradients = torch.autograd.grad(out.sum(), [rank.x, rank.w])
        assert all(tensor.isfinite().all() for tensor in (out, *gradients))
        anywhere = torch.tensor(float(expected))
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
        if not anywhere:
            break
        dispatcher.grow()
        growths += 1
    assert growths > 0, "nothing overflowed"
    outs, *_ = rank.loop()
    torch.testing.assert_close(rank.forward()[0].detach(), outs[rank.me].detach(), rtol=1e-12, atol=1e-12)


class RecordShapes(TorchDispatchMode):
    """Every op that runs, with the shapes of the tensors that it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors, _ = tree_flatten((args, kwargs, out))
        self.ops.append((str(func), *(tuple(t.shape) for t in tensors if isinstance(t, Tensor))))
        return out


def keeps_its_shapes(case: Case, group) -> None:
    """20 steps of other routing: the same ops on the same shapes each time, plan, forward and backward, and one graph
    of the experts when they are compiled; with exact sizes, others in each step."""
    T, D = 64, 32
    w13_eF2D = torch.randn(case.experts // case.ranks, D, 2, D, dtype=torch.bfloat16, requires_grad=True)
    w2_eDF = torch.randn(case.experts // case.ranks, D, D, dtype=torch.bfloat16, requires_grad=True)

    def plain_experts(x_RD, counts_e, weight_R):
        """What a GPU runs, without the autograd Functions around it, which torch.compile cannot follow."""
        gemm = experts._GroupedGemm(counts_e)
        gate_up_R2F = gemm.forward(x_RD, w13_eF2D.flatten(1, 2))
        return gemm.forward(experts.swiglu(gate_up_R2F, weight_R, gemm), w2_eDF)

    def twenty_steps(buffer):
        dispatcher = Rank(replace(case, buffer=buffer, tokens=(T,) * case.ranks, width=D), group).dispatcher
        dispatcher.plan(torch.arange(T * case.top_k).view(T, -1) % case.experts)  # the first one sets NCCL EP up
        graphs = CompileCounter()
        torch._dynamo.reset()
        compiled = torch.compile(plain_experts, backend=graphs, dynamic=False, fullgraph=True)
        generator = torch.Generator().manual_seed(group.rank())
        steps = []
        for step in range(20):
            preference_E = torch.rand(case.experts, generator=generator) * step / 10
            ids = (torch.rand(T, case.experts, generator=generator) + preference_E).topk(case.top_k).indices
            x = torch.randn(T, D, generator=generator).bfloat16().requires_grad_()
            w = torch.rand(T, case.top_k, generator=generator).requires_grad_()
            w13_eF2D.grad = w2_eDF.grad = None
            with RecordShapes() as record:
                received = dispatcher.dispatch(x, w, dispatcher.plan(ids))
                gemm = experts._GroupedGemm(received.counts_e)
                y_RD = experts.by_gemm(gemm, received.x_RD, received.weight_R, w13_eF2D, w2_eDF)
                dispatcher.combine(y_RD, received.state).sum().backward()
            steps.append(record.ops)
            with torch.no_grad():
                compiled(received.x_RD, received.counts_e, received.weight_R)
        return steps, graphs.frame_count

    op = f"plan_{case.dispatcher}_fixed"
    inside = {op: getattr(static, f"_{op}")} if hasattr(static, op) else {}
    with mock.patch.dict(vars(static), inside):  # a mode does not see what an op does inside
        steps, graphs = twenty_steps(case.buffer)
    assert len(steps[0]) > (100 if inside else 50) and all(step == steps[0] for step in steps)
    assert graphs == 1
    te_ep_ops.finalize()  # exact sizes are another set-up
    with mock.patch.object(torch._dynamo.config, "recompile_limit", 100):
        steps, graphs = twenty_steps("exact")
    assert len({str(step) for step in steps}) > 10 and graphs > 5


def too_much(rank: Rank) -> bool:
    """Whether this rank sends more to some rank, or gets more, than the buffers hold."""
    case, (copies, rows, slab_rows), alignment = rank.case, static.fixed_sizes(rank.dispatcher), rank.case.alignment
    to = [(t, int(rank.ids[t, k]) // rank.e) for t, k in rank.kept(rank.me)]
    per_rank = [sum(place == other for _, place in to) for other in range(case.ranks)]
    unique = [sum(place == other for _, place in set(to)) for other in range(case.ranks)]
    sends = max(per_rank) > copies or (case.dispatcher == "dedup" and max(unique) > rows)
    # What a rank gets is what the others' slots let through.
    arrived = [0] * rank.e
    for source in range(case.ranks):
        ids = sorted(int(rank.all_ids[source][t, k]) for t, k in rank.kept(source))
        for expert in [i for i in ids if i // rank.e == rank.me][:copies]:
            arrived[expert - rank.me * rank.e] += 1
    return sends or sum(-(-n // alignment) * alignment for n in arrived) > slab_rows


def repeats_bitwise(case: Case, group) -> None:
    assert Rank(case, group).dispatcher.deterministic

    def run():
        rank = Rank(case, group, dtype=torch.float32)
        out, _ = rank.forward()
        out.backward(rank.all_grad[rank.me].float())
        return [out, rank.x.grad, rank.w.grad, rank.map_eDD.grad]

    assert all(torch.equal(one, two) for one, two in zip(run(), run()))


def main(out: Path, selected: Callable[[int], list[Case]] = cases, backend: str = "gloo") -> None:
    """Check the cases that `selected` has for the number of ranks."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = {}
    for size in (1, 2, 4):
        for first in range(0, world, size):
            if first + size <= world:
                group = dist.new_group(list(range(first, first + size)))
                if first <= rank < first + size:
                    groups[size] = group
    errors: dict[str, list[str]] = {}
    for case in selected(world):
        error = None
        try:
            if hasattr(te_ep_checks, case.check):
                getattr(te_ep_checks, case.check)(Rank(case, groups[case.ranks]))
            else:
                globals()[case.check](case, groups[case.ranks])
        except Exception:  # a rank that waits in vain for this one is freed by the timeout above
            error = f"rank {rank}: {traceback.format_exc()}"
        te_ep_ops.finalize()  # the next case has other sizes
        everywhere: list = [None] * world
        dist.all_gather_object(everywhere, error)
        assert case.name not in errors, f"two cases are called {case.name}"
        errors[case.name] = [e for e in everywhere if e]
    if rank == 0:
        out.write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    te_doubles.install()
    main(Path(sys.argv[1]))
