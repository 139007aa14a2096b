"""Error of the best low-rank approximation of a random matrix, in closed form.

This is the compression quantification model (CQM) of EDGC, arXiv 2511.10333. A gradient
matrix with m = min(rows, cols) and n = max(rows, cols) is modelled with i.i.d. N(0, sigma^2)
entries, so the eigenvalues of A A^T / (sigma^2 n) follow the Marchenko-Pastur law with
c = m / n, and by Eckart-Young-Mirsky the best rank r leaves the m - r smallest of them. Differs
from the paper, which estimates that sum by Monte Carlo: here it is integrated exactly.

With q = sqrt(c) and an angle t in [0, pi] the eigenvalues are x = 1 + c - 2 q cos(t), and

* below angle t lies the energy share   S(t) = (2 t - sin 2t) / (2 pi), whatever c is,
* and the share of the eigenvalues      F(t) = (2 / pi) int_0^t sin(s)^2 / (1 + c - 2 q cos s) ds.

Rank r drops the eigenvalues below the angle with F(t) = 1 - r / m, and leaves rho(r) = S(t).
"""

import math
from collections.abc import Callable

_MAX_SOLVER_STEPS = 100  # bisection alone needs about 60; Newton 3 or 4
_LAST_STEP = 1e-8  # relative; Newton squares it to 1e-16, one rounding


def relative_error(rank: float, rows: int, cols: int) -> float:
    """Share of the energy that the best approximation of a rank leaves out.

    rho(r) = g(r)^2 / (sigma^2 rows cols), Marchenko-Pastur; see the module for the formula.

    Args:
        rank: Matrix rank, a real number in [0, min(rows, cols)].
        rows: Rows of the matrix.
        cols: Columns; rows and cols may be swapped.

    Returns:
        rho in [0, 1], falling in rank; exactly 1.0 at rank 0 and 0.0 at full rank.

    Raises:
        ValueError: The rank is outside [0, min(rows, cols)], or a size is not positive.
    """
    small, large = _checked_sizes(rows, cols)
    return _energy_split(_checked("rank", rank, float(small)), small, large)[0]


def rank_for_error(rho: float, rows: int, cols: int) -> float:
    """Rank that leaves a given share of the energy: the inverse of `relative_error`.

    Args:
        rho: Share of the energy left out, in [0, 1].
        rows: Rows of the matrix.
        cols: Columns; rows and cols may be swapped.

    Returns:
        A real rank in [0, min(rows, cols)]; exactly 0.0 at rho = 1 and full rank at rho = 0.

    Raises:
        ValueError: rho is outside [0, 1], or a size is not positive.
    """
    small, large = _checked_sizes(rows, cols)
    return _rank_of_split(_checked("rho", rho, 1.0), 1.0 - rho, small, large)


def g(rank: float, rows: int, cols: int) -> float:
    """Frobenius norm that rank r leaves out of a (rows, cols) matrix of N(0, 1) entries.

    The paper's g(r; m, n) (arXiv 2511.10333, CQM), which is sqrt(rho(r) rows cols).

    Raises:
        ValueError: The rank is outside [0, min(rows, cols)], or a size is not positive.
    """
    return math.sqrt(relative_error(rank, rows, cols)) * math.sqrt(rows) * math.sqrt(cols)


def inverse_g(value: float, rows: int, cols: int) -> float:
    """Real rank in [0, min(rows, cols)] whose `g` is value; arXiv 2511.10333, CQM.

    Above g(0) = sqrt(rows cols) rank 0 is more than good enough, so the result is 0.0.

    Raises:
        ValueError: value is negative or not finite, or a size is not positive.
    """
    small, large = _checked_sizes(rows, cols)
    root_rho = _checked("value", value) / (math.sqrt(small) * math.sqrt(large))
    if root_rho >= 1.0:
        return 0.0
    # 1 - y^2 as a product keeps its relative accuracy near y = 1.
    kept = (1.0 - root_rho) * (1.0 + root_rho)
    return _rank_of_split(root_rho * root_rho, kept, small, large)


