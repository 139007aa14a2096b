"""Shares of the error and the ranks that they ask for."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_edgc.allocation import (
    ErrorShare,
    after_steps,
    allocate,
    capped,
    common_rank,
    elements,
    mean_rank,
    measured_share,
)
from hf_edgc.layout import Matrix


@given(st.floats(0.05, 0.999), st.floats(1e-20, 1e20), st.floats(0.0, 100.0), st.integers(1, 300))
def test_the_share_is_found_again_from_where_the_error_went(left, grad_square, start, steps):
    start *= grad_square
    square = start
    for _ in range(steps):
        square = left * (grad_square + square)
    assert after_steps(start, grad_square, left, steps) == pytest.approx(square, rel=1e-9)
    share = measured_share(3, grad_square, start, square, steps)
    # One rounding of the error moves the share by at most so much where the recursion hardly depends on it.
    assert share.left_at(3) == pytest.approx(left, rel=1e-6)


def test_a_steady_error_gives_its_formula_and_more_ranks_the_power_law():
    share = measured_share(4, 1.0, 5.0, 5.0, 20)
    assert share.left == pytest.approx(5.0 / 6.0) and share.error_square(4) == pytest.approx(5.0)
    assert share.left_at(8) == pytest.approx((5.0 / 6.0) ** 2)
    assert share.error_square(8) == pytest.approx((25 / 36) / (11 / 36))


@pytest.mark.parametrize(
    "numbers", [(0, 1.0, 0.0, 1.0, 5), (2, 1.0, 0.0, 1.0, 0), (2, math.nan, 0.0, 1.0, 5), (2, 1.0, 0.0, math.inf, 5),
                (2, 1.0, 0.0, 0.0, 5)]
)  # fmt: skip
def test_nothing_is_made_up(numbers):
    assert measured_share(*numbers) is None


def test_an_error_beyond_every_share_is_bounded():
    share = measured_share(2, 1.0, 0.0, 1e30, 5)
    assert math.isfinite(share.error_square(1)) and share.left < 1.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(2, 20), st.integers(2, 20), st.floats(0.1, 0.99), st.floats(0.01, 10)),
        min_size=2,
        max_size=3,
    ),
    st.floats(0.0, 1.0),
)
def test_greedy_is_as_good_as_every_other_choice_up_to_one_rank(rows, place):
    matrices = [Matrix(str(i), m, n, min(m, n, 6)) for i, (m, n, _, _) in enumerate(rows)]
    shares = [ErrorShare(2, left, grad) for _, _, left, grad in rows]
    low, high = (elements(matrices, capped(matrices, rank)) for rank in (1, 6))
    budget = low + place * (high - low)
    chosen = allocate(matrices, [2] * len(rows), shares, budget, 100)
    assert elements(matrices, chosen) <= budget

    def delay(ranks):
        return sum(m.dense_elements * share.delay(rank) for m, share, rank in zip(matrices, shares, ranks, strict=True))

    largest = max(matrix.elements_per_rank for matrix in matrices)
    smaller = [
        ranks
        for ranks in itertools.product(*(range(1, matrix.max_rank + 1) for matrix in matrices))
        if elements(matrices, ranks) <= max(low, budget - largest)
    ]
    assert delay(chosen) <= min(map(delay, smaller)) * (1 + 1e-9)


def test_the_step_limit_yields_to_the_budget_only():
    matrices = [Matrix("a", 100, 100, 40), Matrix("b", 100, 100, 40)]
    shares = [ErrorShare(10, 0.9, 1.0), ErrorShare(10, 0.1, 1.0)]
    assert allocate(matrices, [10, 10], shares, 4000, 4) == [14, 6]
    assert allocate(matrices, [10, 10], shares, 200 * 4, 4) == [3, 1], "6 each would be too many"
    assert allocate(matrices, [10, 10], shares, 200 * 70, 4) == [40, 30], "14 each would leave bytes"


def test_matrices_that_are_dense_or_not_measured_stay():
    matrices = [Matrix(name, 100, 100, 40) for name in "abc"]
    shares = [ErrorShare(10, 0.5, 1.0), None, ErrorShare(10, 0.5, 1.0)]
    assert allocate(matrices, [10, 7, 0], shares, 3000, 4) == [8, 7, 0]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 30)), min_size=1, max_size=6), st.floats(0.0, 40.0))
def test_the_common_rank_has_the_elements(sizes, rank):
    matrices = [Matrix(str(i), size, size, cap) for i, (size, cap) in enumerate(sizes)]
    count = elements(matrices, [min(rank, matrix.max_rank) for matrix in matrices])
    found = common_rank(matrices, count)
    assert elements(matrices, [min(found, matrix.max_rank) for matrix in matrices]) == pytest.approx(count)


def test_the_mean_rank_is_by_bytes_and_leaves_dense_matrices_out():
    matrices = [Matrix("a", 30, 70, 9), Matrix("b", 100, 200, 9), Matrix("c", 5, 5, 2)]
    assert mean_rank(matrices, [1, 5, 0]) == pytest.approx((1 * 100 + 5 * 300) / 400)
    assert mean_rank(matrices, [0, 0, 0]) == 0.0
