"""DAC: when to compress and at which rank, from numbers that are the same on every worker."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hf_edgc.config import EDGCConfig
from hf_edgc.layout import Matrix
from hf_edgc.measured import Measured
from hf_edgc.rank_model import ef_rank, paper_rank, relative_error


@dataclass(frozen=True)
class Plan:
    """What one step does: the rank of each matrix of the layout (0: dense) and the rank they come from."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def compress(self) -> bool:
        """Whether any matrix is compressed."""
        return any(self.ranks)


@dataclass
class _Progress:
    """All that the controller remembers; plain numbers, saved as they are. Entropies in nats, by matrix."""

    step: int = 0
    rank: int = 0
    compressing: bool = False
    window_position: int = 0
    window: list[list[float]] = field(default_factory=list)
    first_entropies: list[float] | None = None
    reference_entropies: list[float] | None = None
    reference_rank: int = 0
    learning_rate: float | None = None
    peak_learning_rate: float = 0.0
    target_rank: float | None = None
    fallback_steps: int = 0
    smallest_grad_norm: float = math.inf


class Controller:
    """Warm-up, window, target and step limit of one model's ranks (arXiv 2511.10333, DAC, one stage).

    ``advance`` is called once after each optimizer step with entropies already averaged over the workers;
    the plan changes there and nowhere else, so every worker holds the same plan for the next step.

    Differs from the paper in that the target always refers to the first full window under compression
    instead of the previous one, so that step limit and clamps lose no memory.
    """

    def __init__(self, config: EDGCConfig, matrices: Sequence[Matrix], total_steps: int | None = None) -> None:
        """Start a run of ``total_steps`` optimizer steps (None: unknown)."""
        self._config = config
        self._matrices = tuple(matrices)
        self._window_steps = config.window(total_steps)
        self._warmup_floor, self._warmup_ceiling = config.warmup_steps(total_steps)
        compressing = config.mode != "none" and self._warmup_ceiling == 0
        self._progress = _Progress(rank=config.start_rank, compressing=compressing)

    @property
    def step(self) -> int:
        """Optimizer step that the plan is for, from 0."""
        return self._progress.step

    @property
    def rank(self) -> int:
        """Rank of the current or, in the warm-up, the first compressed step."""
        return self._progress.rank

    @property
    def target_rank(self) -> float | None:
        """What the error model asked for at the end of the last window, before step limit and clamps."""
        return self._progress.target_rank

    @property
    def phase(self) -> str:
        """``off``, ``warmup``, ``compress``, or ``fallback`` where the watchdog has given compression up."""
        if self._config.mode == "none" or not self._matrices:
            return "off"
        if self._progress.fallback_steps > 0:
            return "fallback"
        return "compress" if self._progress.compressing else "warmup"

    @property
    def plan(self) -> Plan:
        """Ranks for the current step."""
        if self.phase != "compress":
            return Plan(0, (0,) * len(self._matrices))
        return Plan(self.rank, tuple(min(self.rank, matrix.max_rank) for matrix in self._matrices))

    @property
    def wants_entropies(self) -> bool:
        """Whether this step's gradients are to be measured (GDS, iteration sampling)."""
        return self._config.mode == "edgc" and self.phase != "off" and self.step % self._config.entropy_every == 0

    def advance(self, measured: Measured | None = None) -> str:
        """End the step.

        Args:
            measured: of the step just done, averaged over the workers; None if it was not measured.

        Returns:
            Why compression is given up for a window, with all errors to be dropped; empty if it is not.
        """
        progress = self._progress
        if measured is not None:
            progress.window.append([float(entropy) for entropy in measured.entropies])
            progress.first_entropies = _first_finite(progress.first_entropies, progress.window[-1])
            if measured.learning_rate is not None:
                progress.learning_rate = measured.learning_rate
                progress.peak_learning_rate = max(progress.peak_learning_rate, measured.learning_rate)
        progress.step += 1
        if self.phase == "warmup":
            self._maybe_end_warmup()
        elif self.phase == "fallback":
            progress.fallback_steps -= 1
        elif self.phase == "compress" and self._config.mode == "edgc":
            alarm = self._alarm(measured) if measured is not None else ""
            if alarm:
                progress.fallback_steps, progress.window, progress.window_position = self._window_steps, [], 0
                return alarm
            progress.window_position += 1
            if progress.window_position >= self._window_steps and progress.window:
                self._end_window()
        return ""

    def _alarm(self, measured: Measured) -> str:
        """The watchdog: what is wrong with a compressed step, or an empty string."""
        config, progress = self._config, self._progress
        grad, error = measured.grad_norm, measured.error_norm
        if math.isfinite(grad) and grad > 0:
            progress.smallest_grad_norm = min(progress.smallest_grad_norm, grad)
        until = f"dense for {self._window_steps} steps, then compression is tried again"
        if config.watchdog_error_ratio and error > config.watchdog_error_ratio * grad > 0:
            return f"compression is too strong: the errors have {error / grad:.3g} gradient norms; {until}"
        growth = grad / progress.smallest_grad_norm
        if config.watchdog_grad_growth and growth > config.watchdog_grad_growth:
            return f"the run diverges: the gradient norm has grown {growth:.3g} times to {grad:.3g}; {until}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as plain numbers, strings and lists."""
        return {"matrices": [matrix.name for matrix in self._matrices], **asdict(self._progress)}

    def load_state_dict(self, state: dict[str, Any], same_config: bool = True) -> None:
        """Go on from ``state_dict()`` of a controller of a like model.

        Matrices are known by their names: those that are new have no history, those that are gone are dropped.
        With another config the step and the phase are kept, and the ranks start as the config says.

        Raises:
            ValueError: the state lacks fields or has unknown ones.
        """
        try:
            fields = dict(state)
            names = fields.pop("matrices")
            progress = _Progress(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"controller state does not fit this version: {error}") from error
        if not same_config:
            progress = replace(
                self._progress,
                step=progress.step,
                compressing=self._config.mode != "none" and (progress.compressing or self._warmup_ceiling == 0),
                learning_rate=progress.learning_rate,
                peak_learning_rate=progress.peak_learning_rate,
            )
        progress.window = [self._by_name(names, row) for row in progress.window]
        for name in ("first_entropies", "reference_entropies"):
            row = getattr(progress, name)
            setattr(progress, name, None if row is None else self._by_name(names, row))
        self._progress = progress

    def _by_name(self, names: Sequence[str], row: Sequence[float]) -> list[float]:
        known = dict(zip(names, row, strict=True))
        return [known.get(matrix.name, math.nan) for matrix in self._matrices]

    def _maybe_end_warmup(self) -> None:
        progress = self._progress
        if progress.step < self._warmup_floor:
            return
        if progress.step >= self._warmup_ceiling or self._config.mode == "static" or self._error_test():
            progress.compressing = True
            progress.window_position = 0
            progress.window = []

    def _error_test(self) -> bool:
        """Whether the modelled error at min_rank is below the first one at max_rank (paper, DAC warm-up).

        ln(sigma_1^2 rho(min_rank)) < ln(sigma_0^2 rho(max_rank)), with H1 - H0 = ln(sigma_1 / sigma_0).
        """
        first = self._progress.first_entropies
        if first is None or not self._progress.window:
            return False
        latest = self._progress.window[-1]
        margins: list[tuple[float, float]] = []
        for matrix, start, now in zip(self._matrices, first, latest, strict=True):
            if math.isfinite(start) and math.isfinite(now):
                low = relative_error(min(self._config.lowest_rank, matrix.max_rank), matrix.rows, matrix.cols)
                high = relative_error(min(self._config.max_rank, matrix.max_rank), matrix.rows, matrix.cols)
                if high > 0.0:
                    margins.append((2 * (now - start) + math.log(low / high), matrix.elements_per_rank))
        return bool(margins) and _weighted_mean(margins) < 0.0

    def _end_window(self) -> None:
        progress = self._progress
        means = [_finite_mean(column) for column in zip(*progress.window, strict=True)]
        progress.window = []
        progress.window_position = 0
        if progress.reference_entropies is None:
            progress.reference_entropies, progress.reference_rank = means, progress.rank
        progress.target_rank = self._target(means)
        if progress.target_rank is not None:
            progress.rank = self._stepped(progress.target_rank)

    def _target(self, entropies: Sequence[float]) -> float | None:
        """Mean of the matrices' own targets, weighted by the bytes of a rank, so that the total is kept."""
        reference = self._progress.reference_entropies or []
        targets: list[tuple[float, float]] = []
        for matrix, start, now in zip(self._matrices, reference, entropies, strict=True):
            if math.isfinite(start) and math.isfinite(now):
                target = self._matrix_target(matrix, start, now)
                targets.append((target, matrix.elements_per_rank))
        return _weighted_mean(targets) if targets else None

    def _matrix_target(self, matrix: Matrix, start: float, now: float) -> float:
        rank = min(self._progress.reference_rank, matrix.max_rank)
        if self._config.error_model == "paper":
            return paper_rank(rank, start, now, matrix.rows, matrix.cols)
        rate, peak = self._progress.learning_rate, self._progress.peak_learning_rate
        lr_ratio = rate / peak if rate is not None and peak > 0 else 1.0
        return ef_rank(rank, start, now, matrix.rows, matrix.cols, lr_ratio, self._config.lr_exponent)

    def _stepped(self, target: float) -> int:
        """Even rank next to ``target``, or as near as one rank_step and the allowed range let it come."""
        config, rank = self._config, self._progress.rank
        stepped = min(max(2 * round(target / 2), rank - config.rank_step), rank + config.rank_step)
        return min(max(stepped, config.lowest_rank), config.max_rank)


def _first_finite(first: list[float] | None, now: list[float]) -> list[float]:
    """``first`` where it is finite, else ``now``: a matrix without gradient in its first step still gets a start."""
    return [start if math.isfinite(start) else value for start, value in zip(first or now, now, strict=True)]


def _finite_mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN if there is none (a matrix without gradient, an overflow)."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    return math.fsum(value * weight for value, weight in pairs) / math.fsum(weight for _, weight in pairs)
