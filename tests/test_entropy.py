"""Laws of the entropy estimators: closed forms, scale, extremes, sampling, no waiting."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from hf_edgc import entropy
from hf_edgc.entropy import ESTIMATORS, MAX_SAMPLES, measure, sample, sampling_stride

GAUSSIAN_NATS = 0.5 * math.log(2.0 * math.pi * math.e)
each_estimator = pytest.mark.parametrize("estimator", sorted(ESTIMATORS))


def uniform(samples: int, seed: int = 0) -> Tensor:
    """(samples,) float64 in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)


def gaussian(samples: int, seed: int = 0) -> Tensor:
    """(samples,) float32, N(0, 1)."""
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def truncated_gaussian_nats() -> float:
    """Entropy of the middle 99 % of N(0, 1): E[-ln f] with f = phi / 0.99 on [-z, z]."""
    z = 2.5758293035489004
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    second_moment = 1.0 - 2.0 * z * density / 0.99
    return 0.5 * math.log(2.0 * math.pi) + math.log(0.99) + 0.5 * second_moment


def truncated_laplace_nats() -> float:
    """Entropy of the middle 99 % of Laplace(1): ln 2 + ln 0.99 + E[|x|; |x| < ln 100]."""
    return math.log(2.0 * 0.99) + 1.0 - math.log(100.0) * 0.01 / 0.99


# name: quantile function, variance, entropy of the middle 99 %, standard deviation of x^2 over
# the variance (sqrt(kurtosis - 1)), standard deviation of ln density
DISTRIBUTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float, float, float]] = {
    "gaussian": (torch.special.ndtri, 1.0, truncated_gaussian_nats(), math.sqrt(2.0), 0.71),
    "laplace": (
        lambda u: (2.0 * u.minimum(1.0 - u)).log() * (0.5 - u).sign(),
        2.0,
        truncated_laplace_nats(),
        math.sqrt(5.0),
        1.0,
    ),
    "uniform": (lambda u: u, 1.0 / 12.0, math.log(0.99), math.sqrt(0.8), 0.0),
}


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_closed_forms(name: str) -> None:
    """Both differential estimators agree with the closed form, to five standard errors.

    The Gaussian estimator's standard error is half that of ln var. The histogram's is that of the
    mean of ln density, plus the bias of a histogram, bins / (2 samples), plus that of the
    quantiles' distance: each has sqrt(0.005 / samples) / density, taken at the uniform's 1.
    """
    quantile, variance, nats, spread_of_squares, spread_of_log = DISTRIBUTIONS[name]
    samples = 2**16
    x = quantile(uniform(samples)).to(torch.float32)
    root = math.sqrt(samples)
    expected = GAUSSIAN_NATS + 0.5 * math.log(variance)
    bound = 5.0 * 0.5 * spread_of_squares / root
    assert entropy.gaussian_entropy(x).item() == pytest.approx(expected, abs=bound)
    bound = 5.0 * (spread_of_log + math.sqrt(0.005)) / root + 256 / (2 * samples)
    assert bound < 0.03  # below the 0.048 nats of the truncation, so the test can see it
    assert entropy.histogram_entropy(x).item() == pytest.approx(nats, abs=bound)


