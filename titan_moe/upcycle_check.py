"""Whether a mixture of experts can begin as a dense model. See config_check.py. No torch.

A token's K experts all compute MLP(x), so its layer gives (w_1 + ... + w_K) MLP(x): the dense model's where its routing
weights sum to 1, and nothing is added to them.
"""

from titan_moe.config import Config
from titan_moe.flavors import Flavor


def check(config: Config, flavor: Flavor) -> list[str]:
    """Why checkpoint.upcycle cannot give the dense model's loss, from the configuration alone."""
    if not config.checkpoint.upcycle:
        return []
    found, key = [], "checkpoint.upcycle = true"
    if not config.checkpoint.initial_load_path:
        found.append(f"{key}: needs a dense model, a Hugging Face folder in checkpoint.initial_load_path; name one")
    if flavor.attention == "mla":
        return [
            *found,
            f'{key}: model.name = "deepseek_v3" has latent attention, and a shared expert beside the K routed ones, so '
            "a token would get MLP(x) more than once: no dense model is like it. Dense models that one can begin from "
            'are Qwen3 (model.name = "qwen3"), Mistral and Llama ("mixtral")',
        ]
    if not flavor.route_norm:
        found.append(
            f"{key}: model.route_norm = false: the weights of the K = {flavor.top_k} experts that a token goes to, of "
            f"{flavor.num_experts}, do not sum to 1, so its output would be that sum times the dense model's; set "
            "route_norm = true"
        )
    if flavor.route_scale != 1:
        found.append(
            f"{key}: model.route_scale = {flavor.route_scale}: the weights of a token sum to {flavor.route_scale}, so "
            f"its output would be {flavor.route_scale} times the dense model's; set route_scale = 1"
        )
    return found


def no_dense_model(path: str) -> str:
    return (
        f"checkpoint.upcycle = true: initial_load_path = {path!r} is a checkpoint of this trainer, whose models have "
        "experts already; leave upcycle out, or name a Hugging Face folder of a dense model"
    )
