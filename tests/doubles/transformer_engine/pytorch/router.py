"""TE's fused router, in torch.

Held to: fp32 logits (TE takes 16 bits too, our calls must not), contiguous and of at least one token; a float32 bias,
for sigmoid only; groups that divide the experts and a top_k that the used groups divide; a contiguous integer tensor
for the chosen experts.
"""

import enum

import torch


class RoutingMapFormat(enum.Enum):
    BYTEMAP = 0


def fused_topk_with_score_function(
    logits,
    topk,
    use_pre_softmax,
    num_groups,
    group_topk,
    scaling_factor,
    score_function,
    expert_bias,
    routing_map_format=RoutingMapFormat.BYTEMAP,
    topk_indices=None,
    qb_histogram=None,
    qb_bin_bounds=None,
    qb_histogram_mode=None,
):
    T, E = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and T > 0 and 0 < topk <= E
    assert score_function in ("sigmoid", "softmax")
    assert routing_map_format is RoutingMapFormat.BYTEMAP and qb_histogram is None
    assert topk_indices.shape == (T, topk) and topk_indices.dtype == torch.int64 and topk_indices.is_contiguous()
    if expert_bias is not None:
        assert score_function == "sigmoid" and expert_bias.dtype == torch.float32 and expert_bias.shape == (E,)
    if score_function == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1) if use_pre_softmax else logits
    biased = scores if expert_bias is None else scores + expert_bias
    if group_topk is not None:
        assert E % num_groups == 0 and topk % group_topk == 0
        grouped = biased.view(T, num_groups, -1)
        group_scores = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
        unused = torch.ones_like(group_scores, dtype=torch.bool)
        unused.scatter_(1, group_scores.topk(group_topk, dim=-1).indices, False)
        biased = grouped.masked_fill(unused[..., None], -torch.inf).view(T, E)
    values, chosen = biased.topk(topk, dim=-1)
    if expert_bias is not None:
        values = values - expert_bias[chosen]
    if score_function == "softmax" and not use_pre_softmax:
        values = values.softmax(-1)
    if score_function == "sigmoid" and topk > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    topk_indices.copy_(chosen)
    return torch.zeros_like(logits).scatter(1, chosen, values * (scaling_factor or 1.0)), topk_indices
