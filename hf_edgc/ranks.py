"""The ranks: how many bytes the next steps may have, and which matrix gets them."""

import math
from collections.abc import Sequence

from hf_edgc.allocation import after_steps, allocate, capped, common_rank, elements, measured_share
from hf_edgc.budget import Budget
from hf_edgc.config import EDGCConfig
from hf_edgc.error_rule import spending_weight, target_rank, weighted_entropy
from hf_edgc.layout import Matrix
from hf_edgc.progress import Progress
from hf_edgc.schedule import expected_rates

_MOST_ABOVE = 1.15
"""A window of a twentieth of the run that sends 15 percent too much takes 0.75 percent of what the others have."""


class RankDecision:
    """Decides ranks at the ends of windows; all that it remembers is in the ``Progress`` it is given and changes.

    Differs from the paper in that the target of the error rule always refers to the first full window under
    compression instead of the previous one, so that step limit and clamps lose no memory.
    """

    def __init__(
        self, config: EDGCConfig, matrices: Sequence[Matrix], window_steps: int, budget: Budget | None
    ) -> None:
        """Decide every ``window_steps`` steps, by the error rule or, with a ``budget``, to meet it."""
        self._config = config
        self._matrices = matrices
        self._window_steps = window_steps
        # Where errors must be measured right at the end of a window, it lasts until they are.
        self._window_in_effect = config.entropy_every * math.ceil(window_steps / config.entropy_every)
        self._budget = budget
        self._per_tensor = config.allocation == "per_tensor"

    def start(self, progress: Progress) -> None:
        """Choose the ranks of the first compressed step, when nothing is measured yet."""
        if self._budget is not None and progress.step < self._budget.total_steps:
            allowed = self._flat_allowance(self._budget, progress)
            progress.ranks = self._equal_ranks(allowed)
            progress.rank = round(common_rank(self._matrices, allowed))
        else:
            progress.rank = self._config.start_rank
            progress.ranks = capped(self._matrices, progress.rank)

    def after_step(self, progress: Progress) -> None:
        """Decide, if a window is over; in the last window of a budget, settle it step by step."""
        if self._is_due(progress):
            self._end_window(progress)
        elif self._budget is not None and 0 < self._budget.total_steps - progress.step <= self._window_steps:
            # With one decision for the whole window, what one rank costs would be all that is left or missing.
            self._share_out(progress, self._flat_allowance(self._budget, progress))

    def predicted_error_norm(self, progress: Progress) -> float | None:
        """Norm of all errors before the current step; a matrix that was not measured counts as it was."""
        if not progress.shares:
            return None
        steps, squares = progress.step - progress.ranks_since, []
        for matrix, rank in zip(self._matrices, progress.ranks, strict=True):
            start, share = progress.start_squares.get(matrix.name, 0.0), progress.share_of(matrix)
            known = share is not None and rank > 0
            squares.append(
                after_steps(start, share.grad_square, share.left_at(rank), steps) if share and known else start
            )
        return math.sqrt(math.fsum(squares))

    def _is_due(self, progress: Progress) -> bool:
        if progress.window_position < self._window_steps or not progress.window:
            return False
        # Shares are of errors that these ranks have left, and the later the nearer to what the next ranks will meet.
        measured_step = progress.window[-1]["step"]
        return not self._per_tensor or measured_step == progress.step - 1 > progress.ranks_since

    def _end_window(self, progress: Progress) -> None:
        config, matrices = self._config, self._matrices
        entropies = _finite_means([row["entropies"] for row in progress.window])
        if progress.reference_entropies is None:
            progress.reference_entropies, progress.reference_rank = entropies, progress.rank
        if progress.learning_rate is not None:
            progress.rates.append([progress.window[-1]["step"], progress.learning_rate])
        self._measure_shares(progress)
        if self._budget is None:
            reference = progress.reference_entropies
            progress.target_rank = target_rank(
                config, matrices, progress.reference_rank, reference, entropies, progress.lr_ratio
            )
            if progress.target_rank is not None:
                progress.rank = self._stepped(progress.target_rank, progress)
            allowed = elements(matrices, capped(matrices, progress.rank))
        else:
            allowed = self._allowance(self._budget, progress, entropies)
        self._share_out(progress, allowed)
        progress.ranks_since = progress.step
        progress.begin_window()

    def _allowance(self, budget: Budget, progress: Progress, entropies: Sequence[float]) -> float:
        """Elements of a step in the next window, by the budget; notes the rank that has them."""
        if progress.step >= budget.total_steps:  # the run goes on beyond the end that it was given
            return elements(self._matrices, progress.ranks)
        mean, rise = weighted_entropy(self._matrices, entropies), 0.0
        if mean is not None:
            progress.entropy_sum += mean
            progress.entropy_windows += 1
            rise = mean - progress.entropy_sum / progress.entropy_windows
        peak = progress.peak_learning_rate
        ratios = [[step, rate / peak] for step, rate in progress.rates if peak > 0.0] or [[0.0, 1.0]]

        def weights(steps: Sequence[float]) -> list[float]:
            rates = expected_rates(ratios, progress.peak_step, budget.total_steps, steps)
            first, *later = [spending_weight(self._config, rate) for rate in rates]
            return [first * spending_weight(self._config, 1.0, rise), *later]

        allowed = budget.elements_for(progress.sent_bytes, progress.step, self._window_in_effect, weights)
        progress.target_rank = common_rank(self._matrices, allowed)
        progress.rank = round(progress.target_rank)
        return allowed

    def _flat_allowance(self, budget: Budget, progress: Progress) -> float:
        """Elements of each step that is left, all alike."""
        return budget.elements_for(progress.sent_bytes, progress.step, 1, lambda steps: [1.0] * len(steps))

    def _share_out(self, progress: Progress, allowed: float) -> None:
        """Choose ranks with ``allowed`` elements, or as near as can be."""
        shares = [progress.share_of(matrix) for matrix in self._matrices]
        if self._per_tensor and any(shares):
            step = self._config.rank_step
            progress.ranks = allocate(self._matrices, progress.ranks, shares, allowed, step)
        else:
            progress.ranks = self._equal_ranks(allowed)

    def _equal_ranks(self, allowed: float) -> list[int]:
        """One rank for all matrices, the one next to ``allowed`` elements but not far above."""
        rank = common_rank(self._matrices, allowed)
        below, above = (capped(self._matrices, math.floor(rank) + more) for more in (0, 1))
        least, most = (elements(self._matrices, ranks) for ranks in (below, above))
        return above if most - allowed < allowed - least and most <= _MOST_ABOVE * allowed else below

    def _stepped(self, target: float, progress: Progress) -> int:
        """Even rank next to ``target``, or as near as one rank_step and the allowed range let it come."""
        config, rank = self._config, progress.rank
        lowest, highest = config.rank_range(progress.found_max_rank)
        stepped = min(max(2 * round(target / 2), rank - config.rank_step), rank + config.rank_step)
        return min(max(stepped, lowest), highest)

    def _measure_shares(self, progress: Progress) -> None:
        """Learn from the window's gradients and its last errors."""
        last = progress.window[-1]
        grads = _finite_means([row["grad_norms"] for row in progress.window])
        steps = last["step"] - progress.ranks_since
        for index, matrix in enumerate(self._matrices):
            error_square = last["error_norms"][index] ** 2
            start = progress.start_squares.get(matrix.name, 0.0)
            share = measured_share(progress.ranks[index], grads[index] ** 2, start, error_square, steps)
            if share is not None:
                progress.shares[matrix.name] = [share.rank, share.left, share.grad_square]
            if math.isfinite(error_square):
                progress.start_squares[matrix.name] = error_square


def _finite_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Means by column of the finite values; NaN if there is none (a matrix without gradient, an overflow)."""
    columns = [[value for value in column if math.isfinite(value)] for column in zip(*rows, strict=True)]
    return [math.fsum(column) / len(column) if column else math.nan for column in columns]
