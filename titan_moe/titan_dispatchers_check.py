"""What the dispatchers on DeepEP and HybridEP cannot do (moe/titan_dispatchers.py), as far as a configuration shows it.
See config_check.py. No torch.

The limits are those that the libraries assert. Whether they are installed is asked where a run starts: launch.py before
the processes, the dispatcher itself in each of them.
"""

import importlib.util

from titan_moe.config import Config
from titan_moe.config_print import literal
from titan_moe.flavors import Flavor

PACKAGE = "deep_ep"
LIBRARIES = ("deepep", "hybridep")
IN_ONE_CALL = ("te_ep", *LIBRARIES)
"""Dispatchers on libraries, NCCL EP's too: those send and receive in one call, and keep buffers of their own"""
ROW_BYTES = 16  # DeepEP copies rows in pieces of so many bytes
HYBRIDEP_WIDTH = 512
HYBRIDEP_EXPERTS = 4  # of all ranks of an NVLink domain, in multiples of which HybridEP reads its routing map


def check(config: Config, flavor: Flavor) -> list[str]:
    """What does not fit between moe.dispatcher = "deepep" or "hybridep" and the rest."""
    name, found = config.moe.dispatcher, []
    if name not in LIBRARIES:
        return found
    chosen, ep = f'moe.dispatcher = "{name}"', config.parallelism.expert_parallel_degree
    dtype, factor = config.training.mixed_precision_param, config.moe.capacity_factor
    if dtype != "bfloat16":
        found.append(
            f'{chosen}: moves bfloat16 only, but training.mixed_precision_param = "{dtype}"; set that to "bfloat16", '
            'or choose "dedup"'
        )
    if factor is not None:
        found.append(f'{chosen}: drops nothing, but moe.capacity_factor = {factor}; leave that out, or choose "dedup"')
    if name == "deepep" and config.moe.recv_buffer != "exact":
        found.append(
            f"{chosen}: has a fixed number of rows only in inference, but moe.recv_buffer = "
            f'{literal(config.moe.recv_buffer)}; set that to "exact", or choose "hybridep" or "dedup"'
        )
    if config.moe.redispatch and config.activation_checkpoint.mode != "none":
        found.append(
            f"{chosen}: plans when it sends tokens, so that they cannot be sent again without planning again, as "
            'moe.redispatch = true asks; set it to false, or choose "dedup"'
        )
    if name == "deepep" and flavor.dim * 2 % ROW_BYTES:
        found.append(
            f"{chosen}: a row of model.dim = {flavor.dim} has {flavor.dim * 2} bytes, which {ROW_BYTES} do not divide; "
            f'make model.dim a multiple of {ROW_BYTES // 2}, or choose "dedup"'
        )
    if name == "hybridep" and flavor.dim % HYBRIDEP_WIDTH:
        found.append(
            f"{chosen}: model.dim = {flavor.dim} is no multiple of {HYBRIDEP_WIDTH}, which the library asks for; "
            'change it, or choose "deepep" or "dedup"'
        )
    if name == "hybridep" and ep > 1 and (ep % 2 or flavor.num_experts % HYBRIDEP_EXPERTS):
        found.append(
            f"{chosen}: needs an even expert_parallel_degree and experts in multiples of {HYBRIDEP_EXPERTS}, but has "
            f'{ep} ranks and model.num_experts = {flavor.num_experts}; change them, or choose "deepep" or "dedup"'
        )
    return found


def missing(config: Config) -> list[str]:
    """That the library is not installed here, said without importing it."""
    if config.moe.dispatcher not in LIBRARIES or importlib.util.find_spec(PACKAGE) is not None:
        return []
    return [
        f'moe.dispatcher = "{config.moe.dispatcher}": needs the package {PACKAGE}, which is not installed here; build '
        'it from github.com/deepseek-ai/DeepEP, for "hybridep" from its branch hybrid-ep, or choose "dedup"'
    ]
