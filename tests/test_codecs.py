"""Laws that hold for every codec in the table, checked by driving one encoder a worker in lock step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_edgc.codecs import CODECS
from hf_edgc.codecs.low_rank import LowRank, resized
from hf_edgc.codecs.orthogonal import orthonormal_columns, unit_columns
from hf_edgc.feedback import ErrorFeedback

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest relative error of one rounding to the factors' type; float32 results add some products.
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def codecs(rank):
    """Every codec of the table, low_rank in each factor type."""
    for kind in CODECS.values():
        if kind is LowRank:
            yield from (LowRank(rank, dtype) for dtype in DTYPES.values())
        else:
            yield kind()


class Result:
    """What was decoded, multiplied out; ``share`` is what feedback is given."""

    def __init__(self, decoded, shape):
        self.mean, self.local = decoded.mean.write(torch.empty(shape)), decoded.local.write(torch.empty(shape))
        self.share, self.slot = decoded.local, decoded.slot


def exchange(codec, matrices, slots=None, seed=1):
    """One Result a worker, and the bytes each worker sent."""
    slots = slots or [{}] * len(matrices)
    encoders = [codec.encode(matrix, slot, seed) for matrix, slot in zip(matrices, slots, strict=True)]
    messages = [next(encoder) for encoder in encoders]
    sent, rounds = 0, 0
    while True:
        rounds += 1
        sent += sum(tensor.numel() * tensor.element_size() for tensor in messages[0])
        means = [torch.stack(parts).mean(0) for parts in zip(*messages, strict=True)]
        results, next_messages = [], []
        for encoder in encoders:
            try:
                next_messages.append(encoder.send([mean.clone() for mean in means]))
            except StopIteration as stop:
                results.append(Result(stop.value, matrices[0].shape))
        if results:
            assert rounds == codec.rounds
            return results, sent
        messages = next_messages


def factor_rounding(codec):
    return ROUNDING[getattr(codec, "factor_dtype", torch.float32)]


shapes = st.tuples(st.integers(2, 40), st.integers(2, 40))
cases = st.tuples(shapes, st.integers(1, 3), st.integers(0, 2**31), st.sampled_from([1e-30, 1e-6, 1.0, 4e4, 1e30]))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_conservation_what_was_not_decoded_is_the_error(case):
    """mean(new errors) + decoded mean == mean(gradient + old errors), over several steps of feedback."""
    (rows, cols), workers, seed, scale = case
    generator = torch.Generator().manual_seed(seed)
    for codec in codecs(min(2, rows, cols)):
        feedbacks = [ErrorFeedback() for _ in range(workers)]
        slots = [{}] * workers
        for step in range(3):
            gradients = [scale * torch.randn(rows, cols, generator=generator) for _ in range(workers)]
            matrices = [
                feedback.compensated("w", gradient.clone(), 1.0)
                for feedback, gradient in zip(feedbacks, gradients, strict=True)
            ]
            went_in = torch.stack([matrix.double() for matrix in matrices]).mean(0)
            size = max(matrix.abs().max().item() for matrix in matrices) * math.sqrt(rows * cols)
            results, _ = exchange(codec, matrices, slots, seed=step)
            for feedback, matrix, decoded in zip(feedbacks, matrices, results, strict=True):
                feedback.keep("w", matrix, decoded.share)
            none_left = torch.zeros(rows, cols)
            errors = torch.stack([feedback.errors.get("w", none_left).double() for feedback in feedbacks]).mean(0)
            # The share is decoded from what was sent; only the rounding of the averaging itself can be lost.
            difference = (errors + results[0].mean.double() - went_in).abs().max().item()
            assert difference <= 4 * factor_rounding(codec) * size
            slots = [decoded.slot for decoded in results]


@settings(max_examples=30, deadline=None)
@given(cases)
def test_workers_decode_the_same_and_shares_average_to_it(case):
    (rows, cols), workers, seed, scale = case
    generator = torch.Generator().manual_seed(seed)
    matrices = [scale * torch.randn(rows, cols, generator=generator) for _ in range(workers)]
    for codec in codecs(1):
        results, _ = exchange(codec, matrices)
        assert all(torch.equal(results[0].mean, decoded.mean) for decoded in results)
        shares = torch.stack([decoded.local.double() for decoded in results]).mean(0)
        size = max(matrix.double().norm().item() for matrix in matrices)
        assert (shares - results[0].mean).abs().max().item() <= 4 * factor_rounding(codec) * size


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(0, 2**31), st.sampled_from([2.0**-40, 0.125, 8.0, 2.0**40]))
def test_scaling_the_gradient_scales_the_result(shape, seed, factor):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for codec in codecs(min(2, *shape)):
        (one,), _ = exchange(codec, [matrix])
        (other,), _ = exchange(codec, [matrix * factor])
        torch.testing.assert_close(
            other.mean, one.mean * factor, rtol=0, atol=factor * matrix.abs().max().item() * 64 * factor_rounding(codec)
        )


@pytest.mark.parametrize("shape", [(7, 5), (1, 9), (16, 16)])
def test_zeros_in_zeros_out_and_finite(shape):
    for codec in codecs(1):
        (decoded,), _ = exchange(codec, [torch.zeros(shape)])
        assert decoded.mean.abs().max() == 0 and decoded.local.abs().max() == 0
        (decoded,), _ = exchange(codec, [torch.full(shape, 1e30)], [decoded.slot])
        assert decoded.mean.isfinite().all() and decoded.mean.abs().max() > 0


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 6))
def test_wire_bytes_is_what_is_sent(shape, rank):
    for codec in codecs(min(rank, *shape)):
        _, sent = exchange(codec, [torch.ones(shape)])
        assert sent == codec.wire_bytes(*shape, grad_itemsize=4)


def test_bfloat16_factors_are_half_of_float32():
    assert 2 * LowRank(8, torch.bfloat16).wire_bytes(64, 96, 4) == LowRank(8).wire_bytes(64, 96, 4) == 8 * 160 * 4


def test_zero_rows_and_columns_stay_exactly_zero():
    matrix = torch.randn(24, 17, generator=torch.Generator().manual_seed(0))
    matrix[5:9] = 0
    matrix[:, 3] = 0
    for codec in codecs(4):
        (decoded,), _ = exchange(codec, [matrix])
        assert decoded.mean[5:9].abs().max() == 0 and decoded.mean[:, 3].abs().max() == 0
        assert decoded.mean.abs().max() > 0


def test_full_rank_decodes_everything_and_low_rank_is_near_optimal():
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(30, 12, generator=generator)
    (exact,), _ = exchange(LowRank(12), [matrix])
    assert (exact.mean - matrix).norm() < 1e-5 * matrix.norm()
    slot, errors = {}, []
    for _ in range(30):  # power iteration on a constant matrix converges to its leading singular vectors
        (decoded,), _ = exchange(LowRank(3), [matrix], [slot])
        slot = decoded.slot
        errors.append((matrix - decoded.mean).norm().item())
    optimum = torch.linalg.svdvals(matrix)[3:].square().sum().sqrt().item()
    assert errors[-1] == pytest.approx(optimum, rel=1e-2) and errors[0] > errors[-1]


@pytest.mark.parametrize("before, after", [(2, 6), (6, 2), (4, 4)])
def test_a_rank_change_keeps_q(before, after):
    q = torch.randn(40, before, generator=torch.Generator().manual_seed(1))
    changed = resized(q, 40, after, seed=9, device=q.device)
    kept = min(before, after)
    assert changed.shape == (40, after)
    torch.testing.assert_close(changed[:, :kept], unit_columns(q)[:, :kept])
    torch.testing.assert_close(changed.norm(dim=0), torch.ones(after))
    # What was added is orthogonal to what was there, and fixed by the seed alone.
    assert (unit_columns(q).T @ changed[:, kept:]).abs().max() < 1e-5 if after > before else True
    assert torch.equal(changed, resized(q, 40, after, seed=9, device=q.device))
    if after > before:
        assert not torch.equal(changed, resized(q, 40, after, seed=10, device=q.device))


def test_dead_columns_of_q_are_revived():
    slot = {"q": torch.zeros(20, 3)}
    matrix = torch.randn(20, 20, generator=torch.Generator().manual_seed(2))
    (decoded,), _ = exchange(LowRank(3), [matrix], [slot])
    assert torch.linalg.matrix_rank(decoded.mean) == 3


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    exchange(LowRank(4), [torch.randn(9, 9, generator=torch.Generator().manual_seed(0))])
    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from([0.0, 1e-38, 1e-30, 1.0, 1e30]),
    st.sampled_from(["random", "repeated", "one column zero", "zero rows"]),
    st.integers(0, 2**31),
)
def test_orthonormal_columns(rows, rank, scale, kind, seed):
    rank = min(rank, rows)
    matrix = scale * torch.randn(rows, rank, generator=torch.Generator().manual_seed(seed))
    if kind == "repeated":
        matrix = matrix[:, :1].expand(rows, rank).clone()
    elif kind == "one column zero":
        matrix[:, 0] = 0
    elif kind == "zero rows":
        matrix[rows // 2 :] = 0
    basis = orthonormal_columns(matrix)
    assert basis.isfinite().all()
    gram = basis.T @ basis  # the identity, or a projection where columns were given up
    assert (gram @ gram - gram).abs().max() < 1e-4
    assert basis[(matrix == 0).all(dim=1)].abs().sum() == 0
    # Nothing of the input's column space is lost.
    unit = matrix / max(scale, 1e-38)
    torch.testing.assert_close(basis @ (basis.T @ unit), unit, rtol=0, atol=1e-4)
