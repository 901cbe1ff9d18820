"""One job of two ranks that checks the dispatchers on DeepEP and HybridEP: torchtitan's ops on a double of the
libraries.

    python tests/distributed/ranks.py 2 tests/distributed/titan_dispatch_worker.py OUT.json

OUT.json maps each case of `CASES` to the errors that any rank met. The libraries move only bf16, so all numbers here
are small whole ones or halves, which bf16 adds and multiplies exactly: results must be equal, not close.

Shape letters: T tokens of a rank, D model width, K top-k, E experts, e experts of a rank, R rows of the slabs.
"""

import json
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from tests import deep_ep_doubles
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.moe.layer import fuse
from titan_moe.recompute import kept_ops

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    name: str
    dispatcher: str
    check: str = "equals_a_loop"
    tokens: tuple[int, int] = (13, 7)
    experts: int = 8
    top_k: int = 3
    among: int | None = None  # route to the first so many experts only
    alignment: int = 4
    recv_buffer: str | float = "exact"

    @property
    def dim(self) -> int:
        return 8 if self.dispatcher == "deepep" else 512


CASES = [
    *(
        case
        for name in ("deepep", "hybridep")
        for case in (
            Case(f"{name}", name),
            Case(f"{name} equal tokens", name, tokens=(9, 9)),
            Case(f"{name} a rank without tokens", name, tokens=(0, 9)),
            Case(f"{name} all to one expert", name, top_k=1, among=1),
            Case(f"{name} all to the first rank", name, among=4),
            Case(f"{name} to every expert", name, top_k=8),
            Case(f"{name} alignment 1", name, alignment=1),
            Case(f"{name} recompute", name, "recomputes_without_dispatching"),
            Case(f"{name} gradients of the one or the other", name, "needs_no_other_gradient"),
            Case(f"{name} in the layer", name, "works_in_the_layer", tokens=(20, 20)),
        )
    ),
    Case("deepep one local expert", "deepep", experts=2, top_k=2),
    Case("deepep forgets its handles", "deepep", "forgets_its_handles"),
    Case("hybridep worst case", "hybridep", recv_buffer="worst_case"),
    Case("hybridep worst case, all to the first rank", "hybridep", among=4, recv_buffer="worst_case"),
    Case("hybridep worst case, full to the last row", "hybridep", tokens=(8, 8), top_k=8, recv_buffer="worst_case"),
    Case("hybridep room enough", "hybridep", tokens=(9, 9), recv_buffer=1.5),
    Case("hybridep overflow", "hybridep", "says_that_rows_are_missing", tokens=(16, 16), among=4, recv_buffer=1.0),
]


