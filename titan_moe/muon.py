"""Muon: the momentum of each weight matrix, with its singular values made alike, is the update (Keller Jordan's rule
with Moonshot's scale, arXiv 2502.16982).

    B <- mu B + (1 - mu) G                     momentum of the gradient G
    N  = (1 - mu) G + mu B                     Nesterov's look ahead
    O  = U p(p(p(p(p(S))))) V^T                where N / ||N|| = U S V^T, p(s) = 3.4445 s - 4.7750 s^3 + 2.0315 s^5
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(R, C)) O

Five times p brings every singular value that is not tiny close to 1, and needs no decomposition: p(X) is a X +
b (X X^T) X + c (X X^T)^2 X, three matrix products ("Newton-Schulz"). The mean square of O's entries is 1 / max(R, C)
then, so the factor makes updates as large as AdamW's usually are: learning rate and weight decay mean the same in both.

It is a rule for whole matrices, and ours are neither alone nor whole. Experts are stacked, and gate and up are one
parameter: w13_EF2D is 2 E matrices [F, D]. Where FSDP or tensor parallelism has cut inside a matrix, N is gathered (in
the type of the products), one rank computes O, and the others receive it: of as many parameters as there are ranks,
each rank computes one. Expert parallelism cuts stacks between matrices, as FSDP does while there are experts enough:
these, nearly all of a large model, move nowhere. O is what one process would compute, on any mesh.

It is not torchtitan 0.3.0's DistMuon, which has the same rule, because of what that asks of parameters: matrices or
stacks [M, R, C], on CUDA, cut by FSDP and between matrices alone, and no pipeline; w13_EF2D is no such stack, and none
of it would run on a CPU. torch.optim.Muon takes single, whole matrices. The momentum has their name in checkpoints,
`momentum_buffer`, under torchtitan's w1, w2 and w3.

Shape letters: E experts, F expert hidden width, D model width, M matrices, R rows, C columns.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from titan_moe.model import local_slice
from titan_moe.torch_helpers import local

A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
SMALLEST_NORM = 1e-7
SCALE = 0.2
"""Root mean square of AdamW's usual updates"""
BATCH_ELEMENTS = 1 << 28
"""Numbers of a stack whose products are made at once"""
TOGETHER_ELEMENTS = 1 << 24
"""Numbers of parameters whose products are made at once: many small products take as long to start as to compute"""
MATRIX = {2: (0, 1), 3: (1, 2), 4: (1, 3)}
"""Which dimensions of a parameter are rows and columns: of a matrix, w2_EDF, w13_EF2D"""