def paper_rank(rank0: float, entropy0_nats: float, entropy1_nats: float, rows: int, cols: int) -> float:
    """Rank that keeps the absolute error sigma g(r) when the entropy moves from H0 to H1.

    r1 = g^-1( exp(H0 - H1) g(r0) ), arXiv 2511.10333, CQM: sigma0 / sigma1 = exp(H0 - H1), so a
    falling entropy lets the rank fall and a rising one makes it rise. If the argument exceeds
    g(0), even rank 0 keeps the error: the result is 0. Full rank has no error to keep: it stays.
    Badly conditioned: at r = 8 of 768 x 3072 the rank moves by about 700 per nat.

    Args:
        rank0: Rank at H0, a real number in [0, min(rows, cols)]; so is the result.
        entropy0_nats: Differential entropy H0 of the gradient's entries then, finite.
        entropy1_nats: Differential entropy H1 now, finite.
        rows: Rows of the matrix.
        cols: Columns; rows and cols may be swapped.

    Raises:
        ValueError: rank0 or a size is outside its range, or an entropy is not finite.
    """
    small, large = _checked_sizes(rows, cols)
    rho = _energy_split(_checked("rank0", rank0, float(small)), small, large)[0]
    rise = _entropy_rise(entropy0_nats, entropy1_nats)
    if rho == 0.0:
        return float(small)
    # In logarithms, where exp(H0 - H1) cannot overflow before it is cut at g(0).
    return rank_for_error(math.exp(min(0.0, math.log(rho) - 2.0 * rise)), rows, cols)


def ef_rank(
    rank0: float,
    entropy0_nats: float,
    entropy1_nats: float,
    rows: int,
    cols: int,
    lr_ratio: float = 1.0,
    lr_exponent: float = 0.0,
) -> float:
    """Rank that keeps the norm of the error-feedback memory when the entropy moves.

    The memory settles at |E| = |G| sqrt(rho / (1 - rho)). Holding it while |G| grows by e^(H1 - H0):
    logit rho(r1) = logit rho(r0) - 2 (H1 - H0) - 2 lr_exponent ln(lr_ratio). A rising entropy
    raises the rank, a falling learning rate lowers it; ranks 0 and min(rows, cols) have an infinite logit
    and stay. Differs from arXiv 2511.10333 (`paper_rank`), which holds the error of one step.

    Args:
        rank0: Rank at H0, a real number in [0, min(rows, cols)]; so is the result.
        entropy0_nats: Differential entropy H0 of the gradient's entries then, finite.
        entropy1_nats: Differential entropy H1 now, finite.
        rows: Rows of the matrix.
        cols: Columns; rows and cols may be swapped.
        lr_ratio: Learning rate now over the one then, at least 0; at 0 the rank falls to 0.
        lr_exponent: Weight of the learning rate, at least 0; 0 leaves lr_ratio out.

    Raises:
        ValueError: An argument is outside its range, or an entropy is not finite.
    """
    small, large = _checked_sizes(rows, cols)
    rho, kept = _energy_split(_checked("rank0", rank0, float(small)), small, large)
    rise = _entropy_rise(entropy0_nats, entropy1_nats)
    _checked("lr_ratio", lr_ratio)
    _checked("lr_exponent", lr_exponent)
    if rho == 0.0 or kept == 0.0:
        return float(rank0)
    if lr_exponent > 0.0:
        if lr_ratio == 0.0:
            return 0.0
        rise += lr_exponent * math.log(lr_ratio)
    return _rank_of_split(*_split_of_logit(math.log(rho) - math.log(kept) - 2.0 * rise), small, large)


def _split_of_logit(logit: float) -> tuple[float, float]:
    """(rho, 1 - rho) with ln(rho / (1 - rho)) = logit, each accurate relative to itself."""
    tail = math.exp(-abs(logit))  # in [0, 1], so nothing overflows
    major, minor = 1.0 / (1.0 + tail), tail / (1.0 + tail)
    return (major, minor) if logit > 0.0 else (minor, major)


def _energy_split(rank: float, small: int, large: int) -> tuple[float, float]:
    """(rho, 1 - rho) of a rank, each accurate relative to itself."""
    q = math.sqrt(small / large)
    if 2.0 * rank >= small:  # from the nearer end of the spectrum: no small differences
        angle = _eigenvalue_angle((small - rank) / small, q)
        rho = _energy_share(angle)[0]
        return rho, 1.0 - rho
    # The mirror t -> pi - t counts from the largest eigenvalue and turns q into -q.
    angle = _eigenvalue_angle(rank / small, -q)
    kept = _energy_share(angle)[0]
    return 1.0 - kept, kept


def _rank_of_split(rho: float, kept: float, small: int, large: int) -> float:
    """Rank with energy shares rho left out and kept = 1 - rho; inverse of `_energy_split`."""
    q = math.sqrt(small / large)
    if rho <= 0.5:
        angle = _energy_angle(rho)
        return small - small * _eigenvalue_share(angle, q)[0]
    return small * _eigenvalue_share(_energy_angle(kept), -q)[0]


def _energy_share(angle: float) -> tuple[float, float]:
    """S(t), the energy share of the eigenvalues below angle t, and its slope."""
    return _minus_sin(2.0 * angle) / (2.0 * math.pi), 2.0 * math.sin(angle) ** 2 / math.pi


