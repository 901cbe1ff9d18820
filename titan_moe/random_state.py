"""Random numbers of a training step: they follow from (debug.seed, step) and from nothing else.

Every step seeds torch's default generators anew, on the host and on the device. So there is no generator's state to
save, nor one to lose: a run that goes on from a checkpoint draws in step n what the uninterrupted run drew in step n,
whatever number of ranks it goes on with, however often it validated before, and however often a step was tried again.
All ranks draw alike, as they do at start-up.

What draws: forced random routing (`moe.force_balance`), and whatever an edit adds. Weights (`model.py`) and the order
of the data (`packing.py`) have seeds of their own.
"""

import titan_moe.runtime  # noqa: F401 - before torchtitan

import torch

from titan_moe.sources.piece import hashed_bytes


def seed_step(seed: int, step: int) -> None:
    """Seed the default generators of host and devices for an optimizer step. Waits for no device."""
    torch.manual_seed(int.from_bytes(hashed_bytes(8, "step", seed, step), "little"))


def states(device: torch.device) -> list[torch.Tensor]:
    """Where the generators stand, host's first; both states live on the host."""
    on_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state()]
    return [torch.get_rng_state(), *on_device]


def turn_back(device: torch.device, to: list[torch.Tensor]) -> None:
    """Put the generators where `states` found them."""
    torch.set_rng_state(to[0])
    for state in to[1:]:
        torch.get_device_module(device).set_rng_state(state)
