"""CPU attention gives what each packed document by itself would, in blocks of queries and on context ranks too."""

import math

import pytest
import torch

from titan_moe import attention

PACKED = [[5, 1, 7, 3], [3, 7, 1, 5]]  # lengths of the documents of two sequences: 16 tokens each
WHOLE, ONE_WHOLE = [[16], [16]], [[16], [4, 12]]
IN_ORDER = None
HEAD_TAIL = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11])  # of two ranks


@pytest.mark.parametrize("pad_from", [1, 1000])
@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("lengths", [PACKED, WHOLE, ONE_WHOLE])
@pytest.mark.parametrize(
    ("order", "rank", "ranks"), [(IN_ORDER, 0, 1), (IN_ORDER, 1, 2), (HEAD_TAIL, 0, 2), (HEAD_TAIL, 1, 2)]
)
def test_it_equals_attention_inside_each_document(monkeypatch, pad_from, block, lengths, order, rank, ranks):
    """Forward and gradients in float64, value heads narrower than query heads, two sequences with other documents."""
    monkeypatch.setattr(attention, "PAD_FROM_LENGTH", pad_from)
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    heads, scale = 2, 0.3
    q, k, v = (torch.randn(2, 16, heads, width, dtype=torch.float64, requires_grad=True) for width in (6, 6, 4))
    positions_BL = torch.stack([torch.cat([torch.arange(length) for length in each]) for each in lengths])
    tokens = torch.arange(16) if order is None else order
    mine = tokens.chunk(ranks)[rank]

    masks = attention.documents(positions_BL, order, rank, ranks)
    assert masks.causal == (len(lengths[0]) == len(lengths[1]) == 1 and ranks == 1 and order is None and block < 16)
    out = attention.DenseAttention.Config().build()(
        q[:, mine], k[:, tokens], v[:, tokens], attention_masks=masks, scale=scale
    )

    expected = torch.zeros(2, 16, heads, 4, dtype=torch.float64)
    for b, each in enumerate(lengths):
        start = 0
        for length in each:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_document_is_as_exact_without_a_mask(dtype):
    """Against float64, and against the blocks that longer sequences go in: at most 1.3 times their error."""
    torch.manual_seed(0)
    given = [torch.randn(1, 2048, 1, width, dtype=dtype) for width in (48, 48, 32, 32)]
    attend = attention.DenseAttention.Config().build()
    causal = attention.documents(torch.arange(2048)[None])
    assert causal.causal and not attention.documents(torch.arange(attention.CAUSAL_UP_TO_LENGTH + 1)[None]).causal

    def output_and_gradients(masks, dtype):
        q, k, v, direction = (x.detach().to(dtype).requires_grad_() for x in given)
        out = attend(q, k, v, attention_masks=masks)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), direction)]

    in_blocks = causal._replace(causal=False)
    exact = output_and_gradients(in_blocks, torch.float64)
    for found, usual, reference in zip(*(output_and_gradients(m, dtype) for m in (causal, in_blocks)), exact):
        error, usual_error = ((x.double() - reference).norm() / reference.norm() for x in (found, usual))
        assert error < 1.3 * usual_error
