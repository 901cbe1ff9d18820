"""CPU attention gives what each packed document by itself would, in blocks of queries and on context ranks too."""

import math

import pytest
import torch

from titan_moe import attention

LENGTHS = [5, 1, 7, 3]  # of packed documents: 16 tokens
IN_ORDER = None
HEAD_TAIL = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11])  # of two ranks


@pytest.mark.parametrize("pad_from", [1, 1000])
@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize(
    ("order", "rank", "ranks"), [(IN_ORDER, 0, 1), (IN_ORDER, 1, 2), (HEAD_TAIL, 0, 2), (HEAD_TAIL, 1, 2)]
)
def test_it_equals_attention_inside_each_document(monkeypatch, pad_from, block, order, rank, ranks):
    """Forward and gradients in float64, value heads narrower than query heads, two sequences with other documents."""
    monkeypatch.setattr(attention, "PAD_FROM_LENGTH", pad_from)
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    heads, scale, packed = 2, 0.3, [LENGTHS, LENGTHS[::-1]]
    q, k, v = (torch.randn(2, 16, heads, width, dtype=torch.float64, requires_grad=True) for width in (6, 6, 4))
    positions_BL = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in packed])
    tokens = torch.arange(16) if order is None else order
    mine = tokens.chunk(ranks)[rank]

    masks = attention.documents(positions_BL, order, rank, ranks)
    out = attention.DenseAttention.Config().build()(
        q[:, mine], k[:, tokens], v[:, tokens], attention_masks=masks, scale=scale
    )

    expected = torch.zeros(2, 16, heads, 4, dtype=torch.float64)
    for b, lengths in enumerate(packed):
        start = 0
        for length in lengths:
            own = slice(start, start + length)
            scores = torch.einsum("lnh,mnh->nlm", q[b, own], k[b, own]) * scale
            scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
            expected[b, own] = torch.einsum("nlm,mnh->lnh", scores.softmax(-1), v[b, own])
            start += length
    torch.testing.assert_close(out, expected[:, mine])

    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), direction)
    for gradient, reference in zip(found, torch.autograd.grad(expected[:, mine], (q, k, v), direction), strict=True):
        torch.testing.assert_close(gradient, reference)


def test_a_document_that_began_in_the_sequence_before_goes_on():
    """Its positions do not begin at 0."""
    masks = attention.documents(torch.tensor([[7, 8, 9, 0, 1]]))
    assert masks.start_BL.tolist() == [[0, 0, 0, 3, 3]]
