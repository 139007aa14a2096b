"""The codec ``low_rank``: PowerSGD (Vogels et al., arXiv 1905.13727), one power iteration a step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_edgc.codecs.base import Decoded, Product, Rounds, Slot
from hf_edgc.codecs.orthogonal import orthonormal_columns, random_columns, unit_columns

FP16_LIMIT = 2.0**15
"""Half of float16's largest value: leaves room for rounding."""


@dataclass(frozen=True)
class LowRank:
    """Sends P (rows, rank) and Q (cols, rank), M ~ P Q^T, instead of M (rows, cols).

    Q is kept from step to step (warm start), also when the rank changes: it grows by seeded random
    columns and shrinks to its leading ones. Differs from the PowerSGD paper in that Q's columns are
    brought to unit length before use, which leaves the column space of P as it is and keeps P in range.
    """

    rank: int
    factor_dtype: torch.dtype = torch.float32
    workers: int = 1
    """How many workers average: one worker's factor may be so many times the mean."""

    @property
    def rounds(self) -> int:
        """P and Q, and before them the scale of float16 factors."""
        return 3 if self.factor_dtype == torch.float16 else 2

    def wire_bytes(self, rows: int, cols: int, grad_itemsize: int) -> int:
        """Bytes of both factors, and of the float32 scale that float16 factors need."""
        scale_bytes = 4 if self.factor_dtype == torch.float16 else 0
        return self.rank * (rows + cols) * self.factor_dtype.itemsize + scale_bytes

    def encode(self, matrix: Tensor, slot: Slot, seed: int) -> Rounds:
        """P, then Q; with float16 factors the common scale goes first."""
        scale = None
        if self.factor_dtype == torch.float16:
            (bound,) = yield [_factor_bound(matrix)]
            scale = FP16_LIMIT / self.workers / torch.where(bound > 0, bound, torch.ones_like(bound))
        q = resized(slot.get("q"), matrix.shape[1], self.rank, seed, matrix.device)
        (p_mean,) = yield [self._packed(matrix @ q, scale)]  # (rows, rank)
        p = orthonormal_columns(self._unpacked(p_mean, scale))
        # As (p^T M)^T, which is up to twice as fast as M^T p for thin p on CPU.
        sent = self._packed((p.mT @ matrix).mT, scale)  # (cols, rank)
        (q_mean,) = yield [sent]
        q = self._unpacked(q_mean, scale)
        # The share is decoded from what was sent, so the error also holds what the cast of the factor dropped.
        return Decoded(mean=Product(p, q), local=Product(p, self._unpacked(sent, scale)), slot={"q": q})

    def _packed(self, factor: Tensor, scale: Tensor | None) -> Tensor:
        return (factor if scale is None else factor * scale).to(self.factor_dtype)

    def _unpacked(self, factor: Tensor, scale: Tensor | None) -> Tensor:
        return factor.float() if scale is None else factor.float() / scale


def resized(q: Tensor | None, cols: int, rank: int, seed: int, device: torch.device) -> Tensor:
    """Unit columns (cols, rank) that start with those of ``q`` (cols, any).

    Missing and dead (all zero) columns are replaced by random ones orthogonal to ``q``; ``seed`` fixes them.
    """
    kept = unit_columns(q[:, :rank]) if q is not None else torch.empty(cols, 0, dtype=torch.float32, device=device)
    alive = kept.square().sum(dim=0) > 0
    kept = kept if bool(alive.all()) else kept[:, alive]
    missing = rank - kept.shape[1]
    if missing == 0:
        return kept
    fresh = random_columns(cols, missing, seed, device)
    if kept.shape[1] > 0:
        basis = orthonormal_columns(kept)
        fresh = fresh - basis @ (basis.mT @ fresh)
    return torch.cat([kept, unit_columns(fresh)], dim=1)


def _factor_bound(matrix: Tensor) -> Tensor:
    """Upper bound, shape (1,), of every entry of both factors: columns of Q and P have at most unit length."""
    largest_side = max(matrix.shape)
    return (matrix.abs().amax() * math.sqrt(largest_side)).reshape(1)
