"""Which matrix gets how many ranks: by measured delays of the gradient, under one budget of elements.

One step of error feedback leaves the share q of what it is given, E' = what is left of G + E, so that

    |E_t+1|^2 = q (|G|^2 + |E_t|^2),   in steady state   |E|^2 = |G|^2 q / (1 - q),

with gradient and old error as good as orthogonal. q is measured at the rank in use; a further rank takes the same share
of what is left again, q(r) = q^(r / r0). Both are models: predicted and measured norms are told in the step records.

q / (1 - q) = |E|^2 / |G|^2 is also the mean number of steps for which what a step adds waits in the errors. Ranks are
chosen for the smallest mean delay of all entries: an optimizer as Adam divides by the gradient's own scale, so that an
entry counts the same in a matrix with small gradients as in one with large gradients. The smallest sum of |E|^2 instead
gives nearly all ranks to the embedding, and trained no better than one rank for all.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_edgc.layout import Matrix

_MOST_LEFT = 1.0 - 1e-6
"""Largest q: with it errors reach 1000 gradient norms, where the watchdog has long given up."""


@dataclass(frozen=True)
class ErrorShare:
    """What was measured of one matrix: q at ``rank``, and |G|^2 (a worker's gradient, unscaled)."""

    rank: int
    left: float
    grad_square: float

    def left_at(self, rank: float) -> float:
        """Share q of gradient and error that a step at ``rank`` leaves."""
        return math.exp(math.log(self.left) * rank / self.rank)

    def error_square(self, rank: float) -> float:
        """|E|^2 in steady state at ``rank``."""
        return self.grad_square * self.delay(rank)

    def delay(self, rank: float) -> float:
        """Steps that a gradient waits in the errors at ``rank``, on average: q / (1 - q); 0 without gradient."""
        return 1.0 / math.expm1(-math.log(self.left) * rank / self.rank) if self.grad_square > 0.0 else 0.0


def after_steps(start_square: float, grad_square: float, left: float, steps: int) -> float:
    """|E|^2 after ``steps`` steps that each leave the share ``left`` (below 1), from ``start_square``."""
    kept = left**steps
    return start_square * kept + grad_square * left * (1.0 - kept) / (1.0 - left)


def measured_share(
    rank: int, grad_square: float, start_square: float, error_square: float, steps: int
) -> ErrorShare | None:
    """Share q that explains how the error of a matrix moved from ``start_square`` in ``steps`` steps at ``rank``.

    Returns:
        None if nothing can be said: no step, a matrix that is not compressed, a number that is not finite, a gradient
        but no error.
    """
    if steps < 1 or rank < 1 or not all(map(math.isfinite, (grad_square, start_square, error_square))):
        return None
    if grad_square <= 0.0:  # unused: no error to gain on, whatever the rank
        return ErrorShare(rank, 0.5, 0.0)
    if error_square <= 0.0:
        return None
    low, high = 0.0, _MOST_LEFT
    for _ in range(50):  # |E|^2 rises with q; 50 halvings are more than float needs
        middle = 0.5 * (low + high)
        if after_steps(start_square, grad_square, middle, steps) < error_square:
            low = middle
        else:
            high = middle
    return ErrorShare(rank, min(max(high, 1e-12), _MOST_LEFT), grad_square)


def allocate(
    matrices: Sequence[Matrix],
    ranks: Sequence[int],
    shares: Sequence[ErrorShare | None],
    budget_elements: float,
    rank_step: int,
) -> list[int]:
    """Ranks with the smallest mean delay of all entries whose factors have at most ``budget_elements``.

    Greedy: one rank at a time to the matrix where the entries' delay falls most for each element sent; optimal up to
    the last rank, since the delay is convex in the rank. Ranks stay in [1, max_rank of the matrix]. One without
    gradient gets what others leave.

    Args:
        matrices: the matrices.
        ranks: their ranks now; 0 is a matrix that is sent dense, and stays.
        shares: what was measured of each; one without a measurement keeps its rank.
        budget_elements: elements of all factors.
        rank_step: largest change of a rank, unless the budget can't be met with it.
    """
    lowest, highest = _bounds(matrices, ranks, shares, rank_step)
    if not elements(matrices, lowest) <= budget_elements <= elements(matrices, highest):
        lowest, highest = _bounds(matrices, ranks, shares, max(matrix.max_rank for matrix in matrices))
    chosen = list(lowest)
    left = budget_elements - elements(matrices, chosen)
    heap: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        share, rank = shares[index], chosen[index]
        if share is not None and rank < highest[index]:
            matrix = matrices[index]
            gain = matrix.dense_elements * (share.delay(rank) - share.delay(rank + 1))
            heapq.heappush(heap, (-gain / matrix.elements_per_rank, index))

    for index in range(len(matrices)):
        offer(index)
    while heap:
        _, index = heapq.heappop(heap)
        if matrices[index].elements_per_rank <= left:
            chosen[index] += 1
            left -= matrices[index].elements_per_rank
            offer(index)
    return chosen


def _bounds(
    matrices: Sequence[Matrix], ranks: Sequence[int], shares: Sequence[ErrorShare | None], rank_step: int
) -> tuple[list[int], list[int]]:
    """Lowest and highest rank of each matrix that is at most ``rank_step`` away."""
    lowest, highest = [], []
    for matrix, rank, share in zip(matrices, ranks, shares, strict=True):
        step = rank_step if rank > 0 and share is not None else 0
        lowest.append(max(min(1, rank), rank - step))
        highest.append(min(matrix.max_rank, rank + step))
    return lowest, highest


def common_rank(matrices: Sequence[Matrix], budget_elements: float) -> float:
    """Rank, a real number, at which all matrices together, each at most at its own maximum, have so many elements."""
    left, free, floor = budget_elements, float(sum(matrix.elements_per_rank for matrix in matrices)), 0.0
    for matrix in sorted(matrices, key=lambda matrix: matrix.max_rank):
        if left <= (matrix.max_rank - floor) * free:
            return floor + left / free
        left -= (matrix.max_rank - floor) * free
        floor, free = float(matrix.max_rank), free - matrix.elements_per_rank
    return floor


def capped(matrices: Sequence[Matrix], rank: float) -> list[int]:
    """The integer rank below or at ``rank`` for each matrix, or its maximum."""
    return [min(int(rank), matrix.max_rank) for matrix in matrices]


def elements(matrices: Sequence[Matrix], ranks: Sequence[float]) -> float:
    """Elements of the factors of all matrices."""
    return math.fsum(rank * matrix.elements_per_rank for matrix, rank in zip(matrices, ranks, strict=True))


def mean_rank(matrices: Sequence[Matrix], ranks: Sequence[int]) -> float:
    """Mean rank of the matrices that are compressed, weighted by the elements of a rank; 0 if none is."""
    weight = sum(matrix.elements_per_rank for matrix, rank in zip(matrices, ranks, strict=True) if rank)
    return elements(matrices, ranks) / weight if weight else 0.0
