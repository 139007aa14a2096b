"""Orthonormal bases of tall thin matrices, safe for zero, tiny, huge and dependent columns."""

import torch
from torch import Tensor


def orthonormal_columns(matrix: Tensor) -> Tensor:
    """Orthonormal basis (n, r) of the columns of ``matrix`` (n, r), n >= r, float32.

    A row that is exactly zero stays exactly zero, so that rows without gradient are never touched.
    Dependent columns are completed by further orthonormal ones, except where that would touch a zero row.
    Householder QR is used since Gram-Schmidt gives NaN on zero columns.
    """
    # Dividing by the largest entry keeps the squared norms inside float32 for entries of 1e30 or 1e-30.
    largest = matrix.abs().amax()
    scaled = matrix / torch.where(largest > 0, largest, torch.ones_like(largest))
    basis: Tensor = torch.linalg.qr(scaled)[0]
    return basis * (scaled != 0).any(dim=1, keepdim=True)


def unit_columns(matrix: Tensor) -> Tensor:
    """``matrix`` (m, r) with columns of length 1; zero columns stay zero."""
    largest = matrix.abs().amax(dim=0, keepdim=True)
    scaled = matrix / torch.where(largest > 0, largest, torch.ones_like(largest))
    length = torch.linalg.vector_norm(scaled, dim=0, keepdim=True)
    return scaled / torch.where(length > 0, length, torch.ones_like(length))


def random_columns(rows: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Gaussian (rows, count), float32, fixed by ``seed``; the global generators are not touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, generator=generator, dtype=torch.float32).to(device)
