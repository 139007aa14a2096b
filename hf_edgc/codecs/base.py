"""What a codec is: it says what to exchange, is told the mean, and returns what was decoded."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Slot = Mapping[str, Tensor]
"""What a codec remembers of one parameter between steps; owned and saved by ``EDGCState``."""

Rounds = Generator[list[Tensor], list[Tensor], "Decoded"]
"""Yields the tensors to average in one round, is sent their means over the workers, returns the result."""


class Approximation(Protocol):
    """A matrix (rows, cols) that was not multiplied out yet: it is written where it is needed, without a copy."""

    def write(self, out: Tensor) -> Tensor:
        """Overwrite ``out`` (rows, cols), float32, with the matrix, and return it."""
        ...

    def rows(self, start: int, stop: int) -> "Approximation":
        """The rows from ``start`` to before ``stop``."""
        ...


@dataclass(frozen=True)
class Whole:
    """A matrix (rows, cols) as it is."""

    matrix: Tensor

    def write(self, out: Tensor) -> Tensor:
        """Copy the matrix to ``out`` (rows, cols), which may be the matrix itself."""
        return out if out is self.matrix else out.copy_(self.matrix)

    def rows(self, start: int, stop: int) -> "Whole":
        """A view of some rows."""
        return Whole(self.matrix[start:stop])


@dataclass(frozen=True)
class Product:
    """The matrix ``left @ right.mT`` of ``left`` (rows, rank) and ``right`` (cols, rank)."""

    left: Tensor
    right: Tensor

    def write(self, out: Tensor) -> Tensor:
        """Multiply into ``out`` (rows, cols)."""
        return torch.mm(self.left, self.right.mT, out=out)

    def rows(self, start: int, stop: int) -> "Product":
        """Only the rows of ``left`` differ."""
        return Product(self.left[start:stop], self.right)


@dataclass(frozen=True)
class Decoded:
    """Result of one exchange of a gradient matrix.

    ``mean`` (rows, cols) is the same on every worker. ``local`` (rows, cols) is this worker's share:
    its mean over the workers is ``mean``, so that what was dropped is ``matrix - local``.
    ``slot`` replaces the parameter's slot once the step is known to be finite.
    """

    mean: Approximation
    local: Approximation
    slot: Slot


class Codec(Protocol):
    """A frozen set of hyper-parameters with one generator; it keeps no state and issues no collective."""

    @property
    def rounds(self) -> int:
        """How often ``encode`` yields, at least 1."""
        ...

    def wire_bytes(self, rows: int, cols: int, grad_itemsize: int) -> int:
        """Bytes that one worker hands to the collectives for a (rows, cols) gradient, without doing the work."""
        ...

    def encode(self, matrix: Tensor, slot: Slot, seed: int) -> Rounds:
        """Exchange ``matrix`` (rows, cols); neither it nor ``slot`` is changed."""
        ...
