"""Differential entropy of gradients from a strided sample.

This is the gradient data sampler (GDS) of EDGC, arXiv 2511.10333: a strided share of the entries
is read, and the entropy of that sample drives the rank. Differs from the paper in its estimators.
The authors' min-max histogram does not see the scale of the gradient, which is what the rank
model needs; `histogram` and `gaussian` do, and it is kept for reproduction only.

Nothing here waits for the device: no value is read on the host and no shape depends on data, so
that a caller can measure all tensors and read the results with one synchronization. Entries may
lie anywhere between 1e-30 and 1e30.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MAX_SAMPLES = 2**13
"""Largest sample. The standard error of H, sqrt(Var(ln density) / samples), is 0.7 / 90 = 0.008 nats
for a Gaussian and about 0.01 for heavier tails: four to ten times less than the 0.04 to 0.07 nats
that one mini-batch differs from the next. Twice the sample takes 1.7 times as long."""

_TAIL_FRACTION = 0.005
"""Share of the sample left out at either end by `histogram`, so that outliers do not set the
width of its bins."""

_MAX_BINS = 256
_SAMPLES_PER_BIN = 100
_MINMAX_BINS = 1000
"""Number of bins in the public code of arXiv 2511.10333."""


def measure(tensors: Sequence[Tensor], estimator: str, fraction: float, offset: int = 0) -> Tensor:
    """Entropy of each tensor, without waiting for the device.

    Args:
        tensors: Gradients of any shape and real dtype, all on one device. Not changed.
        estimator: A key of `ESTIMATORS`.
        fraction: Largest share of the entries to read, in (0, 1]; the paper's beta.
        offset: Where the stride starts. Pass the step, and successive steps read other entries.

    Returns:
        Entropies in nats, (len(tensors),) float32 on the device of the tensors: -inf for a tensor
        without entries or without spread, nan for one whose sample is not finite.

    Raises:
        ValueError: The estimator is unknown, or the fraction is outside (0, 1].
    """
    _check_limits(fraction, MAX_SAMPLES)
    return of_samples([sample(tensor, fraction, offset=offset) for tensor in tensors], estimator)


def of_samples(samples: Sequence[Tensor], estimator: str) -> Tensor:
    """`measure` for samples that were taken already, each (samples,) float32.

    Raises:
        ValueError: The estimator is unknown.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; it must be one of {sorted(ESTIMATORS)}")
    estimate = ESTIMATORS[estimator]
    values = [estimate(entries) for entries in samples]
    return torch.stack(values) if values else torch.empty(0, dtype=torch.float32)


def sample(tensor: Tensor, fraction: float, max_samples: int = MAX_SAMPLES, offset: int = 0) -> Tensor:
    """Strided entries of a tensor, read in row-major order.

    A row is all that the first dimension indexes, as where gradients are viewed as matrices.

    Args:
        tensor: Any shape, real dtype and memory layout. Not changed; may share memory with the
            result.
        fraction: Largest share of the entries to read, in (0, 1].
        max_samples: Largest number of entries to read, at least 1.
        offset: The first entry read is offset modulo the stride (modulo numel, if that is less).

    Returns:
        The sample, (samples,) float32 on the tensor's device; (0,) for a tensor without entries.

    Raises:
        ValueError: fraction or max_samples is outside its range, or the tensor is complex.
    """
    _check_limits(fraction, max_samples)
    if tensor.is_complex():
        raise ValueError(f"tensor has dtype {tensor.dtype}; it must be real")
    row_length = tensor.numel() // tensor.shape[0] if tensor.numel() and tensor.ndim > 1 else 1
    stride = sampling_stride(tensor.numel(), row_length, fraction, max_samples)
    start = offset % min(stride, max(1, tensor.numel()))
    # Estimators read the sample several times; gathering it once spares them the strided reads.
    return tensor.detach().reshape(-1)[start::stride].to(torch.float32).contiguous()


