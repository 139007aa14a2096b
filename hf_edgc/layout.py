"""Which parameters are compressed, up to which rank, and why the others are not."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hf_edgc.config import EDGCConfig


@dataclass(frozen=True)
class Matrix:
    """A parameter whose gradient is seen as a matrix of shape (rows, cols) = (shape[0], product of the rest)."""

    name: str
    rows: int
    cols: int
    max_rank: int
    """Largest rank at which sending the factors still saves ``min_compression_ratio``."""

    @property
    def dense_elements(self) -> int:
        """Elements of the full gradient."""
        return self.rows * self.cols

    @property
    def elements_per_rank(self) -> int:
        """Elements that one more rank adds to the two factors."""
        return self.rows + self.cols


@dataclass(frozen=True)
class Dense:
    """A parameter that is never compressed, with the reason."""

    name: str
    elements: int
    reason: str


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a model, split into matrices to compress and dense rest."""

    matrices: tuple[Matrix, ...]
    dense: tuple[Dense, ...]
    unmatched: tuple[str, ...] = ()
    """Patterns of include and exclude that no parameter matches."""

    def digest(self) -> int:
        """CRC-32 of names and shapes, equal on workers that hold the same model."""
        return zlib.crc32(repr(self).encode())

    def describe(self) -> str:
        """One line for the compressed parameters and one for each reason to leave some dense."""
        total = sum(m.dense_elements for m in self.matrices) + sum(d.elements for d in self.dense)
        share = sum(m.dense_elements for m in self.matrices) / max(1, total)
        lines = [f"compressing {_count(self.matrices, 'matrix', 'matrices')} ({share:.1%} of {total:,} elements)"]
        for reason in sorted({d.reason for d in self.dense}):
            group = [d for d in self.dense if d.reason == reason]
            names = ", ".join(d.name for d in group[:3]) + (", ..." if len(group) > 3 else "")
            elements = sum(d.elements for d in group)
            lines.append(f"dense, {reason}: {_count(group, 'tensor', 'tensors')}, {elements:,} elements ({names})")
        lines += [f"no parameter matches the pattern {pattern!r}" for pattern in self.unmatched]
        return "\n".join(lines)


def build_layout(shapes: Iterable[tuple[str, tuple[int, ...]]], config: EDGCConfig) -> Layout:
    """Split parameters, given as (name, shape), into those to compress and the dense rest."""
    matrices: list[Matrix] = []
    dense: list[Dense] = []
    shapes = list(shapes)
    patterns = [*(config.include or []), *(config.exclude or [])]
    unmatched = tuple(p for p in patterns if not any(fnmatchcase(name, p) for name, _ in shapes))
    for name, shape in shapes:
        elements = _product(shape)
        if config.mode == "none":
            dense.append(Dense(name, elements, "mode none"))
        elif _matches(name, config.exclude) or (config.include is not None and not _matches(name, config.include)):
            dense.append(Dense(name, elements, "left out by include or exclude"))
        elif len(shape) < 2 or elements == 0:
            dense.append(Dense(name, elements, "fewer than two dimensions" if elements else "empty"))
        else:
            rows, cols = shape[0], elements // shape[0]
            most = min(rows, cols, int(elements / (config.min_compression_ratio * (rows + cols))))
            if most < config.lowest_rank:
                reason = f"saves less than {config.min_compression_ratio:g} x at rank {config.lowest_rank}"
                dense.append(Dense(name, elements, reason))
            else:
                matrices.append(Matrix(name, rows, cols, most))
    return Layout(tuple(matrices), tuple(dense), unmatched)


def _matches(name: str, patterns: list[str] | None) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns or [])


def _count(things: Sequence[object], one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
