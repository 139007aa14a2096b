"""What the learning rate will be for the rest of a run, guessed from what it has been."""

import math
from collections.abc import Callable, Sequence

_LEAST_DROP = 1e-6
"""A rate this share below its peak still counts as constant: floats of a constant schedule."""

_LARGEST_MISFIT = 0.5
"""Of ln(observed drop / modelled drop). The peak is known to the step of a measurement only, which early in a decay is
a large part of the way gone; later the fit tightens by itself."""

_STEEPEST = 5.0
"""Largest fall in ln(rate) over a whole run that is expected to go on; a step schedule's step is steeper, and over."""

_SHAPES: tuple[Callable[[float], float], ...] = (
    lambda x: x,  # linear
    lambda x: 0.5 - 0.5 * math.cos(math.pi * x),  # cosine
)
"""Share of the peak that is lost at share x of the way from the peak to the end of the run."""


def expected_rates(
    history: Sequence[Sequence[float]], peak_step: int, total_steps: int, steps: Sequence[float]
) -> list[float]:
    """Learning rates at future ``steps``, as shares of the peak so far.

    A rate that has not fallen stays. One that falls as linear and cosine schedules do from the peak to the end of the
    run goes on so. Any other goes on as it did between its last two values, exponentially; so after a step of a step
    schedule it is constant again.

    Args:
        history: pairs (step, rate / peak so far), oldest first, at least one.
        peak_step: last step at which the rate was at its peak.
        total_steps: optimizer steps of the run.
        steps: steps after the last of ``history``.
    """
    now, ratio = history[-1]
    if 1.0 - ratio < _LEAST_DROP or total_steps <= peak_step:
        return [ratio] * len(steps)
    after_peak = [(step, share) for step, share in history[-3:] if step > peak_step]

    def way(step: float) -> float:
        return min(max((step - peak_step) / (total_steps - peak_step), 1e-9), 1.0)

    def misfit(shape: Callable[[float], float]) -> float:
        return max(abs(math.log(max(1.0 - share, 1e-12) / shape(way(step)))) for step, share in after_peak)

    best = min(_SHAPES, key=misfit)
    if len(after_peak) > 1 and misfit(best) < _LARGEST_MISFIT:
        left_now = max(1.0 - best(way(now)), 1e-9)
        return [ratio * min(1.0, (1.0 - best(way(step))) / left_now) for step in steps]
    before, earlier = history[-2] if len(history) > 1 else (now, ratio)
    slope = math.log(max(ratio, 1e-9) / max(earlier, 1e-9)) / (now - before) if now > before else 0.0
    slope = min(max(slope, -_STEEPEST / total_steps), 0.0)
    return [ratio * math.exp(slope * (step - now)) for step in steps]
