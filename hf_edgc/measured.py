"""What a step's measurement says: plain numbers, the same on every worker."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measured:
    """Means over the workers, in unscaled units.

    ``entropies`` has nats for each matrix of the layout; ``grad_norm`` is the 2-norm of the whole gradient of a
    worker before compression and averaging, ``error_norm`` that of its errors before the step;
    ``learning_rate`` is None where a worker does not know it. ``grad_norms`` and ``error_norms`` are the same norms of
    each matrix: NaN where there is no gradient, empty if they were not measured.
    """

    entropies: list[float]
    grad_norm: float
    error_norm: float
    learning_rate: float | None
    grad_norms: list[float] = field(default_factory=list)
    error_norms: list[float] = field(default_factory=list)

    @property
    def mean_entropy(self) -> float | None:
        """Mean of the finite entropies in nats, None if there is none."""
        finite = [value for value in self.entropies if math.isfinite(value)]
        return math.fsum(finite) / len(finite) if finite else None
