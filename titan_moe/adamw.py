"""AdamW on fp32 parameters that keeps both moments in bf16: 8 bytes of parameter and moments instead of 12.

A bf16 number has the range of an fp32 one and 8 of its 24 bits. The arithmetic is torch's, in fp32: a batch of moments
is widened, stepped, and rounded back to nearest, and the update of a parameter uses the moments before they are
rounded. So an error does not build up in the parameters, but it can in the moments. A step changes a moment by

    v <- beta2 v + (1 - beta2) g^2,

and what is less than half the distance to the next bf16 number, between 2^-9 and 2^-8 of v, is lost. With beta2 = 0.95
a second moment whose gradients vanish falls by 5 % a step, ten times that or more. With 0.999 it would fall by 0.1 %,
so it stays where it is for good, and holds the parameter's steps down. optimizer_check.py refuses such decays; rounding
stochastically would take them, but give every mesh other numbers. DeepSeek-V3 (arXiv 2412.19437, 3.3.1) trained with
bf16 moments and decays of 0.9 and 0.95.

torchtitan's "fused_opt_states_bf16" is not used: torch's fused kernel takes bf16 moments on GPUs only, and an optimizer
that loads a state casts it to the parameters' type, so that a resumed run would go on with fp32 moments.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.optim import AdamW
from torch.optim.adamw import adamw

from titan_moe.torch_helpers import local

MOMENTS = ("exp_avg", "exp_avg_sq")
BATCH_ELEMENTS = 2**24
"""Elements whose moments are widened at once, 128 MiB of them; a larger parameter is widened alone"""


class Bf16MomentsAdamW(AdamW):
    """`torch.optim.AdamW` whose state has `exp_avg` and `exp_avg_sq` in bf16, also after loading.

    With fused=True it takes `found_inf` as torch's fused AdamW does, without a wait of the host: an attribute set
    before `step`, a tensor of one fp32 number on the device; 1: this step changes nothing. The other implementations
    refuse it, as torch's do.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None, "no closures"
        for group in self.param_groups:
            self._make_state(group)
            params, grads, exp_avgs, exp_avg_sqs, steps = ([] for _ in range(5))
            self._init_group(group, params, grads, exp_avgs, exp_avg_sqs, [], steps)
            assert all(_cut(p) == _cut(grad) for p, grad in zip(params, grads)), "a gradient is cut otherwise"
            params, grads, exp_avgs, exp_avg_sqs = map(_local, (params, grads, exp_avgs, exp_avg_sqs))
            for batch in _batches([parameter.numel() for parameter in params]):
                moments = [*exp_avgs[batch], *exp_avg_sqs[batch]]
                wide = [moment.float() for moment in moments]
                count = len(wide) // 2
                adamw(
                    params[batch],
                    grads[batch],
                    wide[:count],
                    wide[count:],
                    [],
                    steps[batch],
                    foreach=group["foreach"],
                    fused=group["fused"],
                    found_inf=getattr(self, "found_inf", None),
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                torch._foreach_copy_(moments, wide)

    def _make_state(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                where = parameter.device if group["fused"] else "cpu"  # as torch's
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=where)
                for name in MOMENTS:
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.bfloat16)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # casts all of it to the type of the parameters
        for state in self.state.values():
            state.update({name: state[name].bfloat16() for name in MOMENTS})


def _cut(tensor: Tensor) -> tuple[Placement, ...]:
    return tensor.placements if isinstance(tensor, DTensor) else ()


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What this rank holds of them: the update goes element by element."""
    return [local(tensor) for tensor in tensors]


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours of at most BATCH_ELEMENTS together, or one alone."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > BATCH_ELEMENTS:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