class Rank:
    """One rank of one case: everybody's inputs, its own as leaves."""

    def __init__(self, case: Case) -> None:
        self.case, self.me = case, dist.get_rank()
        self.e = case.experts // 2
        generator = torch.Generator().manual_seed(7)

        def whole(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, shape, generator=generator).float()

        self.ids, self.x, self.w, self.grad = [], [], [], []
        for T in case.tokens:
            scores = torch.rand(T, case.among or case.experts, generator=generator)
            self.ids.append(scores.topk(case.top_k, dim=-1).indices)
            x = whole(-2, 2, T, case.dim)
            x[:, 0] = 1  # no row is zero, as padding is
            self.x.append(x.requires_grad_())
            self.w.append((whole(0, 3, T, case.top_k) / 2).requires_grad_())  # 0 is a weight like any other
            self.grad.append(whole(-1, 1, T, case.dim))
        self.scale_E = whole(1, 3, case.experts).requires_grad_()
        self.my_x = self.x[self.me].detach().bfloat16().requires_grad_()
        self.my_w = self.w[self.me].detach().clone().requires_grad_()
        self.my_scale_e = self.scale_E.detach()[self.me * self.e :][: self.e].clone().requires_grad_()
        self.dispatcher = make_dispatcher(
            case.dispatcher,
            num_experts=case.experts,
            top_k=case.top_k,
            alignment=case.alignment,
            ep_group=dist.group.WORLD,
            recv_buffer=case.recv_buffer,
            max_tokens=max(case.tokens),
            dim=case.dim,
        )

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, object]:
        plan = self.dispatcher.plan(self.ids[self.me])
        received = self.dispatcher.dispatch(x, w, plan)
        y_RD = self.experts(received, self.real_rows(received))
        return self.dispatcher.combine(y_RD, received.state), plan

    def real_rows(self, received) -> Tensor:
        """Sizes and padding as promised; returns which rows are copies of tokens, [R]."""
        x_RD, counts = received.x_RD.detach(), received.counts_e.tolist()
        R, slabs = x_RD.shape[0], sum(counts)
        assert x_RD.dtype == torch.bfloat16 and received.weight_R.dtype == torch.float32
        assert received.counts_e.dtype == torch.int64 and all(n % self.case.alignment == 0 for n in counts)
        assert slabs <= R <= self.dispatcher.max_rows(max(self.case.tokens))
        if self.case.recv_buffer == "exact":
            assert slabs == R and not self.dispatcher.sync_free
        else:
            assert self.dispatcher.fixed_rows() == R and self.dispatcher.sync_free
        real_R = (x_RD != 0).any(1) & (torch.arange(R) < slabs)
        padding_R = ~real_R & (torch.arange(R) < slabs)
        assert not x_RD[padding_R].any() and not received.weight_R[padding_R].any()
        for expert, slab_R in enumerate(real_R[:slabs].split(counts), start=self.me * self.e):
            assert slab_R.sum() == sum((ids == expert).sum() for ids in self.ids)
        return real_R

    def experts(self, received, real_R: Tensor) -> Tensor:
        """y = w a_e x for every slab; whatever is no copy of a token is NaN, in y and in both gradients."""
        x_RD, weight_R = received.x_RD, received.weight_R
        for tensor, mask in ((x_RD, real_R[:, None]), (weight_R, real_R)):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, mask=mask: torch.where(mask, grad, NAN))
        ends_e = received.counts_e.cumsum(0)
        expert_R = torch.bucketize(torch.arange(len(real_R)), ends_e, right=True).clamp(max=self.e - 1)
        weight_R = self.my_scale_e[expert_R] * torch.where(real_R, weight_R, 0)
        y_RD = torch.where(real_R[:, None], x_RD, 0).float() * weight_R[:, None]
        return torch.where(real_R[:, None], y_RD, NAN).bfloat16()

    def loop(self) -> list[Tensor]:
        """This rank's output and gradients, token by token, no rank in it."""
        outs = []
        for ids, x, w in zip(self.ids, self.x, self.w):
            rows = [sum(w[t, k] * self.scale_E[i] * x[t] for k, i in enumerate(ids[t])) for t in range(len(x))]
            outs.append(torch.stack(rows) if rows else x * w.sum())
        sum((out * grad).sum() for out, grad in zip(outs, self.grad)).backward()
        scale_grad = self.scale_E.grad[self.me * self.e :][: self.e]
        return [outs[self.me].detach(), self.x[self.me].grad, self.w[self.me].grad, scale_grad]

    def results(self, out: Tensor) -> list[Tensor]:
        out.backward(self.grad[self.me].bfloat16().t().contiguous().t())  # no gradient need lie row by row
        return [out.detach().float(), self.my_x.grad.float(), self.my_w.grad, self.my_scale_e.grad]


def equals_a_loop(case: Case) -> None:
    rank = Rank(case)
    out, plan = rank.forward(rank.my_x, rank.my_w)
    for found, expected in zip(rank.results(out), rank.loop(), strict=True):
        assert torch.equal(found, expected), (found, expected)
    assert plan.counts_E.tolist() == [int((rank.ids[rank.me] == i).sum()) for i in range(case.experts)]
    assert plan.dropped == 0 and plan.kept_TK is None
    assert plan.overflow is None if isinstance(case.recv_buffer, str) else not plan.overflow


def recomputes_without_dispatching(case: Case) -> None:
    """With the ops that recompute keeps, backward plans nothing and changes no bit; that moe.redispatch cannot be
    had is why they are kept whatever it says."""
    from deep_ep import ElasticBuffer, HybridEPBuffer

    buffer = ElasticBuffer if case.dispatcher == "deepep" else HybridEPBuffer
    expected = Rank(case).loop()
    for redispatch in (False, True):
        rank = Rank(case)
        contexts = partial(create_selective_checkpoint_contexts, list(kept_ops(redispatch)))
        before = buffer.dispatches
        out = checkpoint(
            lambda x, w, rank=rank: rank.forward(x * 1, w * 1)[0],
            rank.my_x,
            rank.my_w,
            use_reentrant=False,
            context_fn=contexts,
        )
        results = rank.results(out)
        assert buffer.dispatches == before + 1
        assert all(torch.equal(found, one) for found, one in zip(results, expected, strict=True))


