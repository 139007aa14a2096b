"""All that the controller remembers of a run: plain numbers, saved as they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_edgc.allocation import ErrorShare
from hf_edgc.layout import Matrix
from hf_edgc.measured import Measured


@dataclass
class Progress:
    """Where a run is. Lists have a number for each matrix, dicts go by its name; entropies are in nats.

    ``rank`` is the common rank that has the bytes of ``ranks``, those of the current or first compressed step.
    ``window`` has what was measured in the current window. ``shares`` holds the fields of an ``ErrorShare`` and
    ``start_squares`` the |E|^2 at ``ranks_since``, the first step of the current ranks. ``rates`` has pairs (step,
    learning rate), one for each window.
    """

    step: int = 0
    rank: int = 0
    ranks: list[int] = field(default_factory=list)
    compressing: bool = False
    window_position: int = 0
    window: list[dict[str, Any]] = field(default_factory=list)
    first_entropies: list[float] | None = None
    reference_entropies: list[float] | None = None
    reference_rank: int = 0
    entropy_sum: float = 0.0
    entropy_windows: int = 0
    learning_rate: float | None = None
    peak_learning_rate: float = 0.0
    peak_step: int = 0
    rates: list[list[float]] = field(default_factory=list)
    target_rank: float | None = None
    ranks_since: int = 0
    shares: dict[str, list[float]] = field(default_factory=dict)
    start_squares: dict[str, float] = field(default_factory=dict)
    sent_bytes: float = 0.0
    fallback_steps: int = 0
    smallest_grad_norm: float = math.inf
    trial_step: int = 0
    paying: list[bool] | None = None
    found_max_rank: int | None = None

    @property
    def lr_ratio(self) -> float:
        """Learning rate over its peak so far; 1 where it is not known."""
        if self.learning_rate is None or self.peak_learning_rate <= 0.0:
            return 1.0
        return self.learning_rate / self.peak_learning_rate

    def note(self, measured: Measured, matrices: int) -> None:
        """Take in what was measured in the current step."""
        unknown = [math.nan] * matrices
        entropies = [float(entropy) for entropy in measured.entropies]
        row = {
            "step": self.step,
            "entropies": entropies,
            "grad_norms": list(measured.grad_norms) or unknown,
            "error_norms": list(measured.error_norms) or unknown,
        }
        self.window.append(row)
        # A matrix without gradient in its first step still gets a start.
        known = self.first_entropies or entropies
        self.first_entropies = [a if math.isfinite(a) else b for a, b in zip(known, entropies, strict=True)]
        if measured.learning_rate is not None:
            self.learning_rate = measured.learning_rate
            if measured.learning_rate >= self.peak_learning_rate:
                self.peak_learning_rate, self.peak_step = measured.learning_rate, self.step

    def begin_window(self, errors_are_zero: bool = False) -> None:
        """Forget what was measured; with ``errors_are_zero`` error feedback starts anew."""
        self.window, self.window_position = [], 0
        if errors_are_zero:
            self.ranks_since, self.start_squares = self.step, {}

    def share_of(self, matrix: Matrix) -> ErrorShare | None:
        """The last measured share of the error of ``matrix``."""
        values = self.shares.get(matrix.name)
        return None if values is None else ErrorShare(int(values[0]), values[1], values[2])

    def rename(self, names: Sequence[str], matrices: Sequence[Matrix]) -> None:
        """Bring lists that go by ``names`` to the order of ``matrices``.

        Raises:
            ValueError: a list has not as many entries as there are names.
        """

        def by_name(row: Sequence[Any], missing: Any) -> list[Any]:
            known = dict(zip(names, row, strict=True))
            return [known.get(matrix.name, missing) for matrix in matrices]

        self.ranks = [min(rank, m.max_rank) for rank, m in zip(by_name(self.ranks, self.rank), matrices, strict=True)]
        self.paying = None if self.paying is None else by_name(self.paying, True)
        rows = ("entropies", "grad_norms", "error_norms")
        self.window = [{**row, **{key: by_name(row[key], math.nan) for key in rows}} for row in self.window]
        if self.first_entropies is not None:
            self.first_entropies = by_name(self.first_entropies, math.nan)
        if self.reference_entropies is not None:
            self.reference_entropies = by_name(self.reference_entropies, math.nan)

    def restarted(self, compressing: bool) -> "Progress":
        """A run at the same point that has decided nothing yet."""
        return Progress(
            step=self.step,
            compressing=compressing,
            learning_rate=self.learning_rate,
            peak_learning_rate=self.peak_learning_rate,
            peak_step=self.peak_step,
            rates=self.rates,
            sent_bytes=self.sent_bytes,
            ranks_since=self.step,
            trial_step=self.step,
        )
