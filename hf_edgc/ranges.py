"""Which numbers an option may have, whatever the others are."""

import math
from collections.abc import Mapping
from typing import Any

from hf_edgc.options import invalid

_INF = math.inf
RANGES: dict[str, tuple[float, float, str]] = {
    "rank": (1, _INF, "an integer of at least 1"),
    "max_rank": (1, _INF, "an integer of at least 1"),
    "min_rank": (1, _INF, "an integer of at least 1"),
    "rank_step": (1, _INF, "an integer of at least 1"),
    "window_steps": (1, _INF, "an integer of at least 1"),
    "warmup_fraction": (0.0, math.nextafter(1.0, 0.0), "a number from 0 to below 1"),
    "warmup_max_fraction": (0.0, math.nextafter(1.0, 0.0), "a number from 0 to below 1"),
    "lr_exponent": (0.0, 10.0, "a number from 0 to 10"),
    "entropy_exponent": (0.0, 10.0, "a number from 0 to 10"),
    "target_compression_ratio": (math.nextafter(1.0, 2.0), 1e9, "a number above 1"),
    "watchdog_error_ratio": (0.0, _INF, "a number of at least 0"),
    "watchdog_grad_growth": (0.0, _INF, "a number of at least 0"),
    "entropy_every": (1, _INF, "an integer of at least 1"),
    "entropy_fraction": (math.nextafter(0.0, 1.0), 1.0, "a number above 0 and at most 1"),
    "min_compression_ratio": (1.0, 1e9, "a number of at least 1"),
    "compression_seed": (0, 2**63 - 1, "an integer from 0 to 2^63 - 1"),
}
"""By option: smallest and largest value, and what an error says is allowed."""


def check_ranges(values: Mapping[str, Any]) -> None:
    """Check the values of all options; None has no range.

    Raises:
        ValueError: names the option, the value and what is allowed.
    """
    for name, (low, high, allowed) in RANGES.items():
        value = values[name]
        if value is not None and not low <= value <= high:
            raise invalid(name, value, allowed)
