"""What moe.overlap asks of the rest of a configuration. See config_check.py. No torch."""

from collections.abc import Set

from titan_moe.config import Config
from titan_moe.flavors import Flavor
from titan_moe.mesh_check import EP, LOCAL, microbatch_size
from titan_moe.pipeline_check import MICROBATCH
from titan_moe.titan_dispatchers_check import IN_ONE_CALL


def check(config: Config, flavor: Flavor, unsound: Set[str] = frozenset(), *, accelerator: bool = False) -> list[str]:
    """What does not fit between moe.overlap and the rest, as far as it can be told without the keys that are
    `unsound`."""
    found, delay = [], config.debug.comm_delay_ns_per_byte
    if accelerator and delay > 0:
        found.append(
            f"debug.comm_delay_ns_per_byte = {delay}: makes the host sleep, which on an accelerator does not wait for "
            "transfers; it is for tests on CPUs: leave it out"
        )
    moe, overlap = config.moe, config.moe.overlap
    if overlap == "none":
        return found
    chosen = f'moe.overlap = "{overlap}"'
    if EP not in unsound and config.parallelism.expert_parallel_degree == 1:
        found.append(
            f"{chosen}: hides what experts on other ranks are sent, but parallelism.expert_parallel_degree = 1 sends "
            'nothing; choose "none", or a higher expert_parallel_degree'
        )
    if moe.dispatcher in IN_ONE_CALL:
        found.append(
            f'{chosen}: computes between the start and the end of a transfer, and moe.dispatcher = "{moe.dispatcher}" '
            'does both in one call; choose "none", or the dispatcher "dedup" or "alltoall"'
        )
    if overlap == "shared_expert" and flavor.num_shared_experts == 0:
        found.append(
            f"{chosen}: there is none, model.num_shared_experts = 0, so nothing would run beside dispatch; choose "
            '"half_batch" or "none"'
        )
    if overlap == "half_batch":
        found += _half_batch(config, chosen, unsound)
    return found


def _half_batch(config: Config, chosen: str, unsound: Set[str]) -> list[str]:
    found = []
    key = LOCAL if config.parallelism.pipeline_parallel_degree == 1 else MICROBATCH
    if not unsound & {LOCAL, MICROBATCH} and (size := microbatch_size(config)) < 2:
        found.append(
            f"{key} = {size}: {chosen} computes one half of a microbatch's sequences while the other half's tokens "
            'travel, and one sequence has no halves; make it at least 2, or choose "shared_expert" or "none"'
        )
    if config.moe.capacity_factor is not None:
        found.append(
            f"{chosen}: dispatches each half of a microbatch by itself, so moe.capacity_factor = "
            f"{config.moe.capacity_factor} would be a share of half of the tokens, and drop others than without; "
            'leave it out, or choose "shared_expert" or "none"'
        )
    return found