class Muon(Optimizer):
    """For matrices, stacks of them, and w13_EF2D. State: `momentum_buffer`, like the parameter.

    `found_inf`, an attribute set before `step`, is a float32 scalar on the device: 1 leaves everything as it is. Ranks
    that share parameters call `step` together, and have gradients of the same ones.
    """

    _step_supports_amp_scaling = True  # as torch marks optimizers that read found_inf
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        *,
        dtype: torch.dtype,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        """`dtype`: of the matrix products."""
        self.dtype = dtype
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.parts = {parameter: _part(parameter) for group in self.param_groups for parameter in group["params"]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        assert closure is None, "no closures"
        keep = 1.0 if self.found_inf is None else 1 - self.found_inf  # 0: this step changes nothing
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            for together in _rounds(params):
                ahead = (self._look_ahead(parameter, group["momentum"], keep) for parameter in together)
                for parameter, whole in zip(together, _directions(together, ahead)):
                    rows, columns = (parameter.shape[dim] for dim in MATRIX[parameter.ndim])
                    part, lr, direction = local(parameter), group["lr"], whole[self.parts[parameter]]
                    part.mul_(1 - lr * group["weight_decay"] * keep)
                    part.sub_(direction.to(part.dtype) * (lr * SCALE * math.sqrt(max(rows, columns)) * keep))

    def _look_ahead(self, parameter: Tensor, mu: float, keep: Tensor | float) -> Tensor:
        """This rank's part of N, with its part of the momentum moved."""
        assert parameter.grad is not None
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, gradient = local(self.state[parameter]["momentum_buffer"]), local(parameter.grad)
        assert buffer.shape == gradient.shape == local(parameter).shape, "a gradient is cut otherwise"
        if isinstance(keep, float):
            buffer.lerp_(gradient, 1 - mu)
        else:
            gradient = torch.where(keep > 0, gradient, 0)  # it may not be finite
            buffer.lerp_(gradient, ((1 - mu) * keep).to(buffer.dtype))
        return gradient.lerp(buffer, mu).to(self.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Whole matrices


def _rounds(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters whose work ranks share, at most one for each. Of those that are not cut inside a matrix: with matrices
    of one shape, as many as are small together."""
    waiting: dict[Any, list[Tensor]] = {}
    for parameter in params:
        if dims := _cut_inside(parameter):
            mesh = cast(DTensor, parameter).device_mesh
            together = waiting.setdefault((mesh, dims), [])
            together.append(parameter)
            if len(together) == mesh.size(_shared(parameter, dims)):
                yield waiting.pop((mesh, dims))
            continue
        shape = tuple(parameter.shape[dim] for dim in MATRIX[parameter.ndim])
        together = waiting.get(shape, [])
        if together and sum(local(each).numel() for each in (*together, parameter)) > TOGETHER_ELEMENTS:
            yield waiting.pop(shape)
        waiting.setdefault(shape, []).append(parameter)
    yield from waiting.values()


def _directions(together: Sequence[Tensor], ahead: Iterable[Tensor]) -> Iterator[Tensor]:
    """O of each parameter's matrices on this rank, whole, from this rank's part of N."""
    dims = _cut_inside(together[0])
    if not dims:
        yield from orthogonal(list(ahead))
        return
    mesh, shared = cast(DTensor, together[0]).device_mesh, _shared(together[0], dims)
    rank, group = mesh.get_local_rank(shared), mesh.get_group(shared)
    mine, empty = None, []
    for i, (parameter, part) in enumerate(zip(together, ahead)):
        whole = _whole(part, parameter, dims)
        empty.append((whole.shape, whole.new_empty(0)))
        if i == rank:
            mine = whole
    mine = None if mine is None else orthogonal([mine])[0]  # now that nobody waits for the next gather
    for i, (shape, like) in enumerate(empty):
        direction = mine if i == rank else like.new_empty(shape)
        assert direction is not None
        dist.broadcast(direction, group=group, group_src=i)
        yield direction


def _cut_inside(parameter: Tensor) -> tuple[int, ...]:
    """Dimensions of its mesh along which its matrices are cut: each rank there has some of their rows or columns."""
    if not isinstance(parameter, DTensor):
        return ()
    inside, mesh = MATRIX[parameter.ndim], parameter.device_mesh
    return tuple(
        i for i, at in enumerate(parameter.placements) if getattr(at, "dim", None) in inside and mesh.size(i) > 1
    )


def _shared(parameter: Tensor, dims: Sequence[int]) -> int:
    """The dimension of the mesh along which ranks take a parameter each; along others they do the same work."""
    return max(dims, key=cast(DTensor, parameter).device_mesh.size)


def _whole(part: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
    """Of a tensor that is cut as the parameter is: this rank's matrices, gathered along `dims`."""
    assert isinstance(parameter, DTensor)
    placements = list(parameter.placements)
    like = {"shape": parameter.shape, "stride": parameter.stride()}
    spread = DTensor.from_local(part, parameter.device_mesh, placements, run_check=False, **like)
    for dim in dims:  # one after the other: tensor parallelism, the last, has cut rows first, and FSDP what it left
        placements[dim] = Replicate()
        spread = spread.redistribute(placements=placements)
    return spread.to_local()


def _part(parameter: Tensor) -> tuple[slice, ...]:
    """Of its whole matrices on this rank: where this rank's rows and columns of them are."""
    part, offset = local_slice(parameter)
    inside = MATRIX[parameter.ndim]
    where = enumerate(zip(offset, part.shape))
    return tuple(slice(at, at + size) if dim in inside else slice(None) for dim, (at, size) in where)


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products


def orthogonal(stored: Sequence[Tensor]) -> list[Tensor]:
    """O of the matrices of tensors [R, C], [M, R, C] or [E, F, 2, D], all with as many rows and columns, in the same
    layout and type."""
    stacks = [x.transpose(1, 2).flatten(0, 1) if x.ndim == 4 else x.view(-1, *x.shape[-2:]) for x in stored]
    stack_MRC = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
    count = max(1, BATCH_ELEMENTS // max(stack_MRC[0:1].numel(), 1))
    out_MRC = torch.cat([newton_schulz(some) for some in stack_MRC.split(count)])
    return [
        out.unflatten(0, (x.shape[0], 2)).transpose(1, 2).contiguous() if x.ndim == 4 else out.view(x.shape)
        for x, out in zip(stored, out_MRC.split([len(stack) for stack in stacks]))
    ]


def newton_schulz(x_MRC: Tensor) -> Tensor:
    """O of each matrix, by products in its type."""
    tall = x_MRC.shape[-2] > x_MRC.shape[-1]
    if tall:
        x_MRC = x_MRC.mT
    x_MRC = x_MRC / x_MRC.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram_MRR = x_MRC @ x_MRC.mT
        poly_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=B, alpha=C)
        x_MRC = torch.baddbmm(x_MRC, poly_MRR, x_MRC, beta=A)
    return x_MRC.mT if tall else x_MRC
