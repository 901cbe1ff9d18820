"""Whole runs with `moe.dispatcher = "te_ep"` and `moe.experts = "te"`, over doubles of Transformer Engine, against the
same runs on the portable backends.

Both compute in bfloat16 and round at different places, so they agree as far as its 8 bits go. The doubles hold the run
to the rules of NCCL EP: one set-up, buffers in the same order on all ranks, the communicator given back in time.
"""

import pytest

KERNELS = ("prepare", "dispatch", "combine", "dispatch_bwd", "combine_bwd")


@pytest.mark.parametrize(
    ("ranks", "name", "reference"),
    [(2, "te_ep", "uninterrupted"), pytest.param(4, "pp2_te_ep", "pp2_ep2_bf16", marks=pytest.mark.slow)],
)
def test_the_curve_is_that_of_the_portable_backends(outcome, ranks, name, reference, report):
    """And each parameter's gradient at step 1."""
    losses, expected = outcome(ranks, name).losses, outcome(ranks, reference).losses[:3]
    gradients, wanted = (outcome(ranks, case).step1["gradients"] for case in (name, reference))
    differences = [abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True)]
    errors = {key: ((gradients[key] - grad).norm() / grad.norm()).item() for key, grad in wanted.items()}
    parameter, error = max(errors.items(), key=lambda item: item[1])
    report(
        f"{name} against {reference}, bf16: losses differ by {max(differences):.1e}; largest gradient difference "
        f"{error:.1e} of the norm ({parameter})"
    )
    assert max(differences) < 2**-12
    assert error < 2**-7


@pytest.mark.slow
def test_low_precision_is_near_to_the_emulated_one(outcome, report):
    """mxfp8 in experts and linear layers, by Transformer Engine's quantizers and GEMMs. The emulation rounds at other
    places, which moves a few numbers to their neighbour in FP8: less than what FP8 itself does, 3 % of a product."""
    losses, expected = (outcome(2, name).losses for name in ("te_mxfp8", "emulated_mxfp8"))
    gradients, wanted = (outcome(2, name).step1["gradients"] for name in ("te_mxfp8", "emulated_mxfp8"))
    errors = {key: ((gradients[key] - grad).norm() / grad.norm()).item() for key, grad in wanted.items()}
    difference = max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))
    parameter, error = max(errors.items(), key=lambda item: item[1])
    report(
        f"te_mxfp8 against emulated_mxfp8: losses differ by {difference:.1e}; largest gradient difference {error:.1e} "
        f"of the norm ({parameter})"
    )
    assert difference < 2**-12
    assert error < 2**-6


def test_recompute_neither_plans_nor_sends(outcome):
    """Selective: each kernel runs once per MoE layer and microbatch, which are two and two."""
    assert outcome(2, "te_ep").step1["kernels"] == [{"initialize": 1} | dict.fromkeys(KERNELS, 4)] * 2


def test_an_overflow_is_repeated_with_larger_buffers(outcome):
    """Step 1 overflows at the mean number of rows: NCCL EP is set up anew and the step runs again. The curve has every
    bit of that of exact sizes."""
    exact, static = outcome(2, "te_ep"), outcome(2, "te_ep_static")
    twice = {"initialize": 2, "finalize": 1} | dict.fromkeys(KERNELS, 8)
    assert static.step1["kernels"] == [twice] * 2
    assert static.losses == exact.losses
    gradients, expected = static.step1["gradients"], exact.step1["gradients"]
    assert all(gradients[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_a_split_backward_with_redispatch_sends_by_the_same_plans(outcome):
    """Both MoE layers are on the second pipeline rank, with four microbatches in flight, and one without content, which
    torch learns shapes from. Each is planned once; both halves of backward recompute a block and send its rows again,
    where the one without content has one half."""
    once, again = 2 * (4 + 1), 2 * (2 * 4 + 1)
    expected = {"initialize": 1} | dict.fromkeys(KERNELS, once) | {"dispatch": once + again}
    assert outcome(4, "pp2_te_ep").step1["kernels"] == [{}, {}, expected, expected]
