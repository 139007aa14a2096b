"""Bytes: what steps cost, which targets can be met, and how much of a budget the next steps may have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_edgc.allocation import capped, elements
from hf_edgc.config import EDGCConfig
from hf_edgc.layout import Matrix
from hf_edgc.options import invalid

_MARGIN = 0.01
"""Share of the bytes by which a target must stay clear of what the ranks allow, for it to be met within 2 percent."""

_HALVINGS = 100
"""Of a bracket whose ends may be as far apart as the weights: 52 for a float, 30 more for rates that fall to 1e-9."""

_NUMBERS = 8
"""Float32 numbers that say in each step where a worker is; one more for each matrix says whether it is used."""

_SAMPLES = 64
"""Future steps at which the weights are looked at; schedules are smooth at a 64th of a run."""


@dataclass(frozen=True)
class Costs:
    """Bytes that one worker hands to the collectives in a step.

    ``dense_bytes`` is a step without compression, ``fixed_bytes`` what a compressed step sends besides factors, and
    ``factor_itemsize`` the bytes of an element of a factor.
    """

    dense_bytes: int
    fixed_bytes: int = 0
    factor_itemsize: int = 4

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> "Costs":
        """Costs of a model in float32 that has nothing else than ``matrices``."""
        return cls(4 * sum(matrix.dense_elements for matrix in matrices))

    @classmethod
    def for_model(cls, config: EDGCConfig, matrices: Sequence[Matrix], all_bytes: int, dense_bytes: int) -> "Costs":
        """Costs of a model with gradients of ``all_bytes``, of which ``dense_bytes`` are never compressed."""
        measured = (3 * len(matrices) + 3) / config.entropy_every
        numbers = round(4 * (_NUMBERS + len(matrices) + measured))
        return cls(all_bytes, dense_bytes + numbers, 4 if config.factor_dtype == "float32" else 2)

    def compressed(self, factor_elements: float) -> float:
        """Bytes of a step whose factors have so many elements."""
        return self.fixed_bytes + self.factor_itemsize * factor_elements


@dataclass(frozen=True)
class Budget:
    """What a run may send, in bytes of one worker."""

    total_bytes: float
    total_steps: int
    costs: Costs
    lowest_elements: float
    """Of the factors of a step in which all ranks are as low as allowed."""
    highest_elements: float

    @classmethod
    def for_run(cls, config: EDGCConfig, matrices: Sequence[Matrix], costs: Costs, total_steps: int) -> "Budget":
        """Budget of a run that meets ``config.target_compression_ratio``.

        Raises:
            ValueError: no choice of ranks meets it; says which targets can be met.
        """
        ratio = config.target_compression_ratio or 1.0
        if not matrices:
            raise invalid("target_compression_ratio", ratio, "none, since this model has no matrix to compress")
        warmup = config.warmup_steps(total_steps)[0]
        highest = elements(matrices, capped(matrices, config.highest_rank))
        lowest = elements(matrices, capped(matrices, config.lowest_rank))
        least, most = (
            warmup * costs.dense_bytes + (total_steps - warmup) * costs.compressed(count) for count in (lowest, highest)
        )
        total = costs.dense_bytes * total_steps / ratio
        if not least * (1.0 + _MARGIN) <= total <= most * (1.0 - _MARGIN):
            dense = costs.dense_bytes * total_steps
            weakest, strongest = dense / (most * (1.0 - _MARGIN)), dense / (least * (1.0 + _MARGIN))
            allowed = f"a number from {weakest:.4g} to {strongest:.4g}, what the ranks of this model allow"
            if warmup:
                allowed += f" after {warmup} of {total_steps} steps sent dense"
            raise invalid("target_compression_ratio", ratio, allowed)
        return cls(total, total_steps, costs, lowest, highest)

    def elements_for(
        self, sent_bytes: float, step: int, steps: int, weights: Callable[[Sequence[float]], list[float]]
    ) -> float:
        """Elements that the factors of each of the next ``steps`` steps, from ``step`` on, may have.

        What is left of the budget is shared over the rest of the run in proportion to ``weights`` (of the steps given
        to it), with no step below the lowest or above the highest ranks. Asked again at each decision, so that a wrong
        guess about the future is made good by what follows.
        """
        remaining = self.total_steps - step
        steps = min(steps, remaining)
        left = (self.total_bytes - sent_bytes - remaining * self.costs.fixed_bytes) / self.costs.factor_itemsize
        mean = left / remaining
        points = [step + remaining * (index + 0.5) / _SAMPLES for index in range(_SAMPLES)]
        now, *future = weights([step + 0.5 * steps, *points])
        positive = [weight for weight in future if weight > 0.0]
        if not positive or not self.lowest_elements < mean < self.highest_elements:
            return self._bounded(mean)
        low, high = 0.0, self.highest_elements / min(positive)
        for _ in range(_HALVINGS):
            factor = 0.5 * (low + high)
            spent = sum(self._bounded(factor * weight) for weight in future) / _SAMPLES
            low, high = (factor, high) if spent < mean else (low, factor)
        rest = remaining - steps  # after which the lowest ranks, or the highest, can still end it within the budget
        at_least, at_most = ((left - rest * bound) / steps for bound in (self.highest_elements, self.lowest_elements))
        return self._bounded(min(max(high * now, at_least), at_most))

    def _bounded(self, count: float) -> float:
        return min(max(count, self.lowest_elements), self.highest_elements)
