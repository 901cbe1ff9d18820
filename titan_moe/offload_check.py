"""What activation offload can be asked for, and how much it moves, as numbers and sentences. See offload.py. No torch.

Bytes are per layer and microbatch on a GPU, in the type that is computed in.

Shape letters: T tokens of one rank, D model width, N heads, H head width, K top-k.
"""

from titan_moe.config import Config
from titan_moe.flavors import Flavor
from titan_moe.mesh_check import microbatch_size, region_tokens

MADE_AGAIN = {"mla_up_proj": ("attn_q", "attn_k", "attn_v")}
"""By part of activation_checkpoint.recompute, what it makes again"""

KEPT = {"selective": ("layer_input", "attn_out", "moe_expert_input"), "full": ("layer_input", "moe_expert_input")}
"""By activation_checkpoint.mode, what it keeps of what can be offloaded"""


def check(config: Config) -> list[str]:
    """What does not fit together between activation_offload.tensors and the rest."""
    names: list[str] = list(dict.fromkeys(config.activation_offload.tensors))
    if not names:
        return []
    start = f"activation_offload.tensors = {_listed(names)}: "
    return [start + why for why in (*_recomputed(config, names), *_not_there(config, names))]


def _recomputed(config: Config, names: list[str]) -> list[str]:
    chosen, found = config.activation_checkpoint, []
    kept = KEPT.get(chosen.mode)
    if kept is not None and (again := [name for name in names if name not in kept]):
        found.append(
            f"{_and(again)} cannot be moved away and made again, and activation_checkpoint.mode = "
            f'"{chosen.mode}" makes again all but {_and(kept)}; leave the others out, or set mode = "none"'
        )
    for part in chosen.recompute if chosen.mode == "none" else []:
        if again := [name for name in names if name in MADE_AGAIN.get(part, ())]:
            found.append(
                f'{_and(again)} cannot be moved away and made again, as "{part}" in activation_checkpoint.recompute '
                "does; name it in one of the two"
            )
    if "moe_expert_input" in names and chosen.mode != "none" and config.moe.redispatch:
        found.append(
            "moe_expert_input is not kept with moe.redispatch = true, which sends the rows again; choose one of the two"
        )
    return found


def _not_there(config: Config, names: list[str]) -> list[str]:
    found, p = [], config.parallelism
    if "moe_expert_input" in names and p.expert_parallel_degree == 1:
        found.append(
            "moe_expert_input is not kept with parallelism.expert_parallel_degree = 1, where backward gathers the rows "
            "from their tokens again; leave it out"
        )
    gathered = [name for name in names if name in ("attn_k", "attn_v")]
    if gathered and p.context_parallel_degree > 1:
        found.append(
            f"the kernel keeps keys and values gathered from all context ranks, not this rank's {_and(gathered)}, with "
            f"parallelism.context_parallel_degree = {p.context_parallel_degree}; leave them out"
        )
    if config.compile.enable and "model" in config.compile.components:
        found.append(
            "needs to see what eager code keeps for backward, but torch.compile decides that by itself inside what it "
            'compiles; set compile.enable = false, or compile.components = ["loss"]'
        )
    return found


def offloaded_bytes(config: Config, flavor: Flavor, itemsize: int, *, moe: bool) -> dict[str, int]:
    """Bytes that one layer, `moe` or dense, sends to the host for one microbatch of a rank, by name; of expert inputs
    those of an even load, none of them shared between a rank's experts and none of them quantized. `itemsize` of the
    type computed in."""
    f, p = flavor, config.parallelism
    tokens = microbatch_size(config) * config.training.seq_len // p.context_parallel_degree
    query = f.qk_nope_head_dim + f.qk_rope_head_dim
    heads = tokens * f.n_heads // p.tensor_parallel_degree
    shared = tokens * f.num_kv_heads // p.tensor_parallel_degree if f.attention == "gqa" else heads
    numbers = {
        "layer_input": tokens * f.dim // p.tensor_parallel_degree,
        "attn_q": heads * query,
        "attn_k": shared * query,
        "attn_v": shared * f.v_head_dim,
        "attn_out": heads * f.v_head_dim,
        "moe_expert_input": region_tokens(config) * f.top_k * f.dim if moe else 0,
    }
    return {name: numbers[name] * itemsize for name in dict.fromkeys(config.activation_offload.tensors)}


def _listed(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _and(names: list[str] | tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