@pytest.mark.parametrize("samples", [150, 1_000, 20_001])
def test_histograms_agree_with_numpy(samples: int) -> None:
    """The histograms are numpy's. An entry at an edge may move: ln(samples) / samples each."""
    x = gaussian(samples) ** 3
    values = np.sort(x.double().numpy())
    skipped = int(0.005 * (samples - 1))
    middle = values[skipped : samples - skipped]
    bins = max(2, min(256, samples // 100))

    def discrete(entries: np.ndarray, count: int) -> float:
        shares = np.histogram(entries, bins=count)[0] / len(entries)
        return float(-sum(p * math.log(p) for p in shares if p > 0))

    tolerance = 2.0 * math.log(samples) / samples
    log_width = math.log((middle[-1] - middle[0]) / bins)
    assert entropy.histogram_entropy(x).item() == pytest.approx(discrete(middle, bins) + log_width, abs=tolerance)
    assert entropy.histogram_minmax_entropy(x).item() == pytest.approx(discrete(values, 1000), abs=tolerance)


def test_histogram_ignores_outliers() -> None:
    """A few entries of any size do not move the robust histogram; they ruin the other two."""
    x = gaussian(20_000)
    spoiled = x.clone()
    spoiled[:10] = 1e25
    # Ten entries, each worth at most ln(samples) / samples, and the quantile's step beside them.
    bound = 20.0 * math.log(20_000) / 20_000
    moved = {k: abs(e(spoiled) - e(x)).item() for k, e in ESTIMATORS.items()}
    assert moved["histogram"] < bound
    assert min(moved["gaussian"], moved["histogram_minmax"]) > 1.0


@given(exponent=st.integers(-90, 90), seed=st.integers(0, 3))
def test_scale_law_exact(exponent: int, seed: int) -> None:
    """H(a x) = H(x) + ln |a|; powers of two round nothing, so only the last sum does.

    Two sums of about 65 nats in float32 are each off by at most 4e-6.
    """
    x = gaussian(2_000, seed)
    factor = 2.0**exponent
    for estimator in (entropy.gaussian_entropy, entropy.histogram_entropy):
        moved = estimator(factor * x).item() - estimator(x).item()
        assert moved == pytest.approx(exponent * math.log(2.0), abs=2e-5)
    assert torch.equal(entropy.histogram_minmax_entropy(factor * x), entropy.histogram_minmax_entropy(x))


@pytest.mark.parametrize("factor", [1e-30, 3e-7, 0.7, 1e30])
def test_scale_law_any_factor(factor: float) -> None:
    """Any factor: a rounded entry may pass an edge, ln(samples) / samples = 4e-4 each."""
    x = gaussian(25_000)
    for name, estimator in ESTIMATORS.items():
        moved = estimator(factor * x).item() - estimator(x).item()
        expected = 0.0 if name == "histogram_minmax" else math.log(factor)
        assert moved == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("samples", [1, 2, 3, 99, 777, 3_000])
@pytest.mark.parametrize("value", [0.0, 0.3, -1e30, 1e-30])
def test_no_spread(samples: int, value: float) -> None:
    """One value repeated has no differential entropy, and one full bin."""
    x = torch.full((samples,), value)
    assert entropy.gaussian_entropy(x).item() == -math.inf
    assert entropy.histogram_entropy(x).item() == -math.inf
    assert entropy.histogram_minmax_entropy(x).item() == 0.0


@each_estimator
def test_empty(estimator: str) -> None:
    """No entries, no information; the result keeps its shape and dtype."""
    for x in (gaussian(500), torch.ones(5), torch.zeros(0)):
        result = ESTIMATORS[estimator](x)
        assert (result.shape, result.dtype) == ((), torch.float32)
    assert measure([torch.zeros(0, 5)], estimator, 0.25).tolist() == [-math.inf]
    assert measure([], estimator, 0.25).shape == (0,)


@each_estimator
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("samples", [1, 2, 4_000])
def test_not_finite(estimator: str, bad: float, samples: int) -> None:
    """One bad entry is enough, also where the quantiles would have hidden it."""
    x = gaussian(samples)
    x[samples // 2] = bad
    assert math.isnan(ESTIMATORS[estimator](x).item())
    assert math.isnan(ESTIMATORS[estimator](torch.full((samples,), bad)).item())


@each_estimator
def test_never_waits_for_the_device(estimator: str) -> None:
    """Meta tensors have no values: reading one, or a shape that depends on one, raises."""
    with pytest.raises(RuntimeError):
        bool(torch.ones(1, device="meta") > 0)
    tensors = [torch.empty(s, device="meta") for s in ((64, 96), (5,), (0, 3), (4, 3, 2))]
    entropies = measure(tensors, estimator, 0.25)
    assert entropies.shape == (4,)


@each_estimator
def test_measure_is_pure_and_repeatable(estimator: str) -> None:
    """Same input, same bits; global random state and gradients stay as they were."""
    tensors = [gaussian(60_000, seed).reshape(200, 300) * 10.0**-seed for seed in range(3)]
    copies = [t.clone() for t in tensors]
    before = torch.get_rng_state()
    first = measure(tensors, estimator, 0.25, offset=3)
    assert torch.equal(first, measure(tensors, estimator, 0.25, offset=3))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(t, c) for t, c in zip(tensors, copies, strict=True))
    each = [ESTIMATORS[estimator](sample(t, 0.25, offset=3)) for t in tensors]
    assert torch.equal(first, torch.stack(each))
    assert first.dtype == torch.float32
    assert not torch.equal(first, measure(tensors, estimator, 0.25, offset=4))
    assert not measure([torch.nn.Parameter(tensors[0])], estimator, 0.25).requires_grad


@given(
    numel=st.integers(0, 10**9),
    row_length=st.integers(1, 60_000),
    fraction=st.floats(1e-6, 1.0),
    max_samples=st.integers(1, 10**6),
)
def test_stride_is_the_smallest_allowed(numel: int, row_length: int, fraction: float, max_samples: int) -> None:
    """Odd, coprime, within both limits; and every smaller stride breaks one of these."""
    limit = min(math.ceil(fraction * numel), max_samples)

    def allowed(stride: int) -> bool:
        return math.gcd(stride, 2 * row_length) == 1 and -(-numel // stride) <= limit

    stride = sampling_stride(numel, row_length, fraction, max_samples)
    assert allowed(stride)
    # Strides below numel / limit read too much; only those between have to be tried.
    lowest = -(-numel // limit) if limit else 1
    assert not any(allowed(smaller) for smaller in range(max(1, lowest - 2), stride))


@pytest.mark.parametrize(
    ("arguments", "stride"),
    [
        ((768 * 3072, 3072, 0.25, 2**16), 37),  # 2359296 / 65536 = 36
        ((768 * 768, 768, 0.25, 2**20), 5),  # 1 / 0.25 = 4
        ((100 * 15, 15, 0.5, 2**16), 7),  # 2, 3 and 5 divide 2 * 15
    ],
)
def test_strides_by_hand(arguments: tuple[int, int, float, int], stride: int) -> None:
    """Numel, row length, fraction and cap of a few shapes."""
    assert sampling_stride(*arguments) == stride


@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    fraction=st.floats(0.02, 1.0),
    offset=st.integers(0, 10**6),
)
@example(rows=2, cols=2, fraction=0.25, offset=4)
def test_sample_reads_every_column(rows: int, cols: int, fraction: float, offset: int) -> None:
    """Any cols successive entries of the sample lie in cols different columns."""
    index = torch.arange(rows * cols).reshape(rows, cols)
    read = sample(index, fraction, offset=offset).to(torch.int64)
    assert 1 <= len(read) <= math.ceil(fraction * rows * cols)
    assert len({i % cols for i in read.tolist()}) == min(len(read), cols)


@given(numel=st.integers(2, 500), fraction=st.floats(0.05, 1.0))
def test_offsets_share_the_entries_out(numel: int, fraction: float) -> None:
    """All offsets of one stride together read each entry exactly once."""
    stride = sampling_stride(numel, 1, fraction, MAX_SAMPLES)
    assume(stride <= numel)
    parts = [sample(torch.arange(numel), fraction, offset=k) for k in range(stride)]
    assert torch.cat(parts).sort().values.tolist() == list(range(numel))
    assert torch.equal(sample(torch.arange(numel), fraction, offset=stride), parts[0])


def test_sample_keeps_to_the_cap() -> None:
    """The cap holds where the fraction allows more."""
    x = gaussian(3 * MAX_SAMPLES)
    assert len(sample(x, 1.0)) == MAX_SAMPLES
    assert torch.equal(sample(x, 1.0, max_samples=3 * MAX_SAMPLES), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32])
def test_sample_any_dtype_and_layout(dtype: torch.dtype) -> None:
    """Row-major entries in float32, whatever the memory looks like."""
    x = (10.0 * gaussian(6 * 10)).reshape(6, 10).to(dtype)
    for view in (x, x.t(), x[:, ::3], x.reshape(2, 3, 10).transpose(0, 2), x[0, 0]):
        read = sample(view, 1.0)
        assert read.dtype == torch.float32
        assert torch.equal(read, view.flatten().to(torch.float32))
    assert sample(torch.zeros(0, 4, dtype=dtype), 0.5).shape == (0,)
    assert sample(torch.zeros(4, 0, dtype=dtype), 0.5, offset=7).shape == (0,)
    # (8, 3, 5) is viewed as (8, 15): strides of 3 and 5 would read the same columns.
    read = sample(torch.arange(8 * 15).reshape(8, 3, 5), 0.5)
    assert read[1].item() == 7.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: measure([], "kde", 0.5),
            r"'kde'.*\['gaussian', 'histogram', 'histogram_minmax'\]",
        ),
        (lambda: measure([], "gaussian", 0.0), r"^fraction is 0\.0; .* \(0, 1\]"),
        (lambda: sample(torch.ones(3), 1.5), r"^fraction is 1\.5"),
        (lambda: sample(torch.ones(3), math.nan), r"^fraction is nan"),
        (lambda: sample(torch.ones(3), 1.0, max_samples=0), r"^max_samples is 0; .* at least 1"),
        (lambda: sample(torch.ones(3, dtype=torch.complex64), 1.0), r"complex64; it must be real"),
        (lambda: sampling_stride(-1, 1, 1.0, 1), r"^numel is -1; .* at least 0"),
        (lambda: sampling_stride(1, 0, 1.0, 1), r"^row_length is 0; .* at least 1"),
    ],
)
def test_refuses(call: Callable[[], object], message: str) -> None:
    """Each error names the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        call()