def _eigenvalue_share(angle: float, q: float) -> tuple[float, float]:
    """F(t), the share of the eigenvalues below angle t, and its slope; for q in [-1, 1].

    With z = q sin t / (1 - q cos t) the integral is

        pi F = (t - sin t) + (1 + q) sin t (1 - cos t) / (1 - q cos t)
               + (1 - q^2) / q^2 (z - atan z).

    It comes from the Poisson kernel, sum_k q^k sin(k t) / k = atan z, sorted so that every
    bracket is of third order in t: nothing cancels near t = 0, q = 0 or q = 1.
    """
    if angle == 0.0:
        return 0.0, 0.0
    sine, versine = math.sin(angle), 2.0 * math.sin(0.5 * angle) ** 2
    denominator = (1.0 - q) + q * versine  # 1 - q cos t, without its cancellation
    z = q * sine / denominator
    scaled = (
        _minus_sin(angle) + (1.0 + q) * sine * versine / denominator + (1.0 - q) * (1.0 + q) / (q * q) * _minus_atan(z)
    )
    eigenvalue = (1.0 - q) ** 2 + 2.0 * q * versine  # 1 + q^2 - 2 q cos t
    return scaled / math.pi, 2.0 * sine * sine / (math.pi * eigenvalue)


def _energy_angle(share: float) -> float:
    """Angle t with S(t) = share, for a share in [0, 1/2]."""
    # S <= 2 t^3 / (3 pi): a start from the left, and the exact answer for a small share.
    return _solve(_energy_share, share, (1.5 * math.pi * share) ** (1.0 / 3.0))


def _eigenvalue_angle(share: float, q: float) -> float:
    """Angle t with F(t) = share, for a share in [0, 1/2]."""
    # The integrand of F is at most (s / (1 - q))^2 and at most 1: two starts from the left.
    area = 0.5 * math.pi * share
    start = max((3.0 * area * (1.0 - q) ** 2) ** (1.0 / 3.0), area)
    return _solve(lambda angle: _eigenvalue_share(angle, q), share, start)


def _solve(curve: Callable[[float], tuple[float, float]], target: float, start: float) -> float:
    """Angle in [0, pi] where a rising curve (value, slope) meets target: Newton in a bracket."""
    if target == 0.0:
        return 0.0
    low, high, angle = 0.0, math.pi, start
    for _ in range(_MAX_SOLVER_STEPS):
        value, slope = curve(angle)
        low, high = (low, angle) if value > target else (angle, high)
        step = (target - value) / slope if slope > 0.0 else math.inf
        if abs(step) <= _LAST_STEP * angle:
            return angle + step
        angle += step
        if not low < angle < high:
            angle = 0.5 * (low + high)
    return angle


def _minus_sin(x: float) -> float:
    """Difference x - sin x for x >= 0, accurate relative to itself."""
    if x > 1.0:
        return x - math.sin(x)
    y = x * x
    # Taylor series, nested; the first term left out is below 1e-16 of the first.
    nested = 1.0 - y / 210.0 * (1.0 - y / 272.0)
    nested = 1.0 - y / 72.0 * (1.0 - y / 110.0 * (1.0 - y / 156.0 * nested))
    return x * y / 6.0 * (1.0 - y / 20.0 * (1.0 - y / 42.0 * nested))


def _minus_atan(z: float) -> float:
    """Difference z - atan z, accurate relative to itself (1e-13 just above the series)."""
    if abs(z) > 0.125:
        return z - math.atan(z)
    y = z * z
    nested = 1.0 / 13.0 - y * (1.0 / 15.0 - y * (1.0 / 17.0 - y / 19.0))
    nested = 1.0 / 7.0 - y * (1.0 / 9.0 - y * (1.0 / 11.0 - y * nested))
    return z * y * (1.0 / 3.0 - y * (1.0 / 5.0 - y * nested))


def _checked_sizes(rows: int, cols: int) -> tuple[int, int]:
    """The two sizes, smaller first, if both are positive."""
    for name, size in (("rows", rows), ("cols", cols)):
        if size < 1:
            raise ValueError(f"{name} is {size!r}; it must be an integer of at least 1")
    return (rows, cols) if rows <= cols else (cols, rows)


def _checked(name: str, value: float, upper: float = math.inf, lower: float = 0.0) -> float:
    """The value, if it is finite and lies in [lower, upper]."""
    if not (lower <= value <= upper and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}; it must be finite and in [{lower:g}, {upper:g}]")
    return value


def _entropy_rise(entropy0_nats: float, entropy1_nats: float) -> float:
    """H1 - H0 in nats."""
    start = _checked("entropy0_nats", entropy0_nats, lower=-math.inf)
    return _checked("entropy1_nats", entropy1_nats, lower=-math.inf) - start
