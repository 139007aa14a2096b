"""GDS of one step: what is measured of the gradients bucket by bucket, and read once averaged over the workers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_edgc.config import EDGCConfig
from hf_edgc.entropy import MAX_SAMPLES, of_samples, sample
from hf_edgc.measured import Measured


@dataclass
class Measurement:
    """Collects one step's numbers as tensors, without waiting for the device."""

    config: EDGCConfig
    indices: Mapping[str, int]
    """Position of each matrix in the layout, by parameter name."""
    _entropies: list[tuple[list[int], Tensor]] = field(default_factory=list)
    _norms: dict[str, Tensor] = field(default_factory=dict)

    def add(self, gradients: Sequence[tuple[str, Tensor]], offset: int, exact_norms: bool = False) -> None:
        """Measure the named ``gradients`` of one bucket, from samples that start at ``offset`` modulo their stride.

        Norms of large matrices are those of the sample, scaled up, unless ``exact_norms`` are asked for: a step that is
        not compressed learns from them alone whether the gradients are finite.
        """
        fraction = self.config.entropy_fraction
        samples = {name: sample(grad, fraction, offset=offset) for name, grad in gradients if name in self.indices}
        if samples:
            values = of_samples(list(samples.values()), self.config.entropy_estimator)
            self._entropies.append(([self.indices[name] for name in samples], values))
        for name, grad in gradients:
            self._norms[name] = _norm(grad, None if exact_norms else samples.get(name))

    def vector(self, device: torch.device, errors: Mapping[str, Tensor], learning_rate: float | None) -> Tensor:
        """All numbers for the exchange, shape (3 matrices + 3,), or (0,) if the step is not measured.

        Norms of single matrices cost nothing: those of all are made of them. The learning rate goes along so that
        workers whose schedules differ still decide the same.
        """
        if not self._norms:
            return torch.empty(0, dtype=torch.float32, device=device)
        count = len(self.indices)
        vector = torch.full((3 * count + 3,), math.nan, dtype=torch.float32, device=device)
        entropies, grad_norms, error_norms = vector[: 3 * count].view(3, count)
        for indices, values in self._entropies:
            entropies[indices] = values
        # By name, not by bucket: buckets differ between a run and its continuation, and so would the rounding.
        names = sorted(self._norms)
        norms = torch.stack([self._norms[name] for name in names])
        vector[-3] = torch.linalg.vector_norm(norms)
        of_matrices = [place for place, name in enumerate(names) if name in self.indices]
        grad_norms[[self.indices[names[place]] for place in of_matrices]] = norms[of_matrices]
        error_norms.zero_()
        vector[-2] = 0.0
        if errors:
            names = sorted(errors)
            norms = torch.stack([_norm(errors[name], sample(errors[name], 1.0)).to(device) for name in names])
            vector[-2] = torch.linalg.vector_norm(norms)
            error_norms[[self.indices[name] for name in names]] = norms
        vector[-1] = math.nan if learning_rate is None else learning_rate
        return vector

    def read(self, means: Tensor | None, scale: float) -> Measured | None:
        """Averaged ``vector()`` of gradients with loss scale ``scale``, on the host.

        Returns:
            None if nothing was measured or a gradient was not finite, in which case no figure means anything.
        """
        if means is None or means.numel() == 0:
            return None
        # Scaling a gradient by s adds ln(s) to its differential entropy; the min-max histogram can't see it.
        shift = 0.0 if self.config.entropy_estimator == "histogram_minmax" else math.log(scale)
        *of_matrices, grad_norm, error_norm, rate = means.tolist()
        if not math.isfinite(grad_norm):
            return None
        count = len(self.indices)
        return Measured(
            entropies=[value - shift for value in of_matrices[:count]],
            grad_norm=grad_norm / scale,
            error_norm=error_norm,
            learning_rate=None if math.isnan(rate) else rate,
            grad_norms=[value / scale for value in of_matrices[count : 2 * count]],
            error_norms=of_matrices[2 * count :],
        )


SAMPLED_ABOVE = 8 * MAX_SAMPLES
"""Elements. Smaller tensors are read as a whole; a norm from 8,192 entries has a standard error of about
sqrt((kurtosis - 1) / 8192) / 2, 2 percent for gradients with a kurtosis of 15."""


def _norm(tensor: Tensor, entries: Tensor | None) -> Tensor:
    """2-norm of ``tensor``, shape (); from its sample ``entries`` where it is large."""
    if entries is None or tensor.numel() <= SAMPLED_ABOVE:
        entries = tensor
    norm: Tensor = torch.linalg.vector_norm(entries, dtype=torch.float32)
    return norm * math.sqrt(tensor.numel() / max(1, entries.numel()))
