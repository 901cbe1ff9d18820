"""Which activations of a model offload.py can move: the blocks around which it looks, their inputs, and what their
attention takes and gives; experts mark their own (moe/). And what the metrics say of it."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.tools.logging import logger

from titan_moe.config import Config
from titan_moe.offload import Block, Forward, Offloader, leaves, offloaded
from titan_moe.recompute import mtp_blocks


def build_offloader(config: Config, device: torch.device) -> Offloader | None:
    """The one of this process, for all parts of the model; None if there is nothing to offload."""
    names = config.activation_offload.tensors
    return Offloader(names, device) if names else None


def attach(offloader: Offloader, model: nn.Module) -> None:
    """Offload activations of the model's blocks, those of multi-token prediction included."""
    layers = cast("dict[str, nn.Module]", model.layers)
    last: list[Forward] = []  # through this model
    for index, block in enumerate([*layers.values(), *(block for _, block in mtp_blocks(model))]):
        # A stage's input is kept by the pipeline, and that of a multi-token prediction block by what is before it.
        takes = index < len(layers) and (index > 0 or model.tok_embeddings is not None)
        block.forward = _around(offloader, block.forward, last, first=index == 0, takes_input=takes)
        _mark_attention(cast("nn.Module", block.attention))
    model.offloader = offloader  # type: ignore[assignment]


def _around(
    offloader: Offloader, forward: Callable, last: list[Forward], *, first: bool, takes_input: bool
) -> Callable:
    @wraps(forward)
    def offloading(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *args, **kwargs)
        if first:
            new = Forward([], [])
            for before in last:
                before.then.append(new)
            last[:] = [new]
        with offloader.scope_of(Block(last[0])):
            return forward(offloaded("layer_input", x) if takes_input else x, *args, **kwargs)

    return offloading


def _mark_attention(attention: nn.Module) -> None:
    """What the kernel takes and gives, whichever kernel and attention it is; and what the last projection takes, which
    may be another copy of what the kernel gives."""
    kernel, projection = cast("nn.Module", attention.inner_attention), cast("nn.Module", attention.wo)

    def takes(_module: nn.Module, args: tuple) -> tuple:
        return tuple(
            offloaded(name, _own(name, x)) for name, x in zip(("attn_q", "attn_k", "attn_v"), args, strict=True)
        )

    kernel.register_forward_pre_hook(takes)
    kernel.register_forward_hook(lambda _module, _args, out: offloaded("attn_out", out))
    projection.register_forward_pre_hook(lambda _module, args: (offloaded("attn_out", args[0]), *args[1:]))


def _own(name: str, tensor: Tensor) -> Tensor:
    """`tensor` with memory of its own, if it is to leave: latent attention's values are a view of keys and values, all
    of which would leave, and which would stay all the same if something else kept it."""
    if not leaves(name) or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone() if tensor.is_contiguous() else tensor.contiguous()


def statistics(parts: Sequence[nn.Module], steps: int) -> dict[str, float]:
    """What the metrics say of one of the last `steps` optimizer steps: the mean over all ranks, which take part."""
    offloader = cast("Offloader | None", getattr(parts[0], "offloader", None))
    if offloader is None:
        return {}
    mine = offloader.statistics()
    sums = torch.tensor([*mine.values()], dtype=torch.float64, device=offloader.device)
    dist.all_reduce(sums)
    means = dict(zip(mine, (sums / (steps * dist.get_world_size())).tolist(), strict=True))
    wait = means.pop("wait_s")
    if idle := [name for name, sent in means.items() if not sent]:
        listed = ", ".join(idle)
        logger.warning(
            f"activation_offload.tensors: no layer keeps {listed} for backward as it runs here: nothing is moved"
        )
    return {"offload/bytes": sum(means.values()), "offload/wait_s": wait}