def sampling_stride(numel: int, row_length: int, fraction: float, max_samples: int) -> int:
    """Smallest odd stride, coprime to the row length, that keeps to both limits.

    A stride that shares a factor with the row length reads the same columns in every row, and
    columns of a gradient differ in scale: 4 to 5 times the noise. Odd whatever the row length,
    because the blocks inside a row, such as attention heads, are of even length as a rule.

    Args:
        numel: Number of entries, at least 0.
        row_length: Entries of one row, at least 1.
        fraction: At most ceil(fraction * numel) entries are read; in (0, 1].
        max_samples: At most this many entries are read, at least 1.

    Returns:
        The stride in entries, at least 1. It exceeds numel where a limit allows one entry only.

    Raises:
        ValueError: An argument is outside its range.
    """
    _check_limits(fraction, max_samples)
    if numel < 0:
        raise ValueError(f"numel is {numel}; it must be at least 0")
    if row_length < 1:
        raise ValueError(f"row_length is {row_length}; it must be at least 1")
    limit = max(1, min(math.ceil(fraction * numel), max_samples))
    stride = max(1, -(-numel // limit)) | 1  # reading every k-th of numel gives ceil(numel / k)
    while math.gcd(stride, row_length) > 1:
        stride += 2
    return stride


def gaussian_entropy(x: Tensor) -> Tensor:
    """Entropy of the Gaussian with the sample's variance, H = 0.5 ln(2 pi e var).

    The link between entropy and sigma in arXiv 2511.10333, CQM. H(a x) = H(x) + ln |a|.

    Args:
        x: The sample, (samples,) float32.

    Returns:
        H in nats, () float32: -inf if x is empty or without spread, nan if it is not finite.
    """
    if x.numel() == 0:
        return _constant(x, -math.inf)
    peak = x.abs().amax()
    # Squares of 1e30 or 1e-30 leave float32; those of entries scaled to [-1, 1] do not.
    scale = torch.where(peak > 0.0, peak, 1.0)
    variance = (x / scale).var(correction=0)
    entropy = 0.5 * (variance.log() + math.log(2.0 * math.pi * math.e)) + scale.log()
    return _nan_unless_finite(entropy, x)


def histogram_entropy(x: Tensor) -> Tensor:
    """Entropy of the middle 99 % of the sample, from a histogram and its bin width.

    H = -sum p ln p + ln(width) over equal bins between the 0.5 and the 99.5 % quantile, with
    max(2, min(256, samples // 100)) bins. What lies outside is left out, so H is that of the
    truncated distribution: 0.048 nats below the whole one for a Gaussian, a constant that
    cancels in H1 - H0. H(a x) = H(x) + ln |a|. Differs from arXiv 2511.10333 in quantiles and
    width.

    Args:
        x: The sample, (samples,) float32.

    Returns:
        H in nats, () float32: -inf if x is empty or its middle 99 % has no spread, nan if x is
        not finite.
    """
    samples = x.numel()
    if samples == 0:
        return _constant(x, -math.inf)
    # Order statistics, as many from either end: H(-x) = H(x). topk is far cheaper than a sort.
    position = 1 + int(_TAIL_FRACTION * (samples - 1))
    low = x.topk(position, largest=False, sorted=False).values.amax()
    high = x.topk(position, largest=True, sorted=False).values.amin()
    bins = max(2, min(_MAX_BINS, samples // _SAMPLES_PER_BIN))
    log_width = (high - low).log() - math.log(bins)
    entropy = _discrete_entropy(_counts(x, low, high, bins)) + log_width
    return _nan_unless_finite(entropy, x)


def histogram_minmax_entropy(x: Tensor) -> Tensor:
    """Discrete entropy of 1000 equal bins between minimum and maximum, H = -sum p ln p.

    The authors' public code of arXiv 2511.10333, for reproduction. Scale-blind: H(a x) = H(x), so
    it cannot tell sigma0 / sigma1, which the rank rule asks for.

    Args:
        x: The sample, (samples,) float32.

    Returns:
        H in nats, () float32 in [0, ln 1000]: 0.0 for a sample without spread, -inf for an empty
        one, nan if x is not finite.
    """
    if x.numel() == 0:
        return _constant(x, -math.inf)
    entropy = _discrete_entropy(_counts(x, x.amin(), x.amax(), _MINMAX_BINS))
    return _nan_unless_finite(entropy, x)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": gaussian_entropy,
    "histogram": histogram_entropy,
    "histogram_minmax": histogram_minmax_entropy,
}
"""Each maps a sample, (samples,) float32, to its entropy in nats, () float32."""


def _counts(x: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    """Entries of x (samples,) in equal bins of [low, high]: (bins,) float32.

    torch.histc, histogram and bincount read their limits or their result on the host.
    """
    position = (x - low) / (high - low) * bins  # (samples,)
    # Without spread this is 0 / 0: one full bin. Where x is not finite the caller drops the
    # result, but the index must be valid.
    index = position.nan_to_num(nan=0.0).clamp(0, bins - 1).to(torch.int64)
    inside = ((x >= low) & (x <= high)).to(torch.float32)
    # Adding ones is exact up to 2^24, so the order of the additions does not matter.
    return torch.zeros(bins, dtype=torch.float32, device=x.device).scatter_add_(0, index, inside)


def _discrete_entropy(counts: Tensor) -> Tensor:
    """-sum p ln p in nats of counts (bins,): () float32."""
    shares = counts / counts.sum()
    terms: Tensor = torch.special.entr(shares)  # -p ln p, 0 at p = 0
    return terms.sum()


def _nan_unless_finite(entropy: Tensor, x: Tensor) -> Tensor:
    """The entropy, or nan where an entry of x is not finite: quantiles may have hidden it."""
    return torch.where(x.isfinite().all(), entropy, math.nan)


def _constant(x: Tensor, value: float) -> Tensor:
    """A value, () float32 on the device of x."""
    return torch.full((), value, dtype=torch.float32, device=x.device)


def _check_limits(fraction: float, max_samples: int) -> None:
    """Refuse limits that read nothing, or more than there is."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction is {fraction!r}; it must be in (0, 1]")
    if max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}; it must be at least 1")
