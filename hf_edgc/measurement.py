"""GDS of one step: what is measured of the gradients bucket by bucket, and read once averaged over the workers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_edgc.config import EDGCConfig
from hf_edgc.entropy import measure


@dataclass(frozen=True)
class Measured:
    """Means over the workers, in unscaled units.

    ``entropies`` has nats for each matrix of the layout; ``grad_norm`` is the 2-norm of the whole gradient of a
    worker before compression and averaging; ``learning_rate`` is None where a worker does not know it.
    """

    entropies: list[float]
    grad_norm: float
    learning_rate: float | None

    @property
    def mean_entropy(self) -> float | None:
        """Mean of the finite entropies in nats, None if there is none."""
        finite = [value for value in self.entropies if math.isfinite(value)]
        return math.fsum(finite) / len(finite) if finite else None


@dataclass
class Measurement:
    """Collects one step's numbers as tensors, without waiting for the device."""

    config: EDGCConfig
    indices: Mapping[str, int]
    """Position of each matrix in the layout, by parameter name."""
    _entropies: list[tuple[list[int], Tensor]] = field(default_factory=list)
    _norms: list[Tensor] = field(default_factory=list)

    def add(self, gradients: Sequence[tuple[str, Tensor]], buffer: Tensor, offset: int) -> None:
        """Measure one bucket: its named ``gradients`` are views into the flat ``buffer``."""
        found = [(self.indices[name], grad) for name, grad in gradients if name in self.indices]
        grads = [grad for _, grad in found]
        values = measure(grads, self.config.entropy_estimator, self.config.entropy_fraction, offset)
        self._entropies.append(([index for index, _ in found], values))
        self._norms.append(torch.linalg.vector_norm(buffer.float()))

    def vector(self, device: torch.device, learning_rate: float | None) -> Tensor:
        """All numbers for the exchange, shape (matrices + 2,), or (0,) if the step is not measured.

        The learning rate goes along so that workers whose schedules differ still decide the same.
        """
        if not self._norms:
            return torch.empty(0, device=device)
        vector = torch.empty(len(self.indices) + 2, device=device)
        for indices, values in self._entropies:
            if indices:
                vector[indices] = values
        vector[-2] = torch.linalg.vector_norm(torch.stack(self._norms))
        vector[-1] = math.nan if learning_rate is None else learning_rate
        return vector

    def read(self, means: Tensor | None, scale: float) -> Measured | None:
        """Averaged ``vector()`` of gradients with loss scale ``scale``, on the host; None if there is nothing."""
        if means is None or means.numel() == 0:
            return None
        # Scaling a gradient by s adds ln(s) to its differential entropy; the min-max histogram can't see it.
        shift = 0.0 if self.config.entropy_estimator == "histogram_minmax" else math.log(scale)
        *entropies, norm, rate = means.tolist()
        known_rate = None if math.isnan(rate) else rate
        return Measured([value - shift for value in entropies], norm / scale, known_rate)
