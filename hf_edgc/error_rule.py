"""The error rules: which rank the entropy and the learning rate ask for, and when a warm-up may end."""

import math
from collections.abc import Sequence

from hf_edgc.config import EDGCConfig
from hf_edgc.layout import Matrix
from hf_edgc.rank_model import ef_rank, paper_rank, relative_error


def target_rank(
    config: EDGCConfig,
    matrices: Sequence[Matrix],
    reference_rank: int,
    reference: Sequence[float],
    now: Sequence[float],
    lr_ratio: float,
) -> float | None:
    """Common rank that the error model asks for: mean of the matrices' own targets, weighted by the bytes of a rank.

    Args:
        config: names the error model and its exponents.
        matrices: the matrices.
        reference_rank: common rank at which the error was as it is to stay.
        reference: entropies then, nats, by matrix.
        now: entropies now; matrices with one that is not finite are left out.
        lr_ratio: learning rate over its peak so far.

    Returns:
        None if no matrix has both entropies.
    """
    targets: list[tuple[float, float]] = []
    for matrix, start, end in zip(matrices, reference, now, strict=True):
        if not (math.isfinite(start) and math.isfinite(end)):
            continue
        rank, size = min(reference_rank, matrix.max_rank), (matrix.rows, matrix.cols)
        if config.error_model == "paper":
            target = paper_rank(rank, start, end, *size)
        else:
            end = start + config.entropy_exponent * (end - start)
            target = ef_rank(rank, start, end, *size, lr_ratio, config.lr_exponent)
        targets.append((target, matrix.elements_per_rank))
    return _weighted_mean(targets) if targets else None


def spending_weight(config: EDGCConfig, lr_ratio: float, entropy_rise: float = 0.0) -> float:
    """How many ranks the rule of error model ``ef`` asks for, relative to those at ratio 1 and rise 0, at low ranks.

    There 1 - rho is proportional to the rank and rho near 1, so the rank goes as 1 / (logit rho) does in e:
    lr_ratio^(2 lr_exponent) e^(2 entropy_exponent rise).

    Args:
        config: has the exponents.
        lr_ratio: learning rate over its peak so far.
        entropy_rise: nats.
    """
    return float(lr_ratio ** (2.0 * config.lr_exponent) * math.exp(2.0 * config.entropy_exponent * entropy_rise))


def error_is_bearable(
    config: EDGCConfig, matrices: Sequence[Matrix], first: Sequence[float], latest: Sequence[float]
) -> bool:
    """Whether the modelled error at min_rank is below the first one at max_rank (paper, DAC warm-up).

    ln(sigma_1^2 rho(min_rank)) < ln(sigma_0^2 rho(max_rank)), with H1 - H0 = ln(sigma_1 / sigma_0), nats.
    """
    margins: list[tuple[float, float]] = []
    for matrix, start, now in zip(matrices, first, latest, strict=True):
        if math.isfinite(start) and math.isfinite(now):
            low = relative_error(min(config.lowest_rank, matrix.max_rank), matrix.rows, matrix.cols)
            high = relative_error(min(config.highest_rank, matrix.max_rank), matrix.rows, matrix.cols)
            if high > 0.0:
                margins.append((2 * (now - start) + math.log(low / high), matrix.elements_per_rank))
    return bool(margins) and _weighted_mean(margins) < 0.0


def weighted_entropy(matrices: Sequence[Matrix], entropies: Sequence[float]) -> float | None:
    """Mean of the finite entropies, weighted by the bytes of a rank; None if there is none."""
    pairs = [(h, matrix.elements_per_rank) for matrix, h in zip(matrices, entropies, strict=True) if math.isfinite(h)]
    return _weighted_mean(pairs) if pairs else None


def _weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    return math.fsum(value * weight for value, weight in pairs) / math.fsum(weight for _, weight in pairs)
