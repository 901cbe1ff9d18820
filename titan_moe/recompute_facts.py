"""What activation checkpointing does to a run, as numbers and sentences: for checks, report and planner. No torch.

Bytes are per block and microbatch, on a GPU, where norms and attention are fused kernels.

Shape letters: T tokens of one rank, D model width, N heads, H head width, F hidden width.
"""

from collections.abc import Collection, Sequence

from titan_moe.flavors import Flavor


def problem(mode: str, recompute: Sequence[str], compiles_model: bool) -> str | None:
    """Why this section of the configuration cannot run, or None. Every mode and part runs under every schedule."""
    listed = ", ".join(f'"{part}"' for part in recompute)
    if recompute and mode != "none":
        return (
            f'activation_checkpoint.recompute = [{listed}]: names what mode "none" recomputes, but mode = "{mode}" '
            'recomputes by its own rule; set mode = "none" or leave the list empty'
        )
    if recompute and compiles_model:
        return (
            f"activation_checkpoint.recompute = [{listed}]: needs to see what eager code keeps for backward, but "
            "torch.compile decides that by itself inside what it compiles; set compile.enable = false or leave the "
            "list empty"
        )
    return None


def absent(flavor: Flavor, recompute: Sequence[str]) -> str | None:
    """What is wrong with naming parts that a block of the model does not have, or None."""
    missing = {
        "mla_up_proj": flavor.attention != "mla",
        "swiglu": not (flavor.n_dense_layers or flavor.num_shared_experts),
        "shared_expert": not flavor.num_shared_experts,
    }
    named = [part for part in recompute if missing.get(part)]
    if not named:
        return None
    listed = ", ".join(f'"{part}"' for part in recompute)
    return (
        f"activation_checkpoint.recompute = [{listed}]: this model has no {' and no '.join(named)} that could be made "
        "again; leave out what is not there"
    )


def saved_bytes(
    flavor: Flavor, tokens: int, itemsize: int, parts: Collection[str], *, moe: bool = True, tensor: int = 1
) -> int:
    """How many bytes less one block keeps, `moe` or dense, when `parts` are made again in backward: for `tokens` tokens
    of a rank, activations of `itemsize` bytes, `tensor` tensor-parallel ranks."""
    f, numbers, router_copy = flavor, 0, 0
    if "norms" in parts:
        numbers += f.q_lora_rank + f.kv_lora_rank
        if tensor == 1:  # else they are gathered, and the gathered copy is what is kept
            numbers += 2 * f.dim
            router_copy = 4 * f.dim if moe and itemsize < 4 else 0
    if "mla_up_proj" in parts:
        # v is a view of k's and v's common projection, which it keeps whole.
        head = 2 * (f.qk_nope_head_dim + f.qk_rope_head_dim) + f.qk_nope_head_dim + f.v_head_dim
        numbers += f.n_heads * head // tensor
    hidden = f.num_shared_experts * f.moe_hidden_dim if moe else f.dense_hidden_dim
    if moe and "shared_expert" in parts:
        numbers += 4 * hidden // tensor  # gate, up, silu(gate), silu(gate) * up
    elif "swiglu" in parts:
        numbers += 2 * hidden // tensor
    return tokens * (numbers * itemsize + router_copy)
