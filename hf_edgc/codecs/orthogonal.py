"""Orthonormal bases of tall thin matrices, safe for zero, tiny, huge and dependent columns."""

import torch
from torch import Tensor

SMALLEST_SINE = 0.02
"""Cholesky-QR is used while no column lies closer to the span of those before it. Twice in float32 it is as orthogonal
as Householder QR for condition numbers below about 1 / (8 sqrt(eps)) = 360; a smallest sine of 0.02 keeps to that."""

SINE_FOR_ONE_PASS = 0.5
"""From here on once is enough: the error is about eps / sine^2."""

SQUARED_LENGTHS = (1e-30, 1e30)
"""Where float32 keeps all digits of sums of squares."""


def orthonormal_columns(matrix: Tensor) -> Tensor:
    """Orthonormal basis (n, r) of the columns of ``matrix`` (n, r), n >= r, float32.

    A row that is exactly zero stays exactly zero, so that rows without gradient are never touched.
    Dependent columns are completed by further orthonormal ones, except where that would touch a zero row.

    Cholesky-QR, twice if need be (Yamamoto et al., Electron. Trans. Numer. Anal. 44, 2015), consists of products and
    is several times faster than Householder QR for thin matrices; the latter where columns are nearly dependent, zero,
    tiny or huge.
    """
    basis, sine = _cholesky_qr(matrix)
    if basis is not None and sine < SINE_FOR_ONE_PASS:
        basis, _ = _cholesky_qr(basis)
    return basis if basis is not None else _householder_qr(unit_columns(matrix))


def _cholesky_qr(matrix: Tensor) -> tuple[Tensor | None, float]:
    """Basis (n, r), or None where it would be inexact; and the smallest sine of a column to those before it."""
    gram = matrix.mT @ matrix  # (r, r)
    squared = gram.diagonal()
    inverse_length = squared.rsqrt()
    lower, _ = torch.linalg.cholesky_ex(gram * inverse_length * inverse_length[:, None])
    # Cholesky leaves what it could not factor, so that a wrong diagonal entry is zero, negative or NaN.
    least, most, sine = torch.stack([squared.amin(), squared.amax(), lower.diagonal().amin()]).tolist()
    if not (SQUARED_LENGTHS[0] < least and most < SQUARED_LENGTHS[1] and sine > SMALLEST_SINE):
        return None, sine
    inverse: Tensor = torch.linalg.solve_triangular(lower, inverse_length.diag(), upper=False)
    return matrix @ inverse.mT, sine


def _householder_qr(units: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(units)[0]
    return basis * (units != 0).any(dim=1, keepdim=True)


def unit_columns(matrix: Tensor) -> Tensor:
    """``matrix`` (m, r) with columns of length 1; zero columns stay zero."""
    squared = matrix.square().sum(dim=0)
    least, most = torch.stack(squared.aminmax()).tolist()
    if SQUARED_LENGTHS[0] < least and most < SQUARED_LENGTHS[1]:
        return matrix / squared.sqrt()
    # Dividing by the largest entry keeps the squares inside float32 for entries of 1e30 or 1e-30.
    largest = matrix.abs().amax(dim=0, keepdim=True)
    scaled = matrix / torch.where(largest > 0, largest, torch.ones_like(largest))
    length = torch.linalg.vector_norm(scaled, dim=0, keepdim=True)
    return scaled / torch.where(length > 0, length, torch.ones_like(length))


def random_columns(rows: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Gaussian (rows, count), float32, fixed by ``seed``; the global generators are not touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, generator=generator, dtype=torch.float32).to(device)
