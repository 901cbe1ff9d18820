"""Model FLOPs per token: what a step's arithmetic is counted as, and TFLOPS and MFU are made of.

Forward and backward are 6 FLOPs per multiply-add (2 forward, 4 backward). A product with a weight of n elements costs a
token 6 n; attention over a sequence of s costs it 6 s times the widths of a query and of a value head, times the heads.
Two conventions differ in the attention alone:

- causal (Megatron): a token sees half of the sequence on average, s/2;
- full (torchtitan, older MaxText): all of it. For DeepSeek-V3 at 4,096 tokens the total is 12 % higher, for the same
  speed: that is why this planner shows tokens per second first.

Neither counts norms, softmax, embedding, permutation, quantization or anything computed twice, so recompute lowers MFU;
nor the router (torchtitan does: 0.3 %). Multi-token prediction (MTP) counts when it trains: one more layer and one more
head per depth, and the projection that joins two hidden states.

Source: Megatron-LM's num_floating_point_operations, and the TFLOPS of published runs, which divide by their tokens/s to
within 0.5 % (tests/plan/test_flops.py). Imports no torch.
"""

from titan_moe.flavors import Flavor

FLOPS_PER_MULTIPLY_ADD = 6  # 2 in forward; backward computes two products of the same size


def per_token(flavor: Flavor, seq_len: int, *, num_mtp_layers: int, causal: bool = True) -> dict[str, float]:
    """FLOPs of one token's forward and backward by term, in sequences of `seq_len` tokens. Their sum is the total.

    `num_mtp_layers` is given rather than taken from the flavor, because published figures leave MTP out or in.
    """
    f = flavor
    layers = f.n_layers + num_mtp_layers
    moe_layers = layers - f.n_dense_layers
    macs = {
        **{name: layers * each for name, each in _attention(f).items()},
        "core attention": layers * seq_len * core_attention_width(f) / (2 if causal else 1),
        "dense MLP": 3 * f.dim * f.dense_hidden_dim * f.n_dense_layers,
        "routed experts": 3 * f.dim * f.moe_hidden_dim * f.top_k * moe_layers,
        "shared experts": 3 * f.dim * f.moe_hidden_dim * f.num_shared_experts * moe_layers,
        # Per depth: two norms and a scale (3 D), and the projection of two concatenated hidden states, 2D x D.
        "MTP projection": num_mtp_layers * (3 * f.dim + 2 * f.dim**2),
        "logits": f.dim * f.vocab_size * (1 + num_mtp_layers),
    }
    return {name: FLOPS_PER_MULTIPLY_ADD * float(each) for name, each in macs.items()}


def of_layer(flavor: Flavor, seq_len: int, *, dense: bool) -> float:
    """FLOPs of one token's forward and backward through one layer, attention counted as causal."""
    f = flavor
    hidden = f.dense_hidden_dim if dense else f.moe_hidden_dim * (f.top_k + f.num_shared_experts)
    macs = sum(_attention(f).values()) + seq_len * core_attention_width(f) / 2 + 3 * f.dim * hidden
    return FLOPS_PER_MULTIPLY_ADD * macs


def core_attention_width(flavor: Flavor) -> int:
    """Multiply-adds of one (query, key) pair over all heads: a score and a weighted sum of values."""
    return flavor.n_heads * (flavor.qk_nope_head_dim + flavor.qk_rope_head_dim + flavor.v_head_dim)


def _attention(f: Flavor) -> dict[str, int]:
    """Multiply-adds of one token in one layer's attention projections."""
    qk = f.qk_nope_head_dim + f.qk_rope_head_dim
    full_query = f.dim * f.n_heads * qk
    out = f.n_heads * f.v_head_dim * f.dim
    if f.attention == "gqa":
        return {
            "attention q": full_query,
            "attention kv": f.dim * f.num_kv_heads * (qk + f.v_head_dim),
            "attention out": out,
        }
    # The +1 is the norm on the compressed vector, the one norm that Megatron counts.
    low_rank_query = f.q_lora_rank * (f.dim + f.n_heads * qk + 1)
    expanded = f.n_heads * (f.qk_nope_head_dim + f.v_head_dim)
    return {
        "attention q": low_rank_query if f.q_lora_rank else full_query,
        "attention kv": f.kv_lora_rank * (f.dim + expanded + 1) + f.dim * f.qk_rope_head_dim,
        "attention out": out,
    }
