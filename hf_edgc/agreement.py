"""Notices that workers differ: all at attach, and their point in the run in exchanges that happen anyway."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def require_same(names: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
    """Compare what every worker has sent: ``rows`` holds one integer for each of ``names``, by worker.

    Raises:
        RuntimeError: names what differs; the same on every worker.
    """
    differing = [name for name, column in zip(names, zip(*rows, strict=True), strict=True) if len(set(column)) > 1]
    if differing:
        raise RuntimeError(
            f"The workers differ in: {', '.join(differing)}. Compression needs the same on all {len(rows)}; start all "
            "of them with the same code, options and model."
        )


def require_same_point(means: Tensor, workers: int, worker: int, point: Mapping[str, object]) -> None:
    """Check fingerprints of every worker's ``point``, averaged over ``workers``; one host sync.

    Raises:
        RuntimeError: on every worker, if they are at different points; says where this one is.
    """
    if not all_equal(means, workers):
        where = ", ".join(f"{name} {value}" for name, value in point.items())
        raise RuntimeError(
            f"The workers are not at the same point. Worker {worker} is at {where}. One of them has skipped a step or "
            "has been changed from outside; resume all of them from the last checkpoint."
        )


_DIGITS = 4
SIZE = 2 * _DIGITS
"""Elements that ``fingerprint`` adds to an exchange."""


def fingerprint(facts: object, device: torch.device) -> Tensor:
    """Shape (8,), float32: four hexadecimal digits of the CRC-32 of ``repr(facts)``, and their squares.

    Averaged over the workers they give the variance of each digit, which is zero only if all are equal: so all
    workers see a difference, also those that happen to hold the mean. Digits keep it exact in float32. Facts that
    differ look equal once in 65,536 times.
    """
    value = zlib.crc32(repr(facts).encode())
    digits = torch.tensor([(value >> (4 * place)) & 15 for place in range(_DIGITS)], dtype=torch.float32)
    return torch.cat([digits, digits.square()]).to(device)


def all_equal(means: Tensor, workers: int) -> bool:
    """Whether ``means`` (8,), fingerprints averaged over ``workers``, come from equal facts; one host sync."""
    digits, squares = means[:_DIGITS].double(), means[_DIGITS:].double()
    # One digit of one worker off by one has the variance (W - 1) / W^2; half of that is far above rounding.
    return bool((squares - digits.square()).max().item() < 0.5 * (workers - 1) / workers**2) or workers == 1
