"""Which routers Transformer Engine's fused kernel computes as ours does (moe/te_router.py). See config_check.py. No
torch.

The kernel has no switches for some of what a router may do:

    sigmoid   weights of more than one chosen expert are always divided by their sum; of one, never
    softmax   divided by their sum only by taking the softmax over the chosen experts alone, and then it chooses groups
              by logits, not by scores; it knows no bias
    groups    a group counts the sum of its best K / M scores, M being the groups that a token may use; ours, of its
              best model.scores_per_group
"""

from titan_moe.config import Config
from titan_moe.flavors import Flavor

CHOSEN = 'moe.router = "te"'
WAY_OUT = 'or choose moe.router = "torch"'


def check(config: Config, flavor: Flavor) -> list[str]:
    """Why the router of `config` is not one that TE can compute."""
    if config.moe.router != "te":
        return []
    found = []
    f, norm = flavor, f"model.route_norm = {str(flavor.route_norm).lower()}"
    if config.moe.force_balance != "none":
        found.append(
            f'{CHOSEN}: chooses by itself, but moe.force_balance = "{config.moe.force_balance}" replaces the choice; '
            f'set that to "none", {WAY_OUT}'
        )
    if f.score_func == "sigmoid" and f.route_norm != (f.top_k > 1):
        found.append(
            f"{CHOSEN}: divides sigmoid scores by their sum where top_k is more than 1, and only there, but "
            f"model.top_k = {f.top_k} and {norm}; change one, {WAY_OUT}"
        )
    if f.score_func == "softmax" and config.moe.load_balance_coeff:
        found.append(
            f'{CHOSEN}: has no bias for model.score_func = "softmax", but moe.load_balance_coeff = '
            f"{config.moe.load_balance_coeff}; set it to 0, {WAY_OUT}"
        )
    return found + (_groups(f, norm) if f.num_expert_groups > 1 else [])


def _groups(f: Flavor, norm: str) -> list[str]:
    K, M = f.top_k, f.num_limited_groups
    if f.score_func == "softmax" and f.route_norm:
        return [
            f'{CHOSEN}: with model.score_func = "softmax" and {norm} it would choose among model.num_expert_groups = '
            f"{f.num_expert_groups} groups by logits, not by scores; set route_norm or the groups otherwise, {WAY_OUT}"
        ]
    if M and f.scores_per_group * M != K:
        return [
            f"{CHOSEN}: counts a group by its best top_k / num_limited_groups scores, here {K} / {M}, where this model "
            f"takes its best {f.scores_per_group}; make model.top_k {f.scores_per_group} x model.num_limited_groups, "
            f"{WAY_OUT}"
        ]
    return []
