"""Laws of the rank model: Marchenko-Pastur quadrature, exact SVDs, inverses, both rank rules."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.integrate import quad

from hf_edgc.rank_model import (
    _solve,
    ef_rank,
    g,
    inverse_g,
    paper_rank,
    rank_for_error,
    relative_error,
)

SHAPES = [(768, 3072), (50257, 768), (1, 5), (2, 2), (64, 64), (1, 1), (1, 10**6), (999, 1000)]
Rule = Callable[[float, float, float, int, int], float]
RULES: list[Rule] = [paper_rank, ef_rank]

sizes = st.integers(1, 60_000)
fractions = st.floats(0.0, 1.0)


def marchenko_pastur_shares(cut: float, c: float) -> tuple[float, float]:
    """Shares of the eigenvalues and of the energy below `cut`, by quadrature of the density.

    Straight from the textbook density sqrt((b - x)(x - a)) / (2 pi c x) on [a, b]; x is
    substituted so that the square roots at both ends are smooth.
    """
    a, b = (1.0 - math.sqrt(c)) ** 2, (1.0 + math.sqrt(c)) ** 2
    middle, radius = (a + b) / 2.0, (b - a) / 2.0
    top = math.asin(max(-1.0, min(1.0, (cut - middle) / radius)))

    def density(phi: float, power: int) -> float:
        x = middle + radius * math.sin(phi)
        if x <= 0.0:
            return 0.0
        root = math.sqrt(max(0.0, (b - x) * (x - a)))
        return root / (2.0 * math.pi * c * x) * x**power * radius * math.cos(phi)

    count, energy = (
        quad(density, -math.pi / 2.0, top, args=(k,), epsabs=1e-12, epsrel=1e-12, limit=400)[0] for k in (0, 1)
    )
    return count, energy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", [0.02, 0.3, 0.5, 0.8, 0.97])
def test_agrees_with_quadrature(shape: tuple[int, int], position: float) -> None:
    """The closed form is the integral of the Marchenko-Pastur density."""
    small, large = min(shape), max(shape)
    c = small / large
    low, high = (1.0 - math.sqrt(c)) ** 2, (1.0 + math.sqrt(c)) ** 2
    count, energy = marchenko_pastur_shares(low + position * (high - low), c)
    rank = small * (1.0 - count)
    assert relative_error(rank, *shape) == pytest.approx(energy, abs=1e-9)
    assert rank_for_error(energy, *shape) / small == pytest.approx(rank / small, abs=1e-9)


@pytest.mark.parametrize("shape", [(256, 256), (200, 800), (600, 150)])
def test_agrees_with_exact_svd(shape: tuple[int, int]) -> None:
    """The model predicts the truncation error of Gaussian matrices, at any sigma.

    The eigenvalues of one matrix count off the limit law by a fraction of one eigenvalue. Half
    of the largest one, (1 + q)^2 / (2 m), bounds the share left out; measured 0.001 to 0.003.
    The total energy fluctuates by sqrt(2 / (m n)); five times that bounds it.
    """
    rows, cols = shape
    small, large = min(shape), max(shape)
    sigma = 0.03
    matrix = sigma * np.random.default_rng(0).standard_normal(shape)
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    left_out = np.append(np.cumsum(squares[::-1])[::-1], 0.0)
    model = np.array([g(rank, rows, cols) for rank in range(small + 1)]) ** 2 * sigma**2
    half_an_eigenvalue = 0.5 * (1.0 + math.sqrt(small / large)) ** 2 / small
    assert np.abs(model / model[0] - left_out / left_out[0]).max() < half_an_eigenvalue
    assert left_out[0] == pytest.approx(model[0], rel=5.0 * math.sqrt(2.0 / (rows * cols)))


@pytest.mark.parametrize("shape", SHAPES)
def test_falls_strictly_with_exact_ends(shape: tuple[int, int]) -> None:
    """Every integer rank counts, and nothing is left at full rank."""
    small = min(shape)
    errors = [relative_error(rank, *shape) for rank in range(small + 1)]
    assert errors[0] == 1.0
    assert errors[-1] == 0.0
    assert all(high > low for high, low in pairwise(errors))
    assert rank_for_error(1.0, *shape) == 0.0
    assert rank_for_error(0.0, *shape) == small
    assert g(0.0, *shape) == pytest.approx(math.sqrt(shape[0] * shape[1]), rel=1e-15)
    assert g(small, *shape) == 0.0


@pytest.mark.parametrize("size", [64, 4096])
def test_small_errors_keep_their_digits(size: int) -> None:
    """Near full rank of a square matrix rho -> (pi^2 / 12) ((m - r) / m)^3.

    There F = 2 t / pi and S = 2 t^3 / (3 pi) to a relative t^2, and t = pi / 2 (m - r) / m.
    """
    missing = 1e-4
    rank = size * (1.0 - missing)
    exact = (size - rank) / size
    assert relative_error(rank, size, size) == pytest.approx(math.pi**2 / 12.0 * exact**3, rel=(math.pi * missing) ** 2)


@given(rows=sizes, cols=sizes, fraction=fractions)
@example(rows=7, cols=7, fraction=1.0 - 2.0**-53)
@example(rows=5, cols=9, fraction=5e-324)
@example(rows=59_999, cols=60_000, fraction=0.5)
def test_round_trips_and_orientation(rows: int, cols: int, fraction: float) -> None:
    """Both inverses return the rank, to 1e-9 of m; rows and cols are interchangeable."""
    small = min(rows, cols)
    rank = fraction * small
    rho = relative_error(rank, rows, cols)
    assert 0.0 <= rho <= 1.0
    assert rho == relative_error(rank, cols, rows)
    assert rank_for_error(rho, rows, cols) == pytest.approx(rank, abs=1e-9 * small)
    assert rank_for_error(rho, rows, cols) == rank_for_error(rho, cols, rows)
    value = g(rank, rows, cols)
    assert value**2 == pytest.approx(rho * rows * cols, rel=1e-14)
    assert inverse_g(value, rows, cols) == pytest.approx(rank, abs=1e-9 * small)


@given(rows=sizes, cols=sizes, rho=fractions)
@example(rows=3, cols=3, rho=5e-324)
def test_error_of_the_rank_for_an_error(rows: int, cols: int, rho: float) -> None:
    """The other way round: rho may be any share, and its rank stays in range."""
    rank = rank_for_error(rho, rows, cols)
    assert 0.0 <= rank <= min(rows, cols)
    assert relative_error(rank, rows, cols) == pytest.approx(rho, abs=1e-13)


@pytest.mark.parametrize("root", [1e-3, 1.0, 3.1])
def test_solver_falls_back_on_bisection(root: float) -> None:
    """Newton alone runs away on atan from a start two widths off."""

    def curve(angle: float) -> tuple[float, float]:
        scaled = 20.0 * (angle - root)
        return math.atan(scaled) + 2.0, 20.0 / (1.0 + scaled * scaled)

    assert _solve(curve, 2.0, 1.5) == pytest.approx(root, rel=1e-12)


def test_inverse_g_clamps_above_g_of_zero() -> None:
    """A larger error than that of rank 0 asks for nothing."""
    assert inverse_g(1.01 * g(0.0, 30, 40), 30, 40) == 0.0
    assert inverse_g(1e300, 30, 40) == 0.0
    assert inverse_g(0.0, 30, 40) == 30.0


@pytest.mark.parametrize("rule", RULES)
@given(rows=sizes, cols=sizes, fraction=fractions, entropy=st.floats(-50.0, 50.0))
def test_rules_fixed_point(rule: Rule, rows: int, cols: int, fraction: float, entropy: float) -> None:
    """The same entropy asks for the same rank."""
    rank = fraction * min(rows, cols)
    tolerance = 1e-9 * min(rows, cols)
    assert rule(rank, entropy, entropy, rows, cols) == pytest.approx(rank, abs=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_rules_follow_the_entropy(rule: Rule) -> None:
    """Falling entropy lowers the rank, rising entropy raises it; only the difference counts."""
    assert rule(32.0, -5.0, -5.01, 768, 3072) < 32.0 < rule(32.0, -5.0, -4.99, 768, 3072)
    assert rule(32.0, -5.0, -4.99, 768, 3072) == pytest.approx(rule(32.0, 3.0, 3.01, 3072, 768))


@pytest.mark.parametrize("rule", RULES)
def test_rules_survive_extremes(rule: Rule) -> None:
    """A huge move of the entropy ends in the allowed range, without an overflow."""
    for drop in (800.0, 1e300, 1.7e308):
        assert rule(8.0, drop, -drop, 64, 96) == 0.0
        assert rule(8.0, -drop, drop, 64, 96) == 64.0
    for rise in (-800.0, -1.0, 1.0, 800.0):
        assert rule(64.0, 0.0, rise, 64, 96) == 64.0


def test_paper_rule_keeps_the_absolute_error() -> None:
    """As in arXiv 2511.10333, sigma g(r) is the same before and after, unless rank 0 is enough."""
    rank = paper_rank(300.0, -4.0, -3.7, 768, 3072)
    assert g(rank, 768, 3072) * math.exp(0.3) == pytest.approx(g(300.0, 768, 3072), rel=1e-12)
    assert paper_rank(8.0, 0.0, -0.1, 768, 3072) == 0.0
    rank = paper_rank(0.0, 0.0, 0.2, 768, 3072)
    assert g(rank, 768, 3072) * math.exp(0.2) == pytest.approx(g(0.0, 768, 3072), rel=1e-12)


def test_paper_rule_is_badly_conditioned() -> None:
    """About 700 ranks per nat at r = 8 of 768 x 3072, where `ef_rank` has about 2 r."""
    step = 1e-5
    slopes = [(rule(8.0, 0.0, step, 768, 3072) - 8.0) / step for rule in RULES]
    assert slopes[0] == pytest.approx(703.0, abs=10.0)
    assert slopes[1] == pytest.approx(16.0, abs=1.0)


def memory_norm(rank: float, rows: int, cols: int) -> float:
    """|E| / |G| in the steady state of error feedback."""
    rho = relative_error(rank, rows, cols)
    return math.sqrt(rho / (1.0 - rho))


def test_ef_rule_keeps_the_memory() -> None:
    """|E| = |G| sqrt(rho / (1 - rho)), times lr^lr_exponent, is the same before and after."""
    before = memory_norm(16.0, 768, 3072)
    rank = ef_rank(16.0, 1.0, 1.5, 768, 3072)
    assert memory_norm(rank, 768, 3072) * math.exp(0.5) == pytest.approx(before, rel=1e-12)
    rank = ef_rank(16.0, 1.0, 1.5, 768, 3072, lr_ratio=0.25, lr_exponent=0.5)
    after = memory_norm(rank, 768, 3072) * math.exp(0.5) * 0.25**0.5
    assert after == pytest.approx(before, rel=1e-12)


def test_ef_rule_learning_rate_limits() -> None:
    """A falling rate lowers the rank; a rate of 0 ends at 0, but only if the rate counts."""
    assert ef_rank(16.0, 0.0, 0.0, 64, 96, lr_ratio=0.5, lr_exponent=0.5) < 16.0
    assert ef_rank(16.0, 0.0, 0.0, 64, 96, lr_ratio=2.0, lr_exponent=0.5) > 16.0
    assert ef_rank(16.0, 0.0, 5.0, 64, 96, lr_ratio=0.0, lr_exponent=0.5) == 0.0
    still = ef_rank(16.0, 0.0, 0.0, 64, 96, lr_ratio=0.0, lr_exponent=0.0)
    assert still == pytest.approx(16.0, rel=1e-12)
    assert ef_rank(0.0, 0.0, 9.0, 64, 96) == 0.0
    assert ef_rank(64.0, 0.0, -9.0, 64, 96, lr_ratio=0.0, lr_exponent=1.0) == 64.0


def test_ef_rule_keeps_tiny_ranks() -> None:
    """1 - rho is carried beside rho, so a tiny rank does not round to 0: r is near exp(2 dH)."""
    rank = ef_rank(1e-20, 0.0, 1.0, 64, 96)
    assert rank / 1e-20 == pytest.approx(math.exp(2.0), rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: relative_error(-0.1, 4, 5), r"^rank is -0\.1; .* \[0, 4\]"),
        (lambda: relative_error(4.1, 5, 4), r"^rank is 4\.1; .* \[0, 4\]"),
        (lambda: relative_error(math.nan, 4, 5), r"^rank is nan"),
        (lambda: relative_error(0.0, 0, 5), r"^rows is 0; .* at least 1"),
        (lambda: relative_error(0.0, 5, -1), r"^cols is -1; .* at least 1"),
        (lambda: rank_for_error(1.1, 4, 5), r"^rho is 1\.1; .* \[0, 1\]"),
        (lambda: rank_for_error(-1e-9, 4, 5), r"^rho is -1e-09"),
        (lambda: g(5.0, 4, 5), r"^rank is 5\.0"),
        (lambda: inverse_g(-1.0, 4, 5), r"^value is -1\.0"),
        (lambda: inverse_g(math.inf, 4, 5), r"^value is inf"),
        (lambda: paper_rank(9.0, 0.0, 0.0, 4, 5), r"^rank0 is 9\.0"),
        (lambda: paper_rank(1.0, -math.inf, 0.0, 4, 5), r"^entropy0_nats is -inf"),
        (lambda: paper_rank(1.0, 0.0, math.nan, 4, 5), r"^entropy1_nats is nan"),
        (lambda: ef_rank(9.0, 0.0, 0.0, 4, 5), r"^rank0 is 9\.0"),
        (lambda: ef_rank(1.0, math.nan, 0.0, 4, 5), r"^entropy0_nats is nan"),
        (lambda: ef_rank(0.0, 0.0, math.inf, 4, 5), r"^entropy1_nats is inf"),
        (lambda: ef_rank(1.0, 0.0, 0.0, 4, 5, lr_ratio=-1.0), r"^lr_ratio is -1\.0"),
        (lambda: ef_rank(1.0, 0.0, 0.0, 4, 5, lr_exponent=-0.5), r"^lr_exponent is -0\.5"),
    ],
)
def test_refuses(call: Callable[[], float], message: str) -> None:
    """Each error names the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        call()