def needs_no_other_gradient(case: Case) -> None:
    """Only the rows matter to the loss, only the weights do, or only one of them asks for a gradient."""
    rank = Rank(case)
    for x, w in ((rank.my_x, rank.my_w), (rank.my_x, rank.my_w.detach()), (rank.my_x.detach(), rank.my_w)):
        plan = rank.dispatcher.plan(rank.ids[rank.me])
        received = rank.dispatcher.dispatch(x, w, plan)
        if x.requires_grad:
            out = rank.dispatcher.combine(received.x_RD, received.state)
            (grad,) = torch.autograd.grad(out, [x], torch.ones_like(out), retain_graph=True)
            assert (grad == case.top_k).all()
        if w.requires_grad:
            (grad,) = torch.autograd.grad(received.weight_R.sum(), [w])
            assert (grad == 1).all()


def forgets_its_handles(case: Case) -> None:
    """torchtitan keeps the handle of a dispatch until somebody takes it: backward, or a combine without one."""
    from torchtitan.distributed.deepep import deepep

    rank = Rank(case)
    before = dict(deepep._handle_cache)
    rank.forward(rank.my_x, rank.my_w)[0].sum().backward()
    with torch.no_grad():
        rank.forward(rank.my_x, rank.my_w)
    rank.my_scale_e.requires_grad_(False)
    rank.forward(rank.my_x.detach(), rank.my_w.detach())
    assert deepep._handle_cache == before


def says_that_rows_are_missing(case: Case) -> None:
    """Every copy goes to the first rank, which has room for the mean: it raises the flag, the other does not, and
    nothing points outside the buffer. Grown twice, it has room for all."""
    rank = Rank(case)
    plan = rank.dispatcher.plan(rank.ids[rank.me])
    received = rank.dispatcher.dispatch(rank.my_x, rank.my_w, plan)
    assert bool(plan.overflow) == (rank.me == 0) and plan.overflow.shape == ()
    assert received.counts_e.sum() == (received.x_RD.shape[0] if rank.me == 0 else 0)
    assert (received.counts_e % case.alignment == 0).all() and (received.counts_e >= 0).all()
    out = rank.dispatcher.combine(received.x_RD * received.weight_R[:, None].bfloat16(), received.state)
    out.sum().backward()
    assert out.isfinite().all() and rank.my_x.grad.isfinite().all() and rank.my_w.grad.isfinite().all()
    rank.dispatcher.grow()
    rank.dispatcher.grow()
    plan = rank.dispatcher.plan(rank.ids[rank.me])
    rank.real_rows(rank.dispatcher.dispatch(rank.my_x, rank.my_w, plan))
    assert not plan.overflow


def works_in_the_layer(case: Case) -> None:
    """The layer gives the dispatcher what it needs, recompute included, and computes what it does with dedup."""
    B, L, D, F, E, K = 1, max(case.tokens), case.dim, 16, case.experts, case.top_k
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_BLD = torch.randn(B, L, D, generator=generator).bfloat16()
    scores_BLK, ids_BLK = torch.rand(B, L, E, generator=generator).topk(K)
    config = MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E // 2),  # this rank's
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=Linear.Config(in_features=D, out_features=E), top_k=K),
    )
    mesh = SimpleNamespace(get_optional_mesh=lambda name: SimpleNamespace(get_group=lambda: dist.group.WORLD))
    found = []
    for name in ("dedup", case.dispatcher):
        layer = fuse(config, dispatcher=name, experts="loop", max_tokens=B * L).routed_experts.build().bfloat16()
        for i, parameter in enumerate(layer.parameters()):
            parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
        layer.parallelize(mesh)
        x = x_BLD.clone().requires_grad_()
        scores = scores_BLK.clone().requires_grad_()
        contexts = partial(create_selective_checkpoint_contexts, list(kept_ops(redispatch=False)))
        y = checkpoint(layer, x, scores, ids_BLK, None, use_reentrant=False, context_fn=contexts)
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, scores.grad, *(p.grad for p in layer.parameters())])
    assert type(layer.dispatcher).name == case.dispatcher
    for expected, got in zip(*found, strict=True):
        assert (got - expected).norm() <= 0.01 * expected.norm(), (got - expected).norm() / expected.norm()


def main(out: Path) -> None:
    deep_ep_doubles.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    errors: dict[str, list[str]] = {}
    for case in CASES:
        error = None
        try:
            globals()[case.check](case)
        except Exception:  # a rank that waits in vain for this one is freed by the timeout above
            error = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        everywhere: list = [None, None]
        dist.all_gather_object(everywhere, error)
        assert case.name not in errors, f"two cases are called {case.name}"
        errors[case.name] = [e for e in everywhere if e]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
