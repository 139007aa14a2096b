"""The newest step record of each model and link, and what follows from it."""

import itertools
import math
from typing import Any

from sections import Record, Records

Cells = dict[str, Any]
"""Contender to its figures, on one model and link."""


def newest(records: Records) -> dict[str, dict[str, tuple[Record, Record]]]:
    """By model and link: the newest record with dense DDP in it, and its result there. Links from fast to slow.

    All contenders of one model and link come from one run, so their ratios are of one run.
    """
    found: dict[str, dict[str, tuple[Record, Record]]] = {}
    for record in records.get("step", []):
        for result in record["results"]:
            if "ddp" in result["contenders"]:
                found.setdefault(result["model"], {}).setdefault(result["link"], (record, result))
    return {
        model: dict(sorted(links.items(), key=lambda item: -(item[1][1]["bits_per_s"] or math.inf)))
        for model, links in sorted(found.items())
    }


def cells(links: dict[str, tuple[Record, Record]]) -> dict[str, Cells]:
    """By link: the contenders' figures."""
    return {link: result["contenders"] for link, (_, result) in links.items()}


def contenders(links: dict[str, tuple[Record, Record]]) -> list[str]:
    """All contenders on any of the links, in the order in which they ran."""
    return list(dict.fromkeys(name for on_link in cells(links).values() for name in on_link))


def ratio(on_link: Cells, name: str, other: str, part: str = "step_s") -> float | None:
    """Median of ``name`` over that of ``other``; None if one of them did not run."""
    if name not in on_link or other not in on_link:
        return None
    return float(on_link[name][part]["median"] / on_link[other][part]["median"])


def break_even(links: dict[str, tuple[Record, Record]], name: str) -> str:
    """Link rate at which ``name`` and plain DDP take the same step time.

    Interpolated between the two measured rates around it, log of the ratio over log of the rate.
    """
    points = [
        (result["bits_per_s"], found)
        for _, result in links.values()
        if (found := ratio(result["contenders"], name, "ddp")) is not None and result["bits_per_s"] is not None
    ]
    for (fast, fast_ratio), (slow, slow_ratio) in itertools.pairwise(points):
        if (fast_ratio - 1) * (slow_ratio - 1) <= 0 and fast_ratio != slow_ratio:
            share = math.log(fast_ratio) / (math.log(fast_ratio) - math.log(slow_ratio))
            return rate_text(math.exp(math.log(fast) + share * (math.log(slow) - math.log(fast))))
    if not points:
        return "not measured"
    if all(value < 1 for _, value in points):
        return f"none in range, faster up to {rate_text(points[0][0])}"
    return f"none in range, slower down to {rate_text(points[-1][0])}"


def rate_text(bits_per_s: float | None) -> str:
    """``2e8`` is 200 Mbit/s; None is loopback."""
    if bits_per_s is None:
        return "loopback"
    return f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 999.5e6 else f"{bits_per_s / 1e6:.3g} Mbit/s"
