"""The training loss: cross-entropy of the next token, and of tokens further ahead, without ever holding all logits.

    loss = (CE(h Wᵀ, labels) + c / n * sum over depths k of CE(h_k Wᵀ, labels k further on)) / valid

CE is summed over the tokens of this microbatch and rank, `valid` is the number of labels of the whole step, of all
ranks and microbatches, so that gradients need no further division anywhere. h_k are the outputs of the n multi-token
prediction (MTP) layers, c is `loss.mtp_coeff`. The labels of depth k are those k positions further on inside the same
document; where there are none the token has no such term. All depths are divided by the same `valid`, that of the main
labels, as in torchtitan's `MTPLoss`: a depth with fewer labels weighs less, and no second count crosses the ranks.

**Memory.** Logits of 65,536 tokens x 129,280 words are 34 GB in fp32, once per depth. So the head W runs here and not
in the model (`_skip_lm_head`), over `loss.num_chunks` pieces of the tokens, and each piece goes all the way to its
gradient with respect to h and W while its logits are there. Backward then has nothing to compute again: forward and
backward of the head cost three GEMMs, as without chunks. What waits for it is the gradient of h and of W, one of each
per microbatch in flight, however many chunks and depths there are; that of W is summed over them in fp32. In a pipeline
whose schedule puts weight gradients off, several may be in flight at the last stage, and each keeps a gradient of W
(1.85 GB in bf16 for DeepSeek-V3's head); computing logits again would keep h instead, at the price of two GEMMs more.

**Why not torchtitan's ChunkedLossWrapper.** It runs backward through the head inside the forward pass, which leaves
the head's gradient in `.grad` whether or not a backward follows, unscaled by what the loss is multiplied with, and
switches FSDP2 off and on around its chunks: when it is done it frees the gathered parameters of the group [final norm,
head]. A schedule that splits backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) looks for the gradient of each
of `stage.parameters()`, and by then the module holds the sharded norm.weight, which is not the tensor in the graph: no
path is found, and the norm gets no gradient, silently. With 1F1B autograd finds the gathered parameter by itself, and
without FSDP2 nothing is lost. So here

- the loss is an ordinary node of the graph, `_Head`, with h and W as its inputs: every parameter's gradient arrives in
  backward, exactly once, and scaled by whatever the loss was multiplied with. A split backward calls the node twice,
  for h and for W, and each call only scales what forward has computed.
- W is read, not called: FSDP2's hooks around the head would reduce its gradient once per call. The group's gradients
  are reduced when backward leaves the final norm, which comes after the head: once per backward, and not at all while
  `set_requires_gradient_sync(False)`. Nothing is freed here that the model had left gathered.

**Tensor parallelism.** W is cut along the vocabulary, h is the same on all ranks. torchtitan's loss-parallel
cross-entropy adds up what it needs over the ranks; the gradient of h stays this rank's share, which backward of the
all-gather in front (the norm's output sharding) sums.

Shape letters: B batch, L sequence, T = B*L tokens, D model width, V vocabulary (this rank's part of it).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import titan_moe.runtime  # noqa: F401

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
from torchtitan.models.common import Linear
from torchtitan.models.deepseek_v3 import MTPDecoder
from torchtitan.models.deepseek_v3.mtp import roll_mtp_sequence

from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.moe.experts import GroupedGemm
from titan_moe.precision.backend import backend_of_linears
from titan_moe.precision.layers import chosen
from titan_moe.precision.linear import gemm_of

CrossEntropy = Callable[[Tensor, Tensor], Tensor]  # logits [1, T, V], labels [1, T] -> summed over tokens


class Prediction(NamedTuple):
    """Hidden states before the head, what they should predict, and the factor on their summed cross-entropy."""

    h_TD: Tensor
    labels_T: Tensor
    scale: Tensor


def build_loss(config: Config, model: MTPDecoder) -> "Loss":
    """The loss with the head of `model`, which from now on returns hidden states. Of a pipeline, `model` is the last
    stage."""
    loss = Loss(config)
    loss.take_head(model)
    return loss


class Loss:
    """loss, parts = loss_fn(output, labels_BL, valid_tokens, positions=positions_BL)

    `output` is what the model returns: hidden states, or a list of them with those of the MTP layers behind. Without
    `valid_tokens` the loss is a sum. `parts` are detached: "loss", the main cross-entropy alone, which compares with
    trainings without MTP and with the validation loss, and "mtp_loss", that of the MTP layers in the mean over depths,
    before its coefficient. Without gradients (validation) the loss is the main one.
    """

    def __init__(self, config: Config) -> None:
        self.num_chunks, self.mtp_coeff = config.loss.num_chunks, config.loss.mtp_coeff
        compiled = config.compile.enable and "loss" in config.compile.components
        fn = torch.compile(cross_entropy_loss, backend=config.compile.backend) if compiled else cross_entropy_loss
        flavor = model_flavor(config)
        low = chosen(config, flavor)
        self.gemm: GroupedGemm | None = None  # of the head, where a recipe holds for it
        if low is not None and "lm_head" in low.linears:
            self.gemm = gemm_of(low.recipe, backend_of_linears(config, flavor, low)[0])
        self.cross_entropy: CrossEntropy = partial(fn, global_vocab_size=flavor.vocab_size)
        self.lm_head: Linear | None = None

    def take_head(self, model: MTPDecoder) -> None:
        assert model.lm_head is None or model.lm_head.bias is None
        self.lm_head = model.lm_head
        model._skip_lm_head = True

    def __call__(
        self,
        output: Tensor | Sequence[Tensor],
        labels_BL: Tensor,
        valid_tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        h_BLD, *further = [output] if isinstance(output, Tensor) else output
        mean = torch.ones((), device=h_BLD.device)
        if valid_tokens is not None:
            mean = mean / valid_tokens.clamp(min=1)  # a step without a single label has the loss 0, not 0/0
        predictions = [Prediction(h_BLD.flatten(0, 1), labels_BL.flatten(), mean)]
        assert self.lm_head is not None, "this pipeline stage has no head, so no loss either"
        if not torch.is_grad_enabled():
            with gathered(self.lm_head) as weight_VD:
                sums, _ = head(weight_VD, predictions, self.gemm, self.num_chunks, self.cross_entropy, gradients=False)
            return sums[0] * mean, {"loss": sums[0] * mean}
        for depth, h_k_BLD in enumerate(further, start=1):
            assert positions is not None, "without positions MTP's labels would cross documents"
            labels_k_BL = roll_mtp_sequence(labels_BL, shift=depth, fill_value=IGNORE_INDEX, positions=positions)
            scale = mean * (self.mtp_coeff / len(further))
            predictions.append(Prediction(h_k_BLD.flatten(0, 1), cast(Tensor, labels_k_BL).flatten(), scale))
        with gathered(self.lm_head) as weight_VD:
            hidden, labels, scales = zip(*predictions)
            loss, sums = _Head.apply(weight_VD, labels, scales, self.gemm, self.num_chunks, self.cross_entropy, *hidden)
        parts = {"loss": sums[0] * mean}
        if further:
            parts["mtp_loss"] = sums[1:].mean() * mean
        return loss, parts


@contextmanager
def gathered(lm_head: Linear) -> Iterator[Tensor]:
    """The head's weight as compute sees it: whole along data parallelism, in the compute's dtype.

    The model leaves it gathered unless it reshards after forward everywhere. Then backward shards it again; without
    gradients nobody would.
    """
    sharded = isinstance(lm_head.weight, DTensor)
    if sharded:
        assert isinstance(lm_head, FSDPModule)
        lm_head.unshard()
    yield lm_head.weight
    if sharded and not torch.is_grad_enabled():
        cast(FSDPModule, lm_head).reshard()


class _Head(torch.autograd.Function):
    """Head and cross-entropy of several predictions -> (scaled sum of all, sums of each). The second is only told."""

    @staticmethod
    def forward(ctx: Any, weight_VD, labels, scales, gemm, num_chunks, cross_entropy, *hidden):
        predictions = [Prediction(*p) for p in zip(hidden, labels, scales)]
        sums, gradients = head(weight_VD, predictions, gemm, num_chunks, cross_entropy, gradients=True)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        return (sums * torch.stack(scales)).sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, _):  # type: ignore[override]
        # A product, not in place: a split backward comes a second time. Times 1, which it is here, loses no digit.
        dweight_VD, *dhidden = (saved * grad for saved in ctx.saved_tensors)
        return dweight_VD, *(None,) * 5, *dhidden


def head(
    weight_VD: Tensor,
    predictions: list[Prediction],
    gemm: GroupedGemm | None,
    num_chunks: int,
    cross_entropy: CrossEntropy,
    *,
    gradients: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Summed cross-entropy of each prediction [n], and, if asked for, the gradients of the scaled sum of all with
    respect to the weight and to each prediction's hidden states."""
    sums = torch.zeros(len(predictions), dtype=torch.float32, device=weight_VD.device)
    dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if gradients else None
    dhidden = [torch.empty_like(p.h_TD) for p in predictions] if gradients else []
    for i, (h_TD, labels_T, scale) in enumerate(predictions):
        rows = max(1, -(-len(h_TD) // num_chunks))
        for start in range(0, len(h_TD), rows):
            piece = slice(start, start + rows)
            into = None if dweight_VD is None else (dhidden[i][piece], dweight_VD)
            sums[i] += head_of_piece(weight_VD, h_TD[piece], labels_T[piece], scale, gemm, cross_entropy, into)
    if dweight_VD is None:
        return sums, []
    return sums, [dweight_VD.to(weight_VD.dtype), *dhidden]


def head_of_piece(
    weight_VD: Tensor,
    h_TD: Tensor,
    labels_T: Tensor,
    scale: Tensor,
    gemm: GroupedGemm | None,
    cross_entropy: CrossEntropy,
    into: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Summed cross-entropy of one piece; gradients go `into` (that of h, that of W so far, in fp32). A function of its
    own, so that nothing of the logits' size is left when the next piece begins."""
    logits_TV = F.linear(h_TD, weight_VD) if gemm is None else gemm.forward(h_TD, weight_VD)
    if into is None:
        return cross_entropy(logits_TV[None], labels_T[None])
    with torch.enable_grad():
        loss = cross_entropy(logits_TV.requires_grad_()[None], labels_T[None])
    (dlogits_TV,) = torch.autograd.grad(loss, logits_TV, scale)
    dh_TD, dweight_VD = into
    if gemm is None:
        torch.mm(dlogits_TV, weight_VD, out=dh_TD)
        add_product_(dweight_VD, dlogits_TV.T, h_TD)
    else:
        dh_TD.copy_(gemm.dgrad(dlogits_TV, weight_VD))
        dweight_VD += gemm.wgrad(dlogits_TV, h_TD)
    return loss.detach()


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in fp32 also where a and b are not."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
