"""Lets an exchange that happens anyway tell every worker whether all of them are at the same point."""

import zlib

import torch
from torch import Tensor

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
